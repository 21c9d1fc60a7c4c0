"""`atoll replay`: what happened is done once more, by the same code: the facts of a machine, or all rounds of a run.

    atoll replay logs/facts-shard-0-1.jsonl         the last facts of a machine, a line per fact, and where it breaks
    atoll replay runs/demo                          every round that a run has retained, to the same bits (`cli.replay_run`)
    atoll replay demo --archive s3://bucket/runs    the same of a run whose folder is not here

A dump is written when something of ours fails, or on SIGUSR1 (`atoll.base.fact_dumps`). The same code makes the same
decisions, so a bug that a dump holds is seen again, and its mending too. Neither needs a broker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.look import say
from atoll.cli.options import Assignments, Config

BROKEN = 1


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        name="replay", help="Make the rounds of a run once more, or tell a machine the facts of a dump, and compare."
    )(replay)


def replay(  # noqa: PLR0913  (one option each)
    what: Annotated[str, typer.Argument(metavar="RUN|DUMP", help="A run's folder or id; or a dump: facts-….jsonl.")],
    *,
    archive: Annotated[
        str | None, typer.Option(help="Where the run is archived: a folder, file:///folder or s3://bucket/prefix.")
    ] = None,
    fragment: Annotated[int | None, typer.Option(min=0, help="The rounds of this fragment only.")] = None,
    version: Annotated[
        int | None, typer.Option("--round", min=1, help="Only the round that made this version; needs --fragment.")
    ] = None,
    founding: Annotated[
        str | None, typer.Option(help="Which founding of the run, if it was rebuilt.  [default: the newest]")
    ] = None,
    identity: Annotated[Path | None, typer.Option(help="An identity of a locked run, to check signatures.")] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Of a dump: print the last lines only.")] = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Print what came out; leave with 1 when a machine breaks, or a round differs."""
    from atoll.base.errors import SettingsError  # noqa: PLC0415  (a verb loads what it needs when it runs)

    if version is not None and fragment is None:
        raise SettingsError("a round of which fragment?", got=f"--round {version}", todo="give --fragment as well")
    if Path(what).is_file() or what.endswith(".jsonl"):
        given = {"archive": archive, "fragment": fragment, "founding": founding, "identity": identity, "config": config}
        given["set"] = assignments[0] if assignments else None
        if named := [f"--{name}" for name, value in given.items() if value is not None]:
            raise SettingsError("a dump is of one machine", got=", ".join(named), allowed="--last")
        replay_dump(Path(what), last)
        return
    if last is not None:
        raise SettingsError("only a dump has last lines", got=f"--last beside run {what}", todo="leave it away")
    from atoll.cli.replay_run import Wanted, replay_run  # noqa: PLC0415
    from atoll.settings import own_outer  # noqa: PLC0415

    wanted = Wanted(fragment, version, founding)
    if not replay_run(what, archive, identity, wanted, own_outer(config, assignments or [])):
        raise typer.Exit(BROKEN)


def replay_dump(file: Path, last: int | None) -> None:
    """Print a line per fact with the commands that it leads to; leave with 1 when the machine breaks again."""
    from collections import deque  # noqa: PLC0415

    from atoll.base.errors import DataError  # noqa: PLC0415
    from atoll.base.fact_dumps import DUMP_BYTES_MAX  # noqa: PLC0415
    from atoll.base.regular_files import read_file  # noqa: PLC0415
    from atoll.protocol.recorder import Replay  # noqa: PLC0415

    try:
        dump = Replay(read_file(file, DUMP_BYTES_MAX).splitlines())
    except OSError as error:
        raise DataError("cannot read the dump", got=f"{file}: {error.strerror}") from error
    except DataError as error:
        raise DataError(error.what, got=f"{file}: {error.got}", allowed=error.allowed, todo=error.todo) from error
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
