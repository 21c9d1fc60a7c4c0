r"""The pace of a run: how long steps take, how shards hear of it, when a fragment is called, how long its round may wait.

A shard knows of steps only from heartbeats. So a learner tells a figure that one odd step does not spoil (`StepTimes`), and
tells it soon (`Heartbeats`). A shard takes that of the last heartbeat, within what its own clock allows for the steps that
heartbeats count (`KnownLearner`). The step time of a fleet is the lower median over the learners that contribute: half of them
may claim that their steps take for ever, and a learner of whom nothing is merged sets nobody's pace. Silence counts only while
the shard itself hears its broker (`ConnectedTime`).

**The rhythm of a fragment** is one beat per H median steps, staggered over the fragments of a run: beats of one fragment are
an interval I apart, and those of P fragments I / P. A call rarely comes on its beat: a timer is late, a commit or an outage
took long. Such a call counts for the nearest beat,

.. math::

    beat = due + I \cdot \mathrm{round}\left(\frac{at - due}{I}\right)

and the next call is due one interval after that beat. If it were due one interval after the call itself, an event that moves
all fragments at once (an outage) would end the staggering for good.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from atoll.protocol.events import GraceWindow, LearnerBeat
from atoll.protocol.settings import ProtocolSettings

RECENT_STEPS = 16
ODD_TIMES = 3.0
NEWS_SHARE = 0.2
BEATS_PER_SILENCE = 5.0
PAUSE_S_MIN = 0.5
PATIENCE_STEPS = 10.0
SLOWER_MAX = 4.0
"""How many times slower or faster than the shard's clock shows a step time may be that a learner claims."""
SEEN_S = 20.0
SEEN_S_MIN = 2.0
PATIENCE_S_MAX = 120.0
"""However long its steps are, by its own word, a learner that is silent for so long is no longer waited for."""
LOOK_S = 0.25
LOOK_S_PER_LEARNER = 1e-3
EARLIER_SHARE = 0.25
RECALL_STEPS = 2.0
RECALL_S_MIN = 0.5
CONTRIBUTES_ROUNDS = 2
"""A learner contributes that is part of one of so many last versions of each fragment."""
CUT_OFF_S = 2.5
"""How long a shard may hear nothing of its broker, which it asks after every pause of half a second."""
FINISHING_S = 30.0
"""For how long rounds wait for the last pushes of a learner that trains no more, seconds: shorter than it waits for theirs."""
OVERDUE_S = 600.0
"""How long a learner may beat on without a push or a farewell when a run is over, and still be waited for."""

STEP_S_MIN = 1e-6
STEP_S_MAX = 3600.0
"""A step time out of these bounds is no training: one absurd heartbeat must neither stop a rhythm nor make a learner live
for ever, so it counts as the nearest bound."""


