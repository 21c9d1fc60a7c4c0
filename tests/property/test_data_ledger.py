"""The ledger of data leases under any interleaving: take, read, renew, leave, die, freeze and wake, restart.

A model reads windows exactly as a learner would and counts them. What it may read twice is written down when it happens
(`excused`): what a dead life read after its last renewal, and what a frozen one reads of a unit that it has lost.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from atoll.base.quantities import COUNT_MAX, INCARNATION_MAX
from atoll.protocol import data
from atoll.wire.messages import DOCUMENT_BYTES_MAX, decode, encode

BLOCKS = 5
PER_BLOCK = 2
STEPS = 30
NAMES = ("a", "b")


@dataclass
class LeaserLife:
    """A reader: how far it is in each unit that it believes to hold, and the checkpoint it could come back with."""

    name: str
    incarnation: int
    read: dict[data.Key, int] = field(default_factory=dict)
    checkpoint: dict[data.Key, tuple[int, int]] = field(default_factory=dict)

    @property
    def progress(self) -> data.Progress:
        return {key: (read, windows(key)) for key, read in self.read.items()}


def windows(key: data.Key) -> int:
    return (key[2] - key[1]) * PER_BLOCK


def window(key: data.Key, number: int) -> tuple[int, int]:
    return key[0], key[1] * PER_BLOCK + number


class Leasers(RuleBasedStateMachine):
    """Learners that come and go over one ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = data.DataLedger(blocks=BLOCKS)
        self.lives: dict[str, LeaserLife] = {}
        self.numbers: Counter[str] = Counter()
        self.times: Counter[tuple[int, int]] = Counter()
        self.excused: set[tuple[int, int]] = set()
        self.granted: set[tuple[int, int]] = set()

    def life(self, name: str) -> LeaserLife:
        if name not in self.lives:
            self.numbers[name] += 1
            self.lives[name] = LeaserLife(name, self.numbers[name])
        return self.lives[name]

    def mark(self, key: data.Key) -> int:
        return next((g.read for g in (*self.ledger.grants, *self.ledger.returned) if g.key == key), windows(key))

    def excuse(self, key: data.Key, start: int, stop: int) -> None:
        self.excused |= {window(key, number) for number in range(start, stop)}

    @rule(name=st.sampled_from(NAMES), blocks=st.integers(1, 4))
    def takes(self, name: str, blocks: int) -> None:
        """A learner leases more; nobody else holds any of it."""
        life = self.life(name)
        others = {(g.epoch, i) for g in self.ledger.grants for i in range(g.start, g.stop)}
        self.ledger, grant = data.take(self.ledger, name, life.incarnation, blocks)
        positions = {(grant.epoch, i) for i in range(grant.start, grant.stop)}
        assert not positions & others
        self.granted |= positions
        life.read[grant.key] = grant.read

    @rule(name=st.sampled_from(NAMES), number=st.integers(1, 6))
    def reads(self, name: str, number: int) -> None:
        life = self.life(name)
        for key, read in life.read.items():
            for at in range(read, min(windows(key), read + number)):
                self.times[window(key, at)] += 1
                life.read[key] = at + 1

    @rule(name=st.sampled_from(NAMES))
    def renews(self, name: str) -> None:
        """A learner gives a sign of life and stops reading what is no longer its own."""
        life = self.life(name)
        self.ledger = data.renew(self.ledger, name, life.incarnation, life.progress)
        mine = {grant.key for grant in data.held(self.ledger, name, life.incarnation)}
        life.read = {key: read for key, read in life.read.items() if key in mine}

    @rule(name=st.sampled_from(NAMES), blocks=st.integers(1, 4), number=st.integers(1, 6))
    def works(self, name: str, blocks: int, number: int) -> None:
        """A learner leases, reads some of it and says so: what they do most of the time."""
        self.takes(name, blocks)
        self.reads(name, number)
        self.renews(name)

    @rule(name=st.sampled_from(NAMES))
    def leaves(self, name: str) -> None:
        """A learner returns what it has not read; the ledger knows every window that it has."""
        life = self.life(name)
        self.ledger = data.give_back(self.ledger, name, life.incarnation, life.progress)
        del self.lives[name]

    @rule(name=st.sampled_from(NAMES))
    def dies(self, name: str) -> None:
        life = self.life(name)
        for key, read in life.read.items():
            self.excuse(key, self.mark(key), read)
        self.ledger = data.bury(self.ledger, [(name, life.incarnation)])
        del self.lives[name]

    @rule(name=st.sampled_from(NAMES))
    def is_buried_alive(self, name: str) -> None:
        """A learner is frozen for longer than its lease; it will go on reading until it renews."""
        life = self.life(name)
        for key in life.read:
            self.excuse(key, self.mark(key), windows(key))
        self.ledger = data.bury(self.ledger, [(name, life.incarnation)])

    @rule(name=st.sampled_from(NAMES))
    def keeps_a_checkpoint(self, name: str) -> None:
        life = self.life(name)
        life.checkpoint = dict(life.progress)

    @rule(name=st.sampled_from(NAMES))
    def restarts(self, name: str) -> None:
        """A learner is killed and comes back with its checkpoint before anybody has buried it."""
        former = self.life(name)
        for key, read in former.read.items():
            self.excuse(key, min(self.mark(key), former.checkpoint.get(key, (0, 0))[0]), read)
        self.numbers[name] += 1
        life = self.lives[name] = LeaserLife(name, self.numbers[name])
        self.ledger = data.inherit(self.ledger, name, life.incarnation, former.checkpoint)
        mine = data.held(self.ledger, name, life.incarnation)
        life.read = {grant.key: grant.read for grant in mine}

        assert all(former.checkpoint[grant.key] == (grant.read, grant.of) for grant in mine)
        assert not data.held(self.ledger, name, former.incarnation)

    @invariant()
    def units_are_disjoint(self) -> None:
        units = [(g.epoch, i) for g in (*self.ledger.grants, *self.ledger.returned) for i in range(g.start, g.stop)]
        assert len(units) == len(set(units))

    @invariant()
    def an_epoch_is_granted_whole_before_the_next(self) -> None:
        """So the number of epochs in which two blocks were granted differs by at most one."""
        due = {(epoch, i) for epoch in range(self.ledger.epoch) for i in range(BLOCKS)}
        assert due <= self.granted
        assert {epoch for epoch, _ in self.granted} <= set(range(self.ledger.epoch + 1))

    @invariant()
    def blocks_add_up(self) -> None:
        """Every block of a recent epoch is finished, leased, returned or untouched, and nothing is negative."""
        for sums in data.sums_by_epoch(self.ledger):
            parts = (sums.finished, sums.leased, sums.returned, sums.untouched)
            assert sum(parts) == BLOCKS
            assert min(parts) >= 0

    @invariant()
    def nothing_is_read_twice_without_excuse(self) -> None:
        """Exact while leases live; what may be read twice is known by name."""
        assert {place for place, times in self.times.items() if times > 1} <= self.excused

    def teardown(self) -> None:
        """When all have died and one reads what is left, every window of every epoch begun was read, and is counted."""
        for name in list(self.lives):
            self.dies(name)
        while self.ledger.returned or self.ledger.next_position < BLOCKS:
            self.takes("a", BLOCKS)
            self.reads("a", BLOCKS * PER_BLOCK)
            self.renews("a")
            assert self.ledger.epoch <= sum(self.numbers.values()) * STEPS, "the end does not come"
        for check in (self.units_are_disjoint, self.blocks_add_up, self.nothing_is_read_twice_without_excuse):
            check()

        due = {(epoch, i) for epoch in range(self.ledger.epoch + 1) for i in range(BLOCKS * PER_BLOCK)}
        assert set(self.times) == due
        epochs = min(data.EPOCHS_KEPT, self.ledger.epoch + 1)
        assert [sums.finished for sums in data.sums_by_epoch(self.ledger)] == [BLOCKS] * epochs
        assert sum(data.sums_by_learner(self.ledger).values()) == BLOCKS * (self.ledger.epoch + 1)


