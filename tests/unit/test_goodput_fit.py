"""The fit of the simulated fleets: valid on sizes that it has not seen, better than with less, found again from elsewhere."""

from __future__ import annotations

from functools import cache

import pytest

from atoll_simulator.fleet.cells import ROWS, FleetCell, table
from atoll_simulator.fleet.parameters import FleetParameters, changed
from atoll_simulator.fleet.scavenging import Budget
from benchmarks.fleet import goodput_fit

SIZES = (150_000, 1_200_000)


@cache
def cells() -> tuple[FleetCell, ...]:
    return tuple(table(FleetParameters(), ROWS, SIZES, seeds=range(3), days=2.0, workers=1))


def cells_of(fleet: FleetParameters) -> tuple[FleetCell, ...]:
    return tuple(table(fleet, ROWS, SIZES, seeds=range(2), days=1.0, workers=1))


def test_few_cells_are_fitted_and_validated_are_only_sizes_that_nothing_was_fitted_on() -> None:
    """Four of twelve, by three constants, each of them a stall; six sizes are new to the fit, and one is nobody's but ours."""
    known = goodput_fit.kinds()
    predicted = [cell for cell, (kind, _) in known.items() if kind == "predicted"]

    assert len(goodput_fit.PAPER) == 12
    assert len(goodput_fit.FITTED) == 4
    assert [name for names in goodput_fit.FITS.values() for name in names] == ["restart_s", "downscale_s", "upscale_s"]
    assert len(goodput_fit.VALIDATED) == len({goodput_fit.size(cell) for cell in goodput_fit.VALIDATED}) == 6
    assert not {goodput_fit.size(cell) for cell in goodput_fit.VALIDATED} & {
        goodput_fit.size(cell) for cell in goodput_fit.FITTED
    }
    assert predicted == [("rigid", 300_000), ("rigid", 600_000), ("rigid", 2_400_000), ("elastic", 2_400_000)]
    assert known["8", 1_200_000] == ("again", ("elastic", 150_000))
    assert known["16", 1_200_000] == ("again", ("2", 150_000))


def test_cells_that_restate_others_do_so() -> None:
    """What depends on chips per learner only is the same in both, within what seeds and odd slices leave."""
    found = {(cell.system, cell.chips): cell.goodput.mean for cell in cells()}
    pairs = [
        (cell, first)
        for cell, (kind, first) in goodput_fit.kinds().items()
        if kind == "again" and {cell, first} <= found.keys()
    ]

    assert len(pairs) == 2
    assert all(found[cell] == pytest.approx(found[first], abs=0.01) for cell, first in pairs)


def test_every_size_that_was_not_fitted_is_met() -> None:
    figures = goodput_fit.goodputs(cells())
    judged = [figure for figure in figures if figure.holds is not None]

    assert len(judged) == 6
    assert all(figure.holds and figure.name.startswith("validated") for figure in judged)
    assert goodput_fit.errors(cells())[1] <= goodput_fit.POINTS


@pytest.mark.second_tier
def test_ours_is_better_than_the_null_model_fitted_alike() -> None:
    """One stall fewer meets the fitted cells worse and the others too, and would not hold the goals."""
    null = goodput_fit.null_model(range(2))
    ours = goodput_fit.compare_with_null(cells(), null, cells_of(null))
    theirs = goodput_fit.compare_with_null(cells_of(null), null, cells_of(null))

    assert null.upscale_s == 0.0
    assert [figure.holds for figure in ours] == [True, True, None, None]
    assert [figure.holds for figure in theirs[:2]] == [False, False]


@pytest.mark.second_tier
def test_a_mechanism_that_is_wrong_is_found_out_though_it_is_fitted() -> None:
    """Where only admissions stall, one constant meets the two cells as well as it can, and misses what it has not seen."""
    wrong = goodput_fit.fit(changed(FleetParameters(), downscale_s=0.0), range(2), {("elastic",): ("upscale_s",)})
    verdicts = [figure.holds for figure in goodput_fit.goodputs(cells_of(wrong))]

    assert goodput_fit.errors(cells_of(wrong))[1] > 2 * goodput_fit.POINTS
    assert False in verdicts


def test_four_learners_and_more_are_always_up() -> None:
    figures = goodput_fit.uptimes(cells())

    assert len(figures) == 6
    assert all(figure.holds for figure in figures)


@pytest.mark.second_tier
def test_the_fit_is_found_again_from_elsewhere() -> None:
    start = changed(FleetParameters(), restart_s=40.0, downscale_s=25.0, upscale_s=5.0)
    found = goodput_fit.fit(start, range(2))

    for names in goodput_fit.FITS.values():
        for name in names:
            assert getattr(found, name) == pytest.approx(getattr(FleetParameters(), name), abs=4.0)


@pytest.mark.second_tier
def test_the_constants_that_are_set_hardly_matter_and_the_fitted_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slice size and return time move no cell by a point when halved or doubled; the stalls move some by several."""
    monkeypatch.setattr("benchmarks.fleet.goodput_fit.DAYS", 0.7)
    moves: dict[str, float] = {}
    for figure in goodput_fit.sensitivities([0]):
        name = figure.name.removeprefix("sensitivity: ").split()[0]
        moves[name] = max(moves.get(name, 0.0), abs(figure.value))

    assert max(moves[name] for name in ("slice_chips", "return_s", "return_shape", "return_exponent")) < 1.0
    assert min(moves[name] for name in ("restart_s", "downscale_s", "upscale_s", "admission_s")) > 3.0


def test_figures_of_rounds_and_of_help_hold() -> None:
    figures = [*goodput_fit.window(0, 150), *goodput_fit.scavenging_figures(0, Budget(learners=2, steps=1500), (1.0,))]

    assert [figure.name for figure in figures if figure.holds is False] == []
    assert {figure.name: figure.value for figure in figures}["rounds: ledgers exact"] == 1.0
