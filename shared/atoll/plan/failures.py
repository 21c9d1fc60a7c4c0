"""Goodput under failures, as a closed form: how much of a machine's time is useful compute, in the long run.

A learner of n chips loses one of its slices every MTBI / n seconds, by a Poisson process of rate r = n / MTBI while it
runs. Every loss stops the whole learner for the time of a downscale; what fails meanwhile is absorbed by the same stop.
Slices that come back are taken in together, at most once per admission interval, and that stops the learner too:

    running = (1 - up / (admission + exp(-r admission) / r)) / (1 + r down)
    present = 1 / (1 + slice return / MTBI)                 chips that are not away, of all
    goodput = running x present

A rigid job restarts from a checkpoint at every loss: 1 / (1 + r (restart + replay)). Synchronous training is one learner
of all the chips, elastic or rigid. A learner that fails as a whole (one machine, a home) is away for the time of return;
its span that was not merged yet is lost, half an interval in the mean, and nobody else stops. Of a synchronous job that
is elastic, all stop as above and go on without it; one that is rigid waits until it is back.

The default constants are those of the simulated fleets, with the origin of each (`atoll.sim.fleet.parameters`); the paper does
not publish its own. `atoll sim goodput` plays the same mechanism event by event, and a test holds the two together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from atoll.errors import SettingsError
from atoll.sim.fleet.parameters import Fleet

HOUR_S = 3600.0
YEAR_S = 365.0 * 24.0 * HOUR_S
FLEET = Fleet()


@dataclass(frozen=True, slots=True)
class Failures:
    """What breaks and how long it takes, in seconds.

    Attributes:
        mtbi_s: mean time between interruptions of one chip.
        slice_chips: chips that are lost together.
        return_s: how long what was lost stays away.
        downscale_s: a learner's stop when it loses a slice.
        upscale_s: its stop when it takes slices in again.
        admission_s: shortest time between two such stops.
        restart_s: what a rigid job loses at each failure: restart and replay since its checkpoint.
        loss_per_hour: share of whole learners lost in an hour; above 0 it replaces the failures of chips.
    """

    mtbi_s: float = FLEET.mtbi_s
    slice_chips: int = FLEET.slice_chips
    return_s: float = FLEET.return_s
    downscale_s: float = FLEET.downscale_s
    upscale_s: float = FLEET.upscale_s
    admission_s: float = FLEET.admission_s
    restart_s: float = FLEET.restart_s
    loss_per_hour: float = 0.0

    def check(self) -> Failures:
        """Return self, or raise `SettingsError` for the first value that is out of range."""
        for name in ("return_s", "downscale_s", "upscale_s", "admission_s", "restart_s", "loss_per_hour"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise SettingsError(f"{name} is out of range", got=value, allowed="0 or more", todo=f"correct {name}")
        if not self.mtbi_s > 0.0:
            raise SettingsError(
                "the time between interruptions is no time",
                got=self.mtbi_s,
                allowed="above 0",
                todo="correct --mtbi-days",
            )
        if self.slice_chips < 1:
            raise SettingsError(
                "a slice without chips", got=self.slice_chips, allowed="1 or more", todo="correct --slice-chips"
            )
        return self


def running(failures: Failures, chips: int) -> float:
    """Return the share of time in which an elastic job of `chips` is not stopped."""
    return _running(failures, chips / failures.mtbi_s)


def _running(failures: Failures, rate: float) -> float:
    """Return the same for failures at `rate` per second: admissions follow each other by their interval, or later.

    Taking in slices cannot fill more than the whole of a time in which it is always wanted.
    """
    between_s = failures.admission_s + math.exp(-rate * failures.admission_s) / rate
    return max(0.0, 1.0 - failures.upscale_s / between_s) / (1.0 + rate * failures.downscale_s)


def present(failures: Failures) -> float:
    """Return the share of chips that are not away."""
    return 1.0 / (1.0 + failures.slice_chips * failures.return_s / failures.mtbi_s)


def elastic(failures: Failures, chips: int) -> float:
    """Return the goodput of one elastic job, or of each of several learners, of `chips` chips."""
    return running(failures, chips) * present(failures)


def rigid(failures: Failures, chips: int) -> float:
    """Return the goodput of one job of `chips` chips that restarts at every failure."""
    return 1.0 / (1.0 + chips / failures.mtbi_s * failures.restart_s)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Useful share of all machines' time: learners of Atoll, and the same machines in one synchronous job."""

    atoll: float
    synchronous_elastic: float
    synchronous_rigid: float


def goodput(failures: Failures, learners: int, chips: int, unmerged_s: float) -> Goodput:
    """Return the goodput of M = `learners` of `chips` each; a learner that dies loses `unmerged_s` seconds of its work."""
    if failures.loss_per_hour == 0.0:
        failures = replace(failures, slice_chips=min(failures.slice_chips, chips))
        together = learners * chips
        return Goodput(elastic(failures, chips), elastic(failures, together), rigid(failures, together))
    rate = failures.loss_per_hour / HOUR_S
    away = 1.0 / (1.0 + rate * failures.return_s)
    all_rate = rate * learners
    waits_s = failures.return_s + failures.restart_s
    return Goodput(
        1.0 / (1.0 + rate * (failures.return_s + unmerged_s)),
        away * _running(failures, all_rate),
        1.0 / (1.0 + all_rate * waits_s),
    )
