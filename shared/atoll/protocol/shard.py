"""A synchronizer shard: the rounds of its fragments, the live learners, when the next round is due, and the ledger.

Facts come in through `handle`, commands go out; the shard never looks at a clock, and holds no tensor. Its duties:

* **Pacing.** Every fragment is called once per H median steps, staggered (`atoll.protocol.pacing`). On a fast network a
  round ends long before the next is due: without pacing, H would collapse.
* **Quorum and grace** (`FragmentRound`, `grace_window`); xi_quorum and xi_sync average over this shard's rounds.
* **Liveness.** A learner is live while its newest incarnation keeps reporting, as far as the shard can hear it
  (`ConnectedTime`). No round waits for one that does not. A shard that alone was cut off calls nobody silent, and calls nobody.
* **Once only.** A contribution that the fragment's ledger holds is acknowledged at once; one that was delivered already is not
  fetched twice.
* **Fates.** Each contribution ends as merged, merged_late or refused(reason). Merges enter the fragment's ledger with the
  commit. A refusal and a farewell are durable before they are acknowledged; one `Keep` per fragment takes all (`FragmentSlot`).
  Accounts of lives that are over and settled are folded into one (`atoll.protocol.ledger`).
* **Protection** (`atoll.protocol.quarantine`). A contribution that is too long is clipped. A run that isolates refuses it, and
  isolates an incarnation that offends repeatedly, without effect on others.
* **The end.** At the token target, or when told to drain, a shard finishes once no learner is present, nothing is queued and
  nothing is unsettled. When the last has left, its pushes are merged without a quorum; what no majority can judge is refused.
* **Cost.** A heartbeat that changes nothing costs a few lookups: all learners are looked at now and then (`look_is_due`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

import msgspec

from atoll.base.errors import ProtocolMisuse
from atoll.base.quantities import RUN_TOKENS_MAX, at_most
from atoll.protocol.claims import step_tokens_max, tokens_bound
from atoll.protocol.events import (
    Acknowledge,
    ArmTimer,
    Commit,
    CommitRefused,
    Committed,
    ContributionArrived,
    ContributionReady,
    ContributionSpoiled,
    Dismiss,
    DrainOrdered,
    Fact,
    Fetch,
    Finish,
    Isolate,
    Keep,
    Kept,
    LearnerBeat,
    LearnerLeft,
    PushKey,
    QueueDrained,
    Refuse,
    ShardCommand,
    StandDown,
    TimerFired,
    Unfold,
    id_of,
)
from atoll.protocol.ledger import (
    LIVES_MAX,
    EndedLives,
    FormerLives,
    FragmentLedger,
    Ledger,
    adds_up,
    close_together,
    fate_of,
    fold_life,
    life_of,
    split_life,
)
from atoll.protocol.pacing import (
    CONTRIBUTES_ROUNDS,
    RECALL_S_MIN,
    ConnectedTime,
    KnownLearner,
    MovingAverage,
    comes_earlier,
    due_of_call_s,
    grace_window,
    look_is_due,
    lower_median,
    newest_of,
    recall_s,
)
from atoll.protocol.quarantine import OFFENCES, OTHERS_MIN, Measure, norm_limit
from atoll.protocol.round import PLACES, UNBOUNDED, FragmentRound, Offer, Phase
from atoll.protocol.settings import ProtocolSettings

LAST_VERSIONS: Final = 16
"""A learner hears of the end within seconds. After so many further versions, whoever trains on moves the model alone."""


LengthVerdict = Literal["fold", "clip", "refuse"]
"""What becomes of a contribution for its length; one that is clipped is folded at less."""


@dataclass(slots=True)
class Settling:
    """Refusals by key, and farewells, that may be settled once a ledger that knows of them is durable."""

    refusals: dict[PushKey, Acknowledge] = field(default_factory=dict)
    farewells: list[Dismiss] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.refusals or self.farewells)

    def commands(self) -> list[Acknowledge | Dismiss]:
        """Return the commands that settle it."""
        return [*self.refusals.values(), *self.farewells]


@dataclass(slots=True)
class FragmentSlot:
    """One fragment of a shard: its present round, its ledger, what waits for the next round, and when it is called.

    `due_s` is its next beat, `called_s` the last, `again_s` when a round below its quorum is called again; `parked` offers
    wait for the next round. A refusal or a farewell is `unkept` until the ledger is written, `keeping` while a `Keep` is under
    way, `committing` while a commit carries it: at most one `Keep` per fragment is under way, however many refusals there are.
    Its ledger was `written` so often, the last time perhaps not durably yet, and so often `durable`; the writing `fold_due` is
    the first that knows which lives were folded last. Once the run is at its target, what was trained on a version after
    `last_base` comes too late.
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
    fold_due: int = 0
    last_base: int | None = None

    @property
    def _stages(self) -> tuple[Settling, ...]:
        return self.unkept, self.keeping or Settling(), self.committing

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

    def is_overspent(self, offer: Offer, trained: int) -> bool:
        """Return whether its life pushes more tokens of this fragment than it has `trained`: each may be pushed once."""
        life, ledger = offer.key[:2], self.fragment_ledger
        held = [other for other in self.offers.values() if other.key[:2] == life and not ledger.knows(other.key)]
        return ledger.spent(*life) + sum(other.tokens for other in held) + offer.tokens > trained

    def refusal(self, offer: Offer, trained: int) -> str:
        """Return why an offer of a life that has trained so many tokens is refused unread, or the empty string."""
        if self.is_overspent(offer, trained):
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

    def is_busy(self, overdue: set[str]) -> bool:
        """Return whether the end must wait for what is in hand here: for nothing of a learner that is `overdue`."""
        open_round = bool(self.round.shares) or self.round.phase is Phase.COMMITTING
        unsettled = bool(self.unkept or self.keeping is not None or self.committing)
        return open_round or unsettled or any(key.learner not in overdue for key in self.offers)

    def keep(self, ledger: Ledger, cause_id: str) -> list[Keep]:
        """Return the command to keep the ledger as it is now, unless nothing waits for it or another writing is under way.

        The ledger of the moment holds what a commit under way has decided; so it must not be written before that commit.
        `ledger` is the shard's, for the learners' reports.
        """
        if not self.unkept or self.keeping is not None or self.round.phase is Phase.COMMITTING:
            return []
        self.keeping, self.unkept = self.unkept, Settling()
        frozen = self.freeze(ledger)
        return [Keep(fragment=self.round.fragment, fragment_ledger=frozen, cause_id=cause_id)]

    def settle_closed(self, answer: Acknowledge | Dismiss, ledger: Ledger) -> list[ShardCommand]:
        """Answer what comes of a life that is folded, once a ledger that says so is durable: only then nobody needs it again.

        A process that was frozen, and has a successor, goes on until it looks at its member record.
        """
        if self.durable >= self.fold_due:
            return [answer]
        if isinstance(answer, Acknowledge):
            self.unkept.refusals[answer.key] = answer
        else:
            self.unkept.farewells.append(answer)
        return [*self.keep(ledger, answer.cause_id)]

    def freeze(self, ledger: Ledger) -> bytes:
        """Return the fragment's ledger as it is to be written now; `ledger` is the shard's."""
        self.written += 1
        return self.fragment_ledger.freeze(ledger)

    def lives_in_hand(self) -> set[str]:
        """Return the lives, as `learner/incarnation`, of which a contribution or a farewell is in hand and not settled."""
        keys = [*self.offers, *(key for stage in self._stages for key in stage.refusals)]
        farewells = {life_of(one.learner, one.incarnation) for stage in self._stages for one in stage.farewells}
        return {life_of(*key[:2]) for key in keys} | farewells

    def finish_keeping(self) -> list[Acknowledge | Dismiss]:
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
    ) -> tuple[list[tuple[Offer, float]], list[Fetch]]:
        """Judge the lengths of contributions that have been read, with their norms, which can only be folded together.

        `has_ended` says whether the life that a learner's measure is of has ended. Return those that are refused, with the
        length that was allowed; and commands to read the others once more, because a sum holds one that is to be clipped or
        refused: what is clipped comes apart.
        """
        version = self.round.version
        measures = self.fragment_ledger.measures(version).items()
        known = {learner: measure for learner, measure in measures if not has_ended(learner, measure)}
        judged = [self._judge_length(key, norm, base_norm, known) for key, norm in ready]
        apart = len(ready) > 1 and any(verdict != "fold" for _, verdict, _ in judged)
        outliers, again = list[tuple[Offer, float]](), list[Fetch]()
        for offer, verdict, limit in judged:
            self.offers[offer.key] = offer
            if verdict == "refuse":
                outliers.append((offer, limit))
            elif apart:
                again.append(Fetch(key=offer.key, apart=verdict == "clip", cause_id=cause_id))
                continue
            self.round.loading.discard(offer.key)
            measure = Measure(offer.scale * offer.norm, offer.steps, offer.key.incarnation, version)
            self.fragment_ledger.remember(offer.key.learner, measure)
        return outliers, again

    def _judge_length(
        self, key: PushKey, norm: float, base_norm: float, known: Mapping[str, Measure]
    ) -> tuple[Offer, LengthVerdict, float]:
        if key not in self.offers:
            raise ProtocolMisuse("a contribution became ready that nobody asked for", got=key)
        offer, settings = self.offers[key], self.round.settings
        limit = norm_limit(known, key.learner, offer.steps, settings.outlier_ratio, base_norm)
        scale = limit / norm if norm > limit else 1.0
        verdict: LengthVerdict = "fold"
        if scale < 1.0 and self._isolates(key, known):
            verdict = "refuse"
        elif scale < 1.0 and not settings.by_value(self.round.fragment):
            verdict = "clip"
        else:  # also of values: one that is clipped would be another value
            scale = 1.0
        return msgspec.structs.replace(offer, norm=norm, scale=scale), verdict, limit

    def _isolates(self, key: PushKey, known: Mapping[str, Measure]) -> bool:
        judged = len(known.keys() - {key.learner}) >= OTHERS_MIN
        isolates = self.round.settings.protect == "isolate"
        return isolates and judged and self.fragment_ledger.has_merged(key.learner, key.incarnation)

    def begin_commit(self) -> None:
        """Note that a commit carries the ledger with all that was refused until now."""
        self.committing, self.unkept = self.unkept, Settling()

    def finish_commit(self) -> list[Acknowledge | Dismiss]:
        """Return what may be settled now that the commit is durable."""
        settled, self.committing = self.committing.commands(), Settling()
        self.durable += 1
        return settled

    def is_settling(self, key: PushKey) -> bool:
        """Return whether a contribution is refused, and the ledger that says so is not durable yet."""
        return any(key in stage.refusals for stage in self._stages)


