"""Reference models: what the machines must say, worked out a second time from the facts alone.

An invariant says that no sum is negative. A model says what the sum *is*. Each model sees every fact and every command that
answered it, keeps its own ledger in the most simple form it can (one entry for each step, each contribution, each learner),
and raises `InvariantBroken` where the machine says something else. No model reads a machine's private state to decide.

    RoundModel     connected time, quorum, commit and step time, their averages, the grace window of Eq. 3, why a round ends
    FateModel      weight, age, staleness and clip of each contribution, and the fate of its tokens, by incarnation
    IslandModel    one fate for each step of each fragment, and the answer to each call, head and settled push
    HeadModel      visible heads: versions, epochs, and the tokens that all commits of a fragment have included

Tests and simulated schedules use them beside `atoll.protocol.invariants`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final

from atoll.protocol import events
from atoll.protocol.invariants import require
from atoll.protocol.island import Island
from atoll.protocol.ledger import FormerLives, Ledger
from atoll.protocol.quarantine import OFFENCES
from atoll.protocol.settings import ProtocolSettings

SILENT_STEPS = 10
CUT_S = 2.5
CALLS_IN_VAIN = 8
JUDGES_MIN = 3
CALLS_UNHEARD = 3
FORGIVEN = 8
OTHERS = 3
FORGOTTEN = 24
ROOM = 2
BOUNDED_FROM, STEP_OF_OTHERS = 2, 16
LAST_PUSH_S = 30.0
CLOSE = 1e-9


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= CLOSE * max(1.0, abs(one), abs(other))


def _average(samples: Iterable[float], decay: float) -> float | None:
    """Return the exponential average of samples in their order: the first whole, each later one with weight `decay`."""
    value: float | None = None
    for sample in samples:
        value = sample if value is None else value + decay * (sample - value)
    return value


def _middle(values: Iterable[float]) -> float | None:
    """Return the largest value that at least half of all are not below, counted from the least."""
    ordered = sorted(values)
    while len(ordered) > 2:
        ordered = ordered[1:-1]
    return ordered[0] if ordered else None


SPOILED: Final = ("not_finite", "corrupt", "blob_gone")
"""Why a contribution is refused that was read."""


@dataclass(slots=True)
class _Heard:
    """The newest life of a learner: when it was heard, whether it trains, the step time that it told last, its last commit."""

    incarnation: int
    at_s: float
    training: bool = False
    left: bool = False
    step_s: float | None = None
    commit: int | None = None
    stopped_s: float | None = None
    beats: list[tuple[float, int, int]] = field(default_factory=list)
    training_beats: list[tuple[float, int, int]] = field(default_factory=list)
    absent_s: float = 0.0
    cuts: int = 0
    """How many absences of its shard lie between its heartbeats; steps are measured from one on anew."""

    def fastest_s(self) -> float:
        """Return the shortest step time that its heartbeats allow for: a quarter of that of the last stretch of two seconds."""
        least_s, (then_s, before, cut) = 0.0, self.training_beats[0]
        for at_s, steps, cuts in self.training_beats:
            if cuts > cut:
                then_s, before, cut = at_s, steps, cuts
            between_s, taken = at_s - then_s, steps - before
            if (between_s >= 2.0 and taken > 0) or between_s >= 20.0:
                least_s, then_s, before = between_s / max(1, taken) / 4.0, at_s, steps
        return least_s

    def slowest_s(self) -> float:
        """Return the longest step time that its heartbeats allow for, from the last moment but one at which one was marked."""
        marks = self.beats[:1]
        for at_s, steps, cuts in self.beats:
            if cuts > marks[-1][2]:
                marks = [(at_s, steps, cuts)]
            elif at_s - marks[-1][0] > 20.0:
                marks.append((at_s, steps, cuts))
        (then_s, before, _), (now_s, after, _) = marks[-2:][0], self.beats[-1]
        return 4.0 * max(2.0, now_s - then_s) / max(1, after - before)


@dataclass(slots=True)
class _Round:
    """One round as its commands show it."""

    version: int
    called_s: float | None = None
    asked_s: float = 0.0
    absent_s: float = 0.0
    attempt: int = 0
    quorum_s: float | None = None
    grace_s: float = 0.0
    grace_step_s: float = 0.0
    committing_s: float | None = None
    shares: tuple[events.PushKey, ...] = ()
    folded: list[events.PushKey] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)


def _name_of(life: Any) -> str:  # noqa: ANN401  (a key, or a fact of a learner)
    return f"{life.learner}/{life.incarnation}"


class RoundModel:
    """Times and decisions of one owner's rounds; averages are taken over all samples each time, from the beginning."""

    def __init__(self, settings: ProtocolSettings, versions: Mapping[int, int]) -> None:
        self._settings = settings
        self._rounds = {fragment: _Round(version) for fragment, version in versions.items()}
        self._learners: dict[str, _Heard] = {}
        self._bases: dict[events.PushKey, int] = {}
        self._finals: dict[events.PushKey, bool] = {}
        self._held: set[events.PushKey] = set()
        self._offered: dict[events.PushKey, bool] = {}
        """What was fetched and neither refused nor committed, and whether it is its learner's last."""
        self._loading: set[events.PushKey] = set()
        self._offences: Counter[tuple[str, int, int]] = Counter()
        self._clean: Counter[tuple[str, int, int]] = Counter()
        self._quorums_s: list[float] = []
        self._commits_s: list[float] = []
        self._told = 0
        self._credit: Counter[int] = Counter()
        self._last: Counter[str] = Counter()
        self._sign_s: float | None = None
        self._absent_s = 0.0
        self._commits = 0
        self._ever: set[tuple[str, int]] = set()
        self._former = FormerLives()

    def see(self, fact: events.Fact, actions: Iterable[events.Command]) -> None:
        """Follow a fact and its commands; raise `InvariantBroken` where they are not what the facts lead to."""
        self._told = max(self._told, getattr(fact, "run_tokens", 0))
        if not isinstance(fact, events.TimerFired | events.DrainOrdered):
            self._see_sign(fact.at_s)
        self._take(fact)
        actions = list(actions)
        for action in actions:
            self._see_command(action, fact.at_s, actions)

    def _see_command(self, action: events.Command, at_s: float, actions: list[events.Command]) -> None:
        if isinstance(action, events.Fetch):
            self._held.add(action.key)
            self._loading.add(action.key)
            self._offered.setdefault(action.key, self._finals.get(action.key, False))
        elif isinstance(action, events.Acknowledge):
            self._held.discard(action.key)
            self._loading.discard(action.key)
        elif isinstance(action, events.Refuse):
            self._see_refusal(action)
        elif isinstance(action, events.Fold):
            self._rounds[action.key.fragment].folded.append(action.key)
            self._loading.discard(action.key)
        elif isinstance(action, events.Unfold):
            self._rounds[action.fragment].folded.clear()
        elif isinstance(action, events.PublishCall):
            self._see_call(action, at_s, actions)
        elif isinstance(action, events.ArmTimer):
            kind, _, number = action.name.partition("/")
            see = self._see_grace if kind == "grace" else self._see_due
            see(self._rounds[int(number)], action, at_s)
        elif isinstance(action, events.Commit):
            self._see_commit(action, at_s)

    def inherit(
        self, ledger: Ledger, fates: Mapping[events.PushKey, tuple[str, int]], credit: Mapping[int, int] | None = None
    ) -> None:
        """Begin as an heir: with what learners told the former owner, its learners' offences, and what counted by fragment."""
        self._credit.update(credit or {})
        self._told, self._former = ledger.run_tokens, deepcopy(ledger.former)
        for name, account in ledger.accounts.items():
            learner, _, incarnation = name.rpartition("/")
            self._ever |= {(learner, int(incarnation))} if account.merged or account.merged_late else set()
        for key, (fate, _) in fates.items():
            if fate.partition(":")[2] in OFFENCES:
                self._offences[key.learner, key.incarnation, key.fragment] += 1
                self._clean[key.learner, key.incarnation, key.fragment] = 0
            elif fate.startswith("merged"):
                self._see_merged(key)

    # --- facts ----------------------------------------------------------------------------------------------------------

    def _see_sign(self, at_s: float) -> None:
        """Count the time without a sign: all of a long gap, and of a shorter one what is beyond half a silence."""
        gap_s = max(0.0, at_s - (at_s if self._sign_s is None else self._sign_s))
        self._absent_s += gap_s if gap_s > CUT_S else max(0.0, gap_s - self._settings.silence_s / 2.0)
        self._sign_s = max(at_s, at_s if self._sign_s is None else self._sign_s)

    def _take(self, fact: events.Fact) -> None:
        who = fact.key if isinstance(fact, events.ContributionArrived) else fact
        if isinstance(
            fact, events.LearnerBeat | events.LearnerLeft | events.ContributionArrived
        ) and self._former.covers(_name_of(who)):
            return
        if isinstance(fact, events.LearnerBeat):
            self._take_beat(fact)
        elif isinstance(fact, events.LearnerLeft):
            self._take_farewell(fact)
        elif isinstance(fact, events.ContributionArrived) and fact.key.fragment in self._rounds:
            if fact.key in self._held:
                return
            self._bases[fact.key] = fact.base_version
            self._finals[fact.key] = fact.final
            heard = self._learners.get(fact.key.learner)
            if heard is not None and heard.incarnation == fact.key.incarnation:
                heard.at_s = self._connected_s
        elif isinstance(fact, events.Committed):
            self._take_commit(fact)
        elif isinstance(getattr(fact, "key", None), events.PushKey):
            self._loading.discard(fact.key)  # type: ignore[attr-defined]  # ready or spoiled: it is read

    def _take_commit(self, committed: events.Committed) -> None:
        before = self._rounds[committed.fragment]
        require(before.committing_s is not None, "what is committed was decided", committed)
        self._commits_s.append(self._connected_s - (before.committing_s or 0.0))
        self._commits += 1
        for key in before.shares:
            self._offered.pop(key, None)
            heard = self._learners.get(key.learner)
            if heard is not None and heard.incarnation == key.incarnation:
                heard.commit = self._commits
        self._rounds[committed.fragment] = _Round(committed.version)

    def _take_farewell(self, farewell: events.LearnerLeft) -> None:
        heard = self._learners.get(farewell.learner)
        if heard is None or heard.incarnation < farewell.incarnation:
            heard = self._learners[farewell.learner] = _Heard(farewell.incarnation, self._connected_s)
        if heard.incarnation == farewell.incarnation:
            heard.training, heard.left = False, True

    def _take_beat(self, beat: events.LearnerBeat) -> None:
        heard = self._learners.get(beat.learner)
        if heard is None or beat.incarnation > heard.incarnation:
            heard = self._learners[beat.learner] = _Heard(beat.incarnation, self._connected_s)
        if beat.incarnation == heard.incarnation:
            was, heard.at_s, heard.training = heard.training, self._connected_s, beat.training and not heard.left
            heard.stopped_s = None if heard.training else self._connected_s if was else heard.stopped_s
            heard.cuts += self._absent_s - heard.absent_s > CUT_S
            heard.absent_s = self._absent_s
            heard.beats.append((beat.at_s, beat.steps, heard.cuts))
            if heard.training and beat.step_s > 0.0:
                heard.training_beats.append((beat.at_s, beat.steps, heard.cuts))
                heard.step_s = min(max(beat.step_s, heard.fastest_s()), heard.slowest_s())

    # --- what follows from them -----------------------------------------------------------------------------------------

    def _isolated(self, name: str, incarnation: int) -> bool:
        """Return whether a life has sent what no healthy learner sends, again and again, in a run that isolates."""
        limit = self._settings.offences_max if self._settings.protect == "isolate" else 0
        return 0 < limit <= sum(self._offences[name, incarnation, p] for p in self._rounds)

    def _see_merged(self, key: events.PushKey) -> None:
        life = key.learner, key.incarnation, key.fragment
        self._clean[life] += 1
        if self._offences[life] and self._clean[life] % FORGIVEN == 0:
            self._offences[life] -= 1

    @property
    def _connected_s(self) -> float:
        """Return the time by the last sign of the broker, without that in which there was none."""
        return (self._sign_s or 0.0) - self._absent_s

    def present(self, *, isolated: bool = False) -> set[str]:
        """Return the learners that have not left and are not silent; those in quarantine only if asked for."""
        return {
            name
            for name, heard in self._learners.items()
            if not heard.left
            and self._connected_s - heard.at_s
            <= max(self._settings.silence_s, min(120.0, SILENT_STEPS * (heard.step_s or 0.0)))
            and (isolated or not self._isolated(name, heard.incarnation))
        }

    def live(self, *, isolated: bool = False) -> set[str]:
        return {name for name in self.present(isolated=isolated) if self._learners[name].training}

    def step_s(self) -> float | None:
        """Return the median step time of the live learners: of those that are part of new versions, if there are any."""
        names = self.live() or self.live(isolated=True)
        timed = {name: heard for name, heard in self._learners.items() if name in names and heard.step_s is not None}
        since = self._commits - 2 * len(self._rounds)
        lately = {
            name
            for name, heard in timed.items()
            if heard.commit is not None
            and heard.commit > since
            and self._connected_s - heard.at_s <= self._settings.silence_s
        }
        ever = {name for name, heard in timed.items() if (name, heard.incarnation) in self._ever}
        return _middle(timed[name].step_s or 0.0 for name in lately or ever or timed)

    def window_s(self) -> float:
        """Return the grace window of Eq. 3 at this moment."""
        settings, step_s = self._settings, self.step_s() or 0.0
        quorum_s, sync_s = (_average(seen, settings.average_decay) for seen in (self._quorums_s, self._commits_s))
        slack_s = settings.overlap_steps * step_s - (quorum_s or 0.0) - (sync_s or 0.0)
        return max(0.0, min(settings.grace_gamma * slack_s, settings.grace_cap_steps * step_s))

    # --- commands -------------------------------------------------------------------------------------------------------

    def _see_refusal(self, refusal: events.Refuse) -> None:
        key = refusal.key
        self._held.add(key)
        self._loading.discard(key)
        self._offered.pop(key, None)
        if refusal.reason in OFFENCES:
            self._offences[key.learner, key.incarnation, key.fragment] += 1
            self._clean[key.learner, key.incarnation, key.fragment] = 0
        now = self._rounds[key.fragment]
        if self._bases.get(key) == now.version:
            now.answered.add(key.learner)

    def _see_call(self, call: events.PublishCall, at_s: float, actions: list[events.Command]) -> None:
        now = self._rounds[call.fragment]
        if now.called_s is None:
            now.called_s, now.absent_s = at_s, self._absent_s
        now.asked_s, now.attempt = at_s, now.attempt + 1
        require(at_s - (self._sign_s or 0.0) <= CUT_S, "a shard that is cut off calls nobody", call)
        require((call.version, call.attempt) == (now.version, now.attempt), "a call is for its round", call)
        known = max([self._told, *self._credit.values()])
        ahead = 2 * sum(self._last.values())
        require(known <= call.run_tokens <= known + ahead, "a call says how far the run is", (call, known, ahead))
        due_s = at_s + max(0.5, 2.0 * (self.step_s() or 0.0))
        again = [a.due_s for a in actions if isinstance(a, events.ArmTimer) and a.name == f"due/{call.fragment}"]
        require(any(_near(due_s, armed_s) for armed_s in again), "a call is repeated in time", (again, due_s))

    def _see_due(self, now: _Round, timer: events.ArmTimer, at_s: float) -> None:
        """Check when a called round is called again: two steps after its last call, also when steps have become shorter."""
        if now.called_s is None or now.quorum_s is not None:
            return
        again_s = now.asked_s + max(0.5, 2.0 * (self.step_s() or 0.0))
        cut_off = at_s - (self._sign_s or 0.0) > CUT_S
        require(_near(timer.due_s, at_s + 0.5 if cut_off else again_s), "a call is repeated in time", (timer, again_s))

    def _see_grace(self, now: _Round, timer: events.ArmTimer, at_s: float) -> None:
        require(now.called_s is not None, "grace follows a call", timer)
        if now.quorum_s is not None:
            shorter = (self.step_s() or 0.0) < 0.75 * now.grace_step_s and self.window_s() < now.grace_s
            require(shorter, "grace is granted once, and shortened where steps are", (timer, now))
            now.grace_s = self.window_s()
            require(_near(timer.due_s, now.quorum_s + now.grace_s), "the grace window is that of Eq. 3", timer)
            now.grace_step_s = self.step_s() or 0.0
            return
        counted = now.folded if now.attempt > CALLS_IN_VAIN else self._on_time(now)
        learners = {key.learner for key in counted}
        require(len(learners) >= self._settings.quorum, "grace follows the quorum", (timer, learners))
        self._quorums_s.append(at_s - (now.called_s or 0.0) - (self._absent_s - now.absent_s))
        now.quorum_s, now.grace_s, now.grace_step_s = at_s, self.window_s(), self.step_s() or 0.0
        wanted_s = at_s + now.grace_s
        require(_near(timer.due_s, wanted_s), "the grace window is that of Eq. 3", (timer.due_s, wanted_s))

    def _see_commit(self, commit: events.Commit, at_s: float) -> None:
        now = self._rounds[commit.fragment]
        now.committing_s, now.shares = at_s - self._absent_s, tuple(share.key for share in commit.shares)
        self._ever |= {(key.learner, key.incarnation) for key in now.shares}
        called_s = at_s if now.called_s is None else now.called_s
        quorum_s = called_s if now.quorum_s is None else now.quorum_s
        got, due = (commit.called_s, commit.quorum_s, commit.grace_s), (called_s, quorum_s, now.grace_s)
        require(all(map(_near, got, due)), "a commit says when its round was called and met its quorum", (got, due))
        live = self.live()
        require(commit.live == len(live), "a commit says how many are live", (commit.live, live))
        loading = {key for key in self._loading if key.fragment == commit.fragment}
        if commit.end == "grace over":
            require(at_s >= quorum_s + now.grace_s - CLOSE, "grace was granted whole", (commit, at_s))
        elif commit.end == "all answered":
            answered = now.answered | {key.learner for key in self._on_time(now)}
            together = self._settings.ending == "together"
            require(together or live <= answered, "everybody has answered", (live, answered))
            require(not loading, "what is being read is waited for", loading)
        else:
            coming = {name for name in self.present() if self._may_answer(name, commit.fragment)}
            require(not self.live() and not coming and not loading, "nobody is left", (commit.end, coming, loading))
        for share in commit.shares:
            self._see_merged(share.key)
            self._credit[commit.fragment] += share.credit
            self._last[share.key.learner] = max(self._last[share.key.learner], share.credit)

    def _may_answer(self, name: str, fragment: int) -> bool:
        """Return whether a learner has room in a round, did not send its last push there, and did not stop long ago."""
        here = [final for key, final in self._offered.items() if (key.learner, key.fragment) == (name, fragment)]
        stopped_s = self._learners[name].stopped_s
        return (
            len(here) < ROOM and not any(here) and (stopped_s is None or self._connected_s - stopped_s <= LAST_PUSH_S)
        )

    def _on_time(self, now: _Round) -> list[events.PushKey]:
        return [key for key in now.folded if self._bases[key] == now.version]