Leasers.TestCase.settings = settings(
    max_examples=max(60, 3 * settings().max_examples),
    stateful_step_count=STEPS,
    suppress_health_check=[HealthCheck.too_slow],
)
test_any_interleaving = Leasers.TestCase


def test_long_runs_keep_a_small_ledger() -> None:
    """Epochs of long ago are summed up; what a learner has read is never forgotten."""
    ledger = data.DataLedger(blocks=4)
    for _ in range(40):
        ledger, grant = data.take(ledger, "a", 1, 4)
        ledger = data.renew(ledger, "a", 1, {grant.key: (8, 8)})

    assert len(ledger.finished) == data.EPOCHS_KEPT + 1
    assert ledger.finished[0].epoch == data.OLDER
    assert data.sums_by_learner(ledger) == {"a": 160}
    assert len(msgspec.json.encode(ledger)) < 2000


@pytest.mark.second_tier
def test_a_thousand_learners_over_many_epochs_fit_into_the_record() -> None:
    """A share per learner and epoch would not."""
    ledger = data.DataLedger(blocks=1000)
    for number in range(1000 * (data.EPOCHS_KEPT + 4)):
        name = f"learner-in-some-cluster-{number % 1000:04d}"
        ledger, grant = data.take(ledger, name, 1, 1)
        ledger = data.renew(ledger, name, 1, {grant.key: (8, 8)})

    assert len(encode(ledger)) < DOCUMENT_BYTES_MAX // 4
    assert set(data.sums_by_learner(ledger).values()) == {data.EPOCHS_KEPT + 4}
    assert {sums.finished for sums in data.sums_by_epoch(ledger)} == {1000}


