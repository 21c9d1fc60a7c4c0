"""Goodput under failures, as a closed form: the share of a machine's time that is useful compute, in the long run.

Of n chips those that are not away fail. A running learner loses one of its slices by a Poisson process of rate r, and every
loss stops the whole learner for a downscale; the same stop absorbs failures meanwhile. Returned slices are taken in together by
another stop. Two of those are at least a = max(admission, upscale) apart:

    present = 1 / (1 + slice return / MTBI)                 chips that are not away, of all
    r       = present n / MTBI
    stop    = (exp(s r downscale) - 1) / (s r)             downscale, where no failure during it begins it anew (s = 0)
    running = (1 - upscale / (a + exp(-r a) / r)) (1 + r notice) / (1 + r (notice + stop))
    goodput = running x present

A rigid job restarts at every loss from its last kept progress, kept every c seconds: of the time 1/r between losses it keeps
c / (exp(r c) - 1), and the notice, in 1/r + notice + restart (prolonged like a downscale). Synchronous training is one learner
of all chips, elastic or rigid; a rigid one has its spares of the same machines (`spares`).

If a whole learner fails, it is away for the time of return and loses half its local interval in the mean; no other learner
stops. An elastic synchronous job stops as above and goes on without it; a rigid one runs while all are there: (share of time
that one is there)^M, less a restart for each loss. Default constants are those of the simulated fleets, which play the same
mechanism event by event; a test compares the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from atoll.base.wording import DAY_S, check_within
from atoll_simulator.fleet.parameters import FleetParameters

HOUR_S = 3600.0
YEAR_S = 365.0 * 24.0 * HOUR_S
LOSS_PER_HOUR_MAX = 60.0
LONGEST = 600.0
"""Failures in a stop beyond which its length counts as infinite: its exponential must remain a number."""
FLEET = FleetParameters()
FEW = 8
DEVIATIONS = 6
"""Spares are looked for up to so many standard deviations above the mean of what is away, by quarters of one."""
POISSON_TERMS_MAX = 1000
POISSON_MEAN_MAX = 500.0
"""Above it the chance of few failures is the normal law's, within a hundredth of the sum's."""


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of machines and how long each takes, in seconds; fields of `FleetParameters` mean the same here.

    `mtbi_s` is the mean time between interruptions of one chip. `loss_per_hour` is the share of whole learners that is lost
    in an hour; above 0 it replaces the failures of chips.
    """

    mtbi_s: float = FLEET.mtbi_s
    slice_chips: int = FLEET.slice_chips
    return_s: float = FLEET.return_s
    downscale_s: float = FLEET.downscale_s
    upscale_s: float = FLEET.upscale_s
    admission_s: float = FLEET.admission_s
    restart_s: float = FLEET.restart_s
    checkpoint_s: float = FLEET.checkpoint_s
    notice_s: float = FLEET.notice_s
    stall_again: float = FLEET.stall_again
    loss_per_hour: float = 0.0

    def check(self) -> Failures:
        """Return self, or raise `SettingsError` for the first value that a simulated fleet would also refuse."""
        for each in fields(FleetParameters):
            name, got = each.name, self.mtbi_s / DAY_S if each.name == "mtbi_days" else getattr(self, each.name, None)
            if got is not None:
                check_within("--" + name.replace("_", "-"), got, each.metadata["low"], each.metadata["high"])
        check_within("--loss-per-hour", self.loss_per_hour, 0.0, LOSS_PER_HOUR_MAX)
        return self


def site_mtbf_s(failures: Failures, chips: int) -> float:
    """Return the mean seconds between two failures of a site of `chips` chips, or between two losses of it as a whole."""
    return HOUR_S / failures.loss_per_hour if failures.loss_per_hour else failures.mtbi_s / chips


def running(failures: Failures, chips: int) -> float:
    """Return the share of time in which an elastic job of `chips` is not stopped."""
    return _running_share(failures, present(failures) * chips / failures.mtbi_s)


def _running_share(failures: Failures, rate: float) -> float:
    least_s = max(failures.admission_s, failures.upscale_s)
    between_s = least_s + math.exp(-rate * least_s) / rate
    noticed = rate * failures.notice_s
    stopped = noticed + rate * _mean_stop_s(failures.downscale_s, rate * failures.stall_again)
    return (1.0 - failures.upscale_s / between_s) * (1.0 + noticed) / (1.0 + stopped)


def _mean_stop_s(stop_s: float, rate: float) -> float:
    """Return the mean length of a stop of `stop_s` when failures at `rate` per second begin it anew."""
    again = rate * stop_s
    return math.expm1(min(again, LONGEST)) / rate if again else stop_s


