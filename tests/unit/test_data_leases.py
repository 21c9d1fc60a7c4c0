"""The data ledger on a bus: leases are taken, renewed, lost and inherited by compare-and-set."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import json, structs

from atoll.base.clock import SystemClock
from atoll.base.errors import BrokerUnavailable, BusError, DataError
from atoll.base.quantities import COUNT_MAX
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.data_leases import DataLeases
from atoll.client.membership import claim, release
from atoll.protocol.data import DataGrant, DataLedger, give_back, sums_by_epoch, sums_by_learner, take
from atoll.wire.messages import DOCUMENT_BYTES_MAX, Member, decode
from atoll.wire.subjects import Subjects

BLOCKS = 10
LEASE_S = 6.0
GRANTS_OF_NOBODY = b",".join(
    b'{"epoch":0,"start":%d,"stop":%d,"learner":"m","incarnation":%d}' % (number % BLOCKS, number % BLOCKS + 1, number)
    for number in range(13_000)
)
RETURNED = b",".join([b'{"epoch":0,"start":0,"stop":1,"learner":"","incarnation":0}'] * 16_000)
AHEAD = -1
"""Stands for a number beyond that of the record's own write."""


@dataclass
class LeaseClock:
    """A clock that a test moves."""

    now_s: float = 0.0
    wall_s: float = field(default=1.0)

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.wall_s


class ForgetfulBus(MemoryBus):
    """A bus that writes a record and, once, does not live to hear the answer."""

    loses = False

    async def put_record(self, subject: str, data: bytes, **how: Any) -> int:  # noqa: ANN401  (as the bus takes it)
        """Write; say that nobody answered, if so told."""
        revision = await super().put_record(subject, data, **how)
        if self.loses:
            self.loses = False
            raise BrokerUnavailable("no answer")
        return revision


class Learners:
    """Learners of one run on the in-memory bus, each with its leases, all with one clock."""

    def __init__(self, run: str) -> None:
        self.bus = ForgetfulBus(run, MemoryBroker())
        self.subjects = Subjects(run)
        self.clock = LeaseClock()

    async def join(self, learner: str) -> tuple[Member, DataLeases]:
        member = await claim(self.bus, self.subjects, learner, SystemClock())
        leases = DataLeases(self.bus, self.subjects, member, BLOCKS, lease_s=LEASE_S, clock=self.clock)
        return member, leases

    async def ledger(self) -> DataLedger:
        record = await self.bus.get_record(self.subjects.data)
        assert record is not None
        return decode(DataLedger, record.data)


@pytest.fixture
async def learners(run: str) -> AsyncIterator[Learners]:
    learners = Learners(run)
    yield learners
    await learners.bus.close()


async def test_who_has_other_blocks_than_the_run_leases_nothing(learners: Learners) -> None:
    """The same text in larger blocks has the same fingerprint; its positions are of another text."""
    member, leases = await learners.join("a")
    await leases.take(2)
    other = DataLeases(learners.bus, learners.subjects, member, BLOCKS - 1, lease_s=LEASE_S, clock=learners.clock)

    with pytest.raises(DataError, match="other blocks than this text has"):
        await other.take(2)

    assert (await learners.ledger()).next_position == 2


@pytest.mark.parametrize(
    "wrong",
    [{"blocks": BLOCKS + 1}, {"epoch": COUNT_MAX}, {"epoch": COUNT_MAX - 1, "next_position": BLOCKS}, {"epoch": AHEAD}],
)
async def test_a_ledger_that_cannot_be_the_runs_ends_nobody(learners: Learners, wrong: dict[str, int]) -> None:
    """Who has leased before knows better: the record is replaced by the ledger that it has seen."""
    _, leases = await learners.join("a")
    await leases.take(2)
    record = await learners.bus.get_record(learners.subjects.data)
    assert record is not None
    wrong = {name: record.revision + 2 if value == AHEAD else value for name, value in wrong.items()}
    bad = structs.replace(decode(DataLedger, record.data), **wrong)
    await learners.bus.put_record(learners.subjects.data, json.encode(bad), expected=record.revision)
    leases.progress = {(0, 0, 2): (0, 4)}

    grant = await leases.take(2)

    assert grant.key == (0, 2, 4)
    assert ((await learners.ledger()).blocks, (await learners.ledger()).epoch) == (BLOCKS, 0)


