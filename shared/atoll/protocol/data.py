"""Leases on parts of the data: a pure ledger of which learner may read which, and the watch that tells when a lease is dead.

An epoch is a keyed permutation of the run's blocks, so the ledger grants ranges of *positions*, and membership may change
without reshuffling anything. A granted range stays one *unit* until it is read to its end, because the order of reading inside
it is a function of the unit. The holder reports how far it has come (`read` of `of` windows), and the next holder goes on at
exactly that window.

    untouched ──take──► leased ──read to its end──► finished
                          │  ▲
         left, or dead    ▼  └──take, before anything untouched──┐
                       returned ─────────────────────────────────┘

Invariants (tests/property/test_data_ledger.py): units of one epoch are disjoint, and a leased unit is granted to no other
learner; an epoch is granted whole before the next one begins; finished, leased, returned and untouched blocks of an epoch add
up to all of them.

A lease is alive while its holder renews it (`LeaseWatch`). A holder that was frozen or cut off finds its unit gone at its next
renewal; blocks that it read in between may be read by two learners. Any learner may write the record, so a ledger has bounds
(`fault`), and no change leads beyond them. At all bounds at once it fits into a record.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Final

import msgspec

from atoll.base.quantities import COUNT_MAX, COUNTED, ID, Count, Incarnation, at_most

EPOCHS_KEPT: Final = 16
SHARD_LEASES: Final = 10.0
RENEWALS_PER_LEASE: Final = 3.0
OLDER: Final = -1
"""The epoch of what is summed up over all epochs."""
ALL: Final = ""
"""The learner of what is summed up over all learners."""
OTHERS: Final = "(others)"
"""The learner under which those are summed up who are too many to be named; no id of a learner has brackets."""
LEARNERS_NAMED_MAX: Final = 2048
UNITS_MAX: Final = 2560
"""Leased and returned units of a ledger: as many, of the longest names and numbers, as a record holds beside the sums."""
HELD_MAX: Final = 256
"""Units of one holder: it reads one and asks for the next; of blocks that are smaller than a batch it holds many."""
UNIT_BLOCKS_MAX: Final = 65536
"""Blocks of a unit: a reader mixes the windows of all of them, in memory."""
HolderName = Annotated[str, msgspec.Meta(pattern=rf"^({ID}|\(others\))?$(?!\n)")]
"""The id of a learner, `ALL` or `OTHERS`."""

Key = tuple[int, int, int]
Progress = Mapping[Key, tuple[int, int]]
Holder = tuple[str, int]


class DataGrant(msgspec.Struct, frozen=True):
    """A unit: positions `start <= i < stop` of one epoch, held by an incarnation of a learner, or by none ("").

    `read` of its `of` windows are read, in an order that follows from (epoch, start, stop); `of` is 0 until a holder reports
    it. `counted` blocks of it are in the ledger's sums already. `renewals` counts the holder's signs of life.
    """

    epoch: Count
    start: Count
    stop: Count
    learner: HolderName
    incarnation: Incarnation
    read: Count = 0
    of: Count = 0
    counted: Count = 0
    renewals: Annotated[Count, COUNTED] = 0

    @property
    def key(self) -> Key:
        """Return the unit's identity."""
        return self.epoch, self.start, self.stop

    @property
    def holder(self) -> Holder:
        """Return the incarnation that holds it."""
        return self.learner, self.incarnation

    @property
    def blocks(self) -> int:
        """Return how many blocks it has."""
        return self.stop - self.start

    @property
    def blocks_read(self) -> int:
        """Return how many blocks of it are read; all of them only if every window is."""
        return max(self.counted, self.read * self.blocks // self.of if self.of else 0)


class DataShare(msgspec.Struct, frozen=True):
    """Blocks that were read: by `ALL` in an epoch, or by a learner in all of them (`OLDER`)."""

    epoch: Annotated[int, msgspec.Meta(ge=OLDER, le=COUNT_MAX)]
    learner: HolderName
    blocks: Count


class DataLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The leased units, the returned units, how much each learner has read, and where the untouched rest begins.

    `finished` counts everything that is no longer leased: units read to their end, and the read part of returned units. It
    counts every block twice, for its epoch and for its reader, never for both together: that would be a share per learner
    and epoch, and the record must stay small. At most `LEARNERS_NAMED_MAX` readers are named.
    """

    blocks: Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)]
    epoch: Annotated[Count, COUNTED] = 0
    next_position: Count = 0
    grants: tuple[DataGrant, ...] = ()
    returned: tuple[DataGrant, ...] = ()
    finished: tuple[DataShare, ...] = ()
    schema: int = 1

    @property
    def units(self) -> int:
        """Return how many units are leased or returned."""
        return len(self.grants) + len(self.returned)

    def fault_at(self, revision: int) -> str:
        """Return what has been counted further than there were writes (up to the record's `revision`), or the empty string."""
        if self.epoch > revision:
            return f"epoch {self.epoch} at revision {revision}"
        renewals = max((grant.renewals for grant in self.grants), default=0)
        return f"{renewals} renewals at revision {revision}" if renewals > revision else ""

    def fault(self) -> str:
        """Return why no learner of ours writes this ledger, or the empty string."""
        return next(self._faults(), "")

    def _faults(self) -> Iterator[str]:
        if self.next_position > self.blocks:
            yield f"position {self.next_position} of {self.blocks} blocks"
        if self.units > UNITS_MAX:
            yield f"{self.units} units, more than {UNITS_MAX}"
        if len(self.finished) > LEARNERS_NAMED_MAX + 1 + EPOCHS_KEPT:
            yield f"{len(self.finished)} sums of what was read"
        if any(share.epoch > self.epoch for share in self.finished):
            yield f"blocks that were read after epoch {self.epoch}"
        most = max(Counter(grant.holder for grant in self.grants).values(), default=0)
        if most > HELD_MAX:
            yield f"{most} units of one holder, more than {HELD_MAX}"
        for unit in (*self.grants, *self.returned):
            if not unit.start < unit.stop <= self.blocks or unit.epoch > self.epoch:
                yield f"a unit of blocks {unit.start} to {unit.stop} in epoch {unit.epoch}"
            if unit.blocks > UNIT_BLOCKS_MAX:
                yield f"a unit of {unit.blocks} blocks, more than {UNIT_BLOCKS_MAX}"
            if unit.read > unit.of or unit.counted > unit.blocks:
                yield (
                    f"a unit with {unit.read} of {unit.of} windows read, {unit.counted} of {unit.blocks} blocks counted"
                )


class EpochSum(msgspec.Struct, frozen=True):
    """Blocks of one epoch by state; they add up to the blocks of the run."""

    epoch: int
    finished: int
    leased: int
    returned: int
    untouched: int


def data_lease_s(lease_s: float) -> float:
    """Return how long a lease on data outlives its last renewal, from the run's `lease_s` for shards.

    It is longer, because no process waits for a dead learner's blocks, and a learner that is merely cut off reads on.
    """
    return SHARD_LEASES * lease_s


def too_many_units(ledger: DataLedger, learner: str, incarnation: int) -> str:
    """Return why a holder is granted no further unit, or the empty string."""
    if len(held(ledger, learner, incarnation)) >= HELD_MAX:
        return f"{HELD_MAX} units of one learner"
    if ledger.units >= UNITS_MAX and not ledger.returned:
        return f"{UNITS_MAX} units of {len({grant.learner for grant in ledger.grants})} learners"
    return ""


def take(ledger: DataLedger, learner: str, incarnation: int, blocks: int) -> tuple[DataLedger, DataGrant]:
    """Return the ledger after granting up to `blocks` positions to a learner, and the grant; not if `too_many_units` says why.

    Returned units go first, so that an epoch is finished before the next begins; a grant never spans two epochs. A unit that
    was begun is granted whole, since its order depends on its borders; an untouched one may be cut, if there is room for both.
    """
    blocks = min(blocks, UNIT_BLOCKS_MAX)
    if ledger.returned:
        first, *rest = ledger.returned
        whole = first.read or first.counted or ledger.units >= UNITS_MAX
        stop = first.stop if whole else min(first.stop, first.start + blocks)
        grant = msgspec.structs.replace(first, stop=stop, learner=learner, incarnation=incarnation)
        left = [DataGrant(first.epoch, stop, first.stop, "", 0)] if stop < first.stop else []
        return msgspec.structs.replace(ledger, returned=(*left, *rest), grants=(*ledger.grants, grant)), grant
    epoch, start = ledger.epoch, ledger.next_position
    if start >= ledger.blocks:
        epoch, start = epoch + 1, 0
    stop = min(start + blocks, ledger.blocks)
    grant = DataGrant(epoch, start, stop, learner, incarnation)
    return msgspec.structs.replace(ledger, epoch=epoch, next_position=stop, grants=(*ledger.grants, grant)), grant


def held(ledger: DataLedger, learner: str, incarnation: int) -> tuple[DataGrant, ...]:
    """Return the units that an incarnation holds."""
    return tuple(grant for grant in ledger.grants if grant.holder == (learner, incarnation))


def renew(ledger: DataLedger, learner: str, incarnation: int, progress: Progress) -> DataLedger:
    """Return the ledger after a holder's sign of life: its progress in each unit; fully read units are removed.

    Units of `progress` that the holder no longer has are skipped: `held` returns the ones it still has.
    """
    kept, finished = [], list(ledger.finished)
    for grant in ledger.grants:
        if grant.holder != (learner, incarnation):
            kept.append(grant)
            continue
        now = msgspec.structs.replace(_advanced(grant, progress), renewals=grant.renewals + 1)
        if now.of and now.read == now.of:
            finished.append(DataShare(now.epoch, learner, now.blocks - now.counted))
        else:
            kept.append(now)
    return msgspec.structs.replace(ledger, grants=tuple(kept), finished=_summed(finished, ledger.epoch, kept))


def give_back(ledger: DataLedger, learner: str, incarnation: int, progress: Progress) -> DataLedger:
    """Return the ledger after a holder returned its units, each with the rest beyond `progress`.

    For a dead holder `progress` is empty, and the rest begins where its last renewal stood.
    """
    return bury(renew(ledger, learner, incarnation, progress), [(learner, incarnation)])


def inherit(ledger: DataLedger, learner: str, incarnation: int, cursor: Progress) -> DataLedger:
    """Return the ledger after a new incarnation of a learner took over the units of its former ones.

    A unit in `cursor` (the position in its checkpoint) moves over and is read on from there, so what the former incarnation
    read after that checkpoint may be read again. All other units of former incarnations return to the pool.
    """
    grants, room = [], HELD_MAX - len(held(ledger, learner, incarnation))
    for grant in ledger.grants:
        read, of = cursor.get(grant.key, (0, 0))
        ours = grant.learner == learner and grant.incarnation < incarnation
        if ours and of and 0 <= read <= of and room > 0:
            room -= 1
            mark = {"incarnation": incarnation, "read": read, "of": of, "renewals": 0}
            grants.append(msgspec.structs.replace(grant, **mark))
        else:
            grants.append(grant)
    ledger = msgspec.structs.replace(ledger, grants=tuple(grants))
    former = {g.incarnation for g in grants if g.learner == learner and g.incarnation < incarnation}
    return bury(renew(ledger, learner, incarnation, {}), [(learner, number) for number in former])


def bury(ledger: DataLedger, holders: Iterable[Holder]) -> DataLedger:
    """Return the ledger after all units of dead holders returned to the pool, read as far as their last renewal said.

    All holders at once, since a peer's ledger may name a holder for each unit. A unit that was read to its end is finished.
    """
    dead = set(holders)
    kept, returned, finished = [], list(ledger.returned), list(ledger.finished)
    for grant in ledger.grants:
        if grant.holder not in dead:
            kept.append(grant)
            continue
        read = grant.blocks_read
        finished.append(DataShare(grant.epoch, grant.learner, read - grant.counted))
        if not grant.of or grant.read < grant.of:
            returned.append(msgspec.structs.replace(grant, learner="", incarnation=0, counted=read, renewals=0))
    if len(kept) == len(ledger.grants):
        return ledger
    returned.sort(key=lambda grant: grant.key)
    sums = _summed(finished, ledger.epoch, kept)
    return msgspec.structs.replace(ledger, grants=tuple(kept), returned=tuple(returned), finished=sums)


def sums_by_epoch(ledger: DataLedger) -> list[EpochSum]:
    """Return the blocks of the newest epochs by state; what a live holder reported as read counts as finished."""
    sums = []
    for epoch in range(max(0, ledger.epoch - EPOCHS_KEPT + 1), ledger.epoch + 1):
        live = [grant for grant in ledger.grants if grant.epoch == epoch]
        sums.append(
            EpochSum(
                epoch,
                finished=sum(share.blocks for share in ledger.finished if share.epoch == epoch)
                + sum(grant.blocks_read - grant.counted for grant in live),
                leased=sum(grant.blocks - grant.blocks_read for grant in live),
                returned=sum(grant.blocks - grant.counted for grant in ledger.returned if grant.epoch == epoch),
                untouched=ledger.blocks - ledger.next_position if epoch == ledger.epoch else 0,
            )
        )
    return sums


def sums_by_learner(ledger: DataLedger) -> dict[str, int]:
    """Return the blocks that each learner has read, over all epochs; `OTHERS` sums the learners that are no longer named."""
    sums: dict[str, int] = {}
    for share in ledger.finished:
        if share.learner == ALL:
            continue
        sums[share.learner] = sums.get(share.learner, 0) + share.blocks
    for grant in ledger.grants:
        sums[grant.learner] = sums.get(grant.learner, 0) + grant.blocks_read - grant.counted
    return dict(sorted(sums.items()))


class LeaseWatch:
    """One observer's judgement of which holders are dead: their renewals stood still for `lease_s` that it has observed.

    Between two looks at most half a lease counts. So an observer that could not look (cut off, frozen, or without a broker)
    gives every holder the chance to renew before it judges.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._last_s: float | None = None
        self._signs: dict[Holder, tuple[tuple[Key, int], ...]] = {}
        self._still_s: dict[Holder, float] = {}

    def dead_holders(self, ledger: DataLedger, now_s: float) -> set[Holder]:
        """Look at the ledger at `now_s` of the observer's own clock and return the holders whose leases are dead."""
        passed_s = 0.0 if self._last_s is None else min(now_s - self._last_s, self._lease_s / 2.0)
        self._last_s = now_s
        units: defaultdict[Holder, list[tuple[Key, int]]] = defaultdict(list)
        for grant in ledger.grants:
            units[grant.holder].append((grant.key, grant.renewals))
        signs = {holder: tuple(of_units) for holder, of_units in units.items()}
        self._still_s = {
            holder: self._still_s.get(holder, 0.0) + passed_s if sign == self._signs.get(holder) else 0.0
            for holder, sign in signs.items()
        }
        self._signs = signs
        return {holder for holder, still_s in self._still_s.items() if still_s >= self._lease_s}


def _advanced(grant: DataGrant, progress: Progress) -> DataGrant:
    """Return the grant with its holder's progress; progress never goes back, and impossible progress is ignored."""
    read, of = progress.get(grant.key, (0, 0))
    if not 0 <= read <= of or of == 0 or (of == grant.of and read < grant.read):
        return grant
    return msgspec.structs.replace(grant, read=read, of=of)


def _summed(shares: Iterable[DataShare], epoch: int, grants: Collection[DataGrant]) -> tuple[DataShare, ...]:
    """Return one share per recent epoch and one per learner; learners without a grant that read least are not named."""
    epochs: Counter[int] = Counter()
    learners: Counter[str] = Counter()
    for share in shares:
        if share.epoch != OLDER:
            epochs[share.epoch] = at_most(COUNT_MAX, epochs[share.epoch] + share.blocks)
        if share.learner != ALL:
            learners[share.learner] = at_most(COUNT_MAX, learners[share.learner] + share.blocks)
    if len(learners) > LEARNERS_NAMED_MAX:
        holding = {grant.learner for grant in grants}
        by_rank = sorted(learners, key=lambda name: (name == OTHERS, name in holding, learners[name], name))
        for name in by_rank[: len(learners) - LEARNERS_NAMED_MAX]:
            learners[OTHERS] = at_most(COUNT_MAX, learners[OTHERS] + learners.pop(name))
    read = [DataShare(OLDER, name, blocks) for name, blocks in sorted(learners.items()) if blocks]
    recent = [(number, blocks) for number, blocks in sorted(epochs.items()) if number > epoch - EPOCHS_KEPT and blocks]
    return (*read, *(DataShare(number, ALL, blocks) for number, blocks in recent))
