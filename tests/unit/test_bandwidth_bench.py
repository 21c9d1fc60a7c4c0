"""The table of published bandwidths: the grid, what was fitted, and what the page claims of the rest."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from atoll.protocol.settings import ProtocolSettings
from atoll_simulator.planner import PlanLinks, Question, answer
from atoll_simulator.planner.question import WANTED
from atoll_simulator.planner.systems import System
from benchmarks.lib.publish import texts
from benchmarks.network import bandwidth


@pytest.mark.parametrize("row", [*bandwidth.TABLE_6, *bandwidth.FIVE_B], ids=lambda row: row.name)
def test_what_is_published_lies_on_the_grid(row: bandwidth.PublishedRow) -> None:
    """It was rounded to two places and then to one: 86.851 is printed as 86.8."""
    assert round(round(bandwidth.GRID[bandwidth.nearest_point(row.published)], 2), 1) == row.published


def test_two_thirds_hits_what_it_is_fitted_on_and_the_rest_within_a_step() -> None:
    off = {row: bandwidth.steps_off(row, bandwidth.TWO_THIRDS) for row in bandwidth.TABLE_6}
    fitted = [row for row in bandwidth.TABLE_6 if row.fitted_by == bandwidth.TWO_THIRDS.name]

    assert [off[row] for row in fitted] == [0, 0]
    assert sorted(off[row] for row in bandwidth.TABLE_6 if row not in fitted) == [-1, -1, -1, 0, 0, 0, 0, 0]


def planned(row: bandwidth.PublishedRow, learners: int = 4, **changed: Any) -> System:  # noqa: ANN401  (fields of a question)
    """Return the way of a published row in a plan of that model, over links without latency."""
    asked = Question(
        int(row.parameters),
        row.step_s,
        PlanLinks((bandwidth.GIGA,), (bandwidth.GIGA,), rtt_s=0.0),
        learners=learners,
        protocol=ProtocolSettings(interval_steps=100),
        **changed,
    )
    return answer(asked).systems[1 if row.way == "h100" else 2]


def grid_steps_off(rate: float | None, row: bandwidth.PublishedRow) -> int:
    """Return how many points of the grid a rate lies above what was published."""
    assert rate is not None
    return next(
        k for k, point in enumerate(bandwidth.GRID) if point * bandwidth.GIGA >= rate
    ) - bandwidth.nearest_point(row.published)


@pytest.mark.parametrize("learners", [2, 8])
@pytest.mark.parametrize("row", bandwidth.TABLE_6, ids=lambda row: row.name)
def test_the_table_of_a_plan_is_within_a_grid_step_of_every_published_row(
    row: bandwidth.PublishedRow, learners: int
) -> None:
    """With the flags' own defaults, as the library's two thirds, whatever the number of sites."""
    rate = planned(row, learners).required[row.wanted]

    assert rate == pytest.approx(bandwidth.GIGA * bandwidth.need(row, bandwidth.TWO_THIRDS))
    assert abs(grid_steps_off(rate, row)) <= 1


@pytest.mark.parametrize("row", bandwidth.TABLE_6, ids=lambda row: row.name)
def test_a_ring_of_two_is_one_leg_and_up_to_two_grid_steps_above_what_is_published(row: bandwidth.PublishedRow) -> None:
    rate = planned(row, 2, layers=bandwidth.ONE_LEG.layers[row.parameters]).required_ring[row.wanted]

    assert rate == pytest.approx(bandwidth.GIGA * bandwidth.need(row, bandwidth.ONE_LEG))
    assert grid_steps_off(rate, row) in (1, 2)


@pytest.mark.parametrize("wanted", WANTED)
def test_the_5b_row_whose_utilisation_is_not_said_lies_within_the_table(wanted: float) -> None:
    """104.8 at a second lies between 95 and 99 %, a step from the former. Decoupled is another count: Atoll's own bytes."""
    row = replace(bandwidth.FIVE_B[0], wanted=wanted)
    off = grid_steps_off(planned(row).required[wanted], row)

    assert off == {0.5: -6, 0.8: -3, 0.9: -2, 0.95: -1, 0.99: 2}[wanted]


def test_without_overlap_a_plan_is_dearer_than_what_is_published() -> None:
    """That is what a plan showed of DiLoCo while it said that all was hidden in the backward pass."""
    rows = [row for row in bandwidth.TABLE_6 if row.way == "h100"]
    plans = [planned(row, 2, backward_overlap=False).required_ring[row.wanted] for row in rows]
    times = [(rate or 0.0) / bandwidth.GIGA / row.published for rate, row in zip(plans, rows, strict=True)]

    assert min(times) == pytest.approx(1.3, abs=0.02)
    assert max(times) == pytest.approx(2.3, abs=0.02)


