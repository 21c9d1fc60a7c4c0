"""The feed of a learner: what does not answer in time is given up, and goes on nowhere behind its back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from atoll.base.loop_thread import LoopThread
from atoll.client.join import IslandHandle
from atoll.protocol.data import DataGrant, Key, Progress
from atoll_learner import feed
from atoll_learner.data.batches import BatchReader
from atoll_learner.feed import LeasedFeed


class SilentLeases:
    """A ledger that never answers a resumption or a return; `given_up` are the calls that were cancelled."""

    def __init__(self) -> None:
        """Hold nothing."""
        self.mine: frozenset[Key] = frozenset()
        self.lost: frozenset[Key] = frozenset()
        self.progress: Progress = {}
        self.given_up: list[str] = []

    async def resume(self, cursor: Progress) -> tuple[DataGrant, ...]:
        """Never answer."""
        await self._for_ever(f"resume {len(cursor)}")
        return ()

    async def take(self, blocks: int) -> DataGrant:
        """Never answer."""
        await self._for_ever("take")
        return DataGrant(0, 0, blocks, "a", 1)

    async def give_back(self) -> None:
        """Never answer."""
        await self._for_ever("give_back")

    async def _for_ever(self, what: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up.append(what)
            raise


@pytest.fixture
def home() -> Iterator[LoopThread]:
    """A loop in a thread."""
    home = LoopThread("test-feed")
    yield home
    home.stop()


def test_what_does_not_answer_in_time_is_cancelled(home: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumption that went on would take units over after everybody has stopped waiting for it; so would a lease."""
    monkeypatch.setattr(feed, "RESUME_S", 0.05)
    leases = SilentLeases()
    island = SimpleNamespace(session=SimpleNamespace(leases=leases), call=home.submit)
    reader = SimpleNamespace(needs_more=lambda: True, progress=dict, forget=frozenset)
    fed = LeasedFeed(cast("IslandHandle", island), cast("BatchReader", reader), 4, {(0, 0, 4): (1, 8)})
    returned = fed.close(0.2)
    # What was cancelled ends at the loop's next turns, before anything that is asked of it later.
    home.submit(asyncio.sleep(0)).result(240.0)

    assert not returned
    assert leases.given_up == ["resume 1", "take", "give_back"]
