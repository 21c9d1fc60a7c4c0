"""What a shard makes of a region's words: it waits for one that is at work, and leaves one alone that is not to be believed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from atoll.base.clock import SystemClock
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.protocol.events import Fact, PushKey
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import (
    CHUNKS_GONE,
    NOTHING_KEPT,
    SENDING,
    Contribution,
    RegionAnswer,
    RegionAsk,
    decode,
    encode,
)
from atoll_synchronizer import regions
from atoll_synchronizer.aggregator import Aggregator
from atoll_synchronizer.garbage_collector import GarbageCollector
from atoll_synchronizer.regions import RegionReader
from atoll_synchronizer.shard_context import ShardContext
from support.founded_run import run_record
from support.links import unique_run
from support.shard_owners import FixedOwner, first_head

KEY = PushKey("a", 1, 0, 1)
DIGEST = "0" * 32
SOON_S = 120.0


class AnsweringBus(MemoryBus):
    """A bus on which a region gives these answers, one after the other; the last one again and again."""

    def __init__(self, run: str, *answers: bytes | None) -> None:
        super().__init__(run, MemoryBroker())
        self.answers = list(answers)
        self.asked: list[tuple[float, bytes]] = []
        self.removed: list[str] = []

    async def ask(self, subject: str, data: bytes, *, timeout_s: float, answer_at: str = "") -> bytes | None:
        del subject, answer_at
        self.asked.append((asyncio.get_running_loop().time(), data))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await asyncio.sleep(timeout_s)
        return answer

    async def purge(self, subject_filter: str, *, keep: int = 0) -> int:
        self.removed.append(subject_filter)
        return keep


@dataclass
class RegionDesk:
    """A reader of one region, and what it told its machine."""

    bus: AnsweringBus
    reader: RegionReader
    manifest: Contribution
    facts: list[Fact] = field(default_factory=list)

    async def take(self) -> bool:
        return await self.reader.take("eu", KEY, self.manifest, "cause")


Opened = Callable[..., RegionDesk]


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Opened:
    for name in ("ASK_S", "TURN_S", "SILENT_S", "WORK_S", "AWAY_S", "BACK_S", "BACK_S_MAX"):
        monkeypatch.setattr(regions, name, getattr(regions, name) / 100)

    def open_desk(
        *answers: bytes | None,
        norms: tuple[float, ...] | None = None,
        live: frozenset[str] = frozenset("a"),
        step_s: float = 0.01,
    ) -> RegionDesk:
        run = run_record(unique_run())
        bus, clock = AnsweringBus(run.run, *answers), SystemClock()
        facts: list[Fact] = []
        slices = run.layout.slices(0)
        owner = FixedOwner(facts.append, live, step_s, first_head(run))
        manifest = Contribution(
            learner="a", incarnation=1, fragment=0, push=1, base_version=0, tokens=1, steps=1, trained_tokens=1, loss=None,
            norms=(1.0,) * len(slices) if norms is None else norms, layout=run.layout.fingerprint, run_nonce=run.nonce,
            blob=BlobRef(run.subjects.contribution_stem("a", 0, 1, 1, "0" * 16), 1, 8, DIGEST),
        )  # fmt: skip
        reader = RegionReader(ShardContext(bus, run, 0, clock), Aggregator(bus, run), GarbageCollector(bus), owner)
        return RegionDesk(bus, reader, manifest, facts)

    return open_desk


def said(**fields: Any) -> bytes:  # noqa: ANN401
    return encode(RegionAnswer(**fields))


def verbs(bus: AnsweringBus) -> list[str]:
    return [decode(RegionAsk, data).verb for _, data in bus.asked]


@pytest.mark.parametrize(
    "norms",
    [(), (1.0,) * 65_536, (-1.0, 1.0), (1.7e308, 1.7e308), (1e15,) * 60_000],
    ids=["none", "many", "negative", "inf", "long"],
)
async def test_claims_that_cannot_be_are_read_here(desk: Opened, norms: tuple[float, ...]) -> None:
    """A sum could not be checked by them, and their length would stand in a ledger that no owner can read."""
    one = desk(said(done=True), norms=norms)
    assert await one.take() is False
    assert one.bus.asked == []


async def test_a_question_that_is_too_large_ends_no_shard(desk: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.wire.messages.DOCUMENT_BYTES_MAX", 64)
    one = desk(b"")
    assert await one.take() is False
    assert one.bus.asked == []


@pytest.mark.parametrize("reason", ["corrupt", "checksum", "chunks_gone", "a" * 64])
async def test_a_region_refuses_nothing(desk: Opened, reason: str) -> None:
    """Whatever it says of a contribution, the shard looks at it; its words reach no ledger."""
    one = desk(said(done=True, reason=reason))
    assert await one.take() is False
    assert one.facts == []


async def test_a_region_that_is_not_done_is_asked_at_a_pace(desk: Opened) -> None:
    """It answers at once, again and again; the shard has other things to do.

    A question that a busy machine sends late is followed sooner by the next: the pace is that of all of them.
    """
    one = desk(said(done=False))
    assert await one.take() is False
    times = [at_s for at_s, _ in one.bus.asked]
    assert len(times) > 10
    assert times[-1] - times[0] >= 0.9 * regions.TURN_S * (len(times) - 1)


async def test_silence_is_borne_for_a_while(desk: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may wait behind megabytes on a link; one that comes after all is taken, here "gone"."""
    short_s = regions.SILENT_S
    for name in ("SILENT_S", "WORK_S"):  # a busy machine answers late, too
        monkeypatch.setattr(regions, name, SOON_S)
    one = desk(None, None, said(done=False), None, said(done=True, reason="chunks_gone"), step_s=SOON_S)
    assert await one.take() is False
    assert len(one.bus.asked) == 5
    monkeypatch.setattr(regions, "SILENT_S", short_s)
    silent = desk(None)
    assert await silent.take() is False
    assert asyncio.get_running_loop().time() - silent.bus.asked[0][0] >= 0.99 * regions.SILENT_S
    assert len(silent.bus.asked) <= regions.SILENT_S / regions.ASK_S + 2


