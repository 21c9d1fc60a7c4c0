"""Golden logbooks: the machines' behaviour as text that a person can read and review.

Each file under `logbooks/` holds prose, commands (lines that begin with `> `) and, after `----`, what the machines were
told and answered. `ATOLL_REWRITE_GOLDEN=1` rewrites the answers; a review reads the difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from atoll.protocol.settings import ProtocolSettings
from support.protocol_world import ProtocolWorld

BOOKS = sorted((Path(__file__).parent / "logbooks").glob("*.txt"))


def _each(world: ProtocolWorld, verb: str, names: list[str]) -> None:
    for name in names:
        getattr(world, verb)(name)


def _step(world: ProtocolWorld, learner: str, times: str = "1") -> None:
    for _ in range(int(times)):
        world.step(learner)


def _hear(world: ProtocolWorld) -> None:
    for _ in range(len(world.core_messages)):
        world.core_message()


def _heal(world: ProtocolWorld) -> str:
    settled = world.heal()
    return f"fates {settled.fates} of {settled.trained} token-fragments, exact: {settled.exact}; {world.finished}"


COMMANDS: dict[str, Callable[..., object]] = {
    **{
        verb: lambda world, *names, verb=verb: _each(world, verb, list(names))
        for verb in ("join", "die", "beat", "drain")
    },
    "step": _step,
    "wait": lambda world, seconds: world.tick(float(seconds)),
    "hear": _hear,
    "deliver": lambda world, place="0": world.deliver(int(place)),
    "redeliver": lambda world, place="0": world.deliver(int(place), again=True),
    "read": lambda world, learner="": world.read(0, learner),
    "commit": lambda world: world.commit(),
    "heal": _heal,
}


def run_command(world: ProtocolWorld, words: list[str]) -> str:
    said = COMMANDS[words[0]](world, *words[1:])
    return said if isinstance(said, str) else ""


def played(text: str) -> str:
    head, _, rest = text.partition("\n\n")
    chosen = dict(pair.split("=") for pair in head.split(": ", 1)[1].split())
    world = ProtocolWorld(msgspec.convert({"shards": 1} | chosen, ProtocolSettings, strict=False).check())
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
    text = book.read_text(encoding="utf-8")
    got = played(text)
    if os.environ.get("ATOLL_REWRITE_GOLDEN") == "1":
        book.write_text(got, encoding="utf-8")
        pytest.skip("rewritten, not checked")

    assert got == text
