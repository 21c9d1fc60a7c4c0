"""Promises that must always hold, as functions that raise; tests and the simulator call them after every fact.

1. The versions of a fragment never fork and never go back (`ShardWatch`).
2. A contribution is merged at most once, and only if it arrived (`ShardWatch`).
3. A contribution that is acknowledged has a fate, and exactly one (`ShardWatch`, and durably so: `Durable`).
4. Every account adds up, and nothing is negative (`check_ledger`, `check_island`).
7. Queues stay within their bounds (`check_shard`).

`ShardWatch` sees what one owner commands, `Durable` what of it became visible over any number of owners.

The other promises of the architecture (a deposed owner's write is never visible; with K live learners some round
commits within a bound) need more than one machine to state: `tests/schedules` owns them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll.base.errors import AtollError
from atoll.base.parsing import parsed
from atoll.protocol.events import Acknowledge, Command, Commit, Dismiss, Fetch, Fold, PushKey, Unfold
from atoll.protocol.island import Island
from atoll.protocol.ledger import FragmentLedger, Ledger, life_of
from atoll.protocol.round import Phase
from atoll.protocol.shard import Shard


class InvariantBroken(AtollError):
    """A promise of the protocol does not hold: a bug, with the state that shows it."""


def require(holds: bool, promise: str, got: object) -> None:  # noqa: FBT001  (reads as a sentence at each call)
    """Raise `InvariantBroken` unless `holds`; unlike `assert` it survives `python -O`."""
    if not holds:
        raise InvariantBroken(promise, got=got)


class ShardWatch:
    """Watches the commands of one owner of a shard; `Durable` watches what becomes of them over all owners."""

    def __init__(self) -> None:
        self.committed: dict[int, int] = {}
        self.merged: set[PushKey] = set()
        self.fetched: set[PushKey] = set()
        self.folded: set[PushKey] = set()
        self.fates: dict[PushKey, str] = {}

    def see(self, actions: Iterable[Command]) -> None:
        """Check the commands that one fact led to."""
        for action in actions:
            if isinstance(action, Fetch):
                require(action.key not in self.fates, "what has a fate is not fetched again", action.key)
                self.fetched.add(action.key)
            elif isinstance(action, Fold):
                require(action.key in self.fetched, "only what was fetched is folded", action.key)
                require(action.weight > 0.0, "a folded contribution has a weight", action)
                self.folded.add(action.key)
            elif isinstance(action, Unfold):
                self.folded = {key for key in self.folded if key.fragment != action.fragment}
            elif isinstance(action, Commit):
                self._see_commit(action)
            elif isinstance(action, Acknowledge):
                self._see_acknowledge(action)

    def _see_commit(self, commit: Commit) -> None:
        last = self.committed.get(commit.fragment)
        require(last is None or commit.base_version == last + 1, "versions follow one another", (last, commit))
        self.committed[commit.fragment] = commit.base_version
        require(bool(commit.shares), "a commit has contributors", commit)
        missing = [share.key for share in commit.shares if share.key not in self.folded]
        require(not missing, "only what is folded is committed", missing)
        for share in commit.shares:
            require(share.key not in self.merged, "a contribution is merged once", share.key)
            require(share.key not in self.fates, "what has a fate is not merged", share.key)
            self.merged.add(share.key)

    def _see_acknowledge(self, acknowledge: Acknowledge) -> None:
        if acknowledge.fate == "known":
            return
        before = self.fates.get(acknowledge.key)
        require(before is None, "a contribution has one fate", (acknowledge.key, before, acknowledge.fate))
        merged = acknowledge.fate in ("merged", "merged_late")
        require(merged == (acknowledge.key in self.merged), "merged means committed", acknowledge)
        self.fates[acknowledge.key] = acknowledge.fate


class Durable:
    """Watches what is visible and acknowledged, whoever wrote it: the promises of a shard that may die at any moment."""

    def __init__(self, versions: Mapping[int, int]) -> None:
        self.versions = dict(versions)
        self.fragment_ledger: dict[int, FragmentLedger] = {fragment: FragmentLedger() for fragment in versions}
        self.merged: set[PushKey] = set()
        self.tokens = dict.fromkeys(versions, 0)
        self.fates: dict[PushKey, str] = {}

    def see_commit(self, commit: Commit) -> None:
        """Check a commit that has become visible with its ledger."""
        version = self.versions[commit.fragment]
        require(commit.base_version == version, "visible versions follow one another", (version, commit.base_version))
        self.versions[commit.fragment] = version + 1
        for share in commit.shares:
            require(share.key not in self.merged, "a contribution is merged once, whoever merges it", share.key)
            require(share.key not in self.fates, "what is acknowledged is not merged again", share.key)
            self.merged.add(share.key)
            self.tokens[commit.fragment] += share.tokens
        self.see_ledger(commit.fragment, commit.fragment_ledger)
        for share in commit.shares:
            require(
                self.fragment_ledger[commit.fragment].knows(share.key), "the ledger knows what it merged", share.key
            )

    def see_ledger(self, fragment: int, fragment_ledger: bytes) -> None:
        """Check a ledger that has become durable."""
        self.fragment_ledger[fragment] = parsed(fragment_ledger, FragmentLedger)
        ledger = self.fragment_ledger[fragment]
        open_lives, former = ledger.settled.values(), ledger.former.merged + ledger.former.merged_late
        sums = former + sum(account.merged + account.merged_late for account in open_lives)
        require(sums == self.tokens[fragment], "a ledger holds what is visible, no more", (sums, self.tokens[fragment]))

    def see_acknowledged(self, acknowledge: Acknowledge) -> None:
        """Check an acknowledgement that the queue has taken: nobody will ever see this contribution again."""
        known = self.fragment_ledger[acknowledge.key.fragment].knows(acknowledge.key)
        require(known, "what is acknowledged has a durable fate", acknowledge)
        if acknowledge.fate != "known":
            merged = acknowledge.fate in ("merged", "merged_late")
            require(merged == (acknowledge.key in self.merged), "merged means visible", acknowledge)
            self.fates[acknowledge.key] = acknowledge.fate

    def see_dismissed(self, dismiss: Dismiss) -> None:
        """Check a farewell that the queue has let go of: nobody will hear it again."""
        ledger, name = self.fragment_ledger[dismiss.fragment], life_of(dismiss.learner, dismiss.incarnation)
        known = ledger.former.covers(name) or (name in ledger.reports and ledger.reports[name].left)
        require(known, "a farewell that is dismissed is in the ledger", dismiss)


def check_shard(shard: Shard) -> None:
    """Check one shard's state: bounds hold, what is parked or loading is offered, rounds are on their versions."""
    for fragment, slot in shard.slots.items():
        require(slot.round.fragment == fragment, "a slot holds its own round", fragment)
        require(set(slot.parked) <= set(slot.offers), "what is parked is offered", slot.parked)
        require(slot.round.loading <= set(slot.offers), "what is loading is offered", slot.round.loading)
        early = all(slot.round.ahead(slot.offers[key]) for key in slot.parked)
        require(slot.round.phase is Phase.COMMITTING or early, "only a commit parks, or a coming version", fragment)
        ages = [share.age for share in slot.round.shares]
        require(all(0 <= age <= shard.settings.age_max for age in ages), "ages are within bounds", ages)
    check_ledger(shard.ledger)
    kept = Ledger()
    for fragment, slot in shard.slots.items():
        former = slot.fragment_ledger.former
        require(
            not any(map(former.covers, slot.fragment_ledger.settled)), "a life is folded or has an account", fragment
        )
        FragmentLedger(settled=slot.fragment_ledger.settled, former=former).enter_into(kept)
    require(kept.former == shard.ledger.former, "former lives are the sum of the fragments'", shard.ledger.former)
    require(
        not any(map(kept.former.covers, shard.ledger.accounts)), "a folded life has no account", shard.ledger.former
    )
    fates = {key: (a.merged, a.merged_late, a.refused) for key, a in shard.ledger.accounts.items() if a.settled}
    summed = {key: (a.merged, a.merged_late, a.refused) for key, a in kept.accounts.items() if a.settled}
    require(fates == summed, "the shard's ledger is the sum of its fragments'", (fates, summed))


def check_ledger(ledger: Ledger) -> None:
    """Check that no sum is negative."""
    for key, account in ledger.accounts.items():
        sums = (account.trained, account.pushed, account.superseded, account.merged, account.merged_late)
        require(min(sums) >= 0, "sums are not negative", (key, account))


def check_island(island: Island) -> None:
    """Check one learner's ledger: every token-fragment is pushed, superseded, refused, in flight or open, once."""
    require(island.open >= 0, "no token-fragment has two fates", island.open)
    in_intervals = sum(
        island.tokens - interval.from_tokens - (interval.sent.tokens if interval.sent else 0)
        for interval in island.intervals.values()
    )
    if not island.left:
        require(
            island.open == in_intervals, "open tokens are those of the local intervals", (island.open, in_intervals)
        )
    else:
        require(island.open == 0, "a learner that left has closed its ledger", island.open)
    for fragment, interval in island.intervals.items():
        require(interval.known >= interval.anchor, "a learner knows of what it adopted", fragment)
        require(
            interval.ready is None or interval.ready >= interval.anchor,
            "what waits is not older than the anchor",
            fragment,
        )
