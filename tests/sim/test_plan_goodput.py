"""The planner's closed forms of goodput beside the simulation of the same mechanism, far from the defaults, too."""

from __future__ import annotations

from dataclasses import fields, replace
from statistics import fmean

import pytest

from atoll.base.wording import DAY_S
from atoll_simulator.fleet.cells import ELASTIC, RIGID, Job, simulate
from atoll_simulator.fleet.parameters import FleetParameters, changed
from atoll_simulator.planner import failures


@pytest.mark.parametrize(
    ("chips", "values"),
    [
        (1_200_000, {"admission_s": 0.0}),
        (150_000, {"upscale_s": 300.0}),
        (64_000, {"mtbi_days": 1.0}),
        (300_000, {"upscale_s": 0.0, "downscale_s": 21.0}),
        (1_200_000, {"slice_chips": 4096}),
        (1_200_000, {"notice_s": 10.0}),
        (1_200_000, {"stall_again": 1.0}),
        pytest.param(2_400_000, {"admission_s": 0.0}, marks=pytest.mark.second_tier),
        pytest.param(2_400_000, {"notice_s": 60.0}, marks=pytest.mark.second_tier),
        pytest.param(1_200_000, {"return_s": 604_800.0}, marks=pytest.mark.second_tier),
    ],
)
def test_the_planners_form_holds_for_other_constants_too(chips: int, values: dict[str, float]) -> None:
    """Admissions without a pause, long upscales, long absences, chips that fail every day; returns reach their rest first."""
    fleet = changed(FleetParameters(), **values)
    days = max(3.0, 12.0 * fleet.return_s / DAY_S)
    lived = [simulate(Job(fleet, ELASTIC, chips, days, seed)) for seed in range(2 if days > 3.0 else 4)]
    shared = {
        each.name: getattr(fleet, each.name)
        for each in fields(FleetParameters)
        if hasattr(failures.Failures(), each.name)
    }
    planned = failures.elastic(failures.Failures(mtbi_s=fleet.mtbi_s, **shared), chips)

    assert planned == pytest.approx(fmean(one.goodput for one in lived), abs=0.03)


@pytest.mark.parametrize(
    "values",
    [
        {"checkpoint_s": 1.0},
        {"checkpoint_s": 30.0},
        {"notice_s": 5.0, "restart_s": 84.0},
        {"notice_s": 60.0},
        {"stall_again": 0.5},
        {"stall_again": 1.0, "notice_s": 5.0},
    ],
    ids=str,
)
def test_the_planners_rigid_job_does_as_the_simulated_one(values: dict[str, float]) -> None:
    fleet = changed(FleetParameters(), **values)
    lived = [simulate(Job(fleet, RIGID, 1_200_000, 3.0, seed)) for seed in range(3)]
    planned = failures.rigid(replace(failures.Failures(), **values), 1_200_000)  # type: ignore[arg-type]

    assert planned == pytest.approx(fmean(one.goodput for one in lived), abs=0.02)
