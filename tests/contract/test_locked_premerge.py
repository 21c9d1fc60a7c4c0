"""Pre-merge behind a locked door: a region's synchronizer does its work there with its own identity, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from atoll.base.errors import AccessDenied, BlobGone, BrokerUnavailable, PeerMisbehaved
from atoll.bus.interface import Bus, CoreMessage
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.nats.jetstream_api import JetStream
from atoll.bus.options import BusOptions
from atoll.keys.rights import Kind, premerger_of
from atoll.wire.messages import RegionAnswer, RegionAsk, decode, encode, keeper_word
from atoll.wire.subjects import Subjects
from support.bus_contract import MIB, SOON_S, noise
from support.founded_run import run_record
from support.locked_regions import PATIENCE_S, LockedRelayed, Opened, locked_relayed, opener
from support.regions import until

pytestmark = pytest.mark.connected
EU, US = premerger_of("eu"), premerger_of("us")
KINDS: dict[str, Kind] = {"shard": "synchronizer", "a": "learner", "b": "learner", EU: "premerger", US: "premerger"}
ASKED = encode(RegionAsk(verb="fold", run_nonce="n"))
NONCES = itertools.count()
NEVER_S = 300.0


@pytest.fixture
async def there(tmp_path: Path, run: str) -> AsyncIterator[LockedRelayed]:
    async with locked_relayed(tmp_path, run, KINDS) as locked:
        yield locked


@pytest.fixture
async def opened(there: LockedRelayed) -> AsyncIterator[Opened]:
    """Open buses by name, of a run that is founded; those at the leaf say that they are of `eu`."""
    async with opener(there, lambda name: options_of(there, name)) as one:
        yield one


def options_of(there: LockedRelayed, name: str) -> BusOptions:
    return BusOptions(credentials=there.identity(name).credentials(), patience_s=PATIENCE_S, region="eu", gone_s=0.2)


async def ask(shard: Bus, run: str, region: str = "eu", timeout_s: float = SOON_S) -> bytes | None:
    s = Subjects(run)
    answer_at = s.premerge_answer(region, f"n-{next(NONCES)}")
    return await shard.ask(s.premerge(region), ASKED, timeout_s=timeout_s, answer_at=answer_at)


async def question(
    asking: asyncio.Task[bytes | None], feed_next: Callable[[float], Awaitable[CoreMessage | None]]
) -> str:
    heard = await feed_next(SOON_S)
    assert heard is not None, asking
    assert heard.reply is not None
    assert decode(RegionAsk, heard.data).verb == "fold"
    return heard.reply


@pytest.mark.parametrize("place", ["leaf", "hub"])
async def test_a_shard_asks_a_region_and_believes_its_synchronizer(
    there: LockedRelayed, opened: Opened, place: str
) -> None:
    """At the region's leaf, and at the hub for a region without one; a shard that nobody hears knows at once."""
    shard = await opened("shard", there.hub)
    began_s = asyncio.get_running_loop().time()
    assert await ask(shard, there.run, timeout_s=NEVER_S) is None
    assert asyncio.get_running_loop().time() - began_s < NEVER_S, "it did not wait for an answer"
    region = await opened(EU, there.leaf if place == "leaf" else there.hub)
    feed = await region.listen(Subjects(there.run).premerge("eu"))
    asking = asyncio.create_task(ask(shard, there.run))
    reply = await question(asking, feed.next)
    await region.tell(reply, encode(RegionAnswer(done=True, norm=2.0)))
    answer = await asking
    assert answer is not None
    assert decode(RegionAnswer, answer).norm == 2.0


async def test_chunks_stay_at_the_leaf_and_their_sum_goes_to_the_hub(there: LockedRelayed, opened: Opened) -> None:
    """A region reads what its learner keeps there; a shard has that sent, and then dropped, by the keeper."""
    s, shard = Subjects(there.run), await opened("shard", there.hub)
    learner, region = await opened("a", there.leaf), await opened(EU, there.leaf)
    stem = s.contribution_stem("a", 0, 1, 1, "0" * 16)
    before = there.link.carried_bytes["up"]
    kept = await learner.put_blob(stem, noise(2 * MIB))
    assert await region.get_blob(kept, 2 * MIB) == noise(2 * MIB)
    assert there.link.carried_bytes["up"] - before < MIB, "a contribution has crossed the link"
    total = await region.put_blob(s.partial_stem("eu", 0, 1, "n"), noise(MIB))
    assert await shard.get_blob(total, MIB) == noise(MIB)
    with pytest.raises(BlobGone):
        await shard.get_blob(kept, 2 * MIB)
    subject = s.region_kept("eu")
    sent = await shard.ask(
        subject, keeper_word("send", stem), timeout_s=SOON_S, answer_at=s.region_answer("eu", f"n-{next(NONCES)}")
    )
    assert sent == b"+2"
    assert await shard.get_blob(kept, 2 * MIB) == noise(2 * MIB)
    await shard.tell(subject, keeper_word("drop", stem))

    async def is_dropped() -> bool:
        try:
            await region.get_blob(kept, 2 * MIB)
        except BlobGone:
            return True
        return False

    await until(is_dropped)


