"""Ownership of the shards of a run: one candidate's side of a lease, and how the processes share all shards.

    WAITING --there never was a lease, it is released or has not moved for lease_s--> take (epoch + 1) --written--> OWNING
    OWNING  --every lease_s / 3--> renew                 --another owner's lease is seen--> DEPOSED

Any number of processes (*hosts*) may be candidates for any of the shards. The lease of a shard decides who owns it (`Tenure`);
it is a record that only compare-and-set changes. `Balance` only decides when an owner should give one up of its own accord.

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
    """The machine of one candidate for one shard; `lease_s` is the run's.

    The owner renews the lease. A candidate watches its *revision* and adds up, by its own clock, how long it has seen the
    revision stand still. Clocks of two machines are never compared.

    Only time in which the owner could renew may count. While the broker is away nobody can, so a look that fails, or has no
    answer within `patience_s`, begins the count anew: after an absence the owner has a whole lease to come back. The time
    between two looks counts up to `STILL_SHARE` of a lease: no single look of a candidate that slept is enough.

    Known limitation: while looks fail more often than once in `lease_s`, no candidate takes a dead owner's shard.
    """

    def __init__(self, lease_s: float) -> None:
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


SILENT_LEASES = 2.0
BEATS_PER_LEASE = 3.0
HOSTS_MAX = 1024
VAIN_MAX = 10


class HostHeard(Fact, frozen=True, kw_only=True):
    """A host announced the shards that it `owns` and those it is a candidate for; a `leaving` host wants none."""

    host: str
    wants: frozenset[int]
    owns: frozenset[int]
    leaving: bool = False


class HandOver(Command, frozen=True, kw_only=True):
    """Give `shard` up, so that the host `to` can take it."""

    shard: int
    to: str


class LookAtLeases(Command, frozen=True, kw_only=True):
    """Somebody has given a shard up, or is new: look at the leases now."""


class Balance:
    """The knowledge that one host has of all the others, and its decisions to give a shard up.

    * **Rebalancing.** A host that owns at least two shards more than another host that wants one hands one over. Only the host
      with the most shards does so, one at a time, and then waits until it can have heard the effect.
    * **Leaving.** A host that leaves while the run goes on hands each shard to the least loaded host that wants it.

    Hosts tell each other what they own a few times per lease; a host that is silent for two leases does not count. Where a
    receiver does not take what it was given, nobody merges for a lease, so after each hand-over in vain the next one waits
    twice as long. All of this is advice: no safety property of the protocol depends on it.
    """

    def __init__(self, host: str, lease_s: float) -> None:
        self.host = host
        self.lease_s = lease_s
        self.others: dict[str, HostHeard] = {}
        self.settled_s = float("-inf")
        self.given: HandOver | None = None
        """The last hand-over, until it is known whether it was in vain."""
        self.vain = 0

    def handle(self, fact: HostHeard) -> list[Command]:
        """Take in what a host says: another's word may be a reason to look at leases, our own one to give a shard up."""
        if fact.host == self.host:
            return self._rebalance(fact)
        before = self.others.pop(fact.host, None)
        self.others[fact.host] = fact
        while len(self.others) > HOSTS_MAX:
            del self.others[next(iter(self.others))]
        has_news = before is None or bool(before.owns - fact.owns) or fact.leaving
        return [LookAtLeases()] if has_news else []

    def _rebalance(self, own: HostHeard) -> list[Command]:
        if own.leaving or own.at_s < self.settled_s or len(own.owns) < 2:
            return []
        there = self._by_load(own.at_s)
        richer = [other for other in there if (-len(other.owns), other.host) < (-len(own.owns), own.host)]
        for other in there:
            given = own.owns & other.wants
            if not given or len(own.owns) - len(other.owns) < 2:
                continue
            # It is the turn of a host with more shards than we, or as many and an earlier name, if it can give to this one.
            if any(rich.owns & other.wants for rich in richer):
                continue
            if self._was_in_vain(own.at_s):
                return []
            self.settled_s = own.at_s + SILENT_LEASES * self.lease_s
            self.given = HandOver(shard=max(given), to=other.host)
            return [self.given]
        return []

    def _was_in_vain(self, at_s: float) -> bool:
        """Return whether the last hand-over was not taken, and we must wait for longer than usual before the next one."""
        given, self.given = self.given, None
        if given is None:
            return False
        heir = self.others.get(given.to)
        if heir is not None and given.shard in heir.owns:
            self.vain = 0
            return False
        self.vain = min(self.vain + 1, VAIN_MAX)
        self.settled_s = at_s + 2.0**self.vain * SILENT_LEASES * self.lease_s
        return True

    def successor(self, shard: int, at_s: float) -> str:
        """Return the least loaded host that would take `shard` from a leaving one; empty if there is none."""
        return next((other.host for other in self._by_load(at_s) if shard in other.wants), "")

    def _by_load(self, at_s: float) -> list[HostHeard]:
        fresh_s = SILENT_LEASES * self.lease_s
        there = [other for other in self.others.values() if at_s - other.at_s <= fresh_s and not other.leaving]
        return sorted(there, key=lambda other: (len(other.owns), other.host))
