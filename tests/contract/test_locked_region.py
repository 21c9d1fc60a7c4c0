"""A region of a locked hub: its learners enter at the leaf with their keys, and may do there what they may do at the hub."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from atoll.base.clock import SystemClock
from atoll.base.errors import AccessDenied, PeerMisbehaved, RunReplaced
from atoll.base.retry import Unanswered
from atoll.bus.interface import Bus, Record, Subscription
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.nats.connection import Connection
from atoll.bus.nats.jetstream_api import ApiRefusal, JetStream
from atoll.bus.options import BusOptions
from atoll.client.pushing import Pusher
from atoll.keys.locked import LockedDoor, LockedRegion
from atoll.keys.rights import Kind, region_publishes, rights_of
from atoll.local import brokers
from atoll.protocol.events import Push
from atoll.run.stream_room import places_of
from atoll.wire.messages import Contribution, Member, RunRecord, decode
from atoll.wire.subjects import Subjects
from atoll_synchronizer.aggregator import PendingContribution, check_manifest, read_contribution
from support.bus_contract import MIB, SOON_S, noise
from support.founded_run import run_record
from support.locked_regions import PATIENCE_S, LockedRelayed, Opened, locked_relayed, opener

pytestmark = pytest.mark.connected
POLL_S = 0.05
REVOKED_S = 2.0
HEARD_S = 1.0
KINDS: dict[str, Kind] = {"shard": "synchronizer", "a": "learner", "b": "learner", "spy": "reader"}
PLACES = {"home": "hub", "ours": "eu"}


@pytest.fixture
async def there(tmp_path: Path, run: str) -> AsyncIterator[LockedRelayed]:
    async with locked_relayed(tmp_path, run, KINDS) as locked:
        yield locked


@pytest.fixture
async def opened(there: LockedRelayed) -> AsyncIterator[Opened]:
    def options_of(name: str) -> BusOptions:
        return BusOptions(credentials=there.identity(name).credentials(), patience_s=PATIENCE_S)

    async with opener(there, options_of) as one:
        yield one


async def told_until_heard(teller: Bus, subject: str, feed: Subscription, word: bytes) -> bytes | None:
    """Tell a word again and again until the feed has it: the hub learns in its own time that somebody behind a leaf listens."""
    deadline_s = time.monotonic() + SOON_S
    while time.monotonic() < deadline_s:
        await teller.tell(subject, word)
        heard = await feed.next(0.5)
        if heard is not None:
            return bytes(heard.data)
    return None


async def test_learners_of_a_locked_region_read_and_contribute_through_a_cut(
    there: LockedRelayed, opened: Opened
) -> None:
    s, shard = Subjects(there.run), await opened("shard", there.hub)
    learner, other = await opened("a", there.leaf), await opened("b", there.leaf)
    frame = await shard.put_blob(s.global_stem(0, 1, "n"), noise(4 * MIB))
    await shard.put_record(s.head(0), b"1", expected=0)
    before = there.link.carried_bytes["down"]
    assert await learner.get_blob(frame, 4 * MIB) == await other.get_blob(frame, 4 * MIB) == noise(4 * MIB)
    assert there.link.carried_bytes["down"] - before < 5 * MIB
    calls, beats = await learner.listen(s.call("*")), await shard.listen(s.beat("*"))
    for teller, subject, feed, word in ((shard, s.call(0), calls, b"call"), (learner, s.beat("a"), beats, b"beat")):
        assert await told_until_heard(teller, subject, feed, word) == word
    await asyncio.to_thread(there.cut)
    ref = await learner.put_blob(s.contribution_stem("a", 0, 1, 1, "0" * 16), noise(2 * MIB))
    await learner.publish(s.contribution(0, 0, "a"), b"manifest", msg_id="m")
    there.heal()
    consumer = await shard.consume(s.contributions_of(0), durable="shard")
    delivery = await consumer.next(SOON_S)
    assert delivery is not None
    assert delivery.data == b"manifest"
    assert await shard.get_blob(ref, 2 * MIB) == noise(2 * MIB)


async def test_nobody_writes_as_another_from_a_region(there: LockedRelayed, opened: Opened) -> None:
    """Neither directly nor by the outbox; and a reader hears heartbeats of the region at the hub."""
    s, learner, spy = Subjects(there.run), await opened("a", there.leaf), await opened("spy", there.hub)
    for subject in (s.contribution(0, 0, "b"), s.outbox("eu", s.contribution(0, 0, "b")), s.head(0)):
        bare = await JetStreamBus.open(
            there.leaf.url, there.run, name="a", options=BusOptions(credentials=there.identity("a").credentials())
        )
        with pytest.raises(AccessDenied):
            await bare.connection.call(JetStream(bare.connection).store(subject, b"forged", {}))
        await bare.close()
    beats = await spy.listen(s.beat("*"))
    await learner.tell(s.beat("a"), b"beat")
    heard = await beats.next(SOON_S)
    assert heard is not None
    assert heard.data == b"beat"


@pytest.fixture
async def placed(tmp_path: Path, run: str) -> AsyncIterator[LockedRelayed]:
    """A hub and a region whose roll says of two learners where they are."""
    kinds: dict[str, Kind] = {"shard": "synchronizer", "home": "learner", "ours": "learner", "free": "learner"}
    async with locked_relayed(tmp_path, run, kinds, PLACES) as locked:
        yield locked


async def forged(region: Connection, refused: list[str], stored: list[str]) -> None:
    """Write as a region on subjects that the hub shall refuse to it, and then on others; return when all have arrived."""
    client = await region.ready(SOON_S)
    for subject in refused:
        await client.publish(subject, b"forged")
    for subject in stored:
        assert b'"seq"' in (await region.request(subject, b"forged", timeout_s=SOON_S)).data


async def test_a_region_writes_for_its_own_learners_alone(placed: LockedRelayed) -> None:
    """It took the two places of every learner of the run in the queue, and their pace fell to half."""
    s, p = Subjects(placed.run), Subjects(placed.run).prefix

    def options_of(name: str) -> BusOptions:
        return BusOptions(credentials=placed.identity(name).credentials(), patience_s=PATIENCE_S)

    def subjects_of(learner: str, number: int = 1) -> list[str]:
        return [
            s.contribution(0, number, learner),
            f"{s.contribution_stem(learner, 0, 1, number, '0' * 16)}.0",
            s.member(learner),
            s.event("joined", learner),
        ]

    async with opener(placed, options_of) as opened, as_the_region(placed) as region:
        shard = await opened("shard", placed.hub)

        async def stored() -> set[str]:
            found = [await shard.count_stored(f"{p}.{part}.>", more_than=0) for part in ("up.c", "up.m", "mb", "ev")]
            return {subject for counts in found for subject in counts.by_subject}

        mine = [*subjects_of("ours"), *subjects_of("free")]
        await region.call(forged(region, subjects_of("home"), mine))
        assert await stored() == set(mine)
        with pytest.raises(AccessDenied):
            await opened("home", placed.leaf)

        placed.keys.move("home", placed.run, "eu", time.time())
        placed.keys.move("ours", placed.run, "us", time.time())
        placed.keys.add("late", "learner", placed.run, time.time(), region="eu")
        await asyncio.to_thread(placed.follow)
        late = await opened("late", placed.leaf)
        await late.publish(s.contribution(0, 1, "late"), b"manifest", msg_id="m")
        await region.call(forged(region, subjects_of("ours", 2), subjects_of("home")))
        assert await stored() == {*mine, *subjects_of("home"), s.contribution(0, 1, "late")}


async def test_taps_show_what_a_region_sent_and_check_it(there: LockedRelayed, opened: Opened) -> None:
    """Heartbeats, too, also to who comes late; bodies are signed by who wrote them, and the signature is taken off."""
    s, shard = Subjects(there.run), await opened("shard", there.hub)
    learner, spy = await opened("a", there.leaf), await opened("spy", there.hub)
    taps = await spy.listen(s.tap())
    consumer = await shard.consume(s.contributions_of(0), durable="shard")
    async with asyncio.timeout(SOON_S):
        kept: list[Record] = []
        while not kept:
            await learner.tell(s.beat("a"), b"beat")
            with contextlib.suppress(RunReplaced):  # the shard has only begun to make the stream
                kept = await spy.get_records(s.beat("*"))
    await learner.publish(s.contribution(0, 0, "a"), b"manifest", msg_id="m")
    heard: dict[str, bytes] = {}
    async with asyncio.timeout(SOON_S):
        while len(heard) < 2:
            if (message := await taps.next(SOON_S)) is not None:
                heard[message.subject] = message.data
    await consumer.close()

    assert [(record.subject, record.data) for record in kept] == [(s.beat("a"), b"beat")]
    assert heard == {s.tap("hb.a"): b"beat", s.tap("up.m.0.0.a"): b"manifest"}


async def test_what_the_region_writes_itself_is_not_believed(there: LockedRelayed, opened: Opened) -> None:
    """It may disturb what it carries. It cannot make a manifest of a learner."""
    s, shard = Subjects(there.run), await opened("shard", there.hub)
    region = await JetStreamBus.open(
        there.leaf.url, there.run, name="eu", options=BusOptions(credentials=there.identity("eu").credentials())
    )
    await region.publish(s.contribution(0, 0, "a"), b"forged", msg_id="m")
    consumer = await shard.consume(s.contributions_of(0), durable="shard")
    delivery = await consumer.next(SOON_S)
    await region.close()
    assert delivery is not None
    with pytest.raises(PeerMisbehaved):
        decode(RunRecord, delivery.data)
    assert b"forged" not in delivery.data


async def test_who_is_let_in_at_the_hub_is_let_in_at_the_region(there: LockedRelayed, opened: Opened) -> None:
    """Doors follow the roll while the link stands; who is of another kind stays out of the region."""
    there.keys.add("late", "learner", there.run, time.time())
    await asyncio.to_thread(there.follow)
    late = await opened("late", there.leaf)
    assert await late.get_record(Subjects(there.run).run_record) is not None
    with pytest.raises(AccessDenied):
        await opened("shard", there.leaf)


@asynccontextmanager
async def as_the_region(there: LockedRelayed) -> AsyncIterator[Connection]:
    """Connect to the leaf as who runs it: with every right there."""
    options = BusOptions(credentials=there.identity("eu").credentials(), patience_s=PATIENCE_S)
    bus = await JetStreamBus.open(there.leaf.url, there.run, name="eu", options=options)
    try:
        yield bus.connection
    finally:
        await bus.close()


async def published(connection: Connection, subject: str, data: bytes, reply: str) -> None:
    """Send a message from the leaf that wants its answer elsewhere, and see to it that it has arrived."""
    client = await connection.ready(SOON_S)
    await client.publish(subject, data, reply=reply)
    await client.flush()


async def test_no_answer_to_a_region_is_a_command_to_the_hub(there: LockedRelayed, opened: Opened) -> None:
    """It chose where the answer to a direct get went: to JetStream, whose answer of nothing deleted another run's stream."""
    s, stream = Subjects(there.run), f"atoll_{there.run}"
    shard, spy = await opened("shard", there.hub), await opened("spy", there.hub)
    await shard.put_record(s.member("b"), b"b", expected=0)
    async with as_the_region(there) as region:
        mine = JetStream(region)
        for call, body in (
            (f"DIRECT.GET.{stream}_MB", b'{"last_by_subj":"none"}'),
            (f"DIRECT.GET.{stream}_GL", json.dumps({"last_by_subj": s.run_record}).encode()),
            (f"STREAM.MSG.GET.{stream}_MB", json.dumps({"last_by_subj": s.member("b")}).encode()),
            (f"STREAM.INFO.{stream}_GL", b""),
        ):
            for command in (f"STREAM.DELETE.{stream}_MB", f"STREAM.PURGE.{stream}_MB"):
                await region.call(published(region, f"{mine.root}.{call}", body, f"$JS.API.{command}"))
            await region.call(published(region, f"{mine.root}.{call}", body, s.head(0)))
        await region.call(published(region, s.member("b"), b"garbage", f"$JS.API.STREAM.PURGE.{stream}_MB"))
        assert await region.call(region.request(f"{mine.root}.INFO", timeout_s=SOON_S)) is not None
    assert await spy.get_record(s.run_record) is not None
    assert await shard.get_record(s.head(0)) is None
    told = await shard.get_records(s.member("*"))
    assert [record.subject for record in told] == [s.member("b")]


