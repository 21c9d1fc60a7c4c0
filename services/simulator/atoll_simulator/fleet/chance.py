r"""Virtual time and chance for fleets: a queue of calls, random streams, return times, and the slowest of many slices.

**Time**: calls ordered by when they are due, and among equals by when they were asked for. An exception of a call ends the run
and reaches the caller: the run does not survive a broken safety property.

**Streams** are named by seed and purpose. One more draw of one kind leaves all others as they were: the same seed has the same
failures with and without the protocol beside them. Python seeds a generator with a text by its SHA-512, so a name means the
same in every process.

**Exponentiated Weibull**, with shape k, exponent a and scale s:

.. math::

    F(x) = (1 - e^{-(x/s)^k})^a, \qquad x = s\,(-\ln(1 - u^{1/a}))^{1/k}

**The slowest of n.** A synchronous learner steps as slowly as its slowest slice. The largest of n independent standard normals
has the distribution function Phi(z)^n, so one uniform number gives a sample, Phi^-1(u^(1/n)), and one integral its mean.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import lru_cache
from heapq import heappop, heappush
from statistics import NormalDist
from typing import Any

PARTS = 4096
_NORMAL = NormalDist()


class Engine:
    """The clock of the simulation, `now_s` in seconds since the world began; no simulated process can see it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._order = 0
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def after(self, wait_s: float, call: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401  (passed on)
        """Make `call(*arguments)` when `wait_s` (at least 0) have passed."""
        self._order += 1
        heappush(self._due, (self.now_s + max(0.0, wait_s), self._order, call, arguments))

    def run(self, until_s: float, done: Callable[[], bool] | None = None) -> bool:
        """Make the due calls until `until_s`, or until `done` returns true after a call; return its last result."""
        due = self._due
        while due and due[0][0] <= until_s:
            self.now_s, _, call, arguments = heappop(due)
            self.events += 1
            call(*arguments)
            if done is not None and done():
                return True
        self.now_s = max(self.now_s, until_s)
        return False


def stream(seed: int, *purpose: object) -> random.Random:
    """Return the generator of one purpose."""
    return random.Random("/".join(map(str, (seed, *purpose))))  # noqa: S311  (chance, not secrets)


class ReturnTimes:
    """Return times in seconds with mean `mean_s`: exponentiated Weibull of `shape` k and `exponent` a."""

    def __init__(self, mean_s: float, shape: float, exponent: float, dice: random.Random) -> None:
        self._shape = 1.0 / shape
        self._exponent = 1.0 / exponent
        self._dice = dice
        self._scale = mean_s / _weibull_mean(shape, exponent)

    def draw(self) -> float:
        """Return the time for which the next failed chip stays away."""
        return self._scale * _quantile(self._dice.random(), self._shape, self._exponent)


def _quantile(u: float, one_by_k: float, one_by_a: float) -> float:
    """Return the quantile of `u` for scale 1; finite for every u in [0, 1)."""
    rest = -math.expm1(one_by_a * math.log(u)) if u > 0.0 else 1.0
    return float((-math.log(max(rest, 5e-324))) ** one_by_k)


@lru_cache(maxsize=64)
def _weibull_mean(shape: float, exponent: float) -> float:
    """Return the mean for scale 1: the integral of the quantile by the midpoint rule, refined towards 1.

    The substitution u = 1 - v^4 puts the points where the tail is.
    """
    total = 0.0
    for i in range(PARTS):
        v = (i + 0.5) / PARTS
        total += 4.0 * v**3 * _quantile(1.0 - v**4, 1.0 / shape, 1.0 / exponent)
    return total / PARTS


def slowest(slices: int, u: float) -> float:
    """Return the largest of `slices` standard normals at the share `u`, 0 < u < 1, of its distribution."""
    if slices <= 0:
        return 0.0
    # Use the upper tail: u^(1/n) rounds to 1 when n is large, 1 - u^(1/n) does not.
    tail = -math.expm1(math.log(u) / slices)
    return -_NORMAL.inv_cdf(min(max(tail, 1e-300), 1.0 - 1e-16))


@lru_cache(maxsize=256)
def slowest_mean(slices: int) -> float:
    """Return the mean of the largest of `slices` standard normals."""
    return sum(slowest(slices, (i + 0.5) / PARTS) for i in range(PARTS)) / PARTS


def speeds(learners: int, spread: float, dice: random.Random) -> list[float]:
    """Return the step time of each learner over the nominal one: normal with `spread`, kept within a factor of 3.

    Their mean is 1 in expectation; one learner alone is the reference and has 1.
    """
    if learners == 1:
        return [1.0]
    return [min(3.0, max(1.0 / 3.0, dice.gauss(1.0, spread))) for _ in range(learners)]
