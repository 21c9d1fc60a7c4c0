"""What a learner's new life takes over of the data that its former lives held, unit by unit."""

from __future__ import annotations

import pytest

from atoll.protocol import data


def crowd() -> tuple[data.DataLedger, list[data.DataGrant]]:
    """Return a ledger in which two lives of `a` and one of `b` hold units of four blocks, and those units."""
    ledger, units = data.DataLedger(blocks=40), []
    for learner, life in (("a", 1), ("a", 1), ("b", 1), ("a", 2), ("a", 3)):
        ledger, unit = data.take(ledger, learner, life, 4)
        ledger = data.renew(ledger, learner, life, {unit.key: (1, 8)})
        units.append(unit)
    return ledger, units


def test_a_new_life_goes_on_with_what_its_checkpoint_knows_and_all_else_returns() -> None:
    """Only units of its own former lives; what a later life or another learner holds is left alone."""
    ledger, units = crowd()
    after = data.inherit(ledger, "a", 2, {units[0].key: (2, 8), units[2].key: (3, 8), units[4].key: (4, 8)})

    mine = {grant.key: grant for grant in data.held(after, "a", 2)}
    assert set(mine) == {units[0].key, units[3].key}
    assert (mine[units[0].key].read, mine[units[0].key].of, mine[units[0].key].renewals) == (2, 8, 1)
    assert (mine[units[3].key].read, mine[units[3].key].of) == (1, 8)
    assert data.held(after, "a", 1) == ()
    assert [grant.read for grant in data.held(after, "b", 1)] == [1]
    assert [grant.read for grant in data.held(after, "a", 3)] == [1]
    (back,) = after.returned
    assert (back.key, back.holder, back.read, back.of, back.counted, back.renewals) == (
        units[1].key,
        ("", 0),
        1,
        8,
        0,
        0,
    )


@pytest.mark.parametrize(
    ("cursor", "goes_on"), [((0, 8), True), ((8, 8), True), ((9, 8), False), ((-1, 8), False), ((0, 0), False)]
)
def test_a_cursor_is_within_its_unit_or_none(cursor: tuple[int, int], goes_on: bool) -> None:  # noqa: FBT001
    """From its begin to its end; a unit that is read to its end is finished at once."""
    ledger, unit = data.take(data.DataLedger(blocks=4), "a", 1, 4)
    after = data.inherit(ledger, "a", 2, {unit.key: cursor})

    assert bool(after.returned) != goes_on
    assert len(data.held(after, "a", 2)) == (goes_on and cursor != (8, 8))
    assert data.sums_by_learner(after) == ({"a": 4} if cursor == (8, 8) else {"a": 0} if goes_on else {})


def test_returned_units_are_in_order_and_begun_ones_are_granted_whole() -> None:
    ledger = data.DataLedger(blocks=12)
    ledger, first = data.take(ledger, "a", 1, 4)
    ledger, second = data.take(ledger, "b", 1, 4)
    ledger = data.give_back(ledger, "b", 1, {second.key: (1, 4)})
    ledger = data.give_back(ledger, "a", 1, {})
    assert [grant.key for grant in ledger.returned] == [first.key, second.key]

    ledger, cut = data.take(ledger, "c", 1, 3)
    assert (cut.start, cut.stop) == (0, 3)
    assert [(grant.start, grant.stop) for grant in ledger.returned] == [(3, 4), (4, 8)]
    assert ledger.returned[0].holder == ("", 0)
    ledger, rest = data.take(ledger, "c", 1, 3)
    ledger, whole = data.take(ledger, "c", 1, 1)
    assert ((rest.start, rest.stop), (whole.start, whole.stop)) == ((3, 4), (4, 8))
    assert (whole.read, whole.of, whole.counted) == (1, 4, 1)
    assert [(s.finished, s.leased, s.returned, s.untouched) for s in data.sums_by_epoch(ledger)] == [(1, 7, 0, 4)]