AHEAD_MAX = 2
"""Between two contributions of a learner, so many times the last one is believed to be on its way."""


class Shard:
    """The machine of shard `shard`; `versions` and fragment ledgers come from the heads found at start.

    `ledger` is from the former owner's lease: its reports are newer than those in the fragment ledgers.
    """

    def __init__(
        self,
        settings: ProtocolSettings,
        shard: int,
        versions: dict[int, int],
        *,
        fragment_ledgers: dict[int, FragmentLedger] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.settings = settings
        self.shard = shard
        self.slots: dict[int, FragmentSlot] = {}
        self.ledger = Ledger()
        found = {p: (fragment_ledgers or {}).get(p) or FragmentLedger() for p in settings.fragments_of(shard)}
        close_together(found, settings.fragments)
        for p, kept in found.items():
            kept.enter_into(self.ledger)
            self.slots[p] = FragmentSlot(FragmentRound(p, versions[p], settings.of(p)), kept)
        if ledger is not None:
            self.ledger.learn(ledger)
        self.learners: dict[str, KnownLearner] = {}
        self.quorum, self.sync = MovingAverage(settings.average_decay), MovingAverage(settings.average_decay)
        self.draining = self.finished = False
        self.connected = ConnectedTime(settings.silence_s)
        self.ended = EndedLives()
        self.commits = 0
        self.over_s: float | None = None
        self.looked_s: float | None = None
        self.committing_since: dict[int, float] = {}
        self.step_sizes: list[float] = []
        """Tokens per step of what was merged last of each learner, ascending."""
        self.totals: list[int] = []
        """Tokens that counted of what was merged last of each learner, ascending."""

    def handle(self, event: Fact) -> list[ShardCommand]:
        """Take one fact in and return what to do about it."""
        if self.finished:
            return []
        if self.connected.sign_s is None:
            for slot in self.slots.values():
                slot.round.began_s = event.at_s
        if not isinstance(event, TimerFired | DrainOrdered):
            self.connected.sign(event.at_s)
        rule = self._RULES.get(type(event))
        if rule is None:
            raise ProtocolMisuse("a shard does not know this fact", got=type(event).__name__)
        return rule(self, event)

    # --- what is known --------------------------------------------------------------------------------------------

    def live(self, *, isolated: bool = False) -> set[str]:
        """Return who trains and was heard lately, and is not overdue at the end; `isolated` adds those in quarantine."""
        return set(self._living(isolated=isolated))

    def present(self) -> set[str]:
        """Return the learners that are waited for: neither gone, silent, overdue nor in quarantine."""
        return set(self._living(training=False))

    def _living(self, *, training: bool = True, isolated: bool = False) -> Iterator[str]:
        now_s, silence_s = self.connected.now_s, self.settings.silence_s
        for name, view in self.learners.items():
            counts = (view.training if training else view.present) and view.is_heard(now_s, silence_s)
            lives = counts and not view.is_overdue(now_s, self.over_s)
            if lives and (isolated or not self.isolated(name, view.incarnation)):
                yield name

    def step_s(self) -> float | None:
        """Return xi_step: the lower median step time of the live learners (of the isolated ones if no other trains), or None.

        A learner's word counts while it contributes and is heard. While none does, the words count of those of whom anything
        was ever merged; then those of all that are live.
        """
        live = self.live() or self.live(isolated=True)
        timed = {name: view for name, view in self.learners.items() if name in live and view.step_s is not None}
        now = {name for name, view in timed.items() if self._contributes(view)}
        ever = now or {name for name, view in timed.items() if self.ledger.ever_merged(name, view.incarnation)}
        return lower_median(view.step_s for name, view in timed.items() if view.step_s and (not ever or name in ever))

    def expected_tokens(self) -> int:
        """Return where the run is by now, for schedules: what is merged, and what live learners have trained since.

        Of what a learner says that it trained, not more counts than `AHEAD_MAX` times its last contribution.
        """
        merged = sum(slot.fragment_ledger.tokens_counted for slot in self.slots.values()) // len(self.slots)
        ahead = 0
        for name in self._living():
            view = self.learners[name]
            account = self.ledger.accounts.get(life_of(name, view.incarnation))
            if account is not None:
                ahead += max(0, min(account.trained - account.settled // len(self.slots), AHEAD_MAX * view.credit))
        return max(self.ledger.run_tokens, at_most(RUN_TOKENS_MAX, merged + ahead))

    def _contributes(self, view: KnownLearner) -> bool:
        """Return whether a learner was part of a version lately, and is not merely waited for longer by its own word."""
        lately = view.commit is not None and self.commits - view.commit < CONTRIBUTES_ROUNDS * len(self.slots)
        return lately and self.connected.now_s - view.heard_s <= self.settings.silence_s

    def offences(self, learner: str, incarnation: int) -> int:
        """Return how often an incarnation sent this shard something that no healthy learner sends."""
        return sum(slot.fragment_ledger.offences(learner, incarnation) for slot in self.slots.values())

    def isolated(self, learner: str, incarnation: int) -> bool:
        """Return whether an incarnation is in quarantine: the shard reads nothing of it, and no round waits for it."""
        if self.settings.protect != "isolate":
            return False
        ever = self.ledger.ever_refused(learner, incarnation)  # as a rule not: then no fragment's ledger is looked at
        return ever and 0 < self.settings.offences_max <= self.offences(learner, incarnation)

    def _listened(self) -> bool:
        return self.connected.passed_s >= self.settings.silence_s

    # --- facts ----------------------------------------------------------------------------------------------------

    def _on_learner_beat(self, event: LearnerBeat) -> list[ShardCommand]:
        if not self._opens(event.learner, event.incarnation):
            return []
        view = newest_of(self.learners, event.learner, event.incarnation, self.connected.now_s)
        self.ledger.take_report(
            event.learner, event.incarnation, event.tokens, event.pushed, event.superseded, event.refused_local
        )
        if event.incarnation < view.incarnation:
            return []
        news = view.take(event, self.connected.now_s)
        if not news and not look_is_due(event.at_s, self.looked_s, len(self.learners)):
            return []
        cause_id = id_of("beat", event.learner, event.incarnation)
        return self._schedule(event.at_s) + self._advance_all(event.at_s, cause_id)

    def _on_learner_left(self, event: LearnerLeft) -> list[ShardCommand]:
        where, cause_id = next(iter(self.slots)), id_of("bye", event.learner, event.incarnation)
        dismiss = Dismiss(learner=event.learner, incarnation=event.incarnation, fragment=where, cause_id=cause_id)
        if not self._opens(event.learner, event.incarnation):
            return self.slots[where].settle_closed(dismiss, self.ledger)
        self.ledger.account(event.learner, event.incarnation).left = True
        view = newest_of(self.learners, event.learner, event.incarnation, self.connected.now_s)
        if view.incarnation == event.incarnation:
            view.training = view.present = False
        self.slots[where].unkept.farewells.append(dismiss)
        return self.slots[where].keep(self.ledger, cause_id) + self._advance_all(event.at_s, cause_id)

    def _on_contribution_arrived(self, event: ContributionArrived) -> list[ShardCommand]:
        slot = self.slots.get(event.key.fragment)
        if slot is None:
            return [Acknowledge(key=event.key, fate="refused", reason="wrong_shard", cause_id=event.cause_id)]
        if event.key in slot.offers or slot.is_settling(event.key):
            return []
        if not self._opens(event.key.learner, event.key.incarnation):
            known = Acknowledge(key=event.key, fate="known", cause_id=event.cause_id)
            return slot.settle_closed(known, self.ledger)
        account = self.ledger.account(event.key.learner, event.key.incarnation)
        if not event.absurd:
            account.trained = max(account.trained, event.trained_tokens)
        view = self.learners.get(event.key.learner)
        if view is not None and view.incarnation == event.key.incarnation:
            view.heard_s = self.connected.now_s
        if slot.fragment_ledger.knows(event.key):
            return [Acknowledge(key=event.key, fate="known", cause_id=event.cause_id)]
        offer = Offer(event.key, event.base_version, event.tokens, event.steps, event.final, event.cause_id)
        if self.isolated(event.key.learner, event.key.incarnation):
            reason = "quarantined"
        else:
            reason = "implausible" if event.absurd else slot.refusal(offer, account.trained)
        if reason:
            return self._refuse(slot, offer, reason, event.cause_id)
        slot.offers[event.key] = offer
        slot.round.loading.add(event.key)
        return [Fetch(key=event.key, cause_id=event.cause_id)]

    def _on_contribution_ready(self, event: ContributionReady) -> list[ShardCommand]:
        slot, ready = self.slots[event.key.fragment], ((event.key, event.norm), *event.others)
        outliers, again = slot.judge(ready, event.base_norm, event.cause_id, self._has_ended)
        actions: list[ShardCommand] = [*again]
        for offer, limit in outliers:
            actions += self._refuse(slot, offer, "outlier", event.cause_id, (offer.norm, limit))
        if not outliers and not again:
            offers = [slot.offers[key] for key, _ in ready]
            if slot.round.parks(offers[0]):
                slot.parked += [key for key, _ in ready]
                return []
            actions += self._fold(slot, offers, event.cause_id)
            for view in filter(None, (self.learners.get(key.learner) for key, _ in ready)):
                view.pushed_s = self.connected.now_s
        return actions + self._advance(slot, event.at_s, id_of("push", *event.key))

    def _on_contribution_spoiled(self, event: ContributionSpoiled) -> list[ShardCommand]:
        slot, cause_id = self.slots[event.key.fragment], id_of("push", *event.key)
        actions = self._refuse(slot, slot.offers[event.key], event.reason, cause_id)
        return actions + self._advance(slot, event.at_s, cause_id)

    def _on_timer_fired(self, event: TimerFired) -> list[ShardCommand]:
        kind, _, number = event.name.partition("/")
        slot = self.slots[int(number)]
        if kind == "due":
            if self.connected.is_cut_off(event.at_s):  # nobody would hear the call
                return [ArmTimer(name=event.name, due_s=event.at_s + RECALL_S_MIN)]
            if slot.round.phase is Phase.RESTING and slot.due_s is not None and event.at_s < slot.due_s:
                return [ArmTimer(name=event.name, due_s=slot.due_s)]  # it fired a tick early, and must not be the last
            return self._call(slot, event.at_s, event.cause_id or event.name)
        return self._advance(slot, event.at_s, event.cause_id or event.name)

    def _on_committed(self, event: Committed) -> list[ShardCommand]:
        slot = self.slots[event.fragment]
        old, following, actions = slot.round, slot.round.succeed(event.version, event.at_s), list[ShardCommand]()
        now_s = self.connected.at(event.at_s)
        self.sync.add(now_s - self.committing_since.pop(event.fragment, now_s))
        self.commits += 1
        for share in old.shares:
            slot.offers.pop(share.key, None)
            view = self.learners.get(share.key.learner)
            if view is not None and view.incarnation == share.key.incarnation:
                view.commit, view.credit, view.step_tokens = self.commits, share.credit, share.tokens / share.steps
            actions.append(Acknowledge(key=share.key, fate=fate_of(share), cause_id=event.cause_id))
        self.step_sizes = sorted(view.step_tokens for view in self.learners.values() if view.step_tokens)
        self.totals = sorted(view.credit for view in self.learners.values() if view.credit)
        actions += slot.finish_commit()
        self._fold_former()
        parked = slot.renew(following)
        self._look_for_target()
        if slot.due_s is not None:
            due_s = max(slot.due_s, event.at_s)
            actions.append(ArmTimer(name=f"due/{event.fragment}", due_s=due_s, cause_id=event.cause_id))
        actions += self._fold(slot, parked, event.cause_id)
        actions += slot.keep(self.ledger, event.cause_id)
        return actions + self._schedule(event.at_s, slot) + self._advance(slot, event.at_s, event.cause_id)

    def _on_kept(self, event: Kept) -> list[ShardCommand]:
        slot = self.slots[event.fragment]
        settled = slot.finish_keeping()
        self._fold_former()
        return [*settled, *slot.keep(self.ledger, event.cause_id)]

    def _on_commit_refused(self, event: CommitRefused) -> list[ShardCommand]:
        self.finished = True
        return [StandDown(reason=f"fragment {event.fragment}: {event.reason}", cause_id=event.cause_id)]

    def _on_drain_ordered(self, event: DrainOrdered) -> list[ShardCommand]:
        self.draining = True
        return self._advance_all(event.at_s, event.cause_id)

    def _on_queue_drained(self, event: QueueDrained) -> list[ShardCommand]:
        """Finish when the run is over: told so or at its token target, nobody present, nothing queued or in our hands.

        The learners that are present are not known before all had the time to be heard: an owner that has just taken over
        waits.
        """
        self.ledger.count(event.run_tokens)
        self._look_for_target()
        self._see_ended(event.turns)
        over = self._over()
        if over and self.over_s is None:
            self.over_s = self.connected.now_s
        overdue = {n for n, view in self.learners.items() if view.is_overdue(self.connected.now_s, self.over_s)}
        busy = any(slot.is_busy(overdue) for slot in self.slots.values())
        if not over or busy or not self._listened() or not event.proven or self.present():
            return self._schedule(event.at_s) + self._advance_all(event.at_s, "queue")
        self.finished = True
        return [Finish(reason="drained" if self.draining else "token target reached", cause_id=event.cause_id)]

    _RULES: ClassVar[dict[type[Fact], Callable[[Any, Any], list[ShardCommand]]]] = {
        LearnerBeat: _on_learner_beat,
        LearnerLeft: _on_learner_left,
        ContributionArrived: _on_contribution_arrived,
        ContributionReady: _on_contribution_ready,
        ContributionSpoiled: _on_contribution_spoiled,
        TimerFired: _on_timer_fired,
        Committed: _on_committed,
        Kept: _on_kept,
        CommitRefused: _on_commit_refused,
        DrainOrdered: _on_drain_ordered,
        QueueDrained: _on_queue_drained,
    }

    # --- rules ----------------------------------------------------------------------------------------------------

    def _opens(self, learner: str, incarnation: int) -> bool:
        """Return whether a life has an account or may have one. One that is folded may not: all that it sent has a fate.

        A learner that claims more lives than can be folded in good order costs nobody more than `LIVES_MAX` accounts.
        """
        name = life_of(learner, incarnation)
        if name in self.ledger.accounts:
            return True
        if self.ledger.former.covers(name):
            return False
        own = [number for other, number in map(split_life, self.ledger.accounts) if other == learner]
        if len(own) < LIVES_MAX:
            return True
        oldest = life_of(learner, min(own))
        if incarnation < min(own) or any(oldest in slot.lives_in_hand() for slot in self.slots.values()):
            return False
        self._close_lives([oldest])
        return True

    def _see_ended(self, turns: int) -> None:
        if turns <= self.ended.turns:
            return
        newest = {name: view.incarnation for name, view in self.learners.items()}
        lives = {name: split_life(name) for name in self.ledger.accounts}
        for learner, number in lives.values():
            newest[learner] = max(number, newest.get(learner, 0))
        accounts = self.ledger.accounts
        over = [name for name, (learner, number) in lives.items() if accounts[name].left or number < newest[learner]]
        self.ended.look(turns, over, {fragment: slot.written for fragment, slot in self.slots.items()})

    def _fold_former(self) -> None:
        """Fold the lives whose turn it is: nothing of them can come any more, and all ledgers hold what there was, durably."""
        if not self.ended.batch:
            return
        held = {name for slot in self.slots.values() for name in slot.lives_in_hand()}
        durable = {fragment: slot.durable for fragment, slot in self.slots.items()}
        self._close_lives(name for name in self.ended.take(durable, held) if name in self.ledger.accounts)

    def _close_lives(self, names: Iterable[str]) -> None:
        ledgers = {fragment: slot.fragment_ledger for fragment, slot in self.slots.items()}
        fragments = self.settings.fragments
        folded = list(names)
        for name in folded:
            account = self.ledger.accounts.pop(name)
            if not adds_up(account, fragments, all_here=len(ledgers) == fragments):
                next(iter(ledgers.values())).former.doubt(name)
            fold_life(ledgers, name, account, fragments)
            learner, incarnation = split_life(name)
            if learner in self.learners and self.learners[learner].incarnation <= incarnation:
                del self.learners[learner]
        if folded:
            for slot in self.slots.values():
                slot.fold_due = slot.written + 1
        self.ledger.former = FormerLives()
        for ledger in ledgers.values():
            self.ledger.former.add(ledger.former)

    def _has_ended(self, learner: str, measure: Measure) -> bool:
        """Return whether the life that a measure is of has ended: the learner has left, or a later life of it is known.

        In a run at its target all leave. Those that have left still judge the last ones, or a liar would judge itself.
        """
        newest, name = self.learners.get(learner), life_of(learner, measure.incarnation)
        account = self.ledger.accounts.get(name)
        left = self.ledger.former.covers(name) or (account is not None and account.left)
        return (left and not self._at_target()) or (newest is not None and newest.incarnation > measure.incarnation)

    def _at_target(self) -> bool:
        return self.ledger.reached(self.settings.tokens_target)

    def _look_for_target(self) -> None:
        if self._at_target():
            for slot in self.slots.values():
                slot.reach_target()

    def _over(self) -> bool:
        return self.draining or self._at_target()

    def _schedule(self, at_s: float, *only: FragmentSlot) -> list[ShardCommand]:
        """Give every fragment, or some, the time that its timer is due, or an earlier one when steps have become shorter.

        A resting round waits for its beat, a called one until it is called again, one in its grace window for its end.
        """
        step_s = self.step_s()
        if step_s is None:
            return []
        interval_s, actions = self.settings.interval_steps * step_s, list[ShardCommand]()
        for slot in only or self.slots.values():
            now = slot.round
            if slot.moves_up(at_s, interval_s, self.settings.fragments) and slot.due_s is not None:
                actions.append(ArmTimer(name=f"due/{now.fragment}", due_s=slot.due_s))
            elif now.phase is Phase.COLLECTING:
                again_s = recall_s(now.asked_s, step_s)
                if comes_earlier(slot.again_s, again_s, (slot.again_s or 0.0) - now.asked_s):
                    slot.again_s = again_s
                    actions.append(ArmTimer(name=f"due/{now.fragment}", due_s=again_s))
            elif now.phase is Phase.GRACE and now.grace and comes_earlier(now.grace.step_s, step_s, now.grace.step_s):
                grace = grace_window(self.settings, step_s, self.quorum.value, self.sync.value)
                if grace.granted_s < now.grace_s:
                    actions.append(ArmTimer(name=f"grace/{now.fragment}", due_s=now.shorten_grace(grace)))
        return actions

    def _call(self, slot: FragmentSlot, at_s: float, cause_id: str) -> list[ShardCommand]:
        now = slot.round
        if now.phase not in (Phase.RESTING, Phase.COLLECTING):
            return []
        step_s = self.step_s()
        if step_s is None:
            slot.called_s = slot.due_s = slot.again_s = None
            return self._advance(slot, at_s, cause_id)
        if now.phase is Phase.RESTING:
            now.absent_s = self.connected.absent_s
        now.call(at_s, self.live(), "first" if slot.called_s is None else "due", slot.due_s, step_s, cause_id)
        interval_s = self.settings.interval_steps * step_s
        slot.called_s = due_of_call_s(at_s, slot.due_s, interval_s)
        slot.due_s, slot.again_s = slot.called_s + interval_s, recall_s(at_s, step_s)
        call = now.call_command(self.expected_tokens(), cause_id)
        again = ArmTimer(name=f"due/{now.fragment}", due_s=slot.again_s, cause_id=cause_id)
        return [call, again, *self._advance(slot, at_s, cause_id)]

    def _advance_all(self, at_s: float, cause_id: str) -> list[ShardCommand]:
        self.looked_s = at_s
        live = self.live()  # once for all fragments: nothing that one of them does changes it
        return [action for slot in self.slots.values() for action in self._advance(slot, at_s, cause_id, live)]

    def _advance(
        self, slot: FragmentSlot, at_s: float, cause_id: str, live: set[str] | None = None
    ) -> list[ShardCommand]:
        now = slot.round
        if slot.parked and now.idle:
            parked, slot.parked = slot.parked, []
            return self._fold(slot, [slot.offers[key] for key in parked], cause_id)
        if live is None and now.goes_on(at_s, self._living()):
            return []  # each contribution asks: it may not cost a look at every learner
        live = self.live() if live is None else live
        everybody = self._everybody(slot, live)
        actions = self._meet_quorum(now, at_s, cause_id)
        awaited, patient = (live, False) if everybody is None else (everybody, True)
        reason = now.end(at_s, awaited, alone=self._is_alone(slot, awaited, patient=patient), patient=patient)
        if not reason:
            return actions
        if now.unjudged:
            return actions + (self._dissolve(slot, at_s, cause_id) if self._over() and self._listened() else [])
        if patient and not self._listened():
            return actions
        return [*actions, self._commit(slot, at_s, reason, live, cause_id, together=patient)]

    def _meet_quorum(self, now: FragmentRound, at_s: float, cause_id: str) -> list[ShardCommand]:
        if now.phase is not Phase.COLLECTING or now.quorum_so_far() < self.settings.quorum:
            return []
        self.quorum.add(at_s - now.called_s - (self.connected.absent_s - now.absent_s))
        grace = grace_window(self.settings, self.step_s() or 0.0, self.quorum.value, self.sync.value)
        deadline_s = now.open_grace(at_s, grace, cause_id)
        return [ArmTimer(name=f"grace/{now.fragment}", due_s=deadline_s, cause_id=cause_id)]

    def _is_alone(self, slot: FragmentSlot, awaited: set[str], *, patient: bool) -> bool:
        # Whom an heir hears first is perhaps one that left while nobody served: that says nothing of the others.
        trained = any(view.step_s is not None for view in self.learners.values())
        known = self.draining or trained or self._listened()
        coming = self.present() if patient else self._coming(slot)
        return known and not awaited and not coming

    def _commit(
        self, slot: FragmentSlot, at_s: float, reason: str, live: set[str], cause_id: str, *, together: bool
    ) -> Commit:
        now = slot.round
        self.committing_since[now.fragment] = self.connected.at(at_s)
        for share in now.shares:
            slot.fragment_ledger.merge(share, final=slot.offers[share.key].final, shard=self.ledger)
        self.ledger.count(slot.fragment_ledger.tokens_counted)
        slot.begin_commit()
        frozen = slot.freeze(self.ledger)
        return now.commit(at_s, reason, live, cause_id, together=together, fragment_ledger=frozen)

    def _dissolve(self, slot: FragmentSlot, at_s: float, cause_id: str) -> list[ShardCommand]:
        """Refuse all that is folded: nobody is left who could judge it."""
        actions: list[ShardCommand] = [Unfold(fragment=slot.round.fragment, cause_id=cause_id)]
        folded, slot.round.shares = [slot.offers[share.key] for share in slot.round.shares], []
        for offer in folded:
            actions += self._refuse(slot, offer, "unjudged", cause_id)
        return actions + self._advance(slot, at_s, cause_id)

    def _coming(self, slot: FragmentSlot) -> set[str]:
        """Return the learners that are present and may still answer here, whether they train or not.

        One that fills its places, or sent its last push, cannot: to wait for it would be to wait for each other. One that
        trains no more may have nothing for this fragment, and is waited for within a bound.
        """
        held = Counter(key.learner for key in slot.offers)
        last = {key.learner for key, offer in slot.offers.items() if offer.final}
        there = self.present() - last
        return {n for n in there if held[n] < PLACES and self.learners[n].is_finishing(self.connected.now_s)}

    def _everybody(self, slot: FragmentSlot, live: set[str]) -> set[str] | None:
        if self.settings.ending == "apart" or (live and not self._at_target()):
            return None
        held = Counter(key.learner for key in slot.offers)
        return {name for name in self.present() if held[name] < PLACES}

    def _fold(self, slot: FragmentSlot, ready: list[Offer], cause_id: str) -> list[ShardCommand]:
        actions = list[ShardCommand]()
        for offer in ready:
            if reason := slot.round.refusal(offer):
                actions += self._refuse(slot, offer, reason, cause_id)
            else:
                view = self.learners.get(offer.key.learner)
                own, counted = (0.0, 0) if view is None else (view.step_tokens, view.credit)
                most = step_tokens_max(self.step_sizes, own, self.settings.step_tokens_max)
                interval, size = self.settings.interval_steps, offer.tokens / offer.steps
                bound = (
                    tokens_bound(self.totals, counted, interval, size, most) if self._has_others(offer) else UNBOUNDED
                )
                actions.append(slot.round.fold(offer, cause_id, most, bound))
        return actions

    def _has_others(self, offer: Offer) -> bool:
        """Return whether anybody else is known: what a learner claims that is alone costs nobody."""
        return not self.learners.keys() <= {offer.key.learner}

    def _refuse(
        self, slot: FragmentSlot, offer: Offer, reason: str, cause_id: str, norms: tuple[float, float] | None = None
    ) -> list[ShardCommand]:
        slot.offers.pop(offer.key, None)
        slot.round.drop(offer)
        final = offer.final and reason != "after_final"
        slot.fragment_ledger.refuse(offer.key, offer.tokens, reason, final=final, shard=self.ledger)
        learner, incarnation, *_ = key = offer.key
        slot.unkept.refusals[key] = Acknowledge(key=key, fate="refused", reason=reason, cause_id=cause_id)
        actions: list[ShardCommand] = [Refuse(key=key, reason=reason, norms=norms, cause_id=cause_id)]
        actions += slot.keep(self.ledger, cause_id)
        offences = self.offences(learner, incarnation) if reason in OFFENCES else 0
        if self.isolated(learner, incarnation) and offences == self.settings.offences_max:
            actions.append(Isolate(learner=learner, incarnation=incarnation, offences=offences, reason=reason))
        return actions
