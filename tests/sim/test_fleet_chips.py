"""The chips layer against what can be calculated: absorbed stalls, returns, replay, the slowest of many."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import SettingsError
from atoll.base.wording import DAY_S
from atoll_simulator.fleet import cells
from atoll_simulator.fleet.cells import ELASTIC, RIGID, Job, simulate
from atoll_simulator.fleet.chance import Engine, ReturnTimes, slowest, slowest_mean, speeds, stream
from atoll_simulator.fleet.chips import Chips
from atoll_simulator.fleet.parameters import Exchange, FleetParameters, changed, split
from atoll_simulator.fleet.rounds import StepWindow, rounds
from atoll_simulator.planner import failures

CHIPS = 1_200_000
FEW = settings(max_examples=12, deadline=None)


def rate(chips: int) -> float:
    return chips / FleetParameters().mtbi_s


@FEW
@given(stall_s=st.floats(1.0, 80.0), seed=st.integers(0, 99))
def test_one_learner_whose_failures_are_absorbed_steps_one_in_one_plus_lambda_s(stall_s: float, seed: int) -> None:
    """It steps for 1/lambda on average, then stalls for s, whatever fails meanwhile."""
    fleet = FleetParameters(downscale_s=stall_s, upscale_s=0.0, admission_s=0.0, return_s=0.0)
    lived = simulate(Job(fleet, ELASTIC, CHIPS, 4.0, seed))

    assert lived.goodput == pytest.approx(1.0 / (1.0 + rate(CHIPS) * stall_s), abs=0.02)


@settings(max_examples=6, deadline=None)
@given(return_s=st.floats(600.0, 40_000.0), shape=st.floats(0.8, 3.0), exponent=st.floats(0.7, 4.0))
def test_slices_are_away_as_long_as_they_take_to_return(return_s: float, shape: float, exponent: float) -> None:
    """Without stalls a slice is there 1 in 1 + (its failure rate x mean return time), whatever the distribution."""
    fleet = FleetParameters(
        downscale_s=0.0,
        upscale_s=0.0,
        admission_s=0.0,
        return_s=return_s,
        return_shape=shape,
        return_exponent=exponent,
        slice_chips=256,
    )
    days = 60.0 * return_s / DAY_S + 4.0
    lived = simulate(Job(fleet, ELASTIC, CHIPS, days, 3))
    gone = 256 * return_s / fleet.mtbi_s

    assert lived.uptime == pytest.approx(1.0)
    assert 1.0 - lived.goodput == pytest.approx(gone / (1.0 + gone), rel=0.12)


@FEW
@given(restart_s=st.floats(1.0, 200.0), every_s=st.floats(1.0, 120.0))
def test_a_rigid_job_replays_what_was_not_kept(restart_s: float, every_s: float) -> None:
    """Of its running time lambda C / (exp(lambda C) - 1) is kept, with progress kept every C."""
    fleet = FleetParameters(restart_s=restart_s, checkpoint_s=every_s)
    lived = simulate(Job(fleet, RIGID, CHIPS, 6.0, 1))
    running = 1.0 / (1.0 + rate(CHIPS) * restart_s)
    kept = rate(CHIPS) * every_s / math.expm1(rate(CHIPS) * every_s)

    assert lived.uptime == pytest.approx(running, abs=0.02)
    assert lived.goodput == pytest.approx(running * kept, abs=0.02)


@FEW
@given(notice_s=st.floats(1.0, 200.0), stall_s=st.floats(1.0, 80.0))
def test_failures_that_are_noticed_late_are_noticed_together(notice_s: float, stall_s: float) -> None:
    """A job steps for 1/lambda and the notice, then stalls once for all that failed meanwhile."""
    fleet = FleetParameters(restart_s=stall_s, notice_s=notice_s)
    lived = simulate(Job(fleet, RIGID, CHIPS, 4.0, 3))
    stepped_s = 1.0 / rate(CHIPS) + notice_s

    assert lived.uptime == pytest.approx(stepped_s / (stepped_s + stall_s), abs=0.02)
    assert lived.stalls < lived.failures


@FEW
@given(stall_s=st.floats(1.0, 60.0), share=st.floats(0.05, 1.0), system=st.sampled_from((RIGID, ELASTIC)))
def test_failures_that_begin_a_stall_anew_make_it_grow_exponentially(stall_s: float, share: float, system: str) -> None:
    """A stall of s that failures at rate r begin anew takes (exp(r s) - 1) / r in the mean."""
    fleet = FleetParameters(
        downscale_s=stall_s, restart_s=stall_s, stall_again=share, upscale_s=0.0, admission_s=0.0, return_s=0.0
    )
    lived = simulate(Job(fleet, system, CHIPS, 6.0, 3))
    stalled_s = math.expm1(share * rate(CHIPS) * stall_s) / (share * rate(CHIPS))

    assert lived.uptime == pytest.approx(1.0 / (1.0 + rate(CHIPS) * stalled_s), abs=0.02)


def test_late_notice_and_stalls_begun_anew_change_no_failure() -> None:
    """One seed has the same failures at the same moments whatever becomes of them, as far as they strike what is there."""
    plain, late, anew = (
        simulate(Job(fleet, RIGID, CHIPS, 1.0, 5)).failures
        for fleet in (FleetParameters(), FleetParameters(notice_s=30.0), FleetParameters(stall_again=1.0))
    )

    assert plain == late == anew


@FEW
@given(
    learners=st.sampled_from((1, 2, 5)),
    downscale_s=st.floats(0.0, 200.0),
    upscale_s=st.floats(0.0, 200.0),
    returning_s=st.tuples(st.floats(0.0, 600.0), st.floats(0.0, 50_000.0)),
    mtbi_days=st.floats(0.5, 400.0),
    noticing=st.tuples(st.floats(0.0, 300.0), st.floats(0.0, 1.0)),
)
def test_shares_are_shares(
    learners: int,
    downscale_s: float,
    upscale_s: float,
    returning_s: tuple[float, float],
    mtbi_days: float,
    noticing: tuple[float, float],
) -> None:
    """Useful, missing and stalled time are all there is, also in fleets that hardly work; uptime bounds goodput."""
    fleet = FleetParameters(
        downscale_s=downscale_s,
        upscale_s=upscale_s,
        admission_s=returning_s[0],
        return_s=returning_s[1],
        mtbi_days=mtbi_days,
        notice_s=noticing[0],
        stall_again=noticing[1],
    )
    lived = simulate(Job(fleet, str(learners), 2_000, 0.5, 7))

    assert lived.goodput + lived.stalled + lived.missing == pytest.approx(1.0)
    assert lived.missing >= -1e-9
    assert -1e-9 <= lived.goodput <= lived.uptime + 1e-9 <= 1.0 + 2e-9
    assert lived.stalls >= 0


def test_slices_are_taken_in_together_and_not_too_often() -> None:
    """Between two growths of a learner lies the admission interval at least, and every growth is a stall."""
    fleet = FleetParameters()
    engine = Engine()
    grown: list[float] = []
    seen = [0]

    def hear(number: int) -> None:
        one = world.learners[number]
        if one.active > seen[0]:
            grown.append(engine.now_s)
            assert not one.stepping
        seen[0] = one.active

    world = Chips(engine, fleet, CHIPS, 1, 0, hear)
    seen[0] = world.learners[0].active
    engine.run(DAY_S / 2)
    gaps = [late - early for early, late in pairwise(grown)]

    assert len(grown) > 100
    assert min(gaps) >= fleet.admission_s - 1e-6
    assert world.stalls > len(grown)


def test_a_learner_that_lost_every_slice_is_down_until_some_return() -> None:
    fleet = FleetParameters(mtbi_days=0.05, return_s=3000.0, slice_chips=64)
    lived = simulate(Job(fleet, "2", 256, 2.0, 0))

    assert 0.0 < lived.uptime < 0.9
    assert lived.failures > 100


def test_as_many_learners_are_as_good_as_one_with_as_many_times_fewer_chips() -> None:
    many = fmean(simulate(Job(FleetParameters(), "8", CHIPS, 2.0, seed)).goodput for seed in range(3))
    one = fmean(simulate(Job(FleetParameters(), ELASTIC, CHIPS // 8, 2.0, seed)).goodput for seed in range(3))

    assert many == pytest.approx(one, abs=0.01)


@pytest.mark.parametrize("chips", cells.COLUMNS)
def test_the_whole_mechanism_follows_its_closed_form(chips: int) -> None:
    """Downscales, upscales and the interval between them, as the module's theory says; the planner's form is near too."""
    fleet = FleetParameters()
    lived = [simulate(Job(fleet, ELASTIC, chips, 3.0, seed)) for seed in range(4)]
    interval_s = fleet.admission_s + math.exp(-rate(chips) * fleet.admission_s) / rate(chips)
    stepping = (1.0 - fleet.upscale_s / interval_s) / (1.0 + rate(chips) * fleet.downscale_s)

    assert 1.0 - fmean(one.stalled for one in lived) == pytest.approx(stepping, abs=0.007)
    assert fmean(one.goodput for one in lived) == pytest.approx(failures.elastic(failures.Failures(), chips), abs=0.02)


def test_uptime_is_one_less_the_chance_that_all_stall() -> None:
    lived = simulate(Job(FleetParameters(), "2", 2_400_000, 4.0, 0))

    assert lived.uptime == pytest.approx(1.0 - lived.stalled**2, abs=0.006)


def test_chips_that_fill_no_slice_fail_without_harm() -> None:
    """Of 127 chips in slices of 64 one slice trains: the others are in nobody's way, and it is said that they are idle."""
    fleet = FleetParameters(mtbi_days=1.0)
    (odd,) = cells.table(fleet, (ELASTIC,), (127,), seeds=range(12), days=20.0, workers=1)
    (even,) = cells.table(fleet, (ELASTIC,), (64,), seeds=range(12), days=20.0, workers=1)
    (spared,) = cells.table(fleet, (RIGID,), (127,), seeds=[0], days=0.1, workers=1)

    assert odd.goodput.mean == pytest.approx(even.goodput.mean, abs=0.03)
    assert odd.failures == pytest.approx(even.failures, rel=0.06)
    assert (odd.used_chips, even.used_chips, spared.used_chips) == (64, 64, 127)


