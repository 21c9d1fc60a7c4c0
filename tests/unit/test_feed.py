"""The feed of a learner: what does not answer in time is given up, and goes on nowhere behind its back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.base.background_tasks import LoopThread
from atoll.base.errors import DataError, PeerMisbehaved
from atoll.client.data_leases import DataLeases
from atoll.client.join import IslandHandle
from atoll.protocol.data import DataGrant, Key, Progress
from atoll_learner import feed
from atoll_learner.commands import prepare_text
from atoll_learner.data.shards import TokenShards
from atoll_learner.feed import BatchReader, LeasedFeed, Supply


class SilentLeases:
    """A ledger that never answers a resumption or a return; `given_up` are the calls that were cancelled."""

    def __init__(self) -> None:
        self.mine: frozenset[Key] = frozenset()
        self.lost: frozenset[Key] = frozenset()
        self.progress: Progress = {}
        self.given_up: list[str] = []

    async def resume(self, cursor: Progress) -> tuple[DataGrant, ...]:
        await self._for_ever(f"resume {len(cursor)}")
        return ()

    async def take(self, blocks: int) -> DataGrant:
        await self._for_ever("take")
        return DataGrant(0, 0, blocks, "a", 1)

    async def give_back(self) -> None:
        await self._for_ever("give_back")

    async def _for_ever(self, what: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up.append(what)
            raise


@pytest.fixture
def home() -> Iterator[LoopThread]:
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
        super().__init__()
        self.refusals = refusals

    async def take(self, blocks: int) -> DataGrant:
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


class OtherBlocks(SilentLeases):
    """Leases of a run whose text has other blocks."""

    async def take(self, blocks: int) -> DataGrant:
        raise DataError("the run leases other blocks than this text has", got=blocks)


def test_what_trying_again_cannot_heal_ends_the_feed(home: LoopThread) -> None:
    """A learner with other blocks than the run would wait for ever."""
    session = SimpleNamespace(leases=OtherBlocks(), member=SimpleNamespace(learner="a", incarnation=1))
    reader = SimpleNamespace(
        needs_more=lambda: True, ready=lambda: False, progress=dict, forget=lambda _held: None, batches=0
    )
    island = SimpleNamespace(session=session, call=home.submit)
    reading = LeasedFeed(cast("IslandHandle", island), cast("BatchReader", reader), 2, {})

    with pytest.raises(DataError, match="other blocks"):
        reading.next(lambda: False)


class LeasesUntilTheCut(SilentLeases):
    """A ledger that grants once."""

    granted = False

    async def take(self, blocks: int) -> DataGrant:
        """Return a grant, and never another one."""
        if self.granted:
            await self._for_ever("take")
        self.granted = True
        return DataGrant(0, 0, blocks, "a", 1)


def test_a_learner_that_can_lease_nothing_more_chooses_text_itself(
    home: LoopThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In an order of its own, without end; at its beginning it waits longer for the first lease."""
    monkeypatch.setattr(feed, "ALONE_S", 0.05)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number}\n" for number in range(4_000)))
    prepare_text(tmp_path / "data", [text], validation=0.1, block_tokens=256)
    shards = TokenShards(tmp_path / "data")

    def fed(incarnation: int, leases: SilentLeases) -> LeasedFeed:
        member = SimpleNamespace(learner="a", incarnation=incarnation)
        island = SimpleNamespace(session=SimpleNamespace(leases=leases, member=member), call=home.submit)
        return LeasedFeed(cast("IslandHandle", island), BatchReader(shards, 32, 4, 0), 2, {})

    windows = 2 * 8 // 4
    drawn = []
    for incarnation in (1, 2, 2):
        reading = fed(incarnation, LeasesUntilTheCut())
        batches = [reading.next(lambda: False) for _ in range(4 * windows)]
        assert all(batch is not None for batch in batches)
        drawn.append([batch.tobytes() for batch in batches if batch is not None])
    assert drawn[1] == drawn[2]
    assert drawn[0][:windows] == drawn[1][:windows]
    assert drawn[0][windows:] != drawn[1][windows:]

    given_up = iter([False] * 3 + [True])
    assert fed(1, SilentLeases()).next(lambda: next(given_up)) is None
    monkeypatch.setattr(feed, "NEWCOMER_ALONE_S", 0.05)
    assert fed(1, SilentLeases()).next(lambda: False) is not None


def test_in_a_long_outage_a_learner_waits_only_once_before_it_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Behind a cut link each unit would cost ten seconds; once something is leased, the next outage is waited for anew."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number}\n" for number in range(4_000)))
    prepare_text(tmp_path / "data", [text], validation=0.1, block_tokens=256)
    asked: list[Future[DataGrant]] = []
    looks = 0

    def call(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        coroutine.close()
        asked.append(Future())
        return asked[-1]

    def look(_pending: object, _timeout_s: float) -> None:
        nonlocal looks
        looks += 1

    monkeypatch.setattr(feed, "wait", look)
    monkeypatch.setattr(feed, "time", SimpleNamespace(monotonic=lambda: looks * feed.LOOK_S))
    session = SimpleNamespace(leases=SilentLeases(), member=SimpleNamespace(learner="a", incarnation=1))
    island = SimpleNamespace(session=session, call=call)
    reading = LeasedFeed(cast("IslandHandle", island), BatchReader(TokenShards(tmp_path / "data"), 32, 4, 0), 2, {})

    def waited(batches: int) -> list[int]:
        taken = []
        for _ in range(batches):
            before = looks
            assert reading.next(lambda: False) is not None
            taken.append(looks - before)
        return [count for count in taken if count]

    asked[0].set_result(DataGrant(0, 0, 2, "a", 1))
    first = waited(20)
    asked[-1].set_result(DataGrant(0, 2, 4, "a", 1))
    second = waited(20)

    assert first[0] > feed.ALONE_S / feed.LOOK_S
    assert set(first[1:]) == {1}
    assert max(second) == first[0]
    assert second.count(first[0]) == 1
