"""What may never happen, whoever does it: the broker shows every durable change here before it is made.

Most promises are `atoll.protocol.invariants`'; here are those that need the broker to be stated: what a head names is
there, a later epoch is never followed by an earlier one, a head tells the truth about what was folded into its frame,
every durable push finds exactly one fate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from atoll.protocol.events import Acknowledge, Commit, Dismiss
from atoll.protocol.invariants import Durable, require
from atoll.protocol.island import Island
from atoll.protocol.ledger import Ledger, Settlement, settle
from atoll.sim.dst.broker import Record
from atoll.sim.dst.lease import Lease
from atoll.sim.dst.store import Frame, Head
from atoll.sim.dst.traffic import Contribution, Farewell


class Promises:
    """Watches one run."""

    def __init__(self, versions: dict[int, int]) -> None:
        """Start from the heads of a founded run."""
        self.durable = Durable(versions)
        self.named: dict[int, tuple[str, ...]] = {}
        self.pushed: Counter[str] = Counter()
        self.queued: Counter[str] = Counter()

    def see_record(self, name: str, before: Record, after: Record, blobs: Mapping[str, Any]) -> None:
        """Check a record that is about to become visible."""
        if isinstance(after.value, Head):
            self._see_head(before.value, after.value, blobs)
        elif isinstance(after.value, Lease):
            was = 0 if before.value is None else before.value.epoch
            require(after.value.epoch in (was, was + 1), "tenures are numbered without gaps", (name, was, after.value))

    def _see_head(self, before: Head | None, head: Head, blobs: Mapping[str, Any]) -> None:
        for stem in head.names:
            require(stem in blobs, "what a head names is durable before the head", (stem, head))
        self.named[head.fragment] = head.names
        if before is None:
            return
        require(head.epoch >= before.epoch, "nothing of a deposed owner becomes visible", (before, head))
        fragment_ledger: bytes = blobs[head.fragment_ledger] if head.fragment_ledger else b""
        if head.version == before.version:
            require(head.frame == before.frame, "a version has one frame", (before, head))
            if head.fragment_ledger != before.fragment_ledger:
                require(head.epoch == before.epoch, "books are written by the owner that has fenced", (before, head))
                self.durable.see_books(head.fragment, fragment_ledger)
            return
        require(head.epoch == before.epoch, "a version is written by the owner that has fenced", (before, head))
        frame: Frame = blobs[head.frame]
        keys = frozenset(share.key for share in head.included)
        require(frame.folded == keys, "a frame holds what its head lists", (sorted(frame.folded), sorted(keys)))
        require(blobs[head.state] == frame, "a frame and its outer state belong together", head)
        require(frame.parent == before.frame, "a frame is made from the one before", (frame.parent, before.frame))
        commit = Commit(
            fragment=head.fragment,
            base_version=head.version - 1,
            shares=head.included,
            called_s=0.0,
            quorum_s=0.0,
            grace_s=0.0,
            end="",
            live=0,
            fragment_ledger=fragment_ledger,
        )
        self.durable.see_commit(commit)

    def see_purged(self, stem: str) -> None:
        """Check that nobody can be sent to what was deleted."""
        for fragment, names in self.named.items():
            require(stem not in names, "what a head names is never deleted", (fragment, stem))

    def see_queued(self, body: object) -> None:
        """Count what a learner has made durable."""
        if isinstance(body, Contribution):
            self.pushed[f"{body.key.learner}/{body.key.incarnation}"] += body.tokens

    def see_settled(self, body: object, fate: object) -> None:
        """Check what leaves a queue for good."""
        if isinstance(body, Contribution):
            require(isinstance(fate, Acknowledge), "a contribution leaves the queue with a fate", (body, fate))
            if isinstance(fate, Acknowledge):
                require(fate.key == body.key, "a fate is of the contribution it settles", (body, fate))
                self.durable.see_acknowledged(fate)
        elif isinstance(body, Farewell) and isinstance(fate, Dismiss):
            self.durable.see_dismissed(fate)

    def settlement(self, ledgers: list[Ledger], fragments: int) -> Settlement:
        """Return the settlement of a run that is over; every durable push must have found its one fate."""
        whole = Ledger()
        for ledger in ledgers:
            whole.absorb(ledger)
        for key, account in whole.accounts.items():
            require(account.settled == self.pushed[key], "every durable push has one fate", (key, account))
        for key, tokens in self.pushed.items():
            require(key in whole.accounts, "nobody who pushed is forgotten", (key, tokens))
        settled = settle(whole, fragments)
        require(settled.exact, "fates add up to what was trained", settled)
        return settled

    def check_lives(self, lives: Iterable[tuple[str, Island | None, bool]], ledgers: list[Ledger]) -> None:
        """Compare the books with what the learners know of themselves: exact for who left, no more than that for others."""
        whole = Ledger()
        for ledger in ledgers:
            whole.learn(ledger)
        for key, island, left in lives:
            account = whole.accounts.get(key)
            if island is None or account is None:
                require(island is None or not left, "who left is in the books", key)
                continue
            if left:
                theirs = (island.tokens, island.pushed, island.superseded, island.refused_local)
                ours = (account.trained, account.pushed, account.superseded, account.refused_local)
                require(
                    account.left and ours == theirs, "books hold what a learner said when it left", (key, ours, theirs)
                )
            require(account.trained <= island.tokens, "nothing is counted that was not trained", (key, account))