@pytest.mark.second_tier
def test_two_cells_alone_lead_to_two_thirds_and_36_layers() -> None:
    """Of bf16 the first allows 58 to 69 %; with two thirds the second allows 34 to 40 layers."""
    last, half = (row for row in bandwidth.TABLE_6 if row.fitted_by == bandwidth.TWO_THIRDS.name)
    shares = [
        share / 100
        for share in range(40, 111)
        if not bandwidth.steps_off(half, replace(bandwidth.TWO_THIRDS, bits=0.16 * share))
    ]
    layers = [
        count
        for count in range(20, 61)
        if not bandwidth.steps_off(last, replace(bandwidth.TWO_THIRDS, layers={10e9: count}))
    ]

    assert (min(shares), max(shares)) == (0.58, 0.69)
    assert (min(layers), max(layers)) == (34, 40)


def test_one_leg_hits_the_5b_model_and_overestimates_table_6_by_one_or_two_steps() -> None:
    assert [bandwidth.steps_off(row, bandwidth.ONE_LEG) for row in bandwidth.FIVE_B] == [0, 0]
    assert {bandwidth.steps_off(row, bandwidth.ONE_LEG) for row in bandwidth.TABLE_6} == {1, 2}


def test_layers_matter_for_the_last_cell_only() -> None:
    deep, flat = (replace(bandwidth.TWO_THIRDS, layers={10e9: layers}) for layers in (60, 30))
    changed = [row for row in bandwidth.TABLE_6 if bandwidth.steps_off(row, deep) != bandwidth.steps_off(row, flat)]

    assert [(row.way, row.wanted) for row in changed if row.wanted == 0.99] == [("dp", 0.99)]


def test_what_the_page_says_of_198_holds() -> None:
    found = {figure.name: figure.value for figure in bandwidth.eight_sites()}

    assert found["8 data centres: data-parallel"] == pytest.approx(198, rel=0.005)
    assert found["8 data centres: Decoupled"] == pytest.approx(0.84, rel=0.03)
    assert found["times lower, most"] == pytest.approx(242, rel=0.01)
    assert found["times lower, least"] == pytest.approx(60 * 1.2, rel=0.05)
    assert "within 3 %" in texts("prose")["bench-bandwidth"]


def test_the_sizing_rule_is_that_of_our_bytes() -> None:
    found = {figure.name: figure.value for figure in bandwidth.others()}

    assert found["8B, H=37, 0.5 s, both legs in the mean"] == pytest.approx(2 * 8e9 * 16 / (37 * 0.5) / 1e9, rel=1e-3)


def test_a_full_link_makes_the_same_speed_up_whatever_it_is_and_no_goal_is_set_on_it() -> None:
    """2 (M-1)/M P = 36 for data-parallel that hides nothing; what it does hide and what is superseded is all that differs."""
    found = list(bandwidth.twelve_b())
    factors = {
        figure.name: figure.value / float(re.findall(r"([0-9.]+) % merged", figure.how)[0]) * 100.0
        for figure in found
        if "speed-up" in figure.name and "bf16 down" in figure.name
    }

    assert len(factors) == 2
    assert list(factors.values()) == pytest.approx([36.0, 36.0], rel=0.03)
    assert {(figure.goal, figure.holds) for figure in found} == {("", None)}


def test_the_step_up_to_which_it_is_twenty_times_as_fast_is_the_last_one() -> None:
    for gigabits in (2.0, 5.0):
        last_s = bandwidth._longest_step(gigabits).value
        below, above = (_speed_up(gigabits, last_s * factor) for factor in (0.99, 1.01))

        assert below > 20.0 > above


def test_what_was_fitted_on_1_7_says_so() -> None:
    fitted = {row.published: row.fitted_by for row in bandwidth.FIVE_B}

    assert fitted == {104.8: "", 1.7: bandwidth.ONE_LEG.name}
    assert "two choices are fitted on 1.7" in texts("prose")["bench-bandwidth"]


def _speed_up(gigabits: float, step_s: float) -> float:
    atoll, _, parallel, _ = answer(bandwidth._twelve(gigabits, step_s, "bf16", "bf16", windowed=False)).systems
    return atoll.tokens_per_s / parallel.tokens_per_s