async def test_a_region_writes_over_no_chunk_of_another_learner(there: LockedRelayed, opened: Opened) -> None:
    """Nobody tells it where they will lie, and where they lie the first ones stay: the shard reads the contribution whole."""
    run, shard, learner = run_record(there.run), await opened("shard", there.hub), await opened("b", there.hub)
    await shard.fit(places_of(run))
    consumer = await shard.consume(run.subjects.contributions_of(0), durable="shard")
    member = Member(learner="b", incarnation=1, nonce="n", host="h", pid=1, claimed_at_s=0.0, region="us")
    size = run.layout.fragment_sizes()[0]
    push = Push(fragment=0, push=1, base_version=0, tokens=8, steps=1, trained_tokens=8, cause_id="c")

    async def loss() -> None:
        return None

    theta = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    await Pusher(learner, run, member, SystemClock()).push(
        push, np.zeros(size, np.float32), lambda start, stop: theta[start:stop], loss
    )
    delivery = await consumer.next(SOON_S)
    assert delivery is not None
    manifest = decode(Contribution, delivery.data)
    assert manifest.blob.chunks == 1
    async with as_the_region(there) as region:
        mine = JetStream(region)
        with pytest.raises(Unanswered):
            await region.call(mine.request(f"{mine.root}.STREAM.INFO.atoll_{there.run}_UPC", b"", timeout_s=HEARD_S))
        with pytest.raises(ApiRefusal) as refused:
            await region.call(mine.request(f"{manifest.blob.stem}.0", b"forged"))
        assert refused.value.is_kept_first
    check_manifest(manifest, run)
    assert isinstance(await read_contribution(shard, run, manifest), PendingContribution)


