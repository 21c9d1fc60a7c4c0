r"""The recording of a run as a schedule for the simulator: who was there, how fast, over which link, and what the shards took.

    event log (`History`) + agreement ──► `fit_recording` ──► `Recording`

* **Presence**: `joined` begins a life; `left` ends it, or where it was killed the last that was heard of it.
* **Steps**: two `sample` events of a life, each the first with its count of steps, make a *stretch* of eight steps or more at
  their mean pace. The simulator draws stretches with replacement, each with its length (a block bootstrap): slow times stay
  together. A run too short for samples has the step times noted with pushes, which lack what was between steps.
* **Delay**: an answer to a first call takes the call's way, its upload and its manifest's way. The rest without the upload is
  two delays and what held it up; the quickest tenth bounds the delays, what others took longer is drawn for each push.
* **Rate**: bytes over `upload_s` without the two delays of its first message.
* **Shards**: `read_s`, and `queued_s + merge_s + commit_s`, each drawn anew from those of the recording.

Assumptions: the way down is as fast as the way up, nothing is lost, shards are there all the time and take as long for another
codec. Learners that stopped being heard without a farewell stopped then.

**The outcome** is figures that a recording and a simulation both have, made by the same sums. Token-fragments divided by the
number of fragments are tokens. *Goodput* is that of `atoll.story.goodput`; a simulation has the recording's presence.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median
from typing import Final

from atoll.base.errors import SettingsError
from atoll.codec import KEYFRAME, Framing
from atoll.protocol.events import id_of
from atoll.protocol.pacing import RECENT_STEPS
from atoll.protocol.settings import ProtocolSettings
from atoll.run.history import History, RoundLine, base_of
from atoll.run.process_views import Noted
from atoll.story.goodput import RunGoodput, TimePresent, presences, summed
from atoll.story.lives import RecordedLife, lives_of
from atoll.wire.events import Contributor, JoinedEvent, SampleEvent

LATENCY_S_MIN: Final = 1e-4
QUICK_SHARE: Final = 0.1
RATE_UNKNOWN: Final = 1e9
LINE_SHARE_MIN: Final = 0.1
"""At least so much of an upload is the line's: where delays explain all of it, the rate is only a lower bound."""
STRETCH_STEPS: Final = 8
ROUNDS_MIN: Final = 8
"""With fewer rounds a mean of waiting says nothing."""


@dataclass(frozen=True, slots=True)
class MadeCommit:
    """One commit: its waiting from the call, and (age, token-fragments) of each contribution."""

    fragment: int
    quorum_wait_s: float
    waited_s: float
    shares: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TrainingTotals:
    """Work of the learners: tokens, and their seconds stepping and present."""

    tokens: int
    goodput: RunGoodput


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of one run; seconds are means over its commits, `age_mean` is in versions."""

    commits: float
    merged_tokens_s: float
    trained_tokens_s: float
    goodput: float
    contributors: float
    late_share: float
    age_mean: float
    quorum_wait_s: float
    waited_s: float


TITLES = {
    "commits": "commits",
    "merged_tokens_s": "merged tokens/s",
    "trained_tokens_s": "trained tokens/s",
    "goodput": "goodput",
    "contributors": "contributions per commit",
    "late_share": "late share of contributions",
    "age_mean": "age of contributions, versions",
    "quorum_wait_s": "wait for the quorum, s",
    "waited_s": "wait of a round, s",
}
SHARES = ("goodput", "late_share", "age_mean")
"""Figures whose difference is judged as it is; those of waiting are judged beside the interval of a fragment."""
WAITS = ("quorum_wait_s", "waited_s")


@dataclass(frozen=True, slots=True)
class Miss:
    """Distance of a simulated figure from the recording's; `share` is what is compared with the bound."""

    name: str
    recording: float
    simulated: float
    share: float