async def test_who_does_not_listen_is_asked_once(desk: Opened) -> None:
    """The broker says so at once, and the region is left alone for a while."""
    one = desk(None)
    one.bus.ask = nobody(one.bus)  # type: ignore[method-assign]
    assert await one.take() is False
    assert await one.take() is False
    assert len(one.bus.asked) == 1


def nobody(bus: AnsweringBus) -> Callable[..., Any]:
    """Return an `ask` that is answered by nobody, at once."""

    async def ask(subject: str, data: bytes, *, timeout_s: float, answer_at: str = "") -> None:
        del subject, timeout_s, answer_at
        bus.asked.append((0.0, data))

    return ask


async def test_sums_that_nobody_waited_for_are_removed(desk: Opened) -> None:
    """Soon, and once more before the region is asked for the next one: it may have been at it still."""
    one = desk(said(done=True), said(done=True, reason="failed"))
    assert await one.take() is False
    assert verbs(one.bus) == ["read", "fold"]
    await asyncio.sleep(1.2 * regions.AWAY_S)
    one.bus.answers = [said(done=True), said(done=True, reason="failed")]
    assert await one.take() is False
    prefix, _, _ = one.manifest.blob.stem.partition(".up.")
    assert one.bus.removed == [f"{prefix}.up.c.sum.0.eu.*.*"]


async def opened_sum(one: RegionDesk) -> asyncio.Task[bool]:
    """Have the contribution of `a` taken; return once its region has answered, and whoever may wait for others does so."""
    taking = asyncio.ensure_future(one.take())
    async with asyncio.timeout(SOON_S):
        while not one.reader._open and not taking.done():  # noqa: ASYNC110  (what opens sets no event)
            await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    return taking


