"""What a shard keeps for one fragment between its rounds: ledger, offers, what waits for the next round, what is unsettled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from atoll.base.errors import ProtocolMisuse
from atoll.protocol.events import Acknowledge, Dismiss, Fetch, Keep, PushKey
from atoll.protocol.fragment_ledger import FragmentLedger
from atoll.protocol.ledger import Ledger
from atoll.protocol.pacing import comes_earlier
from atoll.protocol.quarantine import OTHERS_MIN, Measure, norm_limit
from atoll.protocol.round import FragmentRound, Offer, Phase

LAST_VERSIONS: Final = 16
"""A learner hears of the end within seconds. After so many further versions, whoever trains on moves the model alone."""


class Outlier(NamedTuple):
    """A contribution that is refused for its length (L2), and which one was allowed."""

    offer: Offer
    norm: float
    norm_max: float


@dataclass(slots=True)
class Settling:
    """What may be settled once a ledger that knows of it is durable: refusals by key, and farewells."""

    refusals: dict[PushKey, Acknowledge] = field(default_factory=dict)
    farewells: list[Dismiss] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.refusals or self.farewells)

    def commands(self) -> list[Acknowledge | Dismiss]:
        """Return the commands that settle it."""
        return [*self.refusals.values(), *self.farewells]


@dataclass(slots=True)
class FragmentSlot:
    """What a shard keeps for one fragment: its present round, its ledger, what waits, and when it is called.

    `due_s` is its next beat, `called_s` the last, `again_s` when a round below its quorum is called again; `parked` offers
    wait for the next round. A refusal or a farewell is `unkept` until the ledger is written, `keeping` while a `Keep` is under
    way, `committing` while a commit carries it: at most one `Keep` per fragment is under way, however many refusals there are.
    Its ledger was `written` so often, the last time perhaps not durably yet, and so often `durable`. Once the run is at its
    target, what was trained on a version after `last_base` comes too late.
    """

    round: FragmentRound
    fragment_ledger: FragmentLedger
    offers: dict[PushKey, Offer] = field(default_factory=dict)
    parked: list[PushKey] = field(default_factory=list)
    called_s: float | None = None
    due_s: float | None = None
    again_s: float | None = None
    unkept: Settling = field(default_factory=Settling)
    keeping: Settling | None = None
    committing: Settling = field(default_factory=Settling)
    written: int = 0
    durable: int = 0
    last_base: int | None = None

    @property
    def unsettled(self) -> bool:
        """Return whether a refusal or a farewell is not durable yet."""
        return bool(self.unkept or self.keeping is not None or self.committing)

    def moves_up(self, at_s: float, interval_s: float, fragments: int) -> bool:
        """Give it its next beat, or an earlier one when steps have become shorter; return whether that has changed.

        The first beats of all fragments are staggered over one interval. Where the first step was slow, because it compiled,
        that interval is too long: then the staggering begins again with the shorter one.
        """
        first_s = at_s + interval_s * (self.round.fragment + 1) / fragments
        due_s = first_s if self.called_s is None else max(at_s, self.called_s + interval_s)
        if self.round.phase is not Phase.RESTING or not comes_earlier(self.due_s, due_s, interval_s):
            return False
        self.due_s = due_s
        return True

    def follows_final(self, offer: Offer) -> bool:
        """Return whether its life has called another push its last: a learner of ours calls one so, and sends none after it."""
        life = offer.key.learner, offer.key.incarnation
        held = [other.key.push for other in self.offers.values() if other.final and other.key[:2] == life]
        final = self.fragment_ledger.last_push(offer.key) or min(held, default=0)
        return 0 < final != offer.key.push and (offer.final or offer.key.push > final)

    def reach_target(self) -> None:
        """Note that the run is at its target, the first time."""
        if self.last_base is None:
            self.last_base = self.round.version + LAST_VERSIONS

    def is_after_end(self, offer: Offer) -> bool:
        """Return whether it was trained on a version that was made when every learner had long heard of the end."""
        return self.last_base is not None and offer.base_version > self.last_base

    def overspends(self, offer: Offer, trained: int) -> bool:
        """Return whether its life pushes more tokens of this fragment than it has `trained`: each may be pushed once."""
        life, ledger = offer.key[:2], self.fragment_ledger
        held = [other for other in self.offers.values() if other.key[:2] == life and not ledger.knows(other.key)]
        return ledger.spent(*life) + sum(other.tokens for other in held) + offer.tokens > trained

    def refusal(self, offer: Offer, trained: int) -> str:
        """Return why an offer of a life that has trained so many tokens is refused unread, or the empty string."""
        if self.overspends(offer, trained):
            return "implausible"
        if reason := self.round.refusal(offer):
            return reason
        if self.follows_final(offer):
            return "after_final"
        return "after_end" if self.is_after_end(offer) else ""

    def renew(self, following: FragmentRound) -> list[Offer]:
        """Begin the round that follows; return what was parked for it."""
        self.round = following
        parked, self.parked = self.parked, []
        self.round.loading.update(key for key in self.offers if key not in parked)
        return [self.offers[key] for key in parked]

    def busy(self, overdue: set[str]) -> bool:
        """Return whether the end must wait for what is in hand here: for nothing of a learner that is `overdue`."""
        open_round = bool(self.round.shares) or self.round.phase is Phase.COMMITTING
        return open_round or self.unsettled or any(key.learner not in overdue for key in self.offers)

    def keep(self, ledger: Ledger, cause_id: str) -> list[Keep]:
        """Return the command to keep the ledger as it is now, unless nothing waits for it or another writing is under way.

        The ledger of the moment holds what a commit under way has decided; so it must not be written before that commit.
        `ledger` is the shard's, for the learners' reports.
        """
        if not self.unkept or self.keeping is not None or self.round.phase is Phase.COMMITTING:
            return []
        self.keeping, self.unkept = self.unkept, Settling()
        frozen = self.frozen(ledger)
        return [Keep(fragment=self.round.fragment, fragment_ledger=frozen, cause_id=cause_id)]

    def frozen(self, ledger: Ledger) -> bytes:
        """Return the fragment's ledger as it is to be written now; `ledger` is the shard's."""
        self.written += 1
        return self.fragment_ledger.frozen(ledger)

    def holds(self) -> set[str]:
        """Return the lives, as `learner/incarnation`, of which a contribution or a farewell is in hand and not settled."""
        stages = (self.unkept, self.keeping or Settling(), self.committing)
        keys = [*self.offers, *(key for stage in stages for key in stage.refusals)]
        gone = {f"{one.learner}/{one.incarnation}" for stage in stages for one in stage.farewells}
        return {f"{key.learner}/{key.incarnation}" for key in keys} | gone

    def kept(self) -> list[Acknowledge | Dismiss]:
        """Return what may be settled now that the ledger is kept."""
        if self.keeping is None:
            raise ProtocolMisuse("a ledger was kept that nobody asked for", got=self.round.fragment)
        settled, self.keeping = self.keeping.commands(), None
        self.durable += 1
        return settled

    def judge(
        self,
        ready: Sequence[tuple[PushKey, float]],
        base_norm: float,
        cause_id: str,
        has_ended: Callable[[str, Measure], bool],
    ) -> tuple[list[Outlier], list[Fetch]]:
        """Judge the lengths of contributions that have been read, with their norms, which can only be folded together.

        `has_ended` says whether the life that a learner's measure is of has ended. Return those that are refused; and commands
        to read the others once more, because a sum holds one that is to be clipped or refused: what is clipped comes apart.
        """
        ledger, settings, version = self.fragment_ledger, self.round.settings, self.round.version
        outliers, clipped = list[Outlier](), set[PushKey]()
        known = {other: each for other, each in ledger.measures(version).items() if not has_ended(other, each)}
        for key, norm in ready:
            if key not in self.offers:
                raise ProtocolMisuse("a contribution became ready that nobody asked for", got=key)
            offer, name = self.offers[key], key.learner
            limit = norm_limit(known, name, offer.steps, settings.outlier_ratio, base_norm)
            scale = limit / norm if norm > limit else 1.0
            if scale < 1.0 and self._isolates(key, known):
                outliers.append(Outlier(offer, norm, limit))
            elif scale < 1.0 and not settings.by_value(self.round.fragment):  # of values, it would be another value
                clipped.add(key)
            else:
                scale = 1.0
            self.offers[key] = msgspec.structs.replace(offer, norm=norm, scale=scale)
        apart = len(ready) > 1 and bool(outliers or clipped)
        refused = {outlier.offer.key for outlier in outliers}
        for key, norm in ready:
            if key in refused or not apart:
                offer = self.offers[key]
                self.round.loading.discard(key)
                ledger.remember(key.learner, Measure(offer.scale * norm, offer.steps, key.incarnation, version))
        again = [key for key, _ in ready if apart and key not in refused]
        return outliers, [Fetch(key=key, apart=key in clipped, cause_id=cause_id) for key in again]

    def _isolates(self, key: PushKey, known: Mapping[str, Measure]) -> bool:
        """Return whether a contribution that is too long is refused: the run isolates, and enough others judge it."""
        judged = len(known.keys() - {key.learner}) >= OTHERS_MIN
        isolates = self.round.settings.protect == "isolate"
        return isolates and judged and self.fragment_ledger.has_merged(key.learner, key.incarnation)

    def commits(self) -> None:
        """Note that a commit carries the ledger with all that was refused until now."""
        self.committing, self.unkept = self.unkept, Settling()

    def committed(self) -> list[Acknowledge | Dismiss]:
        """Return what may be settled now that the commit is durable."""
        settled, self.committing = self.committing.commands(), Settling()
        self.durable += 1
        return settled

    def settles(self, key: PushKey) -> bool:
        """Return whether a contribution is refused, and the ledger that says so is not durable yet."""
        stages = (self.unkept, self.keeping or Settling(), self.committing)
        return any(key in stage.refusals for stage in stages)