def outcome(commits: Sequence[MadeCommit], trained: TrainingTotals, time_s: float, fragments: int) -> RunFigures:
    """Return the figures of a run that took `time_s` with so many `fragments`."""
    shares = [share for made in commits for share in made.shares]
    called = [made for made in commits if made.shares]
    return RunFigures(
        commits=float(len(commits)),
        merged_tokens_s=sum(tokens for _, tokens in shares) / fragments / time_s,
        trained_tokens_s=trained.tokens / time_s,
        goodput=trained.goodput.share or 0.0,
        contributors=len(shares) / max(1, len(commits)),
        late_share=sum(age > 0 for age, _ in shares) / max(1, len(shares)),
        age_mean=fmean(age for age, _ in shares) if shares else 0.0,
        quorum_wait_s=fmean(made.quorum_wait_s for made in called) if called else 0.0,
        waited_s=fmean(made.waited_s for made in called) if called else 0.0,
    )


def misses(recording: RunFigures, simulated: RunFigures, interval_s: float) -> list[Miss]:
    """Return how far every figure is from the recording's.

    The share is of the recording's figure; of shares and ages the difference itself; of waits the difference over
    `interval_s`, the mean time between two versions of a fragment; a share of milliseconds means nothing.
    """
    found = []
    for each in fields(RunFigures):
        was, now = getattr(recording, each.name), getattr(simulated, each.name)
        beside = 1.0 if each.name in SHARES else interval_s if each.name in WAITS else max(abs(was), 1e-9)
        found.append(Miss(each.name, was, now, abs(now - was) / beside))
    return found


def interval_s(commits: Sequence[MadeCommit], time_s: float) -> float:
    """Return the mean time between two versions of a fragment; the whole time where none has two."""
    by_fragment = Counter(made.fragment for made in commits)
    return time_s * len(by_fragment) / max(1, len(commits)) if by_fragment else time_s


@dataclass(frozen=True, slots=True)
class StepStretch:
    """So many steps at such a mean time."""

    steps: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Life:
    """One incarnation: seconds after the recording's beginning, and what its first step took longer."""

    incarnation: int
    joined_s: float
    ended_s: float
    warm_s: float
    in_order: bool


@dataclass(frozen=True, slots=True)
class RecordedLink:
    """A learner's link, each way: seconds of delay, bytes a second, and whether the recording told them."""

    latency_s: float
    bytes_s: float
    measured: bool = True


@dataclass(frozen=True, slots=True)
class RecordedLearner:
    """One learner: its lives, its stretches, tokens of a step, its time present, its link, and what held its answers."""

    name: str
    lives: tuple[Life, ...]
    stretches: tuple[StepStretch, ...]
    sampled: bool
    step_tokens: int
    there: TimePresent
    link: RecordedLink
    held_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RecordedFragment:
    """One fragment: its elements, and the bytes of a contribution and of a version."""

    elements: int
    up_bytes: float
    down_bytes: float


@dataclass(frozen=True, slots=True)
class Recording:
    """Schedule for the simulator, and the run's own figures; `over` says whether the run had ended."""

    settings: ProtocolSettings
    learners: tuple[RecordedLearner, ...]
    fragments: dict[int, RecordedFragment]
    read_s: tuple[float, ...]
    commit_s: tuple[float, ...]
    time_s: float
    over: bool
    outcome: RunFigures
    interval_s: float

    @property
    def joining_bytes(self) -> float:
        """Return what a learner moves to join: every value once, whole."""
        return float(sum(Framing(each.elements, KEYFRAME).size_bytes for each in self.fragments.values()))