def test_cost_goes_with_failures_and_not_with_chips() -> None:
    counts = []
    for chips, mtbi_days in ((1_000_000, 365.0), (10_000_000, 3650.0)):
        engine = Engine()
        Chips(engine, FleetParameters(mtbi_days=mtbi_days), chips, 4, 0)
        engine.run(DAY_S)
        counts.append(engine.events)

    assert counts[1] == pytest.approx(counts[0], rel=0.05)


# --- chance -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slices", "mean"), [(1, 0.0), (2, 0.5642), (10, 1.5388), (100, 2.5076)])
def test_the_slowest_of_many_has_the_known_mean(slices: int, mean: float) -> None:
    assert slowest_mean(slices) == pytest.approx(mean, abs=0.004)


@given(u=st.floats(1e-9, 1.0 - 1e-9), slices=st.integers(1, 10**9))
def test_more_slices_are_slower(u: float, slices: int) -> None:
    one, more = slowest(slices, u), slowest(10 * slices, u)

    assert math.isfinite(more)
    assert one <= more + 1e-9
    assert slowest(0, u) == 0.0


@pytest.mark.parametrize(("shape", "exponent"), [(1.0, 1.0), (0.7, 0.5), (1.5, 2.0), (3.0, 4.0)])
def test_return_times_have_the_mean_that_was_asked_for(shape: float, exponent: float) -> None:
    """With shape and exponent 1 it is the exponential distribution, whose median is known too."""
    times = ReturnTimes(100.0, shape, exponent, stream(0, "test"))
    drawn = sorted(times.draw() for _ in range(40_000))

    assert fmean(drawn) == pytest.approx(100.0, rel=0.03)
    assert drawn[0] >= 0.0
    if shape == exponent == 1.0:
        assert drawn[20_000] == pytest.approx(100.0 * math.log(2.0), rel=0.03)