async def test_a_reader_in_a_region_sees_how_full_all_streams_are_but_that_of_chunks(
    there: LockedRelayed, opened: Opened
) -> None:
    """Who asks for it is told the names of what lies there, too, before a contribution is whole."""
    await opened("shard", there.hub)
    found = []
    for broker in (there.hub, there.leaf):
        options = BusOptions(credentials=there.identity("spy").credentials(), patience_s=PATIENCE_S)
        spy = await JetStreamBus.open(broker.url, there.run, name="spy", options=options)
        found.append({state.kind for state in await spy.stream_states()})
        await spy.close()
    assert found[0] - found[1] == {"UPC"}
    assert found[1] >= {"UPM", "GL", "EV"}


async def test_a_region_goes_on_when_the_hub_reads_its_doors_again(there: LockedRelayed, opened: Opened) -> None:
    """A newcomer, another region, a second key. What the server had mapped by itself when the leaf connected was lost then."""
    there.keys.add("late", "learner", there.run, time.time())
    there.keys.add("us", "region", there.run, time.time())
    there.keys.rotate("eu", there.run, time.time(), overlap_s=3600.0)
    await asyncio.to_thread(there.follow)
    s, shard, learner = Subjects(there.run), await opened("shard", there.hub), await opened("a", there.leaf)
    frame = await shard.put_blob(s.global_stem(0, 1, "n"), noise(MIB))
    await shard.put_record(s.head(0), b"1", expected=0)
    assert await learner.get_blob(frame, MIB) == noise(MIB)
    head = await learner.get_record(s.head(0))  # as the hub's leader has it
    assert head is not None
    assert head.data == b"1"


