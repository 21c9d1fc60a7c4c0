"""How long a learner's steps take, and when its shards have to hear of it before the next heartbeat is due.

A shard calls a fragment once per H steps of the fleet, and it knows of steps only from heartbeats. While it knows no step time,
it calls nothing; while it believes a wrong one, it calls at a wrong pace. So a learner tells a figure that one odd step does
not spoil, and it tells it soon:

* `StepTimes` is the mean of the recent steps without the odd ones. The first step of a life compiles and is no sample. A median
  would do for a pace, but not for one call per H steps where some steps are regularly longer.
* `Heartbeats` ends the pause between two heartbeats as soon as the figure is off by more than a fifth from the last one told: a
  shard moves no call for less (`comes_earlier`). A heartbeat may be lost, so a learner repeats its news after 0.5, 1, 2, 4 ...
  seconds, until the pause is the usual one.

A shard takes the figure of the last heartbeat as it is. An average over heartbeats would correct an error the more slowly the
fewer heartbeats there are.
"""

from __future__ import annotations

import math
from collections import deque

RECENT_STEPS = 16
ODD_TIMES = 3.0
NEWS_SHARE = 0.2
BEATS_PER_SILENCE = 5.0
PAUSE_S_MIN = 0.5


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
