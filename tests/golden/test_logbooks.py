"""Golden logbooks: the machines' behaviour as text that a person can read and review.

Each file under `logbooks/` holds prose, commands (lines that begin with `> `) and, after `----`, what the machines were
told and answered. `ATOLL_REWRITE_GOLDEN=1` rewrites the answers; a review reads the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from atoll.protocol.settings import ProtocolSettings
from atoll.protocol_testing import World

BOOKS = sorted((Path(__file__).parent / "logbooks").glob("*.txt"))


def run_command(world: World, words: list[str]) -> str:
    """Do one command; return a line to print after it, or nothing."""
    verb, *rest = words
    if verb in {"join", "die", "beat", "drain"}:
        for name in rest:
            getattr(world, verb)(name)
    elif verb == "step":
        for _ in range(int(rest[1]) if len(rest) > 1 else 1):
            world.step(rest[0])
    elif verb == "wait":
        world.tick(float(rest[0]))
    elif verb == "hear":
        for _ in range(len(world.whispers)):
            world.whisper()
    elif verb == "deliver":
        world.deliver(int(rest[0]) if rest else 0)
    elif verb == "redeliver":
        world.deliver(int(rest[0]) if rest else 0, again=True)
    elif verb == "read":
        world.read(0, rest[0] if rest else "")
    elif verb == "commit":
        world.commit()
    elif verb == "heal":
        settled = world.heal()
        return f"fates {settled.fates} of {settled.trained} token-fragments, exact: {settled.exact}; {world.finished}"
    else:
        raise ValueError(f"unknown command {verb}")
    return ""


def played(text: str) -> str:
    """Return the logbook with its answers written anew."""
    head, _, rest = text.partition("\n\n")
    chosen = dict(pair.split("=") for pair in head.split(": ", 1)[1].split())
    world = World(msgspec.convert({"shards": 1} | chosen, ProtocolSettings, strict=False).check())
    lines, seen = [head, ""], 0
    blocks = [block.split("\n----")[0] for block in rest.strip("\n").split("\n\n")]
    for block in blocks:
        lines.append(block)
        said = [run_command(world, line[2:].split()) for line in block.splitlines() if line.startswith("> ")]
        if said:
            lines += ["----", *world.log[seen:], *(line for line in said if line)]
            seen = len(world.log)
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def test_there_are_logbooks() -> None:
    """An empty folder would pass everything."""
    assert len(BOOKS) >= 5


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_a_logbook_reads_as_it_did(book: Path) -> None:
    """What the machines say is what the file says."""
    text = book.read_text(encoding="utf-8")
    got = played(text)
    if os.environ.get("ATOLL_REWRITE_GOLDEN"):
        book.write_text(got, encoding="utf-8")

    assert got == text or os.environ.get("ATOLL_REWRITE_GOLDEN")
