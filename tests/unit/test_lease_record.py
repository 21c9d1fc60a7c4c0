"""A shard's lease as a record: small however many have come and gone, and no crash when it cannot be read."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import structlog

from atoll.base.clock import SystemClock
from atoll.base.quantities import EPOCH_MAX
from atoll.bus.interface import Record
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.protocol.ledger import ACCOUNTS_MAX, Account, Ledger, newest
from atoll.protocol.settings import ProtocolSettings
from atoll.run.record import recorded_progress
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import DOCUMENT_BYTES_MAX, Head, Lease, RunRecord, decode, encode
from atoll.wire.subjects import Subjects
from atoll_synchronizer.lease import LeaseKeeper
from support.clocks import HandClock
from support.founded_run import run_record

DEADLINE_S = 240.0
REASONS = ("malformed", "not_finite", "stale", "future_base", "oversized", "quarantined")
FAR = 1 << 30
"""An epoch above all numbers that the broker of these tests gives."""
PROTOCOL = msgspec.convert({"fragments": 1, "shards": 1, "lease_s": 0.5, "silence_s": 0.25}, ProtocolSettings)


def crowded(incarnations: int) -> Ledger:
    """Return a ledger of a learner with the longest id that died over and over, and of one that lives since the beginning."""
    ledger = Ledger(run_tokens=1 << 40)
    ledger.take_report("veteran", 1, 5, 5, 0, 0)
    for number in range(incarnations):
        account = ledger.account("l" * 64, number + 1)
        account.trained = account.pushed = account.merged = account.superseded = 1 << 40
        account.refused = dict.fromkeys(REASONS, 1 << 30)
    return ledger


async def put_head(bus: MemoryBus, run: str, epoch: int) -> None:
    keyframe = BlobRef(Subjects(run).global_stem(0, 1, "n"), 1, 8, "d" * 32)
    head = Head(
        fragment=0,
        version=1,
        epoch=epoch,
        nonce="n",
        layout="f" * 16,
        keyframe=keyframe,
        key_version=1,
        digest="d" * 32,
    )
    await bus.put_record(Subjects(run).head(0), encode(head), expected=0)


def founded(run: str, nonce: str = "first") -> RunRecord:
    return msgspec.structs.replace(run_record(run), protocol=PROTOCOL, nonce=nonce)


def keeper(bus: MemoryBus, run: str) -> LeaseKeeper:
    """Return a candidate for the only shard."""
    return LeaseKeeper(bus, founded(run), 0, SystemClock())


async def wait_a_lease(clock: HandClock, candidate: LeaseKeeper) -> None:
    for _ in range(6):
        clock.now_s += PROTOCOL.lease_s / 6.0
        await candidate._look(None)


def test_of_many_incarnations_the_living_and_the_last_are_kept_and_all_tokens_stay_known() -> None:
    """Who left goes before who lives, however long ago it was first heard of; nothing changes while all fit."""
    ledger = Ledger(run_tokens=151)
    ledger.account("living", 1).trained = 1
    for number in range(1, 6):
        ledger.account("dying", number).trained = 10
    ledger.accounts["gone/1"] = Account(trained=100, left=True)
    small = newest(ledger, 3)

    assert set(small.accounts) == {"living/1", "dying/5", "gone/1"}
    assert set(newest(ledger, 2).accounts) == {"living/1", "dying/5"}
    assert small.run_tokens == 151
    assert newest(ledger, 7) is ledger


def test_what_an_heir_learns_from_a_bounded_lease_adds_up_with_the_books() -> None:
    """The ledgers hold everybody's reports of the last commit, the lease the newest of those who live."""
    ledger = crowded(10)
    read_again = msgspec.json.decode(msgspec.json.encode(ledger), type=Ledger)
    ledger.take_report("veteran", 1, 9, 5, 4, 0)
    heir = Ledger()
    heir.learn(read_again)
    heir.learn(newest(ledger, 4))

    assert heir.accounts["veteran/1"].trained == 9
    assert heir.run_tokens == ledger.run_tokens > 0


async def test_a_lease_stays_readable_however_many_incarnations_there_were(run: str) -> None:
    broker = MemoryBroker()
    bus = MemoryBus(run, broker)
    first, second = keeper(bus, run), keeper(bus, run)
    async with asyncio.timeout(DEADLINE_S):
        await first.win()
        await first.release(crowded(8000), closed=False)
        inherited = await second.win()
    record = await bus.get_record(Subjects(run).lease(0))

    assert record is not None
    assert len(record.data) < DOCUMENT_BYTES_MAX
    assert decode(Lease, record.data).epoch == second.epoch == 2
    assert inherited is not None
    assert len(inherited.accounts) == ACCOUNTS_MAX
    assert "veteran/1" in inherited.accounts
    assert inherited.run_tokens == crowded(8000).run_tokens > 0
    await bus.close()


