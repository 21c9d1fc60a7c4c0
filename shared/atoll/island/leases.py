"""Which data a learner may read: ranges of block positions, leased through one compare-and-set record.

An epoch is a keyed permutation of the run's blocks; the ledger hands out ranges of *positions* in that order, so any
learner can find its blocks with no further talk, and membership may change without reshuffling anything. A learner
returns what it has not begun when it leaves; the leases of a dead incarnation (a newer one exists, or the member record
says it left) go back to the pool when somebody next asks. Contention is one small record per `lease_blocks` blocks.
"""

from __future__ import annotations

import msgspec

from atoll.bus.interface import Bus
from atoll.bus.subjects import Subjects
from atoll.errors import BusError, RecordConflict
from atoll.wire.messages import DataGrant, DataLedger, Member, decode, encode

CAS_ATTEMPTS = 64


def take(ledger: DataLedger, learner: str, incarnation: int, blocks: int) -> tuple[DataLedger, DataGrant]:
    """Return the ledger after granting up to `blocks` positions to a learner, and the grant. Pure.

    Returned ranges go first, so that an epoch is finished before the next begins; a grant never spans two epochs.
    """
    if ledger.returned:
        first, *rest = ledger.returned
        stop = min(first.stop, first.start + blocks)
        grant = DataGrant(first.epoch, first.start, stop, learner, incarnation)
        left = [DataGrant(first.epoch, stop, first.stop, "", 0)] if stop < first.stop else []
        return msgspec.structs.replace(ledger, returned=(*left, *rest), grants=(*ledger.grants, grant)), grant
    epoch, start = ledger.epoch, ledger.next_position
    if start >= ledger.blocks:
        epoch, start = epoch + 1, 0
    stop = min(start + blocks, ledger.blocks)
    grant = DataGrant(epoch, start, stop, learner, incarnation)
    return msgspec.structs.replace(ledger, epoch=epoch, next_position=stop, grants=(*ledger.grants, grant)), grant


def give_back(ledger: DataLedger, learner: str, incarnation: int, used: tuple[DataGrant, ...]) -> DataLedger:
    """Return the ledger after an incarnation returned everything but `used` (grants cut at what it has begun). Pure."""
    done = {(grant.epoch, grant.start): grant.stop for grant in used}
    returned = list(ledger.returned)
    kept = []
    for grant in ledger.grants:
        if (grant.learner, grant.incarnation) != (learner, incarnation):
            kept.append(grant)
            continue
        begun = done.get((grant.epoch, grant.start), grant.start)
        if begun < grant.stop:
            returned.append(DataGrant(grant.epoch, begun, grant.stop, "", 0))
    returned.sort(key=lambda grant: (grant.epoch, grant.start))
    return msgspec.structs.replace(ledger, grants=tuple(kept), returned=tuple(returned))


class DataLeases:
    """One incarnation's hold on the data ledger of a run with `blocks` blocks."""

    def __init__(self, bus: Bus, subjects: Subjects, member: Member, blocks: int) -> None:
        """Hold nothing yet."""
        self._bus = bus
        self._subjects = subjects
        self._member = member
        self._blocks = blocks

    async def take(self, blocks: int, finished: tuple[DataGrant, ...] = ()) -> DataGrant:
        """Lease up to `blocks` further positions and drop `finished` grants from the books."""
        for _ in range(CAS_ATTEMPTS):
            revision, ledger = await self._read()
            ledger = await self._reclaim(ledger)
            mine = {(grant.epoch, grant.start) for grant in finished}
            kept = tuple(
                g for g in ledger.grants if g.learner != self._member.learner or (g.epoch, g.start) not in mine
            )
            ledger = msgspec.structs.replace(ledger, grants=kept)
            ledger, grant = take(ledger, self._member.learner, self._member.incarnation, blocks)
            if await self._write(ledger, revision):
                return grant
        raise BusError(
            "the data ledger is too contended", got=f"{CAS_ATTEMPTS} attempts", todo="raise data.lease_blocks"
        )

    async def give_back(self, used: tuple[DataGrant, ...]) -> None:
        """Return what this incarnation has not begun; `used` says how far each of its grants was read."""
        for _ in range(CAS_ATTEMPTS):
            revision, ledger = await self._read()
            if await self._write(give_back(ledger, self._member.learner, self._member.incarnation, used), revision):
                return

    async def _read(self) -> tuple[int, DataLedger]:
        record = await self._bus.get_record(self._subjects.data)
        if record is None:
            return 0, DataLedger(blocks=self._blocks)
        return record.revision, decode(DataLedger, record.data)

    async def _write(self, ledger: DataLedger, revision: int) -> bool:
        try:
            await self._bus.put_record(self._subjects.data, encode(ledger), expected=revision)
        except RecordConflict:
            return False
        return True

    async def _reclaim(self, ledger: DataLedger) -> DataLedger:
        """Return the ledger with the leases of dead incarnations back in the pool."""
        holders = {(grant.learner, grant.incarnation) for grant in ledger.grants}
        holders.discard((self._member.learner, self._member.incarnation))
        if not holders:
            return ledger
        records = await self._bus.get_records(self._subjects.member("*"))
        alive = {
            (member.learner, member.incarnation)
            for member in (decode(Member, record.data) for record in records)
            if not member.left
        }
        for learner, incarnation in sorted(holders - alive):
            ledger = give_back(ledger, learner, incarnation, ())
        return ledger
