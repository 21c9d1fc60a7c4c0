"""A locked broker lets in who is on its roll; nobody does more than its kind may. A table of attacks, and the door itself."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.base.errors import AccessDenied, BrokerUnavailable, RecordConflict
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.bus.streams import Places
from atoll.keys.identity import read_identity
from atoll.keys.roll import KeyFolder
from atoll.wire.events import EVENTS
from atoll.wire.limits import INFO_HEADER
from atoll.wire.subjects import Subjects
from support.door_attacks import (
    ATTACKS,
    INTRUDER,
    LEAF,
    NOWHERE,
    PREMERGER,
    SPY,
    SWALLOWED,
    VICTIM,
    VICTIMS_PLACE,
    DoorAttack,
    DoorWitness,
    witness,
)
from support.locked_brokers import HOST, LockedBroker

pytestmark = pytest.mark.connected
RUN, WORKER = "demo", "worker"
S = Subjects(RUN)
SOON_S = 120.0
NEVER_S = 300.0
"""A bus that did not know at once would survive an outage for so long."""
NODES = 3
MIB = 1 << 20


@pytest.fixture(scope="module", params=[1, pytest.param(NODES, marks=pytest.mark.second_tier)])
def locked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockedBroker]:
    """A locked broker, of one node and of several, with a founder, learners, a reader, an evaluator and both synchronizers."""
    with LockedBroker(tmp_path_factory.mktemp("locked"), request.param) as made:
        made.add(RUN, "founder", founds=True)
        for name in (INTRUDER, WORKER):
            made.add(RUN, name)
        made.add(RUN, VICTIM, region=VICTIMS_PLACE)
        made.add(RUN, LEAF, "region")
        made.add(RUN, SPY, "reader")
        made.add(RUN, PREMERGER, "premerger")
        made.add(RUN, "meter", "evaluator")
        made.add(RUN, "shard", "synchronizer")
        yield made


@pytest.fixture
async def founded(locked: LockedBroker) -> AsyncIterator[JetStreamBus]:
    bus = await locked.bus(RUN, locked.identity(RUN, "founder"))
    await bus.provision(64 * MIB)
    shard = await locked.bus(RUN, locked.identity(RUN, "shard"))
    await shard.fit(Places((0, 1), 1))
    await shard.close()
    try:
        await bus.put_record(S.run_record, b"the run", expected=0)
        await bus.put_record(S.head(0), b"the head", expected=0)
    except RecordConflict:
        pass  # another test's founder was first
    yield bus
    await bus.close()


@pytest.fixture
async def seen(locked: LockedBroker, founded: JetStreamBus) -> AsyncIterator[DoorWitness]:
    intruders = {name: locked.identity(RUN, name) for name in (INTRUDER, SPY, PREMERGER, LEAF)}
    async with witness(locked.url, founded.subjects.run, locked.operator, intruders) as made:
        yield made


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: f"{attack.verb}: {attack.name}")
async def test_nothing_gets_in(
    attack: DoorAttack, seen: DoorWitness, locked: LockedBroker, founded: JetStreamBus
) -> None:
    """The operator sees nothing of it, the intruder is told, and the server's log names it; streams and records stay.

    What the intruder may write and readers refuse is stored without a word; what no stream keeps is dropped without one.
    """
    before = locked.said()
    breach = await seen.play(attack)
    assert breach.got_in == ""
    if attack.verb not in ("reroute", "mislead") and attack not in (*NOWHERE, *SWALLOWED):
        assert "permissions violation" in breach.told
        assert any(f"{RUN}/{attack.who}/" in now[len(then) :] for then, now in zip(before, locked.said(), strict=True))
    record = await founded.get_record(S.run_record)
    head = await founded.get_record(S.head(0))
    assert record is not None
    assert record.data == b"the run"
    assert head is not None
    assert head.data == b"the head"


async def test_the_witness_sees_what_does_get_in(seen: DoorWitness) -> None:
    """Otherwise the table above would prove nothing: what each may do arrives, and is taken for a breach."""
    own = (
        DoorAttack("its own manifest", "publish", "{p}.up.m.0.1.{me}"),
        DoorAttack("the manifest of a learner that may be there", "publish", f"{{p}}.up.m.0.0.{INTRUDER}", who=LEAF),
        DoorAttack("the heartbeat of a learner that may be there", "publish", f"{{p}}.hb.{INTRUDER}", who=LEAF),
        DoorAttack("its own account facts", "ask", "$JS.API.INFO", ""),
        DoorAttack(
            "its own farewell",
            "mislead",
            "{p}.ev.left.{me}",
            '{{"kind":"left","who":"{me}","at_s":1,"fields":{{"incarnation":1,"tokens":1,"steps":1}}}}',
        ),
        DoorAttack("calls", "hear", "{p}.call.*", reply="{p}.call.0"),
        # Nobody sends on a tap; the broker says there what a stream has stored.
        DoorAttack("events, as a reader", "hear", "{p}.tap.>", reply="{p}.ev.round.shard-0", who=SPY),
    )
    for attack in own:
        async with asyncio.timeout(SOON_S):  # a busy machine may need a second look
            while not (breach := await seen.play(attack)).got_in:
                pass
        assert breach.told == "", attack.name


@pytest.mark.usefixtures("founded")
async def test_a_learner_does_its_work(locked: LockedBroker) -> None:
    """It contributes, leases data, keeps its record, beats, hears calls and heads, and reads the model."""
    learner = await locked.bus(RUN, locked.identity(RUN, WORKER))
    shard = await locked.bus(RUN, locked.identity(RUN, "shard"))
    blob = await learner.put_blob(S.contribution_stem(WORKER, 0, 1, 1, "0" * 16), b"x" * (3 * MIB))
    queue = await shard.consume(S.contributions_of(0), durable="shard-0")
    await learner.publish(S.contribution(0, 0, WORKER), b"manifest", msg_id="m1", info={"fragment": 0})
    delivery = await queue.next(SOON_S)
    while delivery is not None and delivery.data != b"manifest":
        await delivery.ack()
        delivery = await queue.next(SOON_S)
    assert delivery is not None
    await delivery.ack()
    assert await shard.get_blob(blob, 4 * MIB) == b"x" * (3 * MIB)
    revision = await learner.put_record(S.member(WORKER), b"member", expected=0)
    with pytest.raises(RecordConflict):
        await learner.put_record(S.member(WORKER), b"again", expected=revision + 1)
    calls, heads, beats = (
        await learner.listen(S.call("*")),
        await learner.listen(S.tap("gl.head.*")),
        await shard.listen(S.beat("*")),
    )
    await learner.tell(S.beat(WORKER), b"beat")
    await shard.tell(S.call(0), b"call")
    await shard.put_record(S.head(7), b"seven", expected=0, info={"version": 1})
    beat, call, head = await beats.next(SOON_S), await calls.next(SOON_S), await heads.next(SOON_S)
    assert beat is not None
    assert beat.data == b"beat"
    assert call is not None
    assert call.data == b"call"
    assert head is not None
    assert INFO_HEADER in head.headers
    assert [record.data for record in await learner.get_records(S.head("*"))][-1] == b"seven"
    assert await learner.ask(S.control(WORKER), b"does another process hold this id?", timeout_s=0.3) is None
    for bus in (learner, shard):
        await bus.close()


@pytest.mark.usefixtures("founded")
async def test_everybody_writes_events_of_its_own_kinds(locked: LockedBroker) -> None:
    """And no others: the rights follow from the table that readers ask, so none of ours is refused what it writes."""
    writers = {WORKER: "learner", "meter": "evaluator", "shard": "shard", PREMERGER: ""}
    for identity, writer in writers.items():
        bus = await locked.bus(RUN, locked.identity(RUN, identity))
        name = {"evaluator": "evaluator", "shard": "shard-0"}.get(writer, identity)
        for kind, fields in EVENTS.items():
            if writer in (fields.writer, "shard"):  # who owns a shard writes everything of its run
                await bus.publish(S.event(kind, name), b"{}", msg_id=f"{identity}-{kind}")
            else:
                with pytest.raises(AccessDenied):
                    await bus.publish(S.event(kind, name), b"{}", msg_id=f"{identity}-{kind}")
        await bus.close()


@pytest.mark.usefixtures("founded")
async def test_a_reader_hears_learners_and_synchronizers(locked: LockedBroker) -> None:
    """Their signs of life reach it, and so does each later one; in a cluster a heartbeat may come by two ways."""
    learner = await locked.bus(RUN, locked.identity(RUN, WORKER))
    shard = await locked.bus(RUN, locked.identity(RUN, "shard"))
    for name in (SPY, "meter"):
        reader = await locked.bus(RUN, locked.identity(RUN, name))
        beats, presences = await reader.listen(S.beat("*")), await reader.listen(S.presence("*"))
        for teller, subject, feed, said in (
            (learner, S.beat(WORKER), beats, b"beat"),
            (learner, S.beat(WORKER), beats, b"again"),
            (shard, S.presence("host"), presences, b"here"),
        ):
            async with asyncio.timeout(SOON_S):
                heard = None
                while heard is None or heard.data != said:  # another node learns of a listener a moment later
                    await teller.tell(subject, said)
                    heard = await feed.next(0.2)
        await reader.close()
    for bus in (learner, shard):
        await bus.close()


@pytest.mark.usefixtures("founded")
async def test_a_bus_says_at_once_what_is_refused(locked: LockedBroker) -> None:
    """Not after the time for which it would survive an outage."""
    bus = await locked.bus(RUN, locked.identity(RUN, INTRUDER), patience_s=NEVER_S)
    began_s = time.monotonic()
    with pytest.raises(AccessDenied, match=r"gl\.head\.0 as identity 'mallory'"):
        await bus.put_record(S.head(0), b"zeros", expected=None)
    with pytest.raises(AccessDenied):
        await bus.publish(S.contribution(0, 0, VICTIM), b"", msg_id="x")
    with pytest.raises(AccessDenied):
        await bus.purge(f"{S.contribution_stem(VICTIM, 0, 1, 1, '0' * 16)}.*")
    with pytest.raises(AccessDenied):
        await bus.replay(S.event("*", "*"))
    with pytest.raises(AccessDenied):
        await bus.listen(S.beat("*"))
    with pytest.raises(AccessDenied):
        await bus.remove_run()
    assert time.monotonic() - began_s < NEVER_S
    await bus.close()


async def reads_for_ever(bus: JetStreamBus) -> None:
    async with asyncio.timeout(4 * SOON_S):
        while True:
            await bus.get_record(S.run_record)


async def test_who_is_not_on_the_roll_stays_outside(locked: LockedBroker, tmp_path: Path) -> None:
    """Nobody, an unknown key, a key of another folder: each is told at once, and nothing is retried."""
    stranger = KeyFolder(tmp_path / "others")
    stranger.create([HOST], time.time())
    foreign = read_identity(stranger.add("mallory", "learner", RUN, time.time()))
    unknown = replace(foreign, authority=locked.operator.authority)
    for identity, reason in ((unknown, "does not let us in"), (foreign, "cannot prove that it is ours")):
        with pytest.raises(AccessDenied, match=reason):
            await locked.bus(RUN, identity)
    for url in (locked.url, locked.url.replace("tls:", "nats:")):
        with pytest.raises(AccessDenied, match=r"broker\.identity"):
            await JetStreamBus.open(url, RUN, name="nobody", options=BusOptions(patience_s=SOON_S))


async def test_an_identity_tells_nothing_to_a_broker_in_plain_text(
    locked: LockedBroker, broker: EmbeddedBroker
) -> None:
    for url in (broker.url, broker.url.replace("nats:", "tls:")):
        options = BusOptions(credentials=locked.operator.credentials())
        with pytest.raises(AccessDenied, match="offers no TLS"):
            await JetStreamBus.open(url, RUN, name="x", options=options)


async def test_a_revoked_identity_is_cut_off_at_once(locked: LockedBroker, founded: JetStreamBus) -> None:
    locked.add(RUN, "leaves")
    bus = await locked.bus(RUN, locked.identity(RUN, "leaves"), try_s=1.0)
    assert await bus.get_record(S.run_record) is not None
    before = founded.stats.reconnects
    locked.keys.revoke("leaves", RUN, time.time())
    locked.follow()
    with pytest.raises((AccessDenied, BrokerUnavailable)):
        await reads_for_ever(bus)
    with pytest.raises(AccessDenied, match="is not revoked"):
        await reads_for_ever(bus)
    assert founded.stats.reconnects == before
    assert await founded.get_record(S.run_record) is not None
    await bus.close()


async def test_a_revoked_shard_with_messages_in_hand_can_close(locked: LockedBroker, founded: JetStreamBus) -> None:
    """It cannot give them back, and need not: they are delivered again to the next. See `_no_task_left`."""
    locked.add(RUN, "leaving", "synchronizer")
    bus = await locked.bus(RUN, locked.identity(RUN, "leaving"), own_thread=False)
    queue = await bus.consume(S.contributions_of(0), durable="shard-0")
    await founded.publish(S.contribution(0, 0, "founder"), b"x", msg_id="held")
    assert await queue.next(SOON_S) is not None
    locked.keys.revoke("leaving", RUN, time.time())
    locked.follow()
    with pytest.raises(AccessDenied, match="is not revoked"):
        await reads_for_ever(bus)

    await bus.close()

    with pytest.raises(BrokerUnavailable, match="the bus is closed"):
        await bus.get_record(S.run_record)


@pytest.mark.usefixtures("founded")
async def test_a_key_ends_and_a_new_one_takes_its_place_meanwhile(locked: LockedBroker) -> None:
    """During the overlap both enter; after it the former one stays outside, by the clock alone."""
    locked.add(RUN, "changes")
    former = locked.identity(RUN, "changes")
    training = await locked.bus(RUN, former)
    locked.keys.rotate("changes", RUN, time.time(), overlap_s=3600.0)
    locked.follow()
    newer = locked.identity(RUN, "changes")
    assert newer.seed != former.seed
    beside = await locked.bus(RUN, newer)
    for bus in (training, beside):
        assert await bus.get_record(S.run_record) is not None
    assert training.stats.reconnects == 0
    locked.keys.rotate("changes", RUN, time.time(), overlap_s=0.0)
    locked.follow()
    for identity in (former, newer):
        with pytest.raises(AccessDenied):
            await locked.bus(RUN, identity)
    last = await locked.bus(RUN, locked.identity(RUN, "changes"))
    for bus in (training, beside, last):
        await bus.close()


@pytest.mark.usefixtures("founded")
async def test_a_key_that_has_expired_opens_nothing(locked: LockedBroker) -> None:
    until_s = time.time() + 4.0  # three nodes on a busy machine take some of it before they let the key in
    locked.add(RUN, "short", until_s=until_s)
    bus = await locked.bus(RUN, locked.identity(RUN, "short"), try_s=1.0)
    await asyncio.to_thread(locked.await_end, until_s)
    with pytest.raises((AccessDenied, BrokerUnavailable)):
        await reads_for_ever(bus)
    await bus.close()


async def test_a_broker_with_another_certificate_is_refused(locked: LockedBroker, tmp_path: Path) -> None:
    with LockedBroker(tmp_path) as other:
        other.keys.certify(["hub.example.org"])
        other.follow()
        with pytest.raises(AccessDenied, match="cannot prove that it is ours"):
            await other.bus(RUN, other.operator)
        other.keys.certify([HOST])
        other.follow()
        bus = await other.bus(RUN, other.operator)
        await bus.close()
    context = locked.operator.credentials().tls()
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname
