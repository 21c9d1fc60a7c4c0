r"""The pace of a run: how long steps take, how its shards hear of it, and when a fragment is called.

A shard calls a fragment once per H steps of the fleet, and it knows of steps only from heartbeats. While it knows no step time,
it calls nothing; while it believes a wrong one, it calls at a wrong pace. So a learner tells a figure that one odd step does
not spoil, and it tells it soon:

* `StepTimes` is the mean of the recent steps without the odd ones. The first step of a life compiles and is no sample. A median
  would do for a pace, but not for one call per H steps where some steps are regularly longer.
* `Heartbeats` ends the pause between two heartbeats as soon as the figure is off by more than a fifth from the last one told: a
  shard moves no call for less (`comes_earlier`). A heartbeat may be lost, so a learner repeats its news after 0.5, 1, 2, 4 ...
  seconds, until the pause is the usual one.
* `KnownLearner` is what a shard remembers. It takes the figure of the last heartbeat as it is: an average over heartbeats would
  correct an error the more slowly the fewer heartbeats there are.

**The rhythm of a fragment** is one beat per H median steps, staggered over the fragments of a run: beats of one fragment are
an interval I apart, and those of P fragments I / P. A call rarely comes on its beat: a timer is late, a commit or an outage
took long, a learner's farewell opens a round before its time. Such a call counts for the nearest beat,

.. math::

    beat = due + I \cdot \mathrm{round}\left(\frac{at - due}{I}\right)

and the next call is due one interval after that beat, which is half an interval to one and a half after the call. If it
were due one interval after the call itself, an event that moves all fragments at once (a leaver, an outage) would end the
staggering for good: all rounds of the run would coincide from then on.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

RECENT_STEPS = 16
ODD_TIMES = 3.0
NEWS_SHARE = 0.2
BEATS_PER_SILENCE = 5.0
PAUSE_S_MIN = 0.5
PATIENCE_STEPS = 10.0
SLOWER_MAX = 4.0
SEEN_S = 20.0
SEEN_S_MIN = 2.0
PATIENCE_S_MAX = 120.0
"""However long its steps are, by its own word, a learner that is silent for so long is no longer waited for."""
LOOK_S = 0.25
LOOK_S_PER_LEARNER = 1e-3
EARLIER_SHARE = 0.25
RECALL_STEPS = 2.0
RECALL_S_MIN = 0.5
OVERDUE_S = 600.0
"""How long a learner may beat on without a push or a farewell when a run is over, and still be waited for."""

STEP_S_MIN = 1e-6
STEP_S_MAX = 3600.0
"""A step time out of these bounds is no training: one absurd heartbeat must neither stop a rhythm nor make a learner live
for ever, so it counts as the nearest bound."""


class StepTimes:
    """The step times of one life, as far as they are recent."""

    def __init__(self) -> None:
        """Know none."""
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
    """The pauses between a learner's heartbeats, in a run whose learners may be silent for `silence_s`."""

    def __init__(self, silence_s: float) -> None:
        """Begin with the shortest pause: a life that begins is news."""
        self._usual_s = silence_s / BEATS_PER_SILENCE
        self._told_s = 0.0
        self._pause_s = self.shortest_s

    @property
    def shortest_s(self) -> float:
        """Return the least time between two heartbeats."""
        return min(PAUSE_S_MIN, self._usual_s)

    def is_news(self, step_s: float) -> bool:
        """Return whether shards should not wait for the next heartbeat to hear of this step time."""
        return abs(step_s - self._told_s) > NEWS_SHARE * self._told_s

    def told(self, step_s: float) -> float:
        """Note that a heartbeat has told of this step time, and return how long the next one may wait."""
        again_s = self.shortest_s if self.is_news(step_s) else self._pause_s
        self._told_s = step_s
        self._pause_s = min(2.0 * again_s, self._usual_s)
        return again_s


def plausible(step_s: float) -> float:
    """Return the step time that counts for one that a learner reported, seconds."""
    return min(max(step_s, STEP_S_MIN), STEP_S_MAX)