def test_ids_that_never_come_back_do_not_make_the_record_grow() -> None:
    """Pods get new names for ever: beyond a bound they are counted together, all sums stay exact, who holds is named."""
    ledger = data.DataLedger(blocks=10_000)
    ledger, held_for_long = data.take(ledger, "z-holds", 1, 2)
    ledger = data.renew(ledger, "z-holds", 1, {held_for_long.key: (1, 8)})
    ledger, more = data.take(ledger, "z-holds", 1, 1)
    ledger = data.renew(ledger, "z-holds", 1, {more.key: (4, 4)})
    pods = data.LEARNERS_NAMED_MAX + 50
    for number in range(pods):
        ledger, grant = data.take(ledger, f"pod-{number}", 1, 2)
        ledger = data.renew(ledger, f"pod-{number}", 1, {grant.key: (8, 8)})
    read = data.sums_by_learner(ledger)

    assert len(ledger.finished) <= data.LEARNERS_NAMED_MAX + 2
    assert len(encode(ledger)) < DOCUMENT_BYTES_MAX // 2
    assert sum(read.values()) == 2 * pods + 1 == data.sums_by_epoch(ledger)[0].finished
    assert (read["z-holds"], read[data.OTHERS]) == (1, 2 * 52)


def test_readers_beyond_a_bound_are_counted_together_those_that_read_least_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who holds something is named, however little it has read; the others' sum stays exact."""
    monkeypatch.setattr("atoll.protocol.data.LEARNERS_NAMED_MAX", 3)
    ledger, begun = data.take(data.DataLedger(blocks=1000), "holds", 1, 1)
    ledger, held_for_long = data.take(data.renew(ledger, "holds", 1, {begun.key: (1, 1)}), "holds", 1, 4)
    ledger = data.renew(ledger, "holds", 1, {held_for_long.key: (0, 4)})
    named = []
    for number in range(1, 7):
        ledger, grant = data.take(ledger, f"pod-{number}", 1, number)
        ledger = data.renew(ledger, f"pod-{number}", 1, {grant.key: (2, 2)})

        assert (
            len({share.learner for share in ledger.finished}) <= 3 + 2
        )  # and one sum each of all others and of the epoch
        assert sum(data.sums_by_learner(ledger).values()) == 1 + number * (number + 1) // 2
        named.append([share.learner for share in ledger.finished])
        assert "holds" in named[-1]

    pods = [[number for number in range(1, 7) if f"pod-{number}" in names] for names in named]
    assert pods[:3] == [[1], [1, 2], [2, 3]]
    assert pods[-1] == [6]
    assert data.sums_by_learner(ledger) == {"(others)": 1 + 2 + 3 + 4 + 5, "holds": 1, "pod-6": 6}


