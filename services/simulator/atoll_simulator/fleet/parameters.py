"""The parameters of a simulated fleet: every number once, with its range, its unit and its origin.

The command line, the checks and the table of docs/explanation/goodput.md are made from the fields below, so a parameter
cannot be documented in one place and missing in another. `origin` names the source of each value:

    paper    a number of arXiv 2604.21428, with the confidence mark of our reading of it ([S2]: two independent readers)
    fitted   chosen so that the four cells of one learner come out (benchmarks/fleet/goodput_fit.py); no other cell was used
    ours     unknown in the paper, hardly identifiable from its figures, and set to something plausible before the fit
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from atoll.base.errors import SettingsError
from atoll.base.wording import DAY_S


def knob(default: float, help: str, origin: str, low: float, high: float) -> Any:  # noqa: A002, ANN401  (a field)
    """Return a field with its default, what it means, where its default comes from, and its range."""
    return field(default=default, metadata={"help": help, "origin": origin, "low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetParameters:
    """Chips that fail and return, in slices, in learners that stall for it."""

    mtbi_days: float = knob(
        365.0, "mean time between interruptions of one chip, days", "paper [S2]: one year", 1e-3, 1e6
    )
    slice_chips: int = knob(
        64, "chips per slice; a failure takes its slice away", "ours: one cube of 4 x 4 x 4 chips", 1, 1_000_000
    )
    downscale_s: float = knob(
        14.0,
        "stall of a learner that goes on without a slice, s",
        "fitted on 1 elastic at 150k and 1.2M chips",
        0.0,
        DAY_S,
    )
    upscale_s: float = knob(
        14.0,
        "stall of a learner that takes returned slices in, s",
        "fitted on 1 elastic at 150k and 1.2M chips",
        0.0,
        DAY_S,
    )
    admission_s: float = knob(
        120.0,
        "returned slices are taken in at most once in so long, s",
        "ours, set before the fit; a hand calculation had all cells in view",
        0.0,
        DAY_S,
    )
    return_s: float = knob(
        1800.0, "mean time until a failed chip is back, s", "ours: half an hour, repair or replacement", 0.0, 1e7
    )
    return_shape: float = knob(
        1.5, "Weibull shape k of the return time", "ours; that it is an exponentiated Weibull: paper [S]", 0.1, 20.0
    )
    return_exponent: float = knob(
        2.0, "exponent a of the return time's distribution function", "ours, as return_shape", 0.05, 100.0
    )
    restart_s: float = knob(
        75.0, "stall of a rigid job after a failure, s", "fitted on 1 rigid at 150k and 1.2M chips", 0.0, DAY_S
    )
    checkpoint_s: float = knob(
        1.0,
        "a rigid job keeps its progress once in so long, s",
        "ours: after every step (its two cells leave no room for much more)",
        0.0,
        DAY_S,
    )
    notice_s: float = knob(
        0.0,
        "steps that count go on for so long after a failure, until it is noticed, s",
        "ours: the simplest; 4.6 with a restart of 84 s meets the rigid row better",
        0.0,
        3600.0,
    )
    stall_again: float = knob(
        0.0,
        "share of the failures during a stall that begin it anew",
        "ours: none, the stall deals with them",
        0.0,
        1.0,
    )
    step_s: float = knob(1.0, "nominal step time, s", "paper [S]: the step time of its bandwidth table", 1e-3, 3600.0)
    slice_cv: float = knob(0.02, "spread of one slice's step time over its mean, per step", "ours", 0.0, 0.5)
    learner_cv: float = knob(
        0.1, "spread of the learners' speeds, for good", "paper [S]: the 10 % that its Table 5 injects", 0.0, 0.5
    )

    @property
    def mtbi_s(self) -> float:
        """Return the mean time between interruptions of one chip, in seconds."""
        return self.mtbi_days * DAY_S

    def check(self) -> FleetParameters:
        """Return self, or raise `SettingsError` for the first number out of range."""
        check_ranges(self)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Exchange between learners and shards, and its links."""

    fragments: int = knob(24, "P, parts the model travels in", "paper [S2]", 1, 4096)
    interval_steps: int = knob(24, "H, steps between two rounds of the same fragment", "paper [S2]", 1, 100_000)
    overlap_steps: int = knob(2, "tau, steps a round may overlap with", "paper [S2]", 1, 100_000)
    quorum: int = knob(1, "K, contributions before the grace window opens", "paper [S2]", 1, 4096)
    shards: int = knob(2, "synchronizer processes the fragments are divided over", "Atoll's default", 1, 4096)
    parameters: float = knob(5e9, "parameters of the model", "paper [T]: its 5B model", 1.0, 1e15)
    bits: float = knob(16.0, "bits per parameter on the wire, both ways", "paper [S]: bf16", 1.0, 64.0)
    gbit_s: float = knob(
        10.0, "a learner's link, each way, Gbit/s", "ours: three times what H = P = 24 needs on average", 1e-6, 1e6
    )
    hub_gbit_s: float = knob(100.0, "the shards' own way to the broker, Gbit/s", "ours", 1e-6, 1e6)
    latency_s: float = knob(0.03, "one way, learner to hub, s", "ours: across a continent", 0.0, 60.0)
    loss: float = knob(
        0.001,
        "share of messages lost: at-most-once messages for good, the others once more after retry_s",
        "ours",
        0.0,
        0.9,
    )
    retry_s: float = knob(0.5, "pause before a lost message is sent again, s", "ours", 0.0, 600.0)

    @property
    def fragment_bytes(self) -> float:
        """Return the size of one fragment on the wire, in bytes."""
        return self.parameters * self.bits / 8.0 / self.fragments

    def check(self) -> Exchange:
        """Return self, or raise `SettingsError` for the first number out of range."""
        check_ranges(self)
        return self


Numbers = TypeVar("Numbers", FleetParameters, Exchange)


def check_ranges(parameters: FleetParameters | Exchange) -> None:
    """Raise `SettingsError` for the first number of `parameters` that is out of range; a NaN is out of range."""
    for each in fields(parameters):
        got = getattr(parameters, each.name)
        low, high = each.metadata["low"], each.metadata["high"]
        if not (math.isfinite(got) and low <= got <= high):
            name = "--" + each.name.replace("_", "-")
            todo = f"set {name} within that range ({each.metadata['help']})"
            raise SettingsError(f"{name} is out of range", got=got, allowed=f"{low:g}..{high:g}", todo=todo)


def changed(numbers: Numbers, **values: float) -> Numbers:
    """Return a fleet or an exchange with some numbers changed, checked."""
    other = dataclasses.replace(numbers, **values)  # type: ignore[arg-type]
    check_ranges(other)
    return other


def split(chips: int, learners: int, slice_chips: int) -> int:
    """Return the slices per learner of equal learners, at least 1; raise `SettingsError` if there are too few chips.

    Part of a slice does not count: the shares of time and capacity below are of whole slices.
    """
    if chips < learners * slice_chips:
        raise SettingsError(
            "there are fewer chips than learners need for a slice each",
            got=f"{chips} chips, {learners} learners, {slice_chips} chips per slice",
            allowed=f"at least {learners * slice_chips} chips",
            todo="lower --slice-chips or the number of learners, or take more chips",
        )
    return chips // (learners * slice_chips)
