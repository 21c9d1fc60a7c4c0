"""How synchronizer processes share the shards of a run: which host hands which shard to which other host, and when.

Any number of processes (*hosts*) may be candidates for any of the shards. A lease decides which host owns a shard
(`atoll.protocol.tenure`). This machine only decides when an owner should give one up of its own accord:

* **Rebalancing.** A host that owns at least two shards more than another host that wants one hands one over. Only the host
  with the most shards does so, one at a time, and then waits until it can have heard the effect. So shards move one by
  one until no two hosts differ by more than one.
* **Leaving.** A host that leaves while the run goes on hands each shard to the least loaded host that wants it.

Hosts tell each other what they own a few times per lease; a host that is silent for two leases does not count. Where a
receiver does not take what it was given, nobody merges for a lease. So after each hand-over in vain the next one waits twice
as long: a host that only says that it wants shards costs the run less and less. All of this is advice. If a host's picture of
the others is out of date, a shard moves once too often or stays too long. No safety property of the protocol depends on it.
"""

from __future__ import annotations

from atoll.protocol.events import Command, Fact

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
    """What one host knows of all the others."""

    def __init__(self, host: str, lease_s: float) -> None:
        """Know no other host yet."""
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
            return list[Command](self.rebalance(fact))
        return [LookAtLeases()] if self.hear(fact) else []

    def hear(self, fact: HostHeard) -> bool:
        """Take note of another host; return whether it has newly given something up or is newly leaving."""
        if fact.host == self.host:
            return False
        before = self.others.pop(fact.host, None)
        self.others[fact.host] = fact
        while len(self.others) > HOSTS_MAX:
            del self.others[next(iter(self.others))]
        return before is None or bool(before.owns - fact.owns) or fact.leaving

    def rebalance(self, own: HostHeard) -> list[HandOver]:
        """Return what to give up now so that shards are shared evenly: nothing, or one shard."""
        if own.leaving or own.at_s < self.settled_s:
            return []
        if len(own.owns) < 2:
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
        """Return the hosts that may receive a shard, those with the fewest shards first."""
        fresh_s = SILENT_LEASES * self.lease_s
        there = [other for other in self.others.values() if at_s - other.at_s <= fresh_s and not other.leaving]
        return sorted(there, key=lambda other: (len(other.owns), other.host))