def holding(*renewals: tuple[str, int]) -> data.DataLedger:
    ledger = data.DataLedger(blocks=10)
    for name, count in renewals:
        ledger, _ = data.take(ledger, name, 1, 1)
        for _ in range(count):
            ledger = data.renew(ledger, name, 1, {})
    return ledger


def test_a_lease_dies_when_its_renewals_stand_still() -> None:
    watch = data.LeaseWatch(lease_s=6.0)
    seen: list[set[data.Holder]] = [
        watch.dead_holders(holding(("a", number), ("b", 0)), 100.0 + 2.0 * number) for number in range(4)
    ]

    assert seen == [set(), set(), set(), {("b", 1)}]


def test_an_observer_that_was_away_judges_nobody_at_once() -> None:
    """A broker that was away for an hour kills no lease: half a lease at most counts between two looks."""
    watch = data.LeaseWatch(lease_s=6.0)
    ledger = holding(("a", 1))

    assert watch.dead_holders(ledger, 0.0) == set()
    assert watch.dead_holders(ledger, 3600.0) == set()
    assert watch.dead_holders(ledger, 3603.0) == {("a", 1)}


def test_a_checkpoint_is_no_claim_on_what_another_has_by_now() -> None:
    """Buried and granted again: the heir keeps it, whatever the cursor of the former holder's new life says."""
    ledger, unit = data.take(data.DataLedger(blocks=4), "a", 1, 4)
    ledger = data.bury(data.renew(ledger, "a", 1, {unit.key: (2, 8)}), [("a", 1)])
    ledger, granted = data.take(ledger, "b", 5, 4)
    ledger = data.inherit(ledger, "a", 2, {unit.key: (1, 8)})

    assert data.held(ledger, "a", 2) == ()
    assert data.held(ledger, "b", 5) == (granted,)


def test_a_mark_never_goes_back_and_never_leaves_its_unit() -> None:
    """A renewal that says less than an earlier one, or what cannot be, changes nothing but the sign of life."""
    ledger, unit = data.take(data.DataLedger(blocks=4), "a", 1, 4)
    ledger = data.renew(ledger, "a", 1, {unit.key: (5, 8)})
    for read, of in ((3, 8), (9, 8), (-1, 8), (0, 0)):
        ledger = data.renew(ledger, "a", 1, {unit.key: (read, of)})

    assert [(grant.read, grant.of, grant.renewals) for grant in data.held(ledger, "a", 1)] == [(5, 8, 5)]


HOLDERS = [(name, life) for name in ("a", "b", "c") for life in (1, 2)]
FEW = {"UNITS_MAX": 6, "HELD_MAX": 2, "LEARNERS_NAMED_MAX": 2, "EPOCHS_KEPT": 2}
COUNTS = st.integers(0, BLOCKS * PER_BLOCK)


@st.composite
def units_of_anybody(draw: st.DrawFn, epoch: int) -> data.DataGrant:
    """A unit as a peer may write it: of any holder, over others, read and counted as it likes."""
    holder, start = draw(st.sampled_from(HOLDERS)), draw(st.integers(0, BLOCKS - 1))
    stop, (read, of) = draw(st.integers(start + 1, BLOCKS)), sorted(draw(st.tuples(COUNTS, COUNTS)))
    return data.DataGrant(
        draw(st.integers(0, epoch)), start, stop, *holder, read, of, draw(st.integers(0, stop - start))
    )