class StepTimes:
    """The step times of one life, as far as they are recent: their mean without the odd ones.

    The first step of a life compiles and is no sample. A median would do for a pace, but not for one call per H steps where
    some steps are regularly longer.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._mean_s = 0.0

    @property
    def mean_s(self) -> float:
        """Return the mean of the recent steps that took at most three times their median, 0 while there are none."""
        return self._mean_s

    def add(self, step_s: float) -> float:
        """Take in how long a step took, or nothing where that is not known (0), and return the new mean."""
        if step_s > 0.0:
            self._recent.append(step_s)
            # The lower of two middle ones: after a step that compiled and one that did not, the latter is true.
            median_s = sorted(self._recent)[(len(self._recent) - 1) // 2]
            usual_s = [each for each in self._recent if each <= ODD_TIMES * median_s]
            self._mean_s = math.fsum(usual_s) / len(usual_s)
        return self._mean_s


class Heartbeats:
    """The pauses between a learner's heartbeats, in a run whose learners may be silent for `silence_s`.

    A pause ends as soon as the step time is off by more than a fifth from the last one sent: a shard moves no call for less
    (`comes_earlier`). A heartbeat may be lost, so a learner repeats its news after 0.5, 1, 2, 4 ... seconds, until the pause
    is the usual one.
    """

    def __init__(self, silence_s: float) -> None:
        """Begin with the shortest pause: a life that begins is news."""
        self._usual_s = silence_s / BEATS_PER_SILENCE
        self._sent_s = 0.0
        self._pause_s = self.shortest_s

    @property
    def shortest_s(self) -> float:
        """Return the least time between two heartbeats."""
        return min(PAUSE_S_MIN, self._usual_s)

    def is_news(self, step_s: float) -> bool:
        """Return whether shards should not wait for the next heartbeat to hear of this step time."""
        return abs(step_s - self._sent_s) > NEWS_SHARE * self._sent_s

    def pause_after(self, step_s: float) -> float:
        """Note that a heartbeat with this step time was sent, and return how long the next one may wait."""
        again_s = self.shortest_s if self.is_news(step_s) else self._pause_s
        self._sent_s = step_s
        self._pause_s = min(2.0 * again_s, self._usual_s)
        return again_s


@dataclass(slots=True)
class ConnectedTime:
    """The time of a shard whose learners may be silent for `silence_s`, less that in which it was cut off from its broker.

    It is known late that a connection is lost: a peer that holds the socket open and says nothing is noticed after 15 s. So
    only signs of the broker prove a connection: whatever it delivered or answered. A gap between two signs beyond `CUT_OFF_S`
    was an absence; of a shorter one, half a silence counts at most, so that no gap alone makes a learner silent.
    """

    silence_s: float
    first_s: float = 0.0
    sign_s: float | None = None
    absent_s: float = 0.0

    def sign(self, at_s: float) -> None:
        """Note that something came from the broker."""
        if self.sign_s is None:
            self.first_s = self.sign_s = at_s
        gap_s = at_s - self.sign_s
        self.absent_s += gap_s if gap_s > CUT_OFF_S else max(0.0, gap_s - self.silence_s / 2.0)
        self.sign_s = max(self.sign_s, at_s)

    def at(self, at_s: float) -> float:
        """Return the connected time at a moment since the last sign."""
        return at_s - self.absent_s

    @property
    def now_s(self) -> float:
        """Return the connected time of the last sign: what came after that is not known to be connected."""
        return self.at(self.sign_s or 0.0)

    @property
    def passed_s(self) -> float:
        """Return the connected time since the first sign."""
        return self.now_s - self.first_s

    def is_cut_off(self, at_s: float) -> bool:
        """Return whether nothing came from the broker for so long that it cannot be reached."""
        return self.sign_s is not None and at_s - self.sign_s > CUT_OFF_S


def lower_median(values: Iterable[float]) -> float | None:
    """Return the middle value, of an even number the lower of both; None of none.

    The mean of both would be set by either: as many liars as honest learners would stop all rounds.
    """
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def plausible(step_s: float) -> float:
    """Return the step time that counts for one that a learner reported, seconds."""
    return min(max(step_s, STEP_S_MIN), STEP_S_MAX)


@dataclass(slots=True)
class KnownLearner:
    """A learner's newest incarnation: `training` now, or at least `present` (not left).

    `step_s` is the step time of its last heartbeat, a mean over many steps already (`StepTimes`), and `paced_s` that when it
    was news last. In connected time (`ConnectedTime`), `heard_s` is when it was heard, `pushed_s` when its last contribution
    was folded, and `stopped_s` when it was first heard to train no more; `commit` is the number of the shard's commit that
    held something of it last, `credit` what counted of that, of `step_tokens` a step. `since`, `mark` and `timed` are moments,
    with the steps by then, from which its pace is seen; it was not seen to take less than `least_s` a step. By its last
    heartbeat the shard had been cut off for `absent_s` in all.
    """

    incarnation: int
    heard_s: float
    pushed_s: float | None = None
    paced_s: float | None = None
    step_s: float | None = None
    commit: int | None = None
    credit: int = 0
    step_tokens: float = 0.0
    stopped_s: float | None = None
    training: bool = False
    present: bool = True
    since: tuple[float, int] | None = None
    mark: tuple[float, int] | None = None
    timed: tuple[float, int] | None = None
    least_s: float = 0.0
    absent_s: float = 0.0

    def take(self, beat: LearnerBeat, heard_s: float) -> bool:
        """Take a heartbeat, heard at `heard_s` of the connected time; return whether it is news to rounds or to the pace."""
        was, paced_s = self.training, self.paced_s
        training = beat.training and self.present  # a heartbeat may arrive behind its learner's farewell
        self.heard_s, self.training = heard_s, training
        self.stopped_s = None if training else heard_s if was else self.stopped_s
        former_s, self.absent_s = self.absent_s, beat.at_s - heard_s
        if self.absent_s - former_s > CUT_OFF_S:  # whether it trained on meanwhile or waited is not known
            self.since = self.mark = self.timed = None
        most_s = self._slowest_s(beat.at_s, beat.steps)
        if training and beat.step_s > 0.0:
            self.step_s = plausible(min(max(beat.step_s, self._fastest_s(beat.at_s, beat.steps)), most_s))
        near = paced_s is not None and self.step_s is not None and abs(self.step_s - paced_s) <= NEWS_SHARE * paced_s
        if was is training and (near or self.step_s is None):
            return False
        self.paced_s = self.step_s
        return True

    def _slowest_s(self, at_s: float, steps: int) -> float:
        """Return the longest step time that the clock allows for: `SLOWER_MAX` times that of the steps heard of lately.

        A learner that says that its steps take an hour, and was never seen to need so long, must not stop the others' rounds.
        """
        self.mark = self.mark or (at_s, steps)
        self.since = self.since or self.mark
        if at_s - self.mark[0] > SEEN_S:
            self.since, self.mark = self.mark, (at_s, steps)
        return SLOWER_MAX * max(SEEN_S_MIN, at_s - self.since[0]) / max(1, steps - self.since[1])

    def _fastest_s(self, at_s: float, steps: int) -> float:
        """Return the shortest step time that the clock allows for: a part of that of the last steps that were heard of.

        A learner that says that its steps take no time, and was never seen to step like that, must not hurry the others'
        rounds. It is measured anew every two seconds: a step that compiles, or a pause, says nothing of the steps after it.
        """
        self.timed = self.timed or (at_s, steps)
        between_s, taken = at_s - self.timed[0], steps - self.timed[1]
        if between_s >= (SEEN_S_MIN if taken > 0 else SEEN_S):
            self.least_s, self.timed = between_s / (SLOWER_MAX * max(1, taken)), (at_s, steps)
        return self.least_s

    def is_overdue(self, now_s: float, over_s: float | None) -> bool:
        """Return whether it has neither pushed nor left for `OVERDUE_S`, in a run that is over since `over_s`, if it is."""
        if over_s is None:
            return False
        return now_s - max(over_s, over_s if self.pushed_s is None else self.pushed_s) > OVERDUE_S

    def is_finishing(self, now_s: float) -> bool:
        """Return whether its last pushes may be on their way: it trains no more for less than `FINISHING_S`, or not yet."""
        return self.stopped_s is None or now_s - self.stopped_s <= FINISHING_S

    def is_heard(self, now_s: float, silence_s: float) -> bool:
        """Return whether it was heard recently enough; it may be silent for ten of its own steps, up to a bound."""
        own_s = min(PATIENCE_STEPS * (self.step_s or 0.0), PATIENCE_S_MAX)
        return now_s - self.heard_s <= max(silence_s, own_s)


def newest_of(known: dict[str, KnownLearner], learner: str, incarnation: int, heard_s: float) -> KnownLearner:
    """Return what is known of a learner's newest incarnation, beginning with this one if it is newer or the first.

    A farewell may be the first thing that is heard of it, with heartbeats still on their way.
    """
    view = known.get(learner)
    if view is None or incarnation > view.incarnation:
        view = known[learner] = KnownLearner(incarnation, heard_s)
    return view


@dataclass(slots=True)
class MovingAverage:
    """`value <- (1 - decay) * value + decay * sample`; the first sample is taken whole. `value` is None before it."""

    decay: float
    value: float | None = None

    def add(self, sample: float) -> float:
        """Fold in `sample` and return the new value."""
        self.value = sample if self.value is None else (1.0 - self.decay) * self.value + self.decay * sample
        return self.value


def grace_window(
    settings: ProtocolSettings, step_s: float, quorum_s: float | None, sync_s: float | None
) -> GraceWindow:
    r"""Return how long a round may wait after its quorum, by Eq. 3 of arXiv 2604.21428, with its terms.

    Let xi_step be the step time of the live learners, xi_quorum the time from call to quorum and xi_sync the time from the end
    of collection to a visible head, each an exponential moving average. A round overlaps with tau inner steps, so there is
    left

    .. math::

        \xi_{slack} = \tau \xi_{step} - (\xi_{quorum} + \xi_{sync}), \qquad
        \xi_{grace} = \mathrm{clamp}(\gamma \xi_{slack},\ 0,\ c\,\xi_{step})

    with gamma < 1 and a cap of c steps. The average of xi_quorum holds the present round already; xi_sync is zero until a
    first version is visible. xi_step is a *median*, so one slow island cannot lengthen everybody's window.
    """
    quorum_s, sync_s = quorum_s or 0.0, sync_s or 0.0
    overlap_s = settings.overlap_steps * step_s
    slack_s = overlap_s - quorum_s - sync_s
    cap_s = settings.grace_cap_steps * step_s
    wanted_s = settings.grace_gamma * slack_s
    bound: Literal["none", "slack", "cap"] = "slack"
    if wanted_s <= 0.0:
        wanted_s, bound = 0.0, "none"
    elif wanted_s >= cap_s:
        wanted_s, bound = cap_s, "cap"
    return GraceWindow(wanted_s, bound, step_s, quorum_s, sync_s, overlap_s, slack_s, cap_s)


def look_is_due(at_s: float, looked_s: float | None, learners: int) -> bool:
    """Return whether a heartbeat without news is a reason to look at all learners again, last done at `looked_s`.

    A look costs a microsecond or two per learner. So it is due the more rarely the more there are, and costs the same.
    """
    return looked_s is None or at_s - looked_s >= max(LOOK_S, LOOK_S_PER_LEARNER * learners)


def due_of_call_s(at_s: float, due_s: float | None, interval_s: float) -> float:
    """Return when a call at `at_s` was due: at the beat that it counts for, the nearest. The first call begins the rhythm."""
    if due_s is None or interval_s <= 0.0:
        return at_s
    return due_s + interval_s * round((at_s - due_s) / interval_s)


def comes_earlier(due_s: float | None, wanted_s: float, interval_s: float) -> bool:
    """Return whether to move a beat up: there is none yet, or steps have become much shorter."""
    return due_s is None or due_s - wanted_s > EARLIER_SHARE * interval_s


def recall_s(at_s: float, step_s: float) -> float:
    """Return when a round that was called at `at_s` and is still below its quorum is called again."""
    return at_s + max(RECALL_S_MIN, RECALL_STEPS * step_s)