FORBIDDEN = {
    "a learner asks": ("a", "pm.eu"),
    "a learner answers for its region": ("a", "pm.eu.n"),
    "a learner sends a sum of its region": ("a", "up.c.sum.0.eu.1-n.0"),
    "a learner has chunks of others dropped": ("a", "rg.eu.kept"),
    "a learner keeps chunks as another": ("a", "keep.eu.up.c.b.0.1-1.0"),
    "a premerger answers for another region": (EU, "pm.us.n"),
    "a premerger sends a sum of another region": (EU, "up.c.sum.0.us.1-n.0"),
    "a premerger leaves a sum of another region in the outbox": (EU, "out.eu.up.c.sum.0.us.1-n.0"),
    "a premerger asks its own region": (EU, "pm.eu"),
    "a premerger has chunks dropped": (EU, "rg.eu.kept"),
    "a premerger contributes": (EU, "up.c.a.0.1-1.0"),
    "a premerger queues a manifest": (EU, "up.m.0.0.a"),
    "a premerger leaves a manifest in the outbox": (EU, "out.eu.up.m.0.0.a"),
    "a premerger writes a head": (EU, "gl.head.0"),
    "a premerger takes a lease": (EU, "gl.lease.0"),
    "a premerger writes an outer state": (EU, "st.c.0.1.1.n.0"),
    "a premerger joins": (EU, "mb.learner.a"),
    "a premerger calls": (EU, "call.0"),
}
STREAMS = {
    "purges what stays": "$JS.API.STREAM.PURGE.atoll_{run}_KEEP",
    "deletes what stays": "$JS.API.STREAM.DELETE.atoll_{run}_KEEP",
    "purges contributions": "$JS.hub.API.STREAM.PURGE.atoll_{run}_UPC",
    "reads others' contributions at the hub": "$JS.hub.API.STREAM.MSG.GET.atoll_{run}_UPC",
    "makes a consumer of the queue": "$JS.hub.API.CONSUMER.CREATE.atoll_{run}_UPM",
}


async def is_denied(work: Awaitable[object]) -> bool:
    """Return whether the broker does not allow it."""
    try:
        await work
    except AccessDenied:
        return True
    return False


async def test_nobody_does_more_than_its_kind(there: LockedRelayed, opened: Opened) -> None:
    """At the leaf: nobody claims a sum that is not its own, and a region's synchronizer is neither learner nor shard."""
    del opened  # the run is founded
    for name in ("a", EU):
        bare = await JetStreamBus.open(there.leaf.url, there.run, name=name, options=options_of(there, name))
        api = JetStream(bare.connection)
        tried = {what: f"atoll.{there.run}.{subject}" for what, (who, subject) in FORBIDDEN.items() if who == name}
        for what, subject in tried.items():
            assert await is_denied(bare.connection.call(api.store(subject, b"forged", {}))), what
        for what, subject in STREAMS.items():
            asking = bare.connection.request(subject.format(run=there.run), b"{}", timeout_s=SOON_S)
            assert await is_denied(bare.connection.call(asking)), what
        for heard in ("pm.us", *(("pm.eu",) if name == "a" else ("hb.*", "up.>", "call.*"))):
            assert await is_denied(bare.listen(f"atoll.{there.run}.{heard}")), heard
        await bare.close()


async def test_a_premerger_enters_its_own_region_only(there: LockedRelayed, opened: Opened) -> None:
    for name in (US, "shard"):
        with pytest.raises(AccessDenied):
            await opened(name, there.leaf)


async def test_a_shard_believes_the_synchronizer_of_the_region_that_it_asked(
    there: LockedRelayed, opened: Opened
) -> None:
    """Whoever runs the region's broker can put any message there: nobody's, another's, or an old one is not believed."""
    s, shard, region = Subjects(there.run), await opened("shard", there.hub), await opened(EU, there.leaf)
    feed = await region.listen(s.premerge("eu"))
    broker = await JetStreamBus.open(there.leaf.url, there.run, name="eu", options=options_of(there, "eu"))
    signing = {name: there.identity(name).signatures() for name in ("a", US, EU)}
    founding = run_record(there.run).nonce
    answer = encode(RegionAnswer(done=True, norm=3.0))
    old = s.premerge_answer("eu", "old")
    for why in ("nobody signed this", "a of run", US, "does not fit"):
        asking = asyncio.create_task(ask(shard, there.run))
        reply = await question(asking, feed.next)
        forged = {
            "nobody signed this": answer,
            "a of run": signing["a"].sign(reply, answer, founding),
            US: signing[US].sign(reply, answer, founding),
            "does not fit": signing[EU].sign(old, answer, founding),
        }
        await broker.tell(reply, forged[why])
        told = await asking
        assert told is not None, why
        with pytest.raises(PeerMisbehaved, match="not believed"):
            decode(RegionAnswer, told)
        assert why.encode() in told.replace(b"'", b""), told
    await broker.close()


async def patiently_read(bus: Bus, run: str) -> None:
    async with asyncio.timeout(SOON_S):
        while True:
            await bus.get_record(Subjects(run).run_record)


@pytest.mark.second_tier
async def test_a_revoked_premerger_is_cut_off_and_another_is_let_in(there: LockedRelayed, opened: Opened) -> None:
    """At once, at its leaf; learners beside it notice nothing."""
    learner, region = await opened("a", there.leaf), await opened(EU, there.leaf)
    assert await region.get_record(Subjects(there.run).run_record) is not None
    there.keys.revoke(EU, there.run, 1.0)
    await asyncio.to_thread(there.follow)
    with pytest.raises((AccessDenied, BrokerUnavailable)):
        await patiently_read(region, there.run)
    assert await learner.get_record(Subjects(there.run).run_record) is not None
    assert await ask(await opened("shard", there.hub), there.run) is None
    there.keys.rotate(EU, there.run, 2.0, overlap_s=0.0, readmit=True)
    await asyncio.to_thread(there.follow)
    again = await opened(EU, there.leaf)
    assert await again.get_record(Subjects(there.run).run_record) is not None
