"""A shard's lease as a record: small however many have come and gone, and no crash when it cannot be read."""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from atoll.base.clock import SystemClock
from atoll.bus.memory.bus import MemoryBroker, MemoryBus
from atoll.protocol.ledger import ACCOUNTS_MAX, Account, Ledger, newest
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.messages import MESSAGE_BYTES_MAX, Lease, decode
from atoll.wire.subjects import Subjects
from atoll_synchronizer.lease import LeaseKeeper
from support.clocks import HandClock

DEADLINE_S = 240.0
REASONS = (
    "malformed",
    "not finite",
    "too old",
    "from the future",
    "too large a pseudo-gradient",
    "of another founding",
)
PROTOCOL = msgspec.convert({"fragments": 1, "shards": 1, "lease_s": 0.5, "silence_s": 0.25}, ProtocolSettings)


def crowded(incarnations: int) -> Ledger:
    """Return a ledger of a learner with the longest id that died over and over, and of one that lives since the beginning."""
    ledger = Ledger()
    ledger.reported("veteran", 1, 5, 5, 0, 0)
    for number in range(incarnations):
        account = ledger.account("l" * 64, number + 1)
        account.trained = account.pushed = account.merged = account.superseded = 1 << 40
        account.refused = dict.fromkeys(REASONS, 1 << 30)
    return ledger


def keeper(bus: MemoryBus, run: str) -> LeaseKeeper:
    """Return a candidate for the only shard."""
    return LeaseKeeper(bus, Subjects(run), 0, PROTOCOL, SystemClock())


def test_of_many_incarnations_the_living_and_the_last_are_kept_and_all_tokens_stay_known() -> None:
    """Who left goes before who lives, however long ago it was first heard of; nothing changes while all fit."""
    ledger = Ledger()
    ledger.account("living", 1).trained = 1
    for number in range(1, 6):
        ledger.account("dying", number).trained = 10
    ledger.accounts["gone/1"] = Account(trained=100, left=True)
    small = newest(ledger, 3)

    assert set(small.accounts) == {"living/1", "dying/5", "gone/1"}
    assert set(newest(ledger, 2).accounts) == {"living/1", "dying/5"}
    assert small.known_tokens == ledger.known_tokens == 151
    assert newest(ledger, 7) is ledger


def test_what_an_heir_learns_from_a_bounded_lease_adds_up_with_the_books() -> None:
    """The ledgers hold everybody's reports of the last commit, the lease the newest of those who live."""
    ledger = crowded(10)
    fragment_ledger = msgspec.json.decode(msgspec.json.encode(ledger), type=Ledger)
    ledger.reported("veteran", 1, 9, 5, 4, 0)
    heir = Ledger()
    heir.learn(fragment_ledger)
    heir.learn(newest(ledger, 4))

    assert heir.accounts["veteran/1"].trained == 9
    assert heir.run_tokens == heir.known_tokens == ledger.run_tokens


async def test_a_lease_stays_readable_however_many_incarnations_there_were(run: str) -> None:
    """Won, released with a crowd, and won by the next."""
    broker = MemoryBroker()
    bus = MemoryBus(run, broker)
    first, second = keeper(bus, run), keeper(bus, run)
    async with asyncio.timeout(DEADLINE_S):
        await first.win()
        await first.release(crowded(8000), closed=False)
        inherited = await second.win()
    record = await bus.get_record(Subjects(run).lease(0))

    assert record is not None
    assert len(record.data) < MESSAGE_BYTES_MAX
    assert decode(Lease, record.data).epoch == second.epoch == 2
    assert inherited is not None
    assert len(inherited.accounts) == ACCOUNTS_MAX
    assert "veteran/1" in inherited.accounts
    assert inherited.known_tokens == crowded(8000).run_tokens
    await bus.close()


async def test_a_lease_that_cannot_be_read_is_said_and_waited_for(run: str) -> None:
    """A candidate neither dies of it nor takes it over nor overwrites it, and one error line is enough."""
    bus, subject = MemoryBus(run, MemoryBroker()), Subjects(run).lease(0)
    candidate = keeper(bus, run)
    revision = await bus.put_record(subject, b'{"schema": 99}', expected=None)
    with structlog.testing.capture_logs() as said:
        for _ in range(3):
            await candidate._look(None)
        await candidate.release(Ledger(), closed=False)

    assert [(line["event"], line["log_level"]) for line in said] == [("lease.undecodable", "error")]
    assert subject in said[0]["subject"]
    assert candidate.epoch == 0
    record = await bus.get_record(subject)
    assert record is not None
    assert record.revision == revision
    await bus.close()


async def test_a_lease_runs_out_by_time_that_passes_whatever_the_wall_clock_says(run: str) -> None:
    """Its owner renews it in time, and its heir waits for all of it, while somebody sets the time of day over and over."""
    bus, clock = MemoryBus(run, MemoryBroker()), HandClock()
    owner, heir = (LeaseKeeper(bus, Subjects(run), 0, PROTOCOL, clock) for _ in range(2))
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
    while not heir.epoch:
        clock.now_s += PROTOCOL.lease_s / 6.0
        await heir._look(None)
    assert PROTOCOL.lease_s <= clock.now_s - before_s + PROTOCOL.lease_s / 3.0 <= 2.0 * PROTOCOL.lease_s
    await owner._look(Ledger())
    assert (owner.epoch, heir.epoch) == (0, 2)
    await bus.close()
