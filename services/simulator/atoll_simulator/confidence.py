"""Means over seeds and how far to trust them: the standard error and the 95 % interval of Student's t.

With n values x of one seed each, mean m and sample deviation s, the interval is m ± t s / sqrt(n), t the 97.5 % point of
Student's distribution with n - 1 degrees of freedom: 12.7 for two seeds, 4.30 for three. Two rows are compared by their
differences seed by seed, which share data and initial values.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean over `count` values, its standard error, and half of its 95 % interval; infinite where one value is all."""

    mean: float
    error: float
    half: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Spread(mean, math.inf, math.inf, 1)
    error = statistics.stdev(values) / math.sqrt(count)
    return Spread(mean, error, quantile(count - 1) * error, count)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the spread of the differences ours - theirs, seed by seed."""
    return spread([a - b for a, b in zip(ours, theirs, strict=True)])


@functools.cache
def quantile(freedom: int) -> float:
    """Return the two-sided 95 % point of Student's t with `freedom` degrees, by bisection."""
    low, high = 0.0, 1000.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle, freedom) < LEVEL else (low, middle)
    return (low + high) / 2


def inside(t: float, freedom: int) -> float:
    """Return P(|T| < t) of Student's t with an integer number of degrees (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cos2 = math.cos(angle) ** 2
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    if odd and freedom == 1:
        total = 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cos2 * (k - 1) / k
        total += term
    return 2.0 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
