"""Means over seeds against values anybody can look up."""

from __future__ import annotations

import math

import pytest

from atoll_simulator.confidence import inside, paired, quantile, spread


@pytest.mark.parametrize(
    ("freedom", "point"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227)]
)
def test_the_points_of_students_t_are_those_of_the_tables(freedom: int, point: float) -> None:
    """The 97.5 % points as every table of Student's t prints them, for odd and even degrees of freedom."""
    assert quantile(freedom) == pytest.approx(point, abs=5e-5)


def test_one_degree_of_freedom_is_cauchy() -> None:
    """P(|T| < 1) is one half for the Cauchy distribution, and nothing lies within 0."""
    assert inside(1.0, 1) == pytest.approx(0.5)
    assert inside(0.0, 5) == 0.0


def test_a_spread_is_the_interval_of_the_mean() -> None:
    """For 1, 2, 3: mean 2, deviation 1, error 1/sqrt(3), half 4.30265 of it."""
    got = spread([1.0, 2.0, 3.0])

    assert (got.mean, got.count) == (2.0, 3)
    assert got.error == pytest.approx(1 / math.sqrt(3))
    assert got.half == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)


def test_one_value_has_no_interval() -> None:
    assert spread([5.0]).half == math.inf


def test_pairs_share_what_seeds_have_in_common() -> None:
    """Rows that differ by the same amount in every seed differ for certain, however far the seeds are apart."""
    got = paired([1.5, 7.5, 4.5], [1.0, 7.0, 4.0])

    assert (got.mean, got.half) == (0.5, 0.0)
