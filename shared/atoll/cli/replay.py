"""`atoll replay`: the last facts of a machine, told to a new one; a line per fact, and where it breaks.

A dump is written when something of ours fails, or on SIGUSR1 (`atoll.base.fact_dumps`). Replaying needs no broker: the same
code makes the same decisions, so a bug that a dump holds is seen again, and its mending too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.look import say

BROKEN = 1


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(name="replay", help="Tell a machine the facts of a dump again, and print what it answers.")(replay)


def replay(
    file: Annotated[Path, typer.Argument(help="A dump: facts-….jsonl.")],
    *,
    last: Annotated[int | None, typer.Option(min=1, help="Print the last lines only.")] = None,
) -> None:
    """Print a line per fact with the commands that it leads to; leave with 1 when the machine breaks again."""
    from collections import deque  # noqa: PLC0415  (a verb loads what it needs when it runs)

    from atoll.base.errors import DataError  # noqa: PLC0415
    from atoll.protocol.recorder import Replay  # noqa: PLC0415

    try:
        dump = Replay(file.read_bytes().splitlines())
    except OSError as error:
        raise DataError("cannot read the dump", got=f"{file}: {error.strerror}") from error
    header = dump.header
    say(
        f"{header.name}: {header.facts} facts, {header.facts_before} before them forgotten; written because {header.why}"
    )
    if dump.lost:
        say(
            f"only {len(dump.facts)} of these facts are here: the last {dump.lost} are missing, so the end is not the end"
        )
    told: deque[str] = deque(maxlen=last)
    broken: Exception | None = None
    try:
        for line in dump.logbook():
            told.append(line)
    except Exception as error:  # noqa: BLE001  (a bug of ours is what a dump holds)
        broken = error
    for line in told:
        say("".join(c if c.isprintable() else "?" for c in line))
    if broken is not None:
        say(f"{type(broken).__name__}: {broken}")
        raise typer.Exit(BROKEN)