def fit_recording(history: History, settings: ProtocolSettings) -> Recording:
    """Return the schedule that a run's event log tells.

    Raises:
        SettingsError: the event log has too little of what a schedule needs.
    """
    rounds = list(history.rounds)
    if len(rounds) < ROUNDS_MIN or not history.joined:
        raise SettingsError(
            "the event log tells too little for a what-if",
            got=f"{len(rounds)} rounds, {len(history.joined)} joined learners",
            allowed=f"at least {ROUNDS_MIN} rounds and a learner",
            todo="let the run go on, or take another run",
        )
    from_s = min(each.at_s for each in history.joined)
    over = bool(history.closed) and {each.shard for each in history.tenures} <= history.closed
    until_s = max([rounds[-1].at_s, *(each.at_s for each in history.left if over)])
    joined = {each.who for each in history.joined}
    lives = {name: list(own.values()) for name, own in lives_of(history).items() if name in joined}
    learners = _fit_learners(history, lives, (from_s, until_s), settings)
    time_s = until_s - from_s
    commits = [commit_of(line) for line in rounds]
    return Recording(
        settings=settings,
        learners=learners,
        fragments=_fit_fragments(rounds, settings.fragments),
        read_s=tuple(share.read_s for _, share in history.contributions() if share.read_s is not None) or (0.0,),
        commit_s=tuple(line.round.queued_s + line.round.merge_s + line.round.commit_s for line in rounds),
        time_s=time_s,
        over=over,
        outcome=outcome(commits, _training_totals(lives, learners), time_s, settings.fragments),
        interval_s=interval_s(commits, time_s),
    )


def _fit_learners(
    history: History,
    lives: Mapping[str, Sequence[RecordedLife]],
    times_s: tuple[float, float],
    settings: ProtocolSettings,
) -> tuple[RecordedLearner, ...]:
    there = presences(history)
    fits = (
        _fit_learner(history, name, there[name], own, times_s, settings) for name, own in lives.items() if name in there
    )
    learners = tuple(each for each in fits if each is not None)
    if not learners:
        raise SettingsError(
            "no learner of this run noted how long its steps take",
            got="events of an earlier release",
            todo="make a new run with this Atoll",
        )
    return learners


def _fit_fragments(rounds: Sequence[RoundLine], fragments: int) -> dict[int, RecordedFragment]:
    own = {fragment: [line for line in rounds if line.round.fragment == fragment] for fragment in range(fragments)}
    return {fragment: _fit_fragment(lines or rounds) for fragment, lines in own.items()}


def commit_of(line: RoundLine) -> MadeCommit:
    """Return a round as one commit."""
    made = line.round
    shares = tuple((share.age, share.tokens) for share in made.contributors)
    return MadeCommit(made.fragment, made.quorum_wait_s, made.waited_s, shares)


def _fit_learner(
    history: History,
    name: str,
    there: TimePresent,
    lives: Sequence[RecordedLife],
    times_s: tuple[float, float],
    settings: ProtocolSettings,
) -> RecordedLearner | None:
    merged = [each for life in lives for each in life.merged]
    noted = [share.step_s for _, share in merged if share.step_s > 0.0]
    if not noted:
        return None
    stretches = [stretch for life in lives for stretch in _stretches(life)]
    sampled = len(stretches) >= 2
    if not sampled:
        stretches = [StepStretch(RECENT_STEPS, step_s) for step_s in noted]
    pace_s = sum(each.steps * each.step_s for each in stretches) / sum(each.steps for each in stretches)
    link, held_s = _fit_link(history, merged)
    tokens, steps = sum(share.tokens for _, share in merged), sum(share.steps for _, share in merged)
    return RecordedLearner(
        name=name,
        lives=tuple(
            _fit_life(life, life.joined, times_s, pace_s, 2.0 * settings.silence_s)
            for life in lives
            if life.joined is not None
        ),
        stretches=tuple(stretches),
        sampled=sampled,
        step_tokens=max(1, round(tokens / max(1, steps))),
        there=there,
        link=link,
        held_s=held_s,
    )


def _stretches(life: RecordedLife) -> Iterator[StepStretch]:
    """Yield the times between counts of steps, each as it was first seen, in which a life trained all the time.

    A count is seen up to a sample late, so a stretch has `STRETCH_STEPS` steps at least: that is not taken for uneven steps.
    """
    begun: Noted[SampleEvent] | None = None
    for one, other in itertools.pairwise(life.samples):
        if not one.fields.state == other.fields.state == "training":
            begun = None
            continue
        if other.fields.step <= one.fields.step:
            continue
        steps = 0 if begun is None else other.fields.step - begun.fields.step
        if begun is not None and steps >= STRETCH_STEPS and other.at_s > begun.at_s:
            yield StepStretch(steps, (other.at_s - begun.at_s) / steps)
        if begun is None or steps >= STRETCH_STEPS:
            begun = other


