"""The feed of a learner: what does not answer in time is given up, and goes on nowhere behind its back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import cast

import pytest

from atoll.base.errors import PeerMisbehaved
from atoll.base.loop_thread import LoopThread
from atoll.client.data_leases import DataLeases
from atoll.client.join import IslandHandle
from atoll.protocol.data import DataGrant, Key, Progress
from atoll_learner import feed
from atoll_learner.data.batches import BatchReader
from atoll_learner.feed import LeasedFeed, Supply


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


class RefusingLeases(SilentLeases):
    """A ledger that cannot be read for the first `refusals` times."""

    def __init__(self, refusals: int) -> None:
        """Refuse as often."""
        super().__init__()
        self.refusals = refusals

    async def take(self, blocks: int) -> DataGrant:
        """Return a grant once it can."""
        self.refusals -= 1
        if self.refusals >= 0:
            raise PeerMisbehaved("not a DataLedger")
        return DataGrant(0, 0, blocks, "a", 1)


def test_a_ledger_that_cannot_be_read_is_asked_ever_more_slowly(
    home: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request reads the ledger; without pauses a damaged one would fill the link. After a success all is forgotten."""
    waited: list[int] = []

    def pause_s(failures: int, *_: float) -> float:
        waited.append(failures)
        return 0.0

    monkeypatch.setattr(feed, "pause_s", pause_s)
    granted: list[tuple[int, int]] = []
    reader = SimpleNamespace(
        grant=lambda _epoch, start, stop, **_: granted.append((start, stop)),
        ready=lambda: False,
        progress=dict,
        forget=frozenset,
    )
    leases = RefusingLeases(3)
    supply = Supply(cast("DataLeases", leases), home.submit, cast("BatchReader", reader), 4)
    for _ in range(5):
        supply.want()
        assert supply.pending is not None
        wait([cast("Future[DataGrant]", supply.pending)], 240.0)
        assert supply.poll() is None

    assert granted == [(0, 4), (0, 4)]
    assert waited == [1, 2, 3]
