"""Ownership of a shard: one candidate's side of a lease that is renewed, expires and changes hands.

    WAITING --there never was a lease, it is released or has not moved for lease_s--> take (epoch + 1) --written--> OWNING
    OWNING  --every lease_s / 3--> renew                 --another owner's lease is seen--> DEPOSED

The lease is a record that only compare-and-set changes. Its owner renews it. A candidate watches its *revision* and
adds up, by its own clock, how long it has seen the revision stand still. Clocks of two machines are never compared.

Only time in which the owner could renew may count. While the broker is away nobody can, so a look that fails, or has no
answer within `patience_s`, begins the count anew: after an absence the owner has a whole lease to come back. The time
between two looks counts up to `STILL_SHARE` of a lease: no single look of a candidate that slept is enough.

Known limitation: while looks fail more often than once in `lease_s`, no candidate takes a dead owner's shard.

A frozen process or a slow link can break a lease: two processes may believe for a moment that they own a shard. That does
no harm, because *fences* guard what is visible, not time. A new owner writes every head again with its own epoch before it
reads anything; from then on every compare-and-set of the former owner is refused. The lease decides which process should
try, the fence decides which one can.
"""

from __future__ import annotations

import enum

from atoll.base.errors import ProtocolMisuse
from atoll.protocol.events import Command, Fact, RenewLease, StandDown, TakeLease

RENEWALS_PER_LEASE = 3.0
STILL_SHARE = 0.25
"""Of `lease_s`: what the time between two looks adds at most."""
PATIENCE_SHARE = 0.5
"""Of `lease_s`: how long a look waits for its answer. A lost request of the owner's is so sent again well within a lease."""


class LeaseStanding(enum.Enum):
    """The state of this candidate."""

    WAITING = "waiting"
    TAKING = "taking"
    OWNING = "owning"
    DEPOSED = "deposed"


class LeaseSeen(Fact, frozen=True, kw_only=True):
    """The lease record as its leader has it; `revision` 0: there is none. `ours`: this candidate wrote it."""

    revision: int
    epoch: int = 0
    released: bool = False
    ours: bool = False


class LeaseUnseen(Fact, frozen=True, kw_only=True):
    """A look at the lease, or a write of it, failed for want of the broker: its owner could perhaps not renew it either."""


class LeaseWritten(Fact, frozen=True, kw_only=True):
    """Our taking or renewal became the record's new `revision`."""

    revision: int


class Tenure:
    """The machine of one candidate for one shard; `lease_s` is the run's."""

    def __init__(self, lease_s: float) -> None:
        """Wait; no lease record was seen yet."""
        self.lease_s = lease_s
        self.standing = LeaseStanding.WAITING
        self.epoch = 0
        self.revision = -1
        self.known = False
        """Whether there ever was a lease."""
        self.still_s = 0.0
        """How long we have seen the lease stand still."""
        self.looked_s: float | None = None
        """When we saw it last; None after a look that failed."""
        self.renewed_s = 0.0

    def handle(self, fact: Fact) -> list[Command]:
        """Take one fact in and return what to do about it."""
        if self.standing is LeaseStanding.DEPOSED:
            return []
        if isinstance(fact, LeaseSeen):
            return self._seen(fact)
        if isinstance(fact, LeaseWritten):
            return self._written(fact)
        if isinstance(fact, LeaseUnseen):
            self.still_s, self.looked_s = 0.0, None
            return []
        raise ProtocolMisuse("a candidate does not know this fact", got=type(fact).__name__)

    @property
    def poll_s(self) -> float:
        """Return how often to look at the lease, seconds."""
        return self.lease_s / (2.0 * RENEWALS_PER_LEASE)

    @property
    def patience_s(self) -> float:
        """Return after how many seconds without an answer a look has failed."""
        return PATIENCE_SHARE * self.lease_s

    def _seen(self, fact: LeaseSeen) -> list[Command]:
        if self.standing is LeaseStanding.OWNING:
            if not fact.ours:
                self.standing = LeaseStanding.DEPOSED
                return [StandDown(reason=f"epoch {fact.epoch} holds the lease, we held {self.epoch}")]
            self.revision = fact.revision
            due = fact.at_s - self.renewed_s >= self.lease_s / RENEWALS_PER_LEASE
            return [RenewLease(revision=self.revision)] if due else []
        if self.standing is LeaseStanding.TAKING and fact.ours:
            # The answer to our taking was lost, the taking was not.
            return self._written(LeaseWritten(at_s=fact.at_s, revision=fact.revision))
        passed_s = 0.0 if self.looked_s is None else min(fact.at_s - self.looked_s, STILL_SHARE * self.lease_s)
        self.still_s = self.still_s + passed_s if fact.revision == self.revision else 0.0
        self.revision, self.looked_s = fact.revision, fact.at_s
        self.known = self.known or fact.revision > 0
        free = fact.released or not self.known  # a lease that was there and is lost may have an owner
        if not free and self.still_s < self.lease_s:
            self.standing = LeaseStanding.WAITING
            return []
        self.standing, self.epoch = LeaseStanding.TAKING, fact.epoch + 1
        return [TakeLease(revision=fact.revision, epoch=self.epoch)]

    def _written(self, fact: LeaseWritten) -> list[Command]:
        if self.standing is LeaseStanding.WAITING:
            raise ProtocolMisuse("a lease was written that nobody asked for", got=fact.revision)
        self.standing = LeaseStanding.OWNING
        self.revision, self.renewed_s = fact.revision, fact.at_s
        return []
