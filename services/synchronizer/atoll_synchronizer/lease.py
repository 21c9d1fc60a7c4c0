"""The lease of a shard in the broker: one candidate's reads and writes, driven by `atoll.protocol.ownership`.

While the broker is away, a candidate waits and an owner goes on: fences guard its commits. The lease carries the reports of
the learners, so that the next owner also knows what no commit has recorded yet. It is one small record (`ledger.newest`): one
too large to be read would leave the shard without an owner for ever.

**A lease that says nothing usable.** A new owner's epoch must be above those of all owners before it: it fences heads with it,
and names what it writes by it. A lease says the last epoch. One that cannot be read does not, and neither does one that claims
a higher epoch than the broker has given numbers to messages (its `revision`): each tenure began with a lease of its own. Such
a lease is taken over like any other, once it has stood still for `lease_s`, with an epoch above that number and above all
heads. The owner, if there is one, writes its own lease over it, or anew where it is gone. It cannot know whether somebody had
taken the shard before that lease was lost, so its lease says from where on epochs are free (`epoch_max`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from atoll.base import fact_dumps
from atoll.base.clock import Clock, Identity, this_process
from atoll.base.errors import BrokerUnavailable, BusError, PeerMisbehaved, RecordConflict, StorageFull
from atoll.base.logs import get
from atoll.base.retry import wait_at_most
from atoll.bus.interface import Bus, Record
from atoll.protocol.events import Command, RenewLease, StandDown, TakeLease
from atoll.protocol.ledger import Ledger, newest
from atoll.protocol.ownership import LeaseSeen, LeaseStanding, LeaseUnseen, LeaseWritten, Tenure
from atoll.protocol.recorder import FactRecorder
from atoll.run.record import the_run
from atoll.wire.messages import Head, Lease, RunRecord, decode, encode

T = TypeVar("T")

log = get(__name__)

SAY_S = 30.0


class LeaseKeeper:
    """One candidacy for one shard, from waiting to being deposed or releasing."""

    def __init__(
        self,
        bus: Bus,
        run: RunRecord,
        shard: int,
        clock: Clock,
        identity: Identity | None = None,
    ) -> None:
        settings = run.protocol
        self._bus = bus
        self._run_nonce = run.nonce
        self._subjects = run.subjects
        self._subject = run.subjects.lease(shard)
        self._heads = [run.subjects.head(fragment) for fragment in settings.fragments_of(shard)]
        self._shard = shard
        self._target = settings.tokens_target
        self._clock = clock
        self._identity = identity or this_process()
        self._nonce = self._identity.nonce(8)
        self._machine = Tenure(settings.lease_s)
        self.recorder = FactRecorder(f"tenure-{shard}", self._machine)
        fact_dumps.keep(self.recorder)
        self._ledger: Ledger | None = None
        self._leaving = False
        self._undecodable_s: float | None = None
        self._unseen_s: float | None = None
        """Since when no look has succeeded."""
        self._epoch_max = 0
        self._nudged = asyncio.Event()

    @property
    def epoch(self) -> int:
        """Return the number of our tenure; 0 before it begins."""
        return self._machine.epoch if self._machine.standing is LeaseStanding.OWNING else 0

    async def win(self) -> Ledger | None:
        """Wait until the shard is ours; return the former owner's last reports of the learners, None for the first.

        Returns early, with `epoch` still 0, when the run is over: there is nothing to own any more. It also does so
        after `leave`, once the owner has shown that it is there.
        """
        said_s = self._clock.monotonic() - SAY_S
        told_to_leave_at: int | None = None
        while True:
            lease = await self._look(None)
            if self.epoch:
                return self._ledger
            if lease is not None and self._is_over(lease):
                return self._ledger_of(lease)
            if self._leaving and lease is not None:
                told_to_leave_at = self._machine.revision if told_to_leave_at is None else told_to_leave_at
                if self._machine.revision > told_to_leave_at:
                    return self._ledger_of(lease)
            now_s = self._clock.monotonic()
            if lease is not None and now_s - said_s >= SAY_S:
                said_s = now_s
                log.info("shard.standby", epoch=lease.epoch, owner=f"{lease.host}/{lease.pid}")
            self._nudged.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._machine.poll_s):
                    await self._nudged.wait()

    def nudge(self) -> None:
        """Look at the lease now: its owner may have given it up."""
        self._nudged.set()

    def leave(self) -> None:
        """Stop wanting the shard if it has an owner; without one, its queue would stay full."""
        self._leaving = True

    async def hold(self, ledger: Callable[[], Ledger]) -> str:
        """Renew, with the newest learners' reports, until another process holds the lease; return that reason."""
        while self._machine.standing is not LeaseStanding.DEPOSED:
            await asyncio.sleep(self._machine.poll_s)
            await self._look(ledger())
        return "somebody else holds the lease"

    async def release(self, ledger: Ledger, *, closed: bool, to: str = "") -> None:
        """Release the shard with its final ledger, to a host if one is named; do not touch a lease that is not ours."""
        while True:
            record = await self._bus.get_record(self._subject)
            lease = None if record is None else self._decode(record)
            if record is None or (lease is not None and lease.nonce != self._nonce):
                return
            released = msgspec.structs.replace(self._lease(ledger), released=True, closed=closed, to=to)
            with contextlib.suppress(RecordConflict):
                await self._bus.put_record(self._subject, encode(released), expected=record.revision)
                return

    async def _look(self, ledger: Ledger | None) -> Lease | None:
        try:
            record = await self._soon(self._bus.get_record(self._subject))
            lease = None if record is None else self._decode(record)
            if lease is not None and lease.nonce != self._nonce:
                self._ledger = self._ledger_of(lease)
            seen = LeaseSeen(
                at_s=self._clock.monotonic(),
                revision=0 if record is None else record.revision,
                epoch=await self._epoch_of(lease, 0 if record is None else record.revision),
                released=lease is not None and self._is_free(lease),
                ours=await self._is_ours(lease, record),
            )
            for action in self.recorder.handle(seen):
                await self._do(action, self._ledger if ledger is None else ledger)
        except (BusError, BrokerUnavailable, StorageFull) as error:
            self._on_unseen(str(error))
            return None
        except PeerMisbehaved as error:
            log.warning("lease.unreadable", reason=str(error))
            return None
        if self._unseen_s is not None:
            log.info(
                "lease.seen_again", after_s=round(self._clock.monotonic() - self._unseen_s, 3), owner=self.epoch > 0
            )
            self._unseen_s = None
        return lease

    async def _is_ours(self, lease: Lease | None, record: Record | None) -> bool:
        """Return whether we hold the shard: an owner writes its own lease over one that is lost or nobody can read.

        Raises `RunReplaced` if the broker has lost the run as well.
        """
        if lease is not None:
            return lease.nonce == self._nonce
        if not self.epoch or record is not None:
            return self.epoch > 0
        return (await self._soon(the_run(self._bus, self._subjects))).nonce == self._run_nonce

    async def _soon(self, request: Coroutine[Any, Any, T]) -> T:
        try:
            return await wait_at_most(request, self._machine.patience_s)
        except TimeoutError as error:
            within = f"no answer within {self._machine.patience_s:g} s"
            raise BrokerUnavailable("the lease cannot be reached", got=within) from error

    def _on_unseen(self, reason: str) -> None:
        now_s = self._clock.monotonic()
        self.recorder.handle(LeaseUnseen(at_s=now_s))
        if self._unseen_s is None:
            self._unseen_s = now_s
            log.warning("lease.unseen", reason=reason, owner=self.epoch > 0)

    def _decode(self, record: Record) -> Lease | None:
        try:
            return decode(Lease, record.data)
        except PeerMisbehaved as error:
            self._epoch_max = max(self._epoch_max, record.revision)
            now_s = self._clock.monotonic()
            if self._undecodable_s is None or now_s - self._undecodable_s >= SAY_S:
                self._undecodable_s = now_s
                todo = "run the same Atoll on all machines; a lease that stands still is taken over"
                log.error("lease.undecodable", subject=self._subject, reason=str(error), todo=todo)  # noqa: TRY400  (no bug)
            return None

    async def _epoch_of(self, lease: Lease | None, revision: int) -> int:
        """Return a number that no epoch of the shard is above: what its lease of this revision says, if that can be.

        Raises `PeerMisbehaved` for a head of ours that cannot be read: nobody could serve the fragment.
        """
        if lease is not None and (newest := max(lease.epoch, lease.epoch_max)) <= revision:
            return newest
        heads = [await self._soon(self._bus.get_record(subject)) for subject in self._heads]
        return max(revision, *(0 if head is None else decode(Head, head.data).epoch for head in heads))

    async def _do(self, action: Command, ledger: Ledger | None) -> None:
        if isinstance(action, StandDown):
            log.warning("shard.deposed", reason=action.reason)
        elif isinstance(action, TakeLease | RenewLease):
            try:
                lease = encode(self._lease(ledger))
                write = self._bus.put_record(self._subject, lease, expected=action.revision)
                revision = await self._soon(write)
            except RecordConflict:
                return
            if isinstance(action, RenewLease) and not action.revision:
                self._epoch_max = max(self._epoch_max, revision)
                log.error("lease.written_anew", reason="the broker had lost it", epoch=self.epoch, revision=revision)
            self.recorder.handle(LeaseWritten(at_s=self._clock.monotonic(), revision=revision))

    def _lease(self, ledger: Ledger | None) -> Lease:
        return Lease(
            shard=self._shard,
            epoch=self._machine.epoch,
            nonce=self._nonce,
            run_nonce=self._run_nonce,
            host=self._identity.host,
            pid=self._identity.pid,
            epoch_max=max(self._epoch_max, self._machine.epoch),
            ledger=None if ledger is None else newest(ledger),
        )

    def _ledger_of(self, lease: Lease) -> Ledger | None:
        return lease.ledger if lease.run_nonce == self._run_nonce else None

    def _is_free(self, lease: Lease) -> bool:
        """Return whether we may have it at once; a lease released to another host first runs out like any other."""
        return lease.released and lease.to in ("", self._identity.name) and not self._is_over(lease)

    def _is_over(self, lease: Lease) -> bool:
        ledger = self._ledger_of(lease)
        reached = ledger is not None and ledger.run_tokens >= self._target
        return bool(self._target) and lease.closed and reached
