"""When an evaluator measures: so often, with so much of a core, and not where the end of the run would overtake it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MeasuringPace:
    """How often to measure: with `every_s` seconds between two, and with at most `cores_max` of a core in the mean."""

    every_s: float
    cores_max: float = math.inf

    def pause_s(self, spent_s: float) -> float:
        """Return how long to pause after a measurement that took so much processor time."""
        return max(self.every_s, spent_s / self.cores_max)


@dataclass(frozen=True, slots=True)
class Moment:
    """How many tokens the run had when a measurement began, when that was, and how long it took, in seconds."""

    tokens: int = 0
    at_s: float = 0.0
    took_s: float = 0.0


def ends_before(target: int, former: Moment, now: Moment) -> bool:
    """Return whether the run, at its pace since `former`, reaches its target before another measurement would be done.

    Then only the last one is of use, and it would have to wait for this one: a second or two in which all are done but us.
    """
    trained = now.tokens - former.tokens
    if target <= 0 or trained <= 0 or former.took_s <= 0.0:
        return False
    return (target - now.tokens) * (now.at_s - former.at_s) / trained < former.took_s