def stops(failures: Failures, chips: int) -> tuple[float, float]:
    """Return the share of time in which a learner of `chips` stands still, and the seconds of each stop."""
    if failures.loss_per_hour:
        return 1.0 - _learner_presence(failures), failures.return_s
    return 1.0 - running(_limit_slice(failures, chips), chips), max(failures.downscale_s, failures.upscale_s)


def _learner_presence(failures: Failures) -> float:
    return 1.0 / (1.0 + failures.loss_per_hour / HOUR_S * failures.return_s)


def _limit_slice(failures: Failures, chips: int) -> Failures:
    return replace(failures, slice_chips=min(failures.slice_chips, chips))


def present(failures: Failures) -> float:
    """Return the share of chips that are not away."""
    return 1.0 / (1.0 + failures.slice_chips * failures.return_s / failures.mtbi_s)


def elastic(failures: Failures, chips: int) -> float:
    """Return the goodput of one elastic job, or of each of several learners, of `chips` chips."""
    return running(failures, chips) * present(failures)


def rigid(failures: Failures, chips: int) -> float:
    """Return the goodput of one job of `chips` chips that restarts at every failure; its spares are not counted."""
    return _rigid_goodput(failures, chips / failures.mtbi_s)


def _rigid_goodput(failures: Failures, rate: float) -> float:
    kept = rate * failures.checkpoint_s
    share = kept * math.exp(-kept) / -math.expm1(-kept) if kept else 1.0
    noticed = rate * failures.notice_s
    stopped = noticed + rate * _mean_stop_s(failures.restart_s, rate * failures.stall_again)
    return (share + noticed) / (1.0 + stopped)


@dataclass(frozen=True, slots=True)
class Spares:
    """Spares of a rigid job: so many slices of all, and the share of all machines' time that is left to train."""

    slices: int
    of: int
    share: float


def spares(failures: Failures, learners: int, chips: int) -> Spares:
    """Return the spares with which one rigid job on the machines of `learners` of `chips` chips trains most of the time.

    Of S slices s do not train, and the job waits while more than s are away (Poisson): a small fleet rather waits for repairs.
    """
    failures, chips = _limit_slice(failures, chips), learners * chips
    of = max(1, chips // failures.slice_chips)
    away = _mean_away(failures, of * failures.slice_chips)
    spread = math.sqrt(away)
    tried = {min(of - 1, math.ceil(away + width / 4.0 * spread)) for width in range(4 * DEVIATIONS)} | {
        *range(min(of, FEW))
    }
    return max((_weigh_spares(failures, slices, of) for slices in sorted(tried)), key=lambda found: found.share)


def _weigh_spares(failures: Failures, slices: int, of: int) -> Spares:
    """Return the share of the fleet that trains with so many spares: those that work, while no more than those are away."""
    away = _mean_away(failures, (of - slices) * failures.slice_chips)
    return Spares(slices, of, (of - slices) / of * _poisson_cdf(slices, away))


def _mean_away(failures: Failures, chips: int) -> float:
    return chips * failures.return_s / failures.mtbi_s


def _poisson_cdf(count: int, mean: float) -> float:
    """Return the chance that a Poisson number of this mean is at most `count`; by the normal law for large means."""
    if mean > POISSON_MEAN_MAX:
        return 0.5 * math.erfc((mean - count - 0.5) / math.sqrt(2.0 * mean))
    term = total = math.exp(-mean)
    for each in range(1, min(count, POISSON_TERMS_MAX) + 1):
        term *= mean / each
        total += term
    return min(1.0, total)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Useful share of all machines' time: learners of Atoll, and the same machines in one synchronous job, spares counted."""

    atoll: float
    synchronous_elastic: float
    synchronous_rigid: float


def goodput(failures: Failures, learners: int, chips: int, unmerged_s: float) -> Goodput:
    """Return the goodput of M = `learners` of `chips` each; a learner that dies loses `unmerged_s` seconds of its work."""
    if failures.loss_per_hour == 0.0:
        failures = _limit_slice(failures, chips)
        together = learners * chips
        held = spares(failures, learners, chips)
        working = max(1, together - held.slices * failures.slice_chips)
        return Goodput(elastic(failures, chips), elastic(failures, together), held.share * rigid(failures, working))
    rate = failures.loss_per_hour / HOUR_S
    there = _learner_presence(failures)
    return Goodput(
        1.0 / (1.0 + rate * (failures.return_s + unmerged_s)),
        there * _running_share(failures, there * rate * learners),
        there**learners * _rigid_goodput(failures, rate * learners),
    )
