"""The lease of a shard as the service keeps it: one candidate's reads and writes, driven by the production `Tenure`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from atoll.protocol.events import Action, RenewLease, TakeLease
from atoll.protocol.ledger import Ledger
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.tenure import LeaseSeen, LeaseStanding, LeaseWritten, Tenure
from atoll.sim.dst.broker import Full, Record
from atoll.sim.dst.line import Conflict, Line, Unavailable
from atoll.sim.dst.process import Work


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease record; `ledger` is JSON, `to` the process that a released lease is meant for."""

    epoch: int
    holder: str
    ledger: bytes = b""
    released: bool = False
    closed: bool = False
    to: str = ""


def lease_name(shard: int) -> str:
    """Return the name of a shard's lease record."""
    return f"lease/{shard}"


class LeaseKeeper:
    """One candidacy for one shard, from waiting to being deposed or releasing."""

    def __init__(self, line: Line, shard: int, holder: str, settings: ProtocolSettings) -> None:
        """Want the shard; `win` waits for it. `holder` is new for every candidacy."""
        self._line = line
        self._name = lease_name(shard)
        self._holder = holder
        self.machine = Tenure(settings.lease_s)
        self._ledger = b""
        self.leaving = False

    @property
    def epoch(self) -> int:
        """Return the number of our tenure; 0 before we have one."""
        return self.machine.epoch if self.machine.standing is LeaseStanding.OWNING else 0

    def win(self) -> Work:
        """Wait until the shard is ours; return what the former owner last knew of the learners, or None.

        Returns early, with `epoch` still 0, after `leaving` was set and the owner has shown that it is there.
        """
        told_to_leave_at: int | None = None
        while True:
            lease: Lease | None = yield from self._look(None)
            if self.epoch:
                return msgspec.json.decode(self._ledger, type=Ledger) if self._ledger else None
            if self.leaving and lease is not None:
                told_to_leave_at = self.machine.revision if told_to_leave_at is None else told_to_leave_at
                if self.machine.revision > told_to_leave_at:
                    return None
            yield self.machine.poll_s

    def hold(self, ledger: Callable[[], Ledger]) -> Work:
        """Renew, with the newest reports of the learners, until somebody else holds the lease."""
        while self.machine.standing is not LeaseStanding.DEPOSED:
            yield self.machine.poll_s
            yield from self._look(ledger)

    def release(self, ledger: Ledger, *, closed: bool, to: str) -> Work:
        """Give the shard back with its final ledger, to a process if one is named; one that is not ours is left alone."""
        final = replace(self._lease(msgspec.json.encode(ledger)), released=True, closed=closed, to=to)
        while True:
            record: Record = yield from self._line.ask(self._line.broker.get, self._name)
            if record.value is None or record.value.holder != self._holder:
                return
            try:
                yield from self._line.put_record(self._name, final, record.revision)
            except Conflict:
                continue
            return

    def _look(self, ledger: Callable[[], Ledger] | None) -> Work:
        """Read the lease and do what the machine makes of it; return what was read."""
        try:
            record: Record = yield from self._line.ask(self._line.broker.get, self._name)
            lease: Lease | None = record.value
            if lease is not None and lease.holder != self._holder:
                self._ledger = lease.ledger
            seen = LeaseSeen(
                at_s=self._line.process.clock.now_s,
                revision=record.revision,
                epoch=0 if lease is None else lease.epoch,
                released=lease is not None and lease.released and lease.to in ("", self._line.process.name),
                ours=lease is not None and lease.holder == self._holder,
            )
            for action in self.machine.handle(seen):
                yield from self._do(action, self._ledger if ledger is None else msgspec.json.encode(ledger()))
        except (Unavailable, Full):
            return None
        return lease

    def _do(self, action: Action, ledger: bytes) -> Work:
        if isinstance(action, TakeLease | RenewLease):
            try:
                revision = yield from self._line.put_record(self._name, self._lease(ledger), action.revision)
            except Conflict:
                return
            self.machine.handle(LeaseWritten(at_s=self._line.process.clock.now_s, revision=revision))

    def _lease(self, ledger: bytes) -> Lease:
        return Lease(self.machine.epoch, self._holder, ledger)