@st.composite
def ledgers_of_anybody(draw: st.DrawFn) -> data.DataLedger:
    """A ledger as a peer may write it, at its bounds and beyond them."""
    epoch = draw(st.integers(0, 3))
    shares = st.builds(
        data.DataShare, st.integers(data.OLDER, 4), st.sampled_from(["", data.OTHERS, "a", "b", "d"]), COUNTS
    )
    return data.DataLedger(
        blocks=BLOCKS,
        epoch=epoch,
        next_position=draw(st.integers(0, BLOCKS)),
        grants=tuple(draw(st.lists(units_of_anybody(epoch), max_size=7))),
        returned=tuple(draw(st.lists(units_of_anybody(epoch), max_size=4))),
        finished=tuple(draw(st.lists(shares, max_size=6))),
    )


@given(
    ledger=ledgers_of_anybody(),
    holder=st.sampled_from(HOLDERS),
    dead=st.sets(st.sampled_from(HOLDERS)),
    marks=st.lists(st.tuples(COUNTS, COUNTS), min_size=8, max_size=8),
    blocks=st.integers(1, BLOCKS),
)
@settings(
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_whatever_can_be_read_has_a_successor(
    monkeypatch: pytest.MonkeyPatch,
    ledger: data.DataLedger,
    holder: data.Holder,
    dead: set[data.Holder],
    marks: list[tuple[int, int]],
    blocks: int,
) -> None:
    """Every change of a ledger of a peer leads to one that has no fault either: nobody is stopped by what it reads."""
    for name, bound in FEW.items():
        monkeypatch.setattr(f"atoll.protocol.data.{name}", bound)
    assume(not ledger.fault())
    progress = {grant.key: mark for grant, mark in zip(ledger.grants, marks, strict=False)}
    after = [
        data.renew(ledger, *holder, progress),
        data.give_back(ledger, *holder, progress),
        data.bury(ledger, dead),
        data.inherit(ledger, *holder, progress),
    ]
    after += [
        data.take(each, *holder, blocks)[0] for each in (ledger, *after) if not data.too_many_units(each, *holder)
    ]

    assert [each.fault() for each in after] == [""] * len(after)


def test_what_a_dead_holder_had_read_to_its_end_does_not_return() -> None:
    whole = data.DataGrant(0, 0, 4, "a", 1, read=8, of=8, counted=1)
    after = data.bury(data.DataLedger(blocks=4, next_position=4, grants=(whole,)), [("a", 1)])

    assert (after.grants, after.returned) == ((), ())
    assert data.sums_by_learner(after) == {"a": 3}


@pytest.mark.parametrize(
    "sums", [data.LEARNERS_NAMED_MAX + 1 + data.EPOCHS_KEPT, data.LEARNERS_NAMED_MAX + 2 + data.EPOCHS_KEPT]
)
def test_a_ledger_has_no_more_sums_than_are_kept(sums: int) -> None:
    """Nor any of an epoch that has not begun: those would be kept for ever."""
    named = tuple(data.DataShare(data.OLDER, f"a-{number}", 1) for number in range(sums))

    assert bool(data.DataLedger(blocks=4, finished=named).fault()) == (
        sums > data.LEARNERS_NAMED_MAX + 1 + data.EPOCHS_KEPT
    )
    assert "after epoch 2" in data.DataLedger(blocks=4, epoch=2, finished=(data.DataShare(3, "", 1),)).fault()


@given(ledger=ledgers_of_anybody(), dead=st.lists(st.sampled_from(HOLDERS), unique=True))
def test_the_dead_are_buried_together_as_one_after_the_other(ledger: data.DataLedger, dead: list[data.Holder]) -> None:
    """In any order, and with equal sums; a peer's units may be equal ones, and those have no order."""
    assume(not ledger.fault())

    def unordered(ledger: data.DataLedger) -> data.DataLedger:
        return msgspec.structs.replace(ledger, returned=tuple(sorted(ledger.returned, key=msgspec.structs.astuple)))

    one_by_one = data.renew(ledger, "nobody", 1, {})
    for holder in dead:
        one_by_one = data.bury(one_by_one, [holder])

    assert unordered(data.bury(data.renew(ledger, "nobody", 1, {}), dead)) == unordered(one_by_one)


def test_the_largest_ledger_fits_into_a_record() -> None:
    """All bounds at once, the longest names, numbers as long as they may be; and so does each of its successors."""
    most = COUNT_MAX // 2

    def name(number: int) -> str:
        return f"{number:0>64}"

    def unit(number: int) -> data.DataGrant:
        start = most - data.UNIT_BLOCKS_MAX
        return data.DataGrant(
            most, start, most, name(number), INCARNATION_MAX, most, most + 1, data.UNIT_BLOCKS_MAX, most
        )

    shares = [data.DataShare(data.OLDER, name(number), COUNT_MAX) for number in range(data.LEARNERS_NAMED_MAX)]
    epochs = [data.DataShare(most - number, "", COUNT_MAX) for number in range(data.EPOCHS_KEPT)]
    ledger = data.DataLedger(
        blocks=COUNT_MAX,
        epoch=most,
        next_position=COUNT_MAX,
        grants=tuple(unit(number) for number in range(data.UNITS_MAX)),
        finished=(*shares, data.DataShare(data.OLDER, data.OTHERS, COUNT_MAX), *epochs),
    )
    assert ledger.fault() == ""
    assert decode(data.DataLedger, encode(ledger)) == ledger

    gone = data.bury(ledger, {grant.holder for grant in ledger.grants})
    assert len(gone.returned) == data.UNITS_MAX
    for _ in range(2):
        gone, _ = data.take(gone, "a", 1, 1)
        assert decode(data.DataLedger, encode(gone)) == gone


def test_a_holder_and_a_ledger_are_full_at_their_bounds() -> None:
    """Nothing is granted beyond them; what came back is granted whole, so that one unit does not become two."""
    ledger = data.DataLedger(blocks=data.UNITS_MAX * 2)
    for number in range(data.UNITS_MAX):
        holder = f"learner-{number // data.HELD_MAX}"
        assert data.too_many_units(ledger, holder, 1) == ""
        ledger, _ = data.take(ledger, holder, 1, 2)

    assert "units of one learner" in data.too_many_units(ledger, "learner-0", 1)
    assert f"{data.UNITS_MAX} units of" in data.too_many_units(ledger, "a", 1)
    ledger = data.bury(ledger, [("learner-0", 1)])
    assert data.too_many_units(ledger, "a", 1) == ""
    ledger, unit = data.take(ledger, "a", 1, 1)
    assert unit.blocks == 2
    assert ledger.fault() == ""


def test_the_work_grows_with_the_units_and_not_with_units_times_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def counted(grant: data.DataGrant) -> data.Holder:
        nonlocal looks
        looks += 1
        return grant.learner, grant.incarnation

    monkeypatch.setattr(data.DataGrant, "holder", property(counted))

    def work(units: int) -> int:
        nonlocal looks
        grants = tuple(data.DataGrant(0, number, number + 1, "m", number) for number in range(units))
        ledger, looks = data.DataLedger(blocks=units, next_position=units, grants=grants), 0
        dead = data.LeaseWatch(6.0).dead_holders(ledger, 0.0) | {("m", number) for number in range(units)}
        assert len(data.bury(ledger, dead).returned) == units
        data.inherit(ledger, "m", units, {})
        assert ledger.fault() == ""
        return looks

    assert work(2000) <= 11 * work(200)