def _stepped(life: RecordedLife) -> list[Noted[SampleEvent]]:
    return [each for each in life.samples if each.fields.step > 0]


def _fit_life(
    life: RecordedLife, joined: Noted[JoinedEvent], times_s: tuple[float, float], pace_s: float, recent_s: float
) -> Life:
    """Return one life: when it ended, and whether in order; one heard within `recent_s` before the end was there until then."""
    from_s, until_s = times_s
    heard, left = _stepped(life), life.left
    warm_s = heard[0].at_s - joined.at_s - heard[0].fields.step * pace_s if heard else 0.0
    ended_s = max([joined.at_s] + [each.at_s for each in heard[-1:]] + [line.at_s for line, _ in life.merged[-1:]])
    training = [each for each in heard if each.fields.state == "training"]
    if left is not None:
        # It left when its last steps were done; the event is written when everything of it is durable.
        ended_s = left.at_s
        if training:
            rest = max(0, left.fields.steps - training[-1].fields.step)
            ended_s = min(ended_s, training[-1].at_s + rest * pace_s)
    in_order = left is not None or ended_s > until_s - recent_s
    if left is None and in_order:
        ended_s = until_s
    return Life(life.incarnation, joined.at_s - from_s, ended_s - from_s, max(0.0, warm_s), in_order)


def _fit_link(history: History, merged: list[tuple[RoundLine, Contributor]]) -> tuple[RecordedLink, tuple[float, ...]]:
    """Return a learner's link, and what each of its answers took beside two delays and its upload."""
    uploads = [
        (line, share)
        for line, share in merged
        if share.upload_s > share.full_s and share.bytes > 0 and not share.inline
    ]
    if not uploads:
        return RecordedLink(LATENCY_S_MIN, RATE_UNKNOWN, measured=False), (0.0,)
    answers = sorted(max(0.0, _answered_s(history, *each) - each[1].upload_s) for each in uploads if _answers(*each))
    latency_s = max(LATENCY_S_MIN, answers[int(QUICK_SHARE * len(answers))] / 2.0) if answers else LATENCY_S_MIN
    rates = []
    for _, share in uploads:
        upload_s = share.upload_s - share.full_s
        rates.append(share.bytes / max(upload_s - 2.0 * latency_s, LINE_SHARE_MIN * upload_s))
    held_s = tuple(max(0.0, each - 2.0 * latency_s) for each in answers) or (0.0,)
    return RecordedLink(latency_s, median(rates), measured=bool(answers)), held_s


def _answers(line: RoundLine, share: Contributor) -> bool:
    """Return whether a contribution answered the first call of a round, in time or late."""
    first = id_of("call", line.round.fragment, base_of(line, share), 1)
    return share.arrived_s is not None and share.cause_id == first


def _answered_s(history: History, line: RoundLine, share: Contributor) -> float:
    """Return the time from the call that a contribution answered until it arrived; 0 where the recording forgot that round."""
    called = history.find(line.round.fragment, base_of(line, share) + 1)
    if called is None or share.arrived_s is None:
        return 0.0
    return line.called_s + share.arrived_s - called.called_s


def _fit_fragment(rounds: Sequence[RoundLine]) -> RecordedFragment:
    sent = [share.bytes for line in rounds for share in line.round.contributors if share.bytes]
    return RecordedFragment(
        elements=int(median(line.round.parameters for line in rounds)),
        up_bytes=median(sent) if sent else 0.0,
        down_bytes=median(line.round.bytes_down for line in rounds),
    )


def _training_totals(
    lives: Mapping[str, Sequence[RecordedLife]], learners: tuple[RecordedLearner, ...]
) -> TrainingTotals:
    """Return what the learners did by their farewells; of one without, by its last sample or contributions."""
    tokens = sum(life.steps * learner.step_tokens for learner in learners for life in lives[learner.name])
    return TrainingTotals(tokens, summed(learner.there for learner in learners))
