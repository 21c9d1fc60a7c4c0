"""Leases data for a learner: it changes the ledger of leases, one record, by compare-and-set.

`atoll.protocol.data` decides; this module reads and writes. Each learner that writes the ledger first removes dead holders:
at once if the member record says that the holder left, and after a time if its renewals stand still (`LeaseWatch`). A new
incarnation settles what former ones of the same learner still hold: it takes the units over from a checkpoint (`resume`) or
returns them. A learner renews in the background while it holds anything, and reports how far it has read.

A ledger that nobody can read, or that cannot be, is replaced by the newest one that a learner has seen. Units granted since
are then granted again, and their holders find them lost: the lesser evil, since no learner can lease anything until
somebody does it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, BusError, DataError, PeerMisbehaved, RecordConflict
from atoll.base.logs import get
from atoll.bus.interface import Bus
from atoll.protocol.data import (
    RENEWALS_PER_LEASE,
    DataGrant,
    DataLedger,
    Key,
    LeaseWatch,
    Progress,
    bury,
    give_back,
    held,
    inherit,
    renew,
    take,
    too_many_units,
)
from atoll.run.record import read_members
from atoll.wire.messages import Member, decode, encode
from atoll.wire.subjects import Subjects

log = get(__name__)

CAS_ATTEMPTS = 64


class DataLeases:
    """One incarnation's leases in the data ledger of a run with `blocks` blocks.

    The reader sets `progress`, from any thread: how far each unit is read. `mine` are the units that we hold, `lost`
    those that we held and that are no longer ours.
    """

    def __init__(  # noqa: PLR0913  (who leases what, by which clock)
        self,
        bus: Bus,
        subjects: Subjects,
        member: Member,
        blocks: int,
        *,
        lease_s: float,
        clock: Clock,
        recorded: bool = False,
    ) -> None:
        """Hold nothing yet; `recorded`: the run record says that there are so many blocks."""
        self._bus = bus
        self._subjects = subjects
        self._member = member
        self._blocks = blocks
        self._recorded = recorded
        self._lease_s = lease_s
        self._clock = clock
        self._watch = LeaseWatch(lease_s)
        self._seen = DataLedger(blocks=blocks)
        self._settled = False
        self._leaving = False
        self.mine: frozenset[Key] = frozenset()
        self.progress: Progress = {}
        self.lost: frozenset[Key] = frozenset()

    async def take(self, blocks: int) -> DataGrant:
        """Lease up to `blocks` further positions.

        A unit that the ledger grants us but the reader does not know comes first, whatever its size: the answer to an
        earlier write was lost. So at most one call may be under way, and `progress` has to hold every unit that an earlier
        call returned. Raises `BusError` where the ledger is too contended or full, `DataError` where it is of other blocks
        than ours.
        """
        granted: list[DataGrant] = []

        def change(ledger: DataLedger, progress: Progress) -> DataLedger:
            if not self._settled:
                ledger = inherit(ledger, *self._holder, {})
            ledger = renew(ledger, *self._holder, progress)
            unread = [grant for grant in held(ledger, *self._holder) if grant.key not in progress]
            if unread:
                granted[:] = unread[:1]
                return ledger
            if full := too_many_units(ledger, *self._holder):
                raise BusError("the data ledger has no room for another unit", got=full, todo="raise data.lease_blocks")
            ledger, grant = take(ledger, *self._holder, blocks)
            granted[:] = [grant]
            return ledger

        await self._change(change)
        return granted[0]

    async def resume(self, cursor: Progress) -> tuple[DataGrant, ...]:
        """Take over, as a checkpoint's `cursor` says, what former incarnations still hold, and return it."""
        ledger = await self._change(lambda ledger, _: inherit(ledger, *self._holder, cursor))
        return held(ledger, *self._holder)

    async def renew(self) -> None:
        """Renew the leases, report how far we have read, and learn what is still ours."""
        if self.mine:
            await self._change(lambda ledger, progress: renew(ledger, *self._holder, progress))

    async def renew_for_ever(self) -> None:
        """Renew three times per lease; after a failure the next turn tries again."""
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            try:
                await self.renew()
            except AtollError as error:
                log.warning("data.renewal_failed", reason=str(error))

    async def give_back(self) -> None:
        """Return what this incarnation has not read."""
        self._leaving = True
        await self._change(lambda ledger, progress: give_back(ledger, *self._holder, progress))

    @property
    def _holder(self) -> tuple[str, int]:
        return self._member.learner, self._member.incarnation

    async def _change(self, change: Callable[[DataLedger, Progress], DataLedger]) -> DataLedger:
        for _ in range(CAS_ATTEMPTS):
            revision, before = await self._read()
            progress = self.progress
            ledger = change(bury(before, await self._dead(before)), progress)
            with contextlib.suppress(RecordConflict):
                await self._bus.put_record(self._subjects.data, encode(ledger), expected=revision)
                self._settled, self._seen = True, ledger
                self._learn(ledger, progress)
                return ledger
        raise BusError(
            "the data ledger is too contended", got=f"{CAS_ATTEMPTS} attempts", todo="raise data.lease_blocks"
        )

    def _learn(self, ledger: DataLedger, progress: Progress) -> None:
        now = frozenset(grant.key for grant in held(ledger, *self._holder))
        whole = {key for key, (read, of) in progress.items() if of and read == of}
        gone = frozenset() if self._leaving else self.mine - now - whole
        if gone:
            log.warning("data.lease_lost", units=sorted(gone))
        self.mine = now
        self.lost = (self.lost | gone) - now

    async def _read(self) -> tuple[int, DataLedger]:
        record = await self._bus.get_record(self._subjects.data)
        if record is None:
            return 0, DataLedger(blocks=self._blocks)
        try:
            ledger = decode(DataLedger, record.data)
        except PeerMisbehaved as error:
            return record.revision, self._before(str(error))
        if ledger.blocks == self._blocks:
            if fault := ledger.fault_at(record.revision):
                return record.revision, self._before(fault)
            self._seen = ledger
            return record.revision, ledger
        if self._settled or self._recorded:  # we have the run's text: it is the ledger that is wrong
            return record.revision, self._before(f"it is of {ledger.blocks} blocks, and was of {self._blocks}")
        raise DataError(
            "the run leases other blocks than this text has",
            got=f"{self._blocks} blocks",
            allowed=f"{ledger.blocks}, those of who leased first",
            todo="prepare the text with the same --block-tokens",
        )

    def _before(self, reason: str) -> DataLedger:
        log.warning("data.ledger_replaced", reason=reason, epoch=self._seen.epoch)
        return self._seen

    async def _dead(self, ledger: DataLedger) -> set[tuple[str, int]]:
        holders = {grant.holder for grant in ledger.grants if grant.learner != self._member.learner}
        still = self._watch.dead_holders(ledger, self._clock.monotonic()) & holders
        if not holders:
            return set()
        newest = await read_members(self._bus, self._subjects)
        left = {
            (learner, incarnation)
            for learner, incarnation in holders
            if (member := newest.get(learner)) is not None and member.left and member.incarnation >= incarnation
        }
        return still | left | {holder for holder in holders if holder[0] not in newest}