class _Lengths:
    """How much of each contribution counts, and which is too long for a run that isolates, from all lengths that were read."""

    def __init__(self, settings: ProtocolSettings) -> None:
        self._settings = settings
        self._newest: dict[str, int] = {}
        self._left: set[tuple[str, int]] = set()
        self._counted: Counter[int] = Counter()
        self._run_tokens = 0
        self._read: list[tuple[events.PushKey, int, int, float]] = []
        """Of each contribution that counts as a measure: its key, the version it was read on, its steps, its length."""
        self.scales: dict[events.PushKey, float] = {}
        self.outliers: set[events.PushKey] = set()

    def see(
        self,
        fact: events.Fact,
        actions: list[events.Command],
        versions: Mapping[int, int],
        arrived: Mapping[events.PushKey, events.ContributionArrived],
        fates: Mapping[events.PushKey, tuple[str, int]],
    ) -> None:
        """Follow a fact and its commands; the rest is what the fates' model knows."""
        if isinstance(fact, events.LearnerBeat | events.LearnerLeft):
            self._newest[fact.learner] = max(fact.incarnation, self._newest.get(fact.learner, 0))
        if isinstance(fact, events.LearnerLeft):
            self._left.add((fact.learner, fact.incarnation))
        if isinstance(fact, events.QueueDrained):
            self._run_tokens = max(self._run_tokens, fact.run_tokens)
        if isinstance(fact, events.ContributionReady) and not any(
            isinstance(action, events.Fetch) for action in actions
        ):
            for key, norm in ((fact.key, fact.norm), *fact.others):
                self._judge(key, norm, fact.base_norm, versions[key.fragment], arrived[key].steps, fates)
        for commit in (action for action in actions if isinstance(action, events.Commit)):
            self._counted[commit.fragment] += sum(share.credit for share in commit.shares)
            self._run_tokens = max(self._run_tokens, self._counted[commit.fragment])

    def _judge(
        self,
        key: events.PushKey,
        norm: float,
        base_norm: float,
        version: int,
        steps: int,
        fates: Mapping[events.PushKey, tuple[str, int]],
    ) -> None:
        last = {
            past.learner: (past, on, over, length)
            for past, on, over, length in self._read
            if self._counts(past, on, key.fragment, version)
        }
        own = last.pop(key.learner, None)
        around = list(last.values()) or ([own] if own else [])
        lengths = sorted(length * min(10.0, max(1.0, steps / over)) for _, _, over, length in around)
        most, enough = math.inf, len(last) >= OTHERS
        if lengths and self._settings.outlier_ratio:
            usual = self._settings.outlier_ratio * lengths[len(lengths) // 2]
            most = max(usual, base_norm / 10.0 if enough else base_norm)
        known = any(
            (past.learner, past.incarnation, past.fragment) == key[:3] and fate.startswith("merged")
            for past, (fate, _) in fates.items()
        )
        if norm > most:
            self.scales[key] = most / norm
            if self._settings.protect == "isolate" and enough and known:
                self.outliers.add(key)
        if norm > 0.0 and known:
            self._read = [one for one in self._read if one[0].learner != key.learner or one[0].fragment != key.fragment]
            self._read.append((key, version, steps, min(norm, most)))

    def _counts(self, past: events.PushKey, on: int, fragment: int, version: int) -> bool:
        """Return whether a measure is of this fragment, of a life that goes on, and not too old."""
        target = self._settings.tokens_target
        left = (past.learner, past.incarnation) in self._left and not 0 < target <= self._run_tokens
        over = self._newest.get(past.learner, 0) > past.incarnation or left
        return past.fragment == fragment and not over and version - on <= FORGOTTEN


class FateModel:
    """What became of each contribution's tokens, from what arrived and what the owner commanded."""

    def __init__(
        self,
        settings: ProtocolSettings,
        versions: Mapping[int, int],
        fates: Mapping[events.PushKey, tuple[str, int]] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """Start with the versions that the owner found, the fates that are durable, and what its learners have reported."""
        self._settings = settings
        self._versions = dict(versions)
        self._arrived: dict[events.PushKey, events.ContributionArrived] = {}
        self._folded: dict[int, list[events.PushKey]] = {fragment: [] for fragment in versions}
        self._final: dict[tuple[str, int, int], int] = {}
        self._after_final: set[events.PushKey] = set()
        self._trained = Counter({} if ledger is None else {n: each.trained for n, each in ledger.accounts.items()})
        self._overspent: set[events.PushKey] = set()
        self._sizes: set[tuple[str, float, int]] = set()
        """Tokens per step of what was merged, with who took them."""
        self._weights: dict[events.PushKey, float] = {}
        self._being_made: set[int] = set()
        """Fragments of which the next version is being committed: it may be visible already."""
        self.fates: dict[events.PushKey, tuple[str, int]] = dict(fates or {})
        self._lengths = _Lengths(settings) if fates is None else None
        """An heir has measures that no model has seen."""

    def see(self, fact: events.Fact, actions: Iterable[events.Command]) -> None:
        actions = list(actions)
        if isinstance(fact, events.ContributionArrived):
            self._take(fact)
        elif isinstance(fact, events.LearnerBeat):
            self._trained[_name_of(fact)] = max(self._trained[_name_of(fact)], fact.tokens)
        elif isinstance(fact, events.Committed):
            require(fact.version == self._versions[fact.fragment] + 1, "versions follow one another", fact)
            self._versions[fact.fragment] = fact.version
            self._being_made.discard(fact.fragment)
        if self._lengths is not None:
            self._lengths.see(fact, actions, self._versions, self._arrived, self.fates)
        for action in actions:
            self._see_command(action)

    def _see_command(self, action: events.Command) -> None:
        if isinstance(action, events.Fetch):
            require(not self._unfit(action.key), "what cannot be merged is not read", action)
        elif isinstance(action, events.Fold):
            self._see_fold(action)
        elif isinstance(action, events.Unfold):
            self._see_unfold(action)
        elif isinstance(action, events.Commit):
            self._see_commit(action)
        elif isinstance(action, events.Refuse):
            self._see_refusal(action)
        elif isinstance(action, events.Acknowledge):
            self._see_acknowledge(action)

    def _take(self, arrived: events.ContributionArrived) -> None:
        """Note what arrives, and whether its life has called another push its last."""
        key, name = arrived.key, _name_of(arrived.key)
        if not arrived.absurd:
            self._trained[name] = max(self._trained[name], arrived.trained_tokens)
        if key not in self._arrived:
            self._see_spent(arrived)
            final = self._final.get(key[:3])
            if final is not None and (arrived.final or key.push > final):
                self._after_final.add(key)
            elif arrived.final:
                self._final[key[:3]] = key.push
        self._arrived[key] = arrived

    def _see_spent(self, arrived: events.ContributionArrived) -> None:
        """Note a contribution with which its life would have pushed more tokens of a fragment than it has trained."""
        ours = [key for key in {**self._arrived, **self.fates} if key[:3] == arrived.key[:3]]
        fates = {key: self.fates[key] if key in self.fates else ("", self._arrived[key].tokens) for key in ours}
        spent = sum(tokens for fate, tokens in fates.values() if fate != "refused:implausible")
        if spent + arrived.tokens > self._trained[_name_of(arrived.key)]:
            self._overspent.add(arrived.key)

    def check(self, ledger: Ledger) -> None:
        """Compare the sums by incarnation with the owner's ledger."""
        sums: dict[str, Counter[str]] = {}
        for key, (fate, tokens) in self.fates.items():
            sums.setdefault(f"{key.learner}/{key.incarnation}", Counter())[fate] += tokens
        former = sum((sums.pop(name) for name in list(sums) if ledger.former.covers(name)), Counter[str]())
        said = ledger.former.fates()
        got = {fate: tokens for fate, tokens in said.items() if fate not in ("superseded", "refused:local", "lost")}
        require(Counter(got) == former, "former lives' tokens are those of their contributions", (got, former))
        for name, account in ledger.accounts.items():
            got = {"merged": account.merged, "merged_late": account.merged_late}
            got |= {f"refused:{reason}": tokens for reason, tokens in account.refused.items()}
            mine = sums.pop(name, Counter())
            require(Counter(got) == mine, "each fate's tokens are those of its contributions", (name, got, mine))
        require(not sums, "whose tokens have a fate has an account", sums)

    def _unfit(self, key: events.PushKey) -> str:
        """Return why a contribution cannot be merged into the round that is open now."""
        arrived = self._arrived[key]
        if arrived.absurd or key in self._overspent:
            return "implausible"
        age = self._versions[key.fragment] - arrived.base_version
        onward = self._settings.ending == "together" and arrived.final and age == -1
        if age < 0 and not onward and not (age == -1 and key.fragment in self._being_made):
            return "future_base"
        if age > self._settings.age_max:
            return "stale"
        if min(arrived.tokens, arrived.steps) < 1:
            return "empty"
        if arrived.tokens / arrived.steps > (self._settings.step_tokens_max or math.inf):
            return "implausible"
        return "after_final" if key in self._after_final else ""

    def _see_fold(self, fold: events.Fold) -> None:
        arrived, key, limit = self._arrived[fold.key], fold.key, self._settings.age_max + 1
        age = max(0, self._versions[key.fragment] - arrived.base_version)
        require(fold.age == age <= self._settings.age_max, "the age is the versions it is behind", (fold, age))
        weight, size = arrived.tokens**2 / arrived.steps, arrived.tokens / arrived.steps
        others = [(step, whole) for name, step, whole in self._sizes if name != key.learner]
        smallest = (
            [STEP_OF_OTHERS * min(each) for each in zip(*others, strict=True)] if len(others) >= BOUNDED_FROM else []
        )
        large = bool(smallest) and (size > smallest[0] or arrived.tokens > smallest[1])
        capped = large and fold.weight < weight
        require(capped or _near(fold.weight, weight), "the weight is tokens squared over steps", (fold, weight))
        self._weights[key] = fold.weight
        fresh = self._settings.age_damping**age
        if self._settings.age_law == "gate":
            fresh *= math.cos(math.pi / 2.0 * age / limit) ** 2
        require(_near(fold.staleness_weight, fresh), "the staleness weight is that of the law", (fold, fresh))
        if self._lengths is not None:
            scale = self._lengths.scales.get(key, 1.0)
            require(_near(fold.scale, scale), "what is too long is clipped to what others justify", (fold, scale))
        self._folded[key.fragment].append(key)

    def _see_commit(self, commit: events.Commit) -> None:
        folded, self._folded[commit.fragment] = self._folded[commit.fragment], []
        self._being_made.add(commit.fragment)
        require([share.key for share in commit.shares] == folded, "a commit is of what was folded", (commit, folded))
        learners = {share.key.learner for share in commit.shares}
        judged = self._settings.robust == "none" or len(learners) >= JUDGES_MIN
        require(judged, "where a round judges, three or more learners do", commit)
        require(commit.base_version == self._versions[commit.fragment], "a commit is on its version", commit)
        for share in commit.shares:
            arrived = self._arrived[share.key]
            age = max(0, commit.base_version - arrived.base_version)
            scale = share.scale if self._lengths is None else self._lengths.scales.get(share.key, 1.0)
            require(_near(share.scale, scale), "a share says how it was clipped", (share, scale))
            got = share.tokens, share.steps, share.base_version, share.age, share.weight
            due = arrived.tokens, arrived.steps, arrived.base_version, age, self._weights[share.key]
            require(got == due, "a share is as its contribution was", (got, due))
            require(0 <= share.credit <= share.tokens, "no more counts than was merged", share)
            self._sizes.add((share.key.learner, arrived.tokens / arrived.steps, share.credit))
            self._give(share.key, "merged_late" if age else "merged")

    def _see_unfold(self, unfold: events.Unfold) -> None:
        learners = {key.learner for key in self._folded[unfold.fragment]}
        few = self._settings.robust != "none" and 0 < len(learners) < JUDGES_MIN
        require(few, "only what nobody can judge is taken back", (unfold, learners))
        self._folded[unfold.fragment] = []

    def _see_acknowledge(self, acknowledge: events.Acknowledge) -> None:
        key = acknowledge.key
        if acknowledge.reason == "wrong_shard":
            require(key.fragment not in self._versions, "another shard's fragment is not ours", acknowledge)
        elif acknowledge.fate == "known":
            require(key in self.fates, "what is known has a fate", acknowledge)
        else:
            told = f"refused:{acknowledge.reason}" if acknowledge.fate == "refused" else acknowledge.fate
            require(self.fates[key][0] == told, "the fate that is told is the one it had", acknowledge)

    def _see_refusal(self, refusal: events.Refuse) -> None:
        unfit = self._unfit(refusal.key)
        known = ("future_base", "stale", "empty", "implausible", "after_final")
        # What became too old while it was read may turn out to be spoiled as well.
        fits = refusal.reason in (unfit, "quarantined", *SPOILED)
        require(not unfit or fits, "what cannot be merged is refused", (unfit, refusal))
        require(bool(unfit) or refusal.reason not in known, "what could be merged is not refused", refusal)
        if self._lengths is not None and refusal.reason == "outlier":
            require(refusal.key in self._lengths.outliers, "only a run that isolates refuses for a length", refusal)
        self._give(refusal.key, f"refused:{refusal.reason}")

    def _give(self, key: events.PushKey, fate: str) -> None:
        require(key not in self.fates, "a contribution has one fate", (key, fate, self.fates.get(key)))
        self.fates[key] = fate, self._arrived[key].tokens


@dataclass(slots=True)
class _Own:
    """One fragment of a learner: a fate for each step, and what is known of versions.

    `fates` says for each step "open", "superseded", "local", or the number of the push that it is in.
    """

    anchor: int
    known: int
    fates: list[str | int] = field(default_factory=list)
    begin: int = 0
    sent: int | None = None
    pushes: int = 0
    calls: int = 0
    called_s: float = -math.inf
    fetching: bool = False
    hint: int = 0
    ready: int | None = None
    adopting: bool = False
    unread: int | None = None
    in_vain: int = 0
    not_before_s: float = -math.inf
    anew: int = 0
    not_anew_before_s: float = -math.inf

    @property
    def here(self) -> int:
        """Return the newest version that is here."""
        return max(self.anchor, self.ready or 0)


class IslandModel:
    """One incarnation of a learner, step by step."""

    def __init__(self, settings: ProtocolSettings, anchors: Mapping[int, int]) -> None:
        self._settings = settings
        self._own = {fragment: _Own(version, version) for fragment, version in anchors.items()}
        self._tokens: list[int] = []
        self._flying: set[tuple[int, int]] = set()
        self._draining = False
        self._left = False

    def see(self, fact: events.Fact, actions: Iterable[events.Command]) -> None:
        actions = list(actions)
        if self._left:
            require(not actions, "a learner that left does nothing more", actions)
            return
        wanted = self._wanted(fact)
        got: list[object] = [_told(action) for action in actions]
        require(got == wanted, "the answer to a fact is that of the rules", (fact, got, wanted))

    def check(self, island: Island) -> None:
        """Compare the sums with those of the machine."""
        sums: Counter[str] = Counter()
        for fragment, own in self._own.items():
            for tokens, fate in zip(self._tokens, own.fates, strict=True):
                flying = isinstance(fate, int) and (fragment, fate) in self._flying
                sums["flying" if flying else "pushed" if isinstance(fate, int) else fate] += tokens
        got = {
            "pushed": island.pushed,
            "superseded": island.superseded,
            "local": island.refused_local,
            "open": island.open,
            "flying": sum(island.in_flight.values()),
        }
        require(Counter(got) == sums, "each step has the fate that its pushes and adoptions gave it", (got, sums))
        require(island.left == self._left, "a learner leaves when nothing is in flight", island.left)

    def totals(self) -> Counter[str]:
        """Return the tokens by fate as this learner knows them."""
        sums: Counter[str] = Counter()
        for own in self._own.values():
            for tokens, fate in zip(self._tokens, own.fates, strict=True):
                sums["pushed" if isinstance(fate, int) else fate] += tokens
        return sums

    # --- the rules ------------------------------------------------------------------------------------------------------

    def _wanted(self, fact: events.Fact) -> list[object]:
        """Change the ledgers as a fact asks, and return the commands it must lead to."""
        if isinstance(fact, events.StepDone):
            self._tokens.append(fact.tokens)
            for own in self._own.values():
                own.fates.append("open")
            return [command for p, own in self._own.items() for command in self._boundary(p, own)]
        if isinstance(fact, events.DrainOrdered):
            return self._drained()
        return self._told_of(fact.fragment, self._own[fact.fragment], fact)  # type: ignore[attr-defined]

    def _told_of(self, fragment: int, own: _Own, fact: events.Fact) -> list[object]:
        wanted: list[object] = []
        if isinstance(fact, events.CallHeard):
            wanted = self._called(fragment, own, fact)
        elif isinstance(fact, events.HeadHeard):
            own.known = max(own.known, fact.version) if fact.proven else own.known
            wanted = self._heard(fragment, own, fact.version, fact.at_s)
        elif isinstance(fact, events.Adopted):
            wanted = self._adopted(fragment, own, fact.version, overwritten=fact.overwritten)
        elif isinstance(fact, events.PushSettled):
            wanted = self._settled(fragment, own, fact)
        elif isinstance(fact, events.SnapshotKept):
            own.unread = None if own.unread == fact.push else own.unread
        elif isinstance(fact, events.PushRefused):
            wanted = self._anew(fragment, own, fact.at_s) if own.sent == fact.push else []
        elif isinstance(fact, events.FragmentFetched | events.FetchFailed | events.NothingNewer):
            own.fetching = False
            wanted = self._fetched(fragment, own, fact)
        else:
            raise TypeError(f"the model does not know {fact}")
        return wanted

    @property
    def _goes_on_from_pushes(self) -> bool:
        return self._settings.adoption == "carry" or self._settings.ending == "together"

    def _boundary(self, fragment: int, own: _Own) -> list[object]:
        if own.ready is None or own.adopting or own.unread is not None:
            return []
        own.adopting = True
        alone = len(own.fates) - self._beyond(own)
        cut_off = own.ready - 1 - own.anchor > self._settings.age_max and alone > self._settings.interval_steps
        since = own.sent or 0 if self._goes_on_from_pushes else 0
        return [("adopt", fragment, own.ready, cut_off, since)]

    def _fetched(self, fragment: int, own: _Own, fact: events.Fact) -> list[object]:
        if isinstance(fact, events.FetchFailed):
            return []
        if isinstance(fact, events.NothingNewer):
            own.in_vain += 1
            own.not_before_s = fact.at_s + min(1.0, 0.1 * 2**own.in_vain)
        elif isinstance(fact, events.FragmentFetched):
            if fact.version > own.here:
                own.in_vain, own.not_before_s = 0, -math.inf
            own.known = max(own.known, fact.version)
            own.ready = own.ready if self._draining else fact.version
        return self._heard(fragment, own, own.hint, fact.at_s)

    def _called(self, fragment: int, own: _Own, call: events.CallHeard) -> list[object]:
        if own.anchor > call.version or own.adopting or self._draining:
            return []
        wanted = self._heard(fragment, own, call.version, call.at_s)
        if own.sent is None:
            too_late = call.version > own.anchor + self._settings.age_max
            return wanted if too_late else wanted + self._push(fragment, own, keep=self._goes_on_from_pushes)
        counts = own.anchor == call.version and (fragment, own.sent) not in self._flying
        if counts and call.at_s - own.called_s >= 0.25:
            own.calls, own.called_s = own.calls + 1, call.at_s
            if own.calls % CALLS_UNHEARD == 0:
                wanted += self._anew(fragment, own, call.at_s)
        return wanted

    def _heard(self, fragment: int, own: _Own, version: int, at_s: float) -> list[object]:
        """Look for a version that is not here: at once if a record has shown one, else not too often in vain."""
        if self._draining or max(version, own.known) <= own.here:
            return []
        if own.fetching:
            own.hint = max(own.hint, version)
            return []
        if own.known <= own.here and at_s < own.not_before_s:
            return []
        return self._fetch(fragment, own, version)

    def _anew(self, fragment: int, own: _Own, at_s: float) -> list[object]:
        if own.fetching or self._draining or at_s < own.not_anew_before_s:
            return []
        own.anew += 1
        own.not_anew_before_s = at_s + min(60.0, 0.5 * 2**own.anew)
        return self._fetch(fragment, own, 0, again=True)

    def _fetch(self, fragment: int, own: _Own, version: int, *, again: bool = False) -> list[object]:
        own.fetching, own.hint = True, 0
        return [("fetch", fragment, max(own.known, own.anchor, version), again)]

    def _adopted(self, fragment: int, own: _Own, version: int, *, overwritten: bool) -> list[object]:
        carry, wanted = self._settings.adoption == "carry" and not overwritten, list[object]()
        too_late = version > own.anchor + self._settings.age_max
        if not carry and not overwritten and own.sent is None and not too_late:
            wanted = self._push(fragment, own)
        if carry:
            own.begin = self._beyond(own)
        else:
            own.fates = ["superseded" if fate == "open" else fate for fate in own.fates]
            own.begin = len(own.fates)
        if version > own.anchor:
            own.anew, own.not_anew_before_s = 0, -math.inf
        own.anchor, own.known, own.sent, own.calls = version, max(own.known, version), None, 0
        own.called_s, own.adopting = -math.inf, False
        own.ready = own.ready if own.ready is not None and own.ready > version else None
        return wanted

    def _settled(self, fragment: int, own: _Own, fact: events.PushSettled) -> list[object]:
        self._flying.discard((fragment, fact.push))
        own.unread = None if own.unread == fact.push else own.unread
        ours, wanted = own.sent == fact.push, list[object]()
        if not fact.reason:
            wanted = self._last(fragment, own) if ours and self._draining else []
        else:
            fate = "local" if fact.reason == "not_finite" else "open" if ours else "superseded"
            own.fates = [fate if step == fact.push else step for step in own.fates]
            if fate == "local" and ours:
                wanted = self._anew(fragment, own, fact.at_s)
            elif ours:
                own.sent = None
        return wanted + self._leave()

    def _drained(self) -> list[object]:
        if self._draining:
            return []
        self._draining = True
        return [command for p, own in self._own.items() for command in self._last(p, own)] + self._leave()

    def _last(self, fragment: int, own: _Own) -> list[object]:
        if own.sent is None:
            return self._push(fragment, own, final=True)
        rest = any(fate == "open" for fate in own.fates[self._beyond(own) :])
        if self._settings.ending == "apart" or not rest or (fragment, own.sent) in self._flying:
            return []
        own.anchor = own.known = max(own.known, own.anchor + 1)
        own.begin, own.ready = self._beyond(own), None
        return self._push(fragment, own, final=True, onward=True)

    def _beyond(self, own: _Own) -> int:
        """Return the step after the last one of the push that this local interval has sent; its begin if it has sent none."""
        if own.sent is None:
            return own.begin
        covered = [at for at, fate in enumerate(own.fates) if fate == own.sent]
        return covered[-1] + 1 if covered else self._local_beyond(own)

    @staticmethod
    def _local_beyond(own: _Own) -> int:
        """Return the step after those of a local interval's push that were refused at home."""
        at = own.begin
        while at < len(own.fates) and own.fates[at] == "local":
            at += 1
        return at

    def _push(
        self, fragment: int, own: _Own, *, final: bool = False, onward: bool = False, keep: bool = False
    ) -> list[object]:
        steps = [at for at in range(own.begin, len(own.fates)) if own.fates[at] == "open"]
        if not steps or not any(self._tokens[at] for at in steps):
            return []
        own.pushes += 1
        own.sent, own.calls, own.called_s = own.pushes, 0, -math.inf
        own.unread = own.pushes if keep else own.unread
        for at in steps:
            own.fates[at] = own.pushes
        self._flying.add((fragment, own.pushes))
        tokens = sum(self._tokens[at] for at in steps)
        return [("push", fragment, own.pushes, own.anchor, tokens, len(steps), sum(self._tokens), final, onward, keep)]

    def _leave(self) -> list[object]:
        if not self._draining or self._flying:
            return []
        self._left = True
        for own in self._own.values():
            own.fates = ["superseded" if fate == "open" else fate for fate in own.fates]
        return [("leave",)]


def _told(action: events.Command) -> object:
    if isinstance(action, events.Push):
        told = action.fragment, action.push, action.base_version, action.tokens, action.steps, action.trained_tokens
        return ("push", *told, action.final, action.onward, action.keep)
    if isinstance(action, events.Adopt):
        return ("adopt", action.fragment, action.version, action.overwrite, action.since)
    if isinstance(action, events.FetchFragment):
        return ("fetch", action.fragment, action.version, action.again)
    return ("leave",) if isinstance(action, events.Leave) else action


class HeadModel:
    """The visible heads of a run, whoever writes them; every write that succeeded is seen, in its order."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int, int]] = {}

    def see(self, fragment: int, version: int, epoch: int, tokens_merged: int, included: Iterable[int]) -> None:
        """Check a head that has become visible, with the tokens of what it includes."""
        before = self._seen.get(fragment)
        now = version, epoch, tokens_merged
        self._seen[fragment] = now
        if before is None:
            return
        require(epoch >= before[1], "nothing of a deposed owner becomes visible", (fragment, before, now))
        if version == before[0]:
            require(tokens_merged == before[2], "the same version holds the same tokens", (fragment, before, now))
            return
        require(version == before[0] + 1, "visible versions follow one another", (fragment, before, now))
        require(epoch == before[1], "a version is written by the owner that has fenced", (fragment, before, now))
        due = before[2] + sum(included)
        require(tokens_merged == due, "a head's tokens are those of all commits so far", (fragment, tokens_merged, due))
