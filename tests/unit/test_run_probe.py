"""Two foundings of one run id: what learners of the lost one say to shards of the rebuilt one is not believed."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from atoll.base.clock import SystemClock
from atoll.base.errors import BrokerUnavailable, PeerMisbehaved, RunReplaced
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.membership import claim, publish_origin
from atoll.protocol.events import ContributionArrived, Fact, Refuse
from atoll.protocol.shard import Shard
from atoll.settings.sections import ArchiveSettings
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import Beat, Contribution, Rebuilt, RunRecord, encode
from atoll.wire.subjects import Subjects
from atoll_synchronizer.acknowledgements import PendingAcknowledgements
from atoll_synchronizer.garbage_collector import GarbageCollector
from atoll_synchronizer.intake import FactIntake, read_beat, read_manifest
from atoll_synchronizer.process import Host
from atoll_synchronizer.shard_context import EventLog, ShardContext
from support.founded_run import FRAGMENTS, run_record
from support.queued_bytes import QueuedBytes
from support.shard_owners import FixedOwner


def rebuilt(run: str) -> RunRecord:
    """Return the record of a run that went back to a checkpoint with 5 commits of every fragment."""
    origin = Rebuilt(
        source="first",
        checkpoint=60,
        generation=1,
        tokens=10,
        versions=5 * FRAGMENTS,
        checkpoint_at_s=1.0,
        rebuilt_at_s=2.0,
    )
    return msgspec.structs.replace(run_record(run), nonce="second", rebuilt=origin)


def contribution(record: RunRecord, run_nonce: str, base_version: int) -> QueuedBytes:
    subjects = Subjects(record.run)
    manifest = Contribution(
        learner="a",
        incarnation=1,
        fragment=0,
        push=9,
        base_version=base_version,
        tokens=8,
        steps=1,
        trained_tokens=80,
        loss=None,
        norms=(1.0,),
        layout=record.layout.fingerprint,
        run_nonce=run_nonce,
        blob=BlobRef(subjects.contribution_stem("a", 0, 1, 9, "0" * 16), 1, 10, "d" * 32),
    )
    return QueuedBytes(subjects.contribution(0, 0, "a"), encode(manifest))


def test_a_contribution_of_the_lost_founding_is_refused(run: str) -> None:
    record = rebuilt(run)
    stranger, ours = contribution(record, "first", 5), contribution(record, "second", 5)

    with pytest.raises(PeerMisbehaved, match="another founding"):
        read_manifest(stranger, Subjects(run), record, 0)
    assert read_manifest(ours, Subjects(run), record, 0).push == 9


async def test_a_base_that_the_rebuilt_run_does_not_have_yet_is_refused(run: str) -> None:
    """Also of a learner that says the right founding: `future_base`."""
    record = rebuilt(run)
    shard = Shard(record.protocol, 0, dict.fromkeys(record.protocol.fragments_of(0), 5))
    context, told = ShardContext(MemoryBus(run, MemoryBroker()), record, 0, SystemClock()), list[Fact]()
    event_log = EventLog(context.bus, context.subjects, context.name, context.clock)
    owner = FixedOwner(told.append)
    pending = PendingAcknowledgements(context.bus, context.subjects, event_log, GarbageCollector(context.bus), owner)
    await claim(context.bus, context.subjects, "a", SystemClock())
    intake = FactIntake(context, pending, event_log, owner)
    await intake.open(1)
    await intake._on_delivery(contribution(record, "second", 8))
    (fact,) = told
    assert isinstance(fact, ContributionArrived)

    refused = [action for action in shard.handle(fact) if isinstance(action, Refuse)]

    assert [action.reason for action in refused] == ["future_base"]


def test_a_heartbeat_of_the_lost_founding_is_not_heard(run: str) -> None:
    """Its tokens were trained after the checkpoint and are in no book: they must not count towards the target."""
    record = rebuilt(run)
    fields = {
        "learner": "a",
        "incarnation": 1,
        "state": "training",
        "at_s": 0.0,
        "step": 1,
        "step_s": 1.0,
        "tokens": 10**6,
    }
    zeros = {"tokens_per_s": 0.0, "loss": None, "pushed": 0, "superseded": 0}
    beat = msgspec.convert({**fields, **zeros, "run_nonce": "first"}, Beat)

    with pytest.raises(PeerMisbehaved, match="another founding"):
        read_beat(encode(beat), record)
    assert read_beat(encode(msgspec.structs.replace(beat, run_nonce="second")), record).tokens == 10**6


async def test_nobody_puts_fresh_values_into_a_run_that_is_being_rebuilt(run: str) -> None:
    bus = MemoryBus(run, MemoryBroker())

    with pytest.raises(BrokerUnavailable, match="is being rebuilt"):
        await publish_origin(bus, rebuilt(run), {})


async def test_a_host_does_not_serve_a_run_that_the_broker_has_lost(run: str) -> None:
    """It lived through the loss: it stops, instead of taking leases on the empty broker again and again."""
    host = Host(MemoryBus(run, MemoryBroker()), run_record(run), (0, 1), SystemClock(), ArchiveSettings())

    async with asyncio.timeout(240.0):
        with pytest.raises(RunReplaced, match="not on this broker"):
            await host.serve(asyncio.Event())