def test_purposes_have_streams_of_their_own() -> None:
    assert stream(1, "a").random() == stream(1, "a").random() != stream(1, "b").random()
    assert stream(2, "a").random() != stream(1, "a").random()
    assert speeds(1, 0.5, stream(0, "x")) == [1.0]
    assert fmean(speeds(2000, 0.1, stream(0, "x"))) == pytest.approx(1.0, abs=0.01)


# --- cells and parameters -----------------------------------------------------------------------------------------------


def test_a_table_is_the_same_for_any_number_of_workers() -> None:
    arguments = (FleetParameters(), (RIGID, "4"), (150_000, 600_000))
    alone = cells.table(*arguments, seeds=range(3), days=0.2, workers=1)
    together = cells.table(*arguments, seeds=range(3), days=0.2, workers=3)

    assert alone == together
    assert [(cell.system, cell.chips) for cell in alone] == [
        (RIGID, 150_000),
        (RIGID, 600_000),
        ("4", 150_000),
        ("4", 600_000),
    ]


def test_a_learner_of_fewer_slices_is_less_slowed_by_its_slowest() -> None:
    """The pace of many small learners is better than that of a large one; without spread there is nothing to wait for."""
    one, many = cells.table(FleetParameters(), (ELASTIC, "16"), (CHIPS,), seeds=[0], days=0.01, workers=1)
    (even,) = cells.table(
        changed(FleetParameters(), slice_cv=0.0), (ELASTIC,), (CHIPS,), seeds=[0], days=0.01, workers=1
    )

    assert 0.9 < one.pace < many.pace < 1.0
    assert even.pace == 1.0