def test_a_unit_whose_windows_were_counted_but_not_read_is_whole_too() -> None:
    begun = data.DataGrant(0, 0, 4, "", 0, read=0, of=0, counted=1)
    ledger, unit = data.take(data.DataLedger(blocks=4, next_position=4, returned=(begun,)), "c", 1, 2)
    assert (unit.start, unit.stop) == (0, 4)
    read = data.DataGrant(0, 0, 4, "", 0, read=1, of=8, counted=0)
    ledger, unit = data.take(data.DataLedger(blocks=4, next_position=4, returned=(read,)), "c", 1, 2)
    assert (unit.start, unit.stop) == (0, 4)
    assert ledger.returned == ()


def test_the_dead_are_buried_with_what_their_last_renewal_said() -> None:
    """And nobody else."""
    ledger, units = crowd()
    after = data.bury(ledger, [("a", 1), ("b", 1)])
    assert [grant.key for grant in after.returned] == sorted(unit.key for unit in units[:3])
    assert {grant.holder for grant in after.grants} == {("a", 2), ("a", 3)}


def test_what_one_reader_left_and_another_goes_on_with_is_each_ones_own() -> None:
    ledger, unit = data.take(data.DataLedger(blocks=8), "a", 1, 8)
    ledger = data.give_back(ledger, "a", 1, {unit.key: (3, 8)})
    ledger, again = data.take(ledger, "b", 1, 8)
    assert data.sums_by_learner(ledger) == {"a": 3, "b": 0}

    ledger = data.renew(ledger, "b", 1, {again.key: (5, 8)})

    assert data.sums_by_learner(ledger) == {"a": 3, "b": 2}
    assert [(s.finished, s.leased) for s in data.sums_by_epoch(ledger)] == [(5, 3)]


def test_the_sums_are_those_of_the_newest_sixteen_epochs() -> None:
    ledger = data.DataLedger(blocks=1)
    for _ in range(20):
        ledger, unit = data.take(ledger, "a", 1, 1)
        ledger = data.renew(ledger, "a", 1, {unit.key: (1, 1)})
    assert [sums.epoch for sums in data.sums_by_epoch(ledger)] == list(range(4, 20))


def test_a_holder_says_how_many_windows_it_has_before_it_has_read_one() -> None:
    ledger, unit = data.take(data.DataLedger(blocks=4), "a", 1, 4)
    (now,) = data.held(data.renew(ledger, "a", 1, {unit.key: (0, 8)}), "a", 1)
    assert (now.read, now.of) == (0, 8)


def test_a_lease_dies_after_all_of_its_time_and_no_sooner() -> None:
    watch, (ledger, _) = data.LeaseWatch(lease_s=6.0), data.take(data.DataLedger(blocks=4), "a", 1, 4)
    dead_at = [look for look in range(40) if watch.dead_holders(ledger, 100.0 + 0.25 * look)]
    assert dead_at[0] == 24
    renewed = data.renew(ledger, "a", 1, {})
    assert watch.dead_holders(renewed, 110.0) == set()
    assert watch.dead_holders(renewed, 115.75) == set()
    assert watch.dead_holders(renewed, 118.75) == {("a", 1)}


def test_a_unit_that_no_reader_mixes_in_memory_is_none() -> None:
    """It would be granted whole, since it was begun."""
    most = data.UNIT_BLOCKS_MAX
    for stop, fault in ((most, ""), (most + 1, f"a unit of {most + 1} blocks, more than {most}")):
        begun = data.DataGrant(0, 0, stop, "", 0, read=1, of=2)
        assert data.DataLedger(blocks=2 * most, next_position=stop, returned=(begun,)).fault() == fault
    ledger, unit = data.take(data.DataLedger(blocks=2 * most), "a", 1, 2 * most)
    assert (unit.blocks, ledger.fault()) == (most, "")


def test_no_life_inherits_more_than_one_may_hold() -> None:
    ledger = data.DataLedger(blocks=2 * data.HELD_MAX)
    for life in (1, 2):
        for _ in range(data.HELD_MAX):
            ledger, _ = data.take(ledger, "a", life, 1)
    ledger = data.inherit(ledger, "a", 3, {grant.key: (1, 2) for grant in ledger.grants})

    assert len(data.held(ledger, "a", 3)) == len(ledger.returned) == data.HELD_MAX
    assert ledger.fault() == ""
