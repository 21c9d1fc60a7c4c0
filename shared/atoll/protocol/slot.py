"""What a shard keeps for one fragment between its rounds: ledger, offers, what waits for the next round, what is unsettled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.base.errors import ProtocolMisuse
from atoll.protocol.events import Acknowledge, Dismiss, Fetch, Keep, PushKey
from atoll.protocol.fragment_ledger import FragmentLedger
from atoll.protocol.ledger import Ledger
from atoll.protocol.pacing import comes_earlier
from atoll.protocol.quarantine import Measure, judged, norm_max
from atoll.protocol.round import FragmentRound, Offer, Phase


class Unfit(NamedTuple):
    """A contribution that is refused for its length, why, and which length (L2) was allowed."""

    offer: Offer
    reason: str
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

    `due_s` is its next beat, `called_s` the last; `parked` offers wait for the next round. A refusal or a farewell is
    `unkept` until the ledger is written, `keeping` while a `Keep` is under way, `committing` while a commit carries it: at
    most one `Keep` per fragment is under way, however many refusals there are.
    """

    round: FragmentRound
    fragment_ledger: FragmentLedger
    offers: dict[PushKey, Offer] = field(default_factory=dict)
    parked: list[PushKey] = field(default_factory=list)
    called_s: float | None = None
    due_s: float | None = None
    unkept: Settling = field(default_factory=Settling)
    keeping: Settling | None = None
    committing: Settling = field(default_factory=Settling)

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
        open_round = self.round.phase in (Phase.RESTING, Phase.COLLECTING)
        if not open_round or not comes_earlier(self.due_s, due_s, interval_s):
            return False
        self.due_s = due_s
        return True

    def renew(self, version: int, at_s: float) -> list[Offer]:
        """Begin the round on `version`; return what was parked for it."""
        self.round = FragmentRound(self.round.fragment, version, self.round.settings, began_s=at_s)
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
        frozen = self.fragment_ledger.frozen(ledger)
        return [Keep(fragment=self.round.fragment, fragment_ledger=frozen, cause_id=cause_id)]

    def kept(self) -> list[Acknowledge | Dismiss]:
        """Return what may be settled now that the ledger is kept."""
        if self.keeping is None:
            raise ProtocolMisuse("a ledger was kept that nobody asked for", got=self.round.fragment)
        settled, self.keeping = self.keeping.commands(), None
        return settled

    def unfit(
        self,
        ready: Sequence[tuple[PushKey, float]],
        base_norm: float,
        cause_id: str,
        has_ended: Callable[[Measure], bool],
    ) -> tuple[list[Unfit], list[Fetch]]:
        """Weigh contributions that have been read, with their norms, which can only be folded together.

        `has_ended` says whether the life that a measure is of has ended. Return those that are refused; and commands to read
        the others once more, without these.
        """
        ledger, settings, told = self.fragment_ledger, self.round.settings, list[tuple[Offer, Measure]]()
        known, ratio = [each for each in ledger.measures if not has_ended(each)], settings.outlier_ratio
        for key, norm in ready:
            if key not in self.offers:
                raise ProtocolMisuse("a contribution became ready that nobody asked for", got=key)
            told.append(
                (self.offers[key], Measure(norm, self.offers[key].steps, key.learner, incarnation=key.incarnation))
            )
        refused = [(offer, measure, judged(known, measure, ratio, base_norm)) for offer, measure in told]
        bad = [
            Unfit(offer, reason, measure.norm, norm_max(known, measure.steps, ratio, base_norm))
            for offer, measure, reason in refused
            if reason
        ]
        again = [Fetch(key=offer.key, cause_id=cause_id) for offer, _, reason in refused if bad and not reason]
        for offer, measure, reason in refused:
            if reason or not bad:
                self.round.loading.discard(offer.key)
                ledger.remember(measure, settings, refused=bool(reason))
        return bad, again

    def commits(self) -> None:
        """Note that a commit carries the ledger with all that was refused until now."""
        self.committing, self.unkept = self.unkept, Settling()

    def committed(self) -> list[Acknowledge | Dismiss]:
        """Return what may be settled now that the commit is durable."""
        settled, self.committing = self.committing.commands(), Settling()
        return settled

    def settles(self, key: PushKey) -> bool:
        """Return whether a contribution is refused, and the ledger that says so is not durable yet."""
        stages = (self.unkept, self.keeping or Settling(), self.committing)
        return any(key in stage.refusals for stage in stages)