@pytest.mark.parametrize(
    ("text", "sizes"), [("150k", (150_000,)), ("1.2M, 4096", (1_200_000, 4096)), ("0.5m", (500_000,))]
)
def test_sizes_are_read_as_people_write_them(text: str, sizes: tuple[int, ...]) -> None:
    assert cells.sizes_in(text) == sizes
    assert cells.sizes_in(",".join(map(cells.size_text, sizes))) == sizes


@pytest.mark.parametrize(
    ("numbers", "name", "value"),
    [
        (FleetParameters(), "mtbi_days", 0.0),
        (FleetParameters(), "downscale_s", -1.0),
        (FleetParameters(), "downscale_s", math.nan),
        (FleetParameters(), "return_s", math.inf),
        (FleetParameters(), "slice_chips", 0),
        (Exchange(), "loss", 1.0),
        (Exchange(), "fragments", 0),
        (Exchange(), "gbit_s", 0.0),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(numbers: FleetParameters | Exchange, name: str, value: float) -> None:
    with pytest.raises(SettingsError, match="--" + name.replace("_", "-")):
        dataclasses.replace(numbers, **{name: value}).check()  # type: ignore[arg-type]


def test_what_would_never_end_is_refused() -> None:
    with pytest.raises(SettingsError, match="fewer chips"):
        split(1000, 16, 64)
    with pytest.raises(SettingsError, match="too many failures"):
        cells.table(FleetParameters(mtbi_days=0.01), (ELASTIC,), (CHIPS,), seeds=[0], days=30.0, workers=1)
    with pytest.raises(SettingsError, match="too many failures"):
        rounds(FleetParameters(mtbi_days=0.001), Exchange(), StepWindow(100_000_000, 8, 2000), 0)
