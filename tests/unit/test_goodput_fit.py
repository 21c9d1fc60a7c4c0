"""The fit of the simulated fleets: valid on the cells that it has not seen, and found again from elsewhere."""

from __future__ import annotations

from functools import cache

import pytest
from goodput_fit import FITS, FITTED, PAPER, POINTS, fitted, listed, scavenged, sensitivities, uptimes, window

from atoll.sim.fleet.cells import ROWS, Cell, table
from atoll.sim.fleet.parameters import Fleet, changed
from atoll.sim.fleet.scavenging import Plan

SIZES = (150_000, 1_200_000)


@cache
def cells() -> tuple[Cell, ...]:
    """Return the cells that the paper lists, from three seeds."""
    return tuple(table(Fleet(), ROWS, SIZES, seeds=range(3), days=2.0, workers=1))


def test_few_cells_are_fitted_and_the_rest_is_validated() -> None:
    """Four of twelve, by three constants; each of them is a stall."""
    assert len(PAPER) == 12
    assert len(FITTED) == 4
    assert [name for names in FITS.values() for name in names] == ["restart_s", "downscale_s", "upscale_s"]


def test_every_cell_of_the_paper_is_met() -> None:
    """Within four points, those that were not fitted too; most of them within one and a half."""
    figures = {figure.name: figure for figure in listed(cells())}
    validated = [figure for name, figure in figures.items() if name.startswith("validated")]

    assert [name for name, figure in figures.items() if figure.holds is False] == []
    assert len(validated) == 8
    assert figures["largest error of a validated cell"].value <= POINTS - 1.0
    assert figures["root mean square error of the validated cells"].value < 1.5


def test_a_mechanism_that_is_wrong_is_found_out() -> None:
    """The same cells are missed where stalls are twice as long: the figures can fail."""
    wrong = table(changed(Fleet(), downscale_s=28.0), ROWS, SIZES, seeds=[0], days=1.0, workers=1)

    assert any(figure.holds is False for figure in listed(wrong))


def test_four_learners_and_more_are_always_up() -> None:
    """A hundred per cent, as whole per cents are written."""
    figures = uptimes(cells())

    assert len(figures) == 6
    assert all(figure.holds for figure in figures)


def test_the_fit_is_found_again_from_elsewhere() -> None:
    """It does not depend on where it begins; few seeds leave it some seconds of play."""
    start = changed(Fleet(), restart_s=40.0, downscale_s=25.0, upscale_s=5.0)
    found = fitted(start, range(2))

    for names in FITS.values():
        for name in names:
            assert getattr(found, name) == pytest.approx(getattr(Fleet(), name), abs=4.0)


def test_the_constants_that_are_set_hardly_matter_and_the_fitted_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slice size and return time move no cell by a point when halved or doubled; the stalls move some by several."""
    monkeypatch.setattr("goodput_fit.DAYS", 0.7)
    moves: dict[str, float] = {}
    for figure in sensitivities([0]):
        name = figure.name.removeprefix("sensitivity: ").split()[0]
        moves[name] = max(moves.get(name, 0.0), abs(figure.value))

    assert max(moves[name] for name in ("slice_chips", "return_s", "return_shape", "return_exponent")) < 1.0
    assert min(moves[name] for name in ("restart_s", "downscale_s", "upscale_s", "admission_s")) > 3.0


def test_figures_of_rounds_and_of_help_hold() -> None:
    """A shorter window and a shorter budget than the published ones say the same."""
    figures = [*window(0, 150), *scavenged(0, Plan(learners=2, steps=1500), (1.0,))]

    assert [figure.name for figure in figures if figure.holds is False] == []
    assert {figure.name: figure.value for figure in figures}["rounds: books exact"] == 1.0
