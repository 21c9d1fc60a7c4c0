"""The data ledger: ranges are granted once, returned whole, and an epoch ends before the next begins."""

from __future__ import annotations

from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.bus.subjects import Subjects
from atoll.clock import SystemClock
from atoll.island.leases import DataLeases, give_back, take
from atoll.island.membership import claim, release
from atoll.wire.messages import DataGrant, DataLedger


def positions(grants: tuple[DataGrant, ...]) -> list[tuple[int, int]]:
    """Return every (epoch, position) that is granted."""
    return sorted((grant.epoch, position) for grant in grants for position in range(grant.start, grant.stop))


def test_an_epoch_is_granted_once_and_finished_before_the_next() -> None:
    """Grants never overlap and never span two epochs."""
    ledger, grants = DataLedger(blocks=10), []
    for number in range(6):
        ledger, grant = take(ledger, "abc"[number % 3], 1, 4)
        grants.append(grant)

    assert positions(tuple(grants[:3])) == [(0, position) for position in range(10)]
    assert positions(tuple(grants[3:])) == [(1, position) for position in range(10)]


def test_what_was_not_begun_comes_back_and_goes_out_first() -> None:
    """The rest of a returned range is granted before anything new."""
    ledger, grant = take(DataLedger(blocks=10), "a", 1, 4)
    ledger, _ = take(ledger, "b", 1, 4)
    ledger = give_back(ledger, "a", 1, (DataGrant(0, grant.start, 1, "", 0),))

    ledger, again = take(ledger, "c", 1, 4)

    assert (again.start, again.stop) == (1, 4)
    assert {g.learner for g in ledger.grants} == {"b", "c"}


async def test_the_leases_of_a_dead_incarnation_return_when_its_successor_asks(run: str) -> None:
    """No lease has to expire: a higher incarnation, or a goodbye, frees it."""
    bus, subjects, clock = MemoryBus(run, MemoryBroker()), Subjects(run), SystemClock()
    first = await claim(bus, subjects, "a", clock)
    lost = await DataLeases(bus, subjects, first, 10).take(4)
    second = await claim(bus, subjects, "a", clock)
    found = await DataLeases(bus, subjects, second, 10).take(4)
    await release(bus, subjects, second)
    third = await claim(bus, subjects, "b", clock)
    again = await DataLeases(bus, subjects, third, 10).take(4)
    await bus.close()

    assert second.incarnation == 2
    assert (lost.start, lost.stop) == (found.start, found.stop) == (again.start, again.stop) == (0, 4)