async def test_a_sum_waits_for_every_live_learner_of_its_region(desk: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The region folds both contributions at once, however much later the second one comes."""
    monkeypatch.setattr(regions, "WAIT_S_MIN", SOON_S)
    one = desk(said(done=True), said(done=True), said(done=True, reason="failed"), live=frozenset("ab"))
    first = await opened_sum(one)
    assert verbs(one.bus) == ["read"]

    later = msgspec.structs.replace(one.manifest, learner="b")
    assert await one.reader.take("eu", PushKey("b", 1, 0, 1), later, "cause") is False
    assert await first is False

    assert verbs(one.bus) == ["read", "read", "fold"]
    assert [push.learner for push in decode(RegionAsk, one.bus.asked[-1][1]).pushes] == ["a", "b"]


async def test_a_live_learner_that_does_not_push_is_not_waited_for_long(
    desk: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "WAIT_S_MIN", 0.01)
    one = desk(said(done=True), said(done=True, reason="failed"), live=frozenset("ab"))
    assert await one.take() is False

    assert verbs(one.bus) == ["read", "fold"]
    assert [push.learner for push in decode(RegionAsk, one.bus.asked[-1][1]).pushes] == ["a"]


async def test_a_keeper_is_asked_while_the_hub_is_searched(desk: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast loop has taken several intervals by the time at which a reader gives chunks up."""
    one, found, answers = desk(b"+1"), asyncio.Event(), [("", 2.0)]
    ask = one.bus.ask

    async def sending(*words: Any, **options: Any) -> bytes | None:  # noqa: ANN401  (as `ask`)
        found.set()
        return await ask(*words, **options)

    async def fetch(_self: Aggregator, _key: PushKey, _manifest: Contribution) -> tuple[str, float]:
        async with asyncio.timeout(SOON_S):
            await found.wait()
        return answers.pop(0)

    monkeypatch.setattr(one.bus, "ask", sending)
    monkeypatch.setattr(Aggregator, "fetch", fetch)
    assert await one.reader.read("eu", KEY, one.manifest) == ("", 2.0)
    answers[:] = [(CHUNKS_GONE, 0.0), ("", 2.0)]
    assert await one.reader.read("eu", KEY, one.manifest) == ("", 2.0), "they came after all"
    answers[:] = [("", 2.0)]
    assert await one.reader.read("", KEY, one.manifest) == ("", 2.0)
    assert len(one.bus.asked) == 2, "nobody is asked for what is in no region"


async def test_a_keeper_that_sends_is_waited_for(desk: Opened) -> None:
    one = desk(*[SENDING] * 5, b"+3")
    assert await one.reader.fetch_back("eu", one.manifest) is True
    assert len(one.bus.asked) == 6
    assert await desk(NOTHING_KEPT).reader.fetch_back("eu", one.manifest) is False


async def test_a_learner_that_is_not_there_costs_its_region_nothing(
    desk: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says itself where it is: a permitted learner of elsewhere had the sums of all others of a region given up."""
    one = desk(said(done=True, reason="chunks_gone"))
    ask = one.bus.ask

    async def searching(*words: Any, **options: Any) -> bytes | None:  # noqa: ANN401  (as `ask`)
        await asyncio.sleep(regions.TURN_S)
        return await ask(*words, **options)

    monkeypatch.setattr(one.bus, "ask", searching)
    for _ in range(200):
        assert await one.take() is False
    asked = len(one.bus.asked)
    assert asked < 100, "after a while it is as one that is in no region"

    other = msgspec.structs.replace(one.manifest, learner="b")
    assert await one.reader.take("eu", PushKey("b", 1, 0, 1), other, "cause") is False
    assert len(one.bus.asked) == asked + 1, "the region is asked for the contributions of others, as ever"