@dataclass(slots=True)
class KnownLearner:
    """A learner's newest incarnation: `training` now, or at least `present` (not left).

    `step_s` is the step time of its last heartbeat, which is a mean over many steps already (`StepTimes`). `pushed_s` is when
    its last contribution was folded, `paced_s` its step time when that was news last. `since` and `mark` are moments, with the
    steps by then, from which its pace is seen.
    """

    incarnation: int
    heard_s: float
    pushed_s: float | None = None
    paced_s: float | None = None
    step_s: float | None = None
    training: bool = False
    present: bool = True
    since: tuple[float, int] | None = None
    mark: tuple[float, int] | None = None

    def take(self, at_s: float, training: bool, step_s: float, steps: int) -> bool:  # noqa: FBT001  (as a heartbeat says it)
        """Take a heartbeat; return whether it is news to rounds or to the pace: whether it trains, and how fast."""
        was, paced_s = self.training, self.paced_s
        training = training and self.present  # a heartbeat may arrive behind its learner's farewell
        self.heard_s, self.training = at_s, training
        most_s = self._slowest_s(at_s, steps)
        if training and step_s > 0.0:
            self.step_s = plausible(min(step_s, most_s))
        near = paced_s is not None and self.step_s is not None and abs(self.step_s - paced_s) <= NEWS_SHARE * paced_s
        if was is training and (near or self.step_s is None):
            return False
        self.paced_s = self.step_s
        return True

    def _slowest_s(self, at_s: float, steps: int) -> float:
        """Return the longest step time that the clock allows for: `SLOWER_MAX` times that of the steps heard of lately.

        Who says that its steps take an hour, and was never seen to need so long, must not stop the others' rounds.
        """
        self.mark = self.mark or (at_s, steps)
        self.since = self.since or self.mark
        if at_s - self.mark[0] > SEEN_S:
            self.since, self.mark = self.mark, (at_s, steps)
        return SLOWER_MAX * max(SEEN_S_MIN, at_s - self.since[0]) / max(1, steps - self.since[1])

    def overdue(self, at_s: float, over_s: float | None) -> bool:
        """Return whether it has neither pushed nor left for `OVERDUE_S`, in a run that is over since `over_s`, if it is."""
        if over_s is None:
            return False
        return at_s - max(over_s, over_s if self.pushed_s is None else self.pushed_s) > OVERDUE_S

    def heard(self, at_s: float, silence_s: float) -> bool:
        """Return whether it was heard recently enough; it may be silent for ten of its own steps, up to a bound."""
        own_s = min(PATIENCE_STEPS * (self.step_s or 0.0), PATIENCE_S_MAX)
        return at_s - self.heard_s <= max(silence_s, own_s)


def newest_of(known: dict[str, KnownLearner], learner: str, incarnation: int, at_s: float) -> KnownLearner:
    """Return what is known of a learner's newest incarnation, beginning with this one if it is newer or the first.

    A farewell may be the first thing that is heard of it, with heartbeats still on their way.
    """
    view = known.get(learner)
    if view is None or incarnation > view.incarnation:
        view = known[learner] = KnownLearner(incarnation, at_s)
    return view


def look_is_due(at_s: float, looked_s: float | None, learners: int) -> bool:
    """Return whether a heartbeat without news is a reason to look at all learners again, last done at `looked_s`.

    A look costs a microsecond or two per learner. So it is due the more rarely the more there are, and costs the same.
    """
    return looked_s is None or at_s - looked_s >= max(LOOK_S, LOOK_S_PER_LEARNER * learners)


def due_of_call_s(at_s: float, due_s: float | None, interval_s: float, *, between: bool = False) -> float:
    """Return when a call at `at_s` was due: at the beat that it counts for, the nearest. The first call begins the rhythm.

    A call `between` beats, for the last push of a learner that leaves, counts for the one before it, unless the next is near:
    a leaving learner has all fragments called at once, and else none would be called for most of an interval after that.
    """
    if due_s is None or interval_s <= 0.0:
        return at_s
    beats = (at_s - due_s) / interval_s
    return due_s + interval_s * (math.floor(beats + EARLIER_SHARE) if between else round(beats))


def comes_earlier(due_s: float | None, wanted_s: float, interval_s: float) -> bool:
    """Return whether to move a beat up: there is none yet, or steps have become much shorter."""
    return due_s is None or due_s - wanted_s > EARLIER_SHARE * interval_s


def recall_s(at_s: float, step_s: float) -> float:
    """Return when a round that was called at `at_s` and is still below its quorum is called again."""
    return at_s + max(RECALL_S_MIN, RECALL_STEPS * step_s)
