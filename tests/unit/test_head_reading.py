"""Readings of heads: all of few, some of many, and all again after something was missed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.base.errors import PeerMisbehaved
from atoll.client import driver
from atoll.client.driver import IN_TURN, NAMES_MAX, HeadReading
from atoll.wire.messages import Head, RunRecord
from atoll.wire.traffic import BusStats


class CountedHeads:
    """Stands for a bus with readable heads, and notes which of them are read; `all` is a reading of every head."""

    def __init__(self, fragments: int, monkeypatch: pytest.MonkeyPatch, contributors: int = NAMES_MAX) -> None:
        self.stats = BusStats()
        self.read: list[int | str] = []
        self.bad: set[int] = set()

        async def read_heads(_bus: object, _run: object) -> dict[int, SimpleNamespace]:
            self.read.append("all")
            return {number: SimpleNamespace(included=[0] * contributors) for number in range(fragments)}

        async def read_head(_bus: object, _run: object, fragment: int) -> int:
            self.read.append(fragment)
            if fragment in self.bad:
                raise PeerMisbehaved("a head of another layout")
            return fragment

        monkeypatch.setattr(driver, "read_heads", read_heads)
        monkeypatch.setattr(driver, "read_head", read_head)
        layout = type("Layout", (), {"fragments": [0] * fragments})
        run = cast("RunRecord", type("Run", (), {"layout": layout}))
        self._reading = HeadReading(cast("Any", self), run)

    async def next(self) -> tuple[list[Head], list[int | str]]:
        """Read once more; return what was returned, and what was read."""
        self.read.clear()
        found = await self._reading.read()
        return found, list(self.read)


async def test_few_heads_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = CountedHeads(NAMES_MAX // 8, monkeypatch, contributors=7)

    assert [(await heads.next())[1] for _ in range(3)] == [["all"]] * 3


async def test_many_heads_are_read_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first reading each takes the next ones, so that all have their turn."""
    heads = CountedHeads(5 * IN_TURN, monkeypatch)

    assert (await heads.next())[1] == ["all"]
    turns = [(await heads.next())[1] for _ in range(5)]
    assert [len(turn) for turn in turns] == [IN_TURN] * 5
    assert {fragment for turn in turns for fragment in turn} == set(range(5 * IN_TURN))


async def test_what_may_have_been_missed_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection or a dropped message is a reason to read all heads, once."""
    heads = CountedHeads(5 * IN_TURN, monkeypatch)
    await heads.next()

    heads.stats.reconnects += 1
    assert (await heads.next())[1] == ["all"]
    assert len((await heads.next())[1]) == IN_TURN
    heads.stats.core_messages_dropped += 1
    assert (await heads.next())[1] == ["all"]


async def test_a_head_that_does_not_fit_keeps_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = CountedHeads(5 * IN_TURN, monkeypatch)
    heads.bad = {1}
    await heads.next()

    found, read = await heads.next()

    assert (len(read), len(found)) == (IN_TURN, IN_TURN - 1)