@pytest.mark.parametrize(
    "units", [b'"grants":[%s]' % GRANTS_OF_NOBODY, b'"returned":[%s]' % RETURNED], ids=["of nobody", "returned"]
)
async def test_a_ledger_of_more_units_than_learners_hold_is_replaced(learners: Learners, units: bytes) -> None:
    """Written out, it would be larger than a record: whoever read it could write none that follows."""
    _, leases = await learners.join("a")
    await leases.take(2)
    record = await learners.bus.get_record(learners.subjects.data)
    assert record is not None
    bad = b'{"blocks":%d,"next_position":5,%s}' % (BLOCKS, units)
    assert len(bad) < DOCUMENT_BYTES_MAX
    await learners.bus.put_record(learners.subjects.data, bad, expected=record.revision)
    leases.progress = {(0, 0, 2): (0, 4)}

    assert (await leases.take(2)).key == (0, 2, 4)
    assert (await learners.ledger()).units == 2


async def test_who_holds_too_many_units_is_told_to_lease_larger_ones(
    learners: Learners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.protocol.data.HELD_MAX", 2)
    _, leases = await learners.join("a")
    for _ in range(2):
        leases.progress = {**leases.progress, (await leases.take(1)).key: (0, 4)}
    with pytest.raises(BusError, match="no room for another unit") as refused:
        await leases.take(1)

    assert "data.lease_blocks" in str(refused.value)
    assert leases.mine == {(0, 0, 1), (0, 1, 2)}


async def test_a_newcomer_is_not_stopped_by_a_ledger_of_other_blocks_than_the_run_record_says(
    learners: Learners,
) -> None:
    """Any learner may write the ledger, and nobody but the founder how many blocks the run's text has."""
    member, _ = await learners.join("a")
    await learners.bus.put_record(learners.subjects.data, json.encode(DataLedger(blocks=7)), expected=0)
    known = DataLeases(
        learners.bus, learners.subjects, member, BLOCKS, lease_s=LEASE_S, clock=learners.clock, recorded=True
    )

    assert (await known.take(4)).blocks == 4
    assert (await learners.ledger()).blocks == BLOCKS


async def test_renewals_beyond_the_writes_of_a_ledger_are_not_counted_on(learners: Learners) -> None:
    """The holder could not write the next one, and would lose what it holds."""
    _, leases = await learners.join("a")
    grant = await leases.take(2)
    leases.progress = {grant.key: (1, 4)}
    before = await learners.ledger()
    record = await learners.bus.get_record(learners.subjects.data)
    assert record is not None
    for renewals in (record.revision + 100, COUNT_MAX):
        bad = structs.replace(before, grants=(structs.replace(before.grants[0], renewals=renewals),))
        await learners.bus.put_record(learners.subjects.data, json.encode(bad), expected=None)
        await leases.renew()

    assert (await learners.ledger()).grants[0].renewals < 10
    assert leases.lost == frozenset()


def positions(grants: tuple[DataGrant, ...]) -> list[tuple[int, int]]:
    return sorted((grant.epoch, position) for grant in grants for position in range(grant.start, grant.stop))


def test_the_rest_of_a_unit_comes_back_and_goes_out_first_at_its_window() -> None:
    """A unit that was begun is granted whole, with the place to go on at; one that was not may be cut."""
    ledger, begun = take(DataLedger(blocks=BLOCKS), "a", 1, 4)
    ledger, untouched = take(ledger, "a", 1, 4)
    ledger = give_back(ledger, "a", 1, {begun.key: (5, 20)})

    ledger, rest = take(ledger, "b", 1, 2)
    ledger, cut = take(ledger, "b", 1, 2)

    assert (rest.start, rest.stop, rest.read, rest.of) == (0, 4, 5, 20)
    assert (cut.start, cut.stop, cut.read) == (untouched.start, untouched.start + 2, 0)


async def test_a_new_life_returns_what_the_former_held_and_a_goodbye_frees_it_for_all(learners: Learners) -> None:
    _, leases = await learners.join("a")
    lost = await leases.take(4)
    second, leases = await learners.join("a")
    found = await leases.take(4)
    await release(learners.bus, learners.subjects, second)
    _, leases = await learners.join("b")
    again = await leases.take(4)

    assert (second.incarnation, lost.key) == (2, (0, 0, 4))
    assert found.key == again.key == lost.key


async def test_a_holder_that_does_not_renew_loses_its_unit_and_learns_of_it(learners: Learners) -> None:
    """It was read to window 3 of 8 when it was last heard of; the heir goes on there, the former owner knows at once."""
    _, sleeper = await learners.join("sleeper")
    _, observer = await learners.join("observer")
    unit = await sleeper.take(4)
    observer.progress = {(await observer.take(1)).key: (0, 2)}
    sleeper.progress = {unit.key: (3, 8)}
    await sleeper.renew()
    for _ in range(5):
        await observer.renew()
        learners.clock.now_s += LEASE_S / 3.0
    heir = await observer.take(4)
    sleeper.progress = {unit.key: (5, 8)}
    await sleeper.renew()

    assert (heir.key, heir.read, heir.of) == (unit.key, 3, 8)
    assert sleeper.lost == {unit.key}
    assert not sleeper.mine


async def test_a_holder_that_renews_keeps_its_unit_however_long_it_takes(learners: Learners) -> None:
    _, slow = await learners.join("slow")
    _, observer = await learners.join("observer")
    unit = await slow.take(4)
    await observer.take(1)
    for _ in range(30):
        learners.clock.now_s += LEASE_S / 2.0
        await slow.renew()
        await observer.renew()

    assert slow.mine == {unit.key}
    assert not slow.lost


async def test_what_is_read_to_its_end_is_struck_and_counted(learners: Learners) -> None:
    _, leases = await learners.join("a")
    unit = await leases.take(4)
    leases.progress = {unit.key: (8, 8)}
    await leases.renew()
    ledger = await learners.ledger()

    assert not leases.lost
    assert not ledger.grants
    assert sums_by_learner(ledger) == {"a": 4}
    assert sums_by_epoch(ledger)[0].finished == 4


async def test_a_restart_with_a_checkpoint_goes_on_in_its_own_units(learners: Learners) -> None:
    """Nobody else gets them in between, although the former life is over; what the checkpoint does not name returns."""
    _, former = await learners.join("a")
    kept = await former.take(4)
    former.progress = {kept.key: (6, 8)}
    forgotten = await former.take(2)
    await former.renew()
    _, heir = await learners.join("a")
    _, other = await learners.join("b")
    between = await other.take(4)
    resumed = await heir.resume({kept.key: (4, 8), (0, 8, 10): (1, 4)})

    assert not set(positions((between,))) & set(positions((kept, forgotten)))
    assert [(grant.key, grant.read) for grant in resumed] == [(kept.key, 4)]
    assert [grant.key for grant in (await learners.ledger()).returned] == [forgotten.key]


@pytest.mark.parametrize("renewed", [False, True])
async def test_a_unit_whose_grant_was_never_heard_of_is_handed_out_by_the_next_take(
    learners: Learners, *, renewed: bool
) -> None:
    """The write came through and its answer did not: nobody would read the unit, and every renewal would keep it."""
    _, leases = await learners.join("a")
    known = await leases.take(2)
    leases.progress = {known.key: (1, 8)}
    learners.bus.loses = True
    with pytest.raises(BrokerUnavailable):
        await leases.take(4)
    if renewed:
        await leases.renew()
    heard = await leases.take(4)
    leases.progress = {**leases.progress, heard.key: (0, 8)}
    further = await leases.take(4)

    assert [known.key, heard.key, further.key] == [(0, 0, 2), (0, 2, 6), (0, 6, 10)]
    assert leases.mine == {known.key, heard.key, further.key}


async def test_what_a_resumption_took_over_unheard_is_handed_out_where_the_checkpoint_was(learners: Learners) -> None:
    _, former = await learners.join("a")
    first = await former.take(4)
    former.progress = {first.key: (0, 8)}
    second = await former.take(4)
    _, heir = await learners.join("a")
    learners.bus.loses = True
    with pytest.raises(BrokerUnavailable):
        await heir.resume({first.key: (3, 8), second.key: (1, 8)})
    one = await heir.take(4)
    heir.progress = {one.key: (one.read, one.of)}
    two = await heir.take(4)

    assert [(grant.key, grant.read) for grant in (one, two)] == [(first.key, 3), (second.key, 1)]