@pytest.mark.parametrize("junk", [b'{"schema": 99}', b"", b"[" * 5000], ids=["another schema", "empty", "deep"])
async def test_a_lease_that_cannot_be_read_is_taken_over_once_it_stands_still(run: str, junk: bytes) -> None:
    """One error line is enough; the new owner's epoch is above those of the heads, and above the number of the junk."""
    bus, subject, clock = MemoryBus(run, MemoryBroker()), Subjects(run).lease(0), HandClock()
    await put_head(bus, run, epoch=FAR)
    candidate = LeaseKeeper(bus, founded(run), 0, clock)
    await bus.put_record(subject, junk, expected=None)
    with structlog.testing.capture_logs() as said:
        await candidate._look(None)
        early = candidate.epoch
        await wait_a_lease(clock, candidate)

    assert [(line["event"], line["log_level"]) for line in said] == [("lease.undecodable", "error")]
    assert (early, candidate.epoch) == (0, FAR + 1)
    await bus.close()


@pytest.mark.parametrize("junk", [b"junk", None], ids=["junk", "lost"])
async def test_an_owner_writes_its_lease_over_one_that_is_lost_or_that_nobody_can_read(
    run: str, junk: bytes | None
) -> None:
    """It takes no shard from its owner, and a later epoch is above all that the broker has given a number."""
    bus, subject, clock = MemoryBus(run, MemoryBroker()), Subjects(run).lease(0), HandClock()
    await bus.put_record(
        Subjects(run).run_record, encode(msgspec.structs.replace(run_record(run), nonce="first")), expected=0
    )
    owner, heir = (LeaseKeeper(bus, founded(run), 0, clock) for _ in range(2))
    await owner.win()
    await heir._look(None)
    if junk is None:
        await bus.purge(subject)
    else:
        await bus.put_record(subject, junk, expected=None)
    await heir._look(None)
    for _ in range(4):
        clock.now_s += PROTOCOL.lease_s / 3.0
        await owner._look(Ledger())
        await heir._look(None)
    record = await bus.get_record(subject)

    assert record is not None
    lease = decode(Lease, record.data)
    assert (lease.epoch, owner.epoch, heir.epoch) == (1, 1, 0)
    assert 1 < lease.epoch_max <= record.revision
    await bus.close()


async def test_an_owner_of_a_run_that_was_founded_anew_does_not_write_its_lease_there(run: str) -> None:
    bus, subject, clock = MemoryBus(run, MemoryBroker()), Subjects(run).lease(0), HandClock()
    owner = LeaseKeeper(bus, founded(run), 0, clock)
    await owner.win()
    await bus.purge(subject)
    await bus.put_record(
        Subjects(run).run_record, encode(msgspec.structs.replace(run_record(run), nonce="second")), expected=0
    )
    clock.now_s += PROTOCOL.lease_s
    await owner._look(Ledger())

    assert owner.epoch == 0
    assert await bus.get_record(subject) is None
    await bus.close()


class AbsentBus(MemoryBus):
    """A broker that is away: `silent`, its answers do not come."""

    silent = False

    async def get_record(self, subject: str) -> Record | None:
        if self.silent:
            await asyncio.Event().wait()
        return await super().get_record(subject)


async def test_a_broker_that_was_away_for_longer_than_a_lease_takes_no_shard_from_its_owner(run: str) -> None:
    """The candidate is answered first; the owner comes back within a lease. Each absence is one line in the log."""
    broker, clock = MemoryBroker(), HandClock()
    there, away = MemoryBus(run, broker), AbsentBus(run, broker)
    owner = LeaseKeeper(there, founded(run), 0, clock)
    heir = LeaseKeeper(away, founded(run), 0, clock)
    await owner.win()
    await heir._look(None)
    away.silent = True
    with structlog.testing.capture_logs() as said:
        for _ in range(2):
            clock.now_s += 20.0 * PROTOCOL.lease_s
            await heir._look(None)
        away.silent = False
        for _ in range(6):
            await heir._look(None)
            clock.now_s += PROTOCOL.lease_s / 6.0
    early = heir.epoch
    await owner._look(Ledger())
    await wait_a_lease(clock, heir)

    assert (early, owner.epoch, heir.epoch) == (0, 1, 0)
    assert [line["event"] for line in said] == ["lease.unseen", "lease.seen_again"]
    await wait_a_lease(clock, heir)
    assert heir.epoch == 2
    await there.close()
    await away.close()