async def test_heartbeats_reach_the_leaf_once(there: LockedRelayed, opened: Opened) -> None:
    s, home, spy = Subjects(there.run), await opened("b", there.hub), await opened("spy", there.leaf)
    beats = await spy.listen(s.beat("*"))
    assert await told_until_heard(home, s.beat("b"), beats, b"first") == b"first"
    for _ in range(5):
        await home.tell(s.beat("b"), b"beat")
    assert await home.reach(SOON_S)
    heard = []
    while (message := await beats.next(HEARD_S)) is not None:
        heard.append(message.data)
    assert heard.count(b"beat") == 5


async def test_a_region_that_is_revoked_reaches_the_hub_no_more(there: LockedRelayed, opened: Opened) -> None:
    """The server lets the connection of a leaf stand, and went on to send it all that it had subscribed to."""
    s, shard, learner = Subjects(there.run), await opened("shard", there.hub), await opened("a", there.leaf)
    async with as_the_region(there) as region:
        root = JetStream(region).root
        assert await region.call(region.request(f"{root}.INFO", timeout_s=SOON_S)) is not None
        calls = await learner.listen(s.call("*"))
        assert await told_until_heard(shard, s.call(0), calls, b"call") == b"call"
        there.keys.revoke("eu", there.run, time.time())
        assert await asyncio.to_thread(there.hub_door.has_changed)
        await asyncio.to_thread(brokers._apply_door, there.hub, there.hub_door)
        with pytest.raises(Unanswered):
            await region.call(region.request(f"{root}.INFO", timeout_s=REVOKED_S))
        await region.call(published(region, s.member("b"), b"late", "_INBOX.x"))
        while await calls.next(REVOKED_S) is not None:
            """What was told before the revoking."""
        await shard.tell(s.call(0), b"late")
        assert await shard.reach(SOON_S)
        assert await calls.next(REVOKED_S) is None
    assert await shard.get_records(s.member("*")) == []


def test_the_seed_of_a_region_is_in_a_file_of_its_own(tmp_path: Path, run: str) -> None:
    """Which nobody else may read."""
    locked = LockedRelayed(tmp_path, run, KINDS)
    mine = locked.identity("eu")
    door = LockedDoor(locked.keys, tmp_path / "eu", region=LockedRegion(mine, "eu", ("tls://127.0.0.1:7422",)))
    assert door.remote is not None
    assert mine.seed in door.remote.read_text(encoding="utf-8")
    assert stat.S_IMODE(door.remote.stat().st_mode) == 0o600
    assert mine.seed not in door.config.read_text(encoding="utf-8")


def test_a_region_founds_only_if_it_is_told_so(run: str) -> None:
    everything = f"{Subjects(run).prefix}.gl.>"
    assert everything not in region_publishes(rights_of("region", run, "eu"))
    assert everything in region_publishes(rights_of("region", run, "eu", founds=True))