@pytest.mark.parametrize("epoch", [2 * FAR, EPOCH_MAX])
async def test_an_epoch_above_the_broker_s_numbers_is_not_gone_on_from(run: str, epoch: int) -> None:
    """The heirs count from the broker's numbers and the heads, so that what they write stays readable, however often."""
    bus, subject, clock = MemoryBus(run, MemoryBroker()), Subjects(run).lease(0), HandClock()
    await put_head(bus, run, epoch=FAR)
    absurd = Lease(shard=0, epoch=epoch, nonce="x", run_nonce="first", host="h", pid=1)
    for _ in range(3):
        await bus.put_record(subject, encode(absurd), expected=None)
        heir = LeaseKeeper(bus, founded(run), 0, clock)
        await heir._look(None)
        await wait_a_lease(clock, heir)
        assert heir.epoch == FAR + 1
    await bus.close()


@pytest.mark.parametrize("junk", [b"", b"[" * 2000, None], ids=["empty", "deep", "as it was"])
async def test_no_two_owners_have_the_same_epoch_whatever_is_written_over_their_leases(
    run: str, junk: bytes | None
) -> None:
    """An owner that has fenced nothing yet is not forgotten: each began with a lease, which the broker has numbered."""
    bus, subject, clock = MemoryBus(run, MemoryBroker()), Subjects(run).lease(0), HandClock()
    await put_head(bus, run, epoch=0)
    epochs: list[int] = []
    for _ in range(4):
        owner = LeaseKeeper(bus, founded(run), 0, clock)
        await owner._look(None)
        await wait_a_lease(clock, owner)
        epochs.append(owner.epoch)
        if junk is not None:
            await bus.put_record(subject, junk, expected=None)
    assert epochs == sorted(set(epochs))
    assert epochs[0] > 0
    await bus.close()


async def test_a_lease_runs_out_by_time_that_passes_whatever_the_wall_clock_says(run: str) -> None:
    """Its owner renews it in time, and its heir waits for all of it, while somebody sets the time of day over and over."""
    bus, clock = MemoryBus(run, MemoryBroker()), HandClock()
    owner, heir = (LeaseKeeper(bus, founded(run), 0, clock) for _ in range(2))
    renewed: list[int] = []
    async with asyncio.timeout(DEADLINE_S):
        await owner.win()
    for _ in range(60):
        clock.now_s += PROTOCOL.lease_s / 6.0
        await owner._look(Ledger())
        await heir._look(None)
        record = await bus.get_record(Subjects(run).lease(0))
        renewed.append(0 if record is None else record.revision)

    assert (owner.epoch, heir.epoch) == (1, 0)
    assert 20 <= len(set(renewed)) <= 31
    before_s = clock.now_s
    for _ in range(60):
        if heir.epoch:
            break
        clock.now_s += PROTOCOL.lease_s / 6.0
        await heir._look(None)
    assert PROTOCOL.lease_s <= clock.now_s - before_s + PROTOCOL.lease_s / 3.0 <= 2.0 * PROTOCOL.lease_s
    await owner._look(Ledger())
    assert (owner.epoch, heir.epoch) == (0, 2)
    await bus.close()


async def test_what_an_owner_of_a_former_founding_says_of_learners_is_not_taken_over(run: str) -> None:
    """A broker lost its store; a candidate of the lost founding wrote its lease, with that one's ledger, into the new one."""
    bus, clock = MemoryBus(run, MemoryBroker()), HandClock()
    former = LeaseKeeper(bus, founded(run, "lost"), 0, clock)
    await former.win()
    ledger = Ledger(run_tokens=1 << 40)
    await former.release(ledger, closed=False)
    heirs = {nonce: LeaseKeeper(bus, founded(run, nonce), 0, clock) for nonce in ("lost", "first")}
    known = {}
    for nonce, heir in heirs.items():
        await heir._look(None)
        known[nonce] = heir._ledger

    assert known["first"] is None
    assert known["lost"] is not None
    assert (await recorded_progress(bus, founded(run))).tokens == 0
    assert (await recorded_progress(bus, founded(run, "lost"))).tokens == 1 << 40
    await bus.close()
