"""The same values are measured once, whoever asks; other values never answer for them. The end is not made to wait."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from atoll.run.merged_model import MergedModel
from atoll_learner.evaluate import Moment, ends_before
from atoll_learner.evaluations import MeasureOnce, measure_merged


class CountedMeasure:
    """A measure that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, params: dict[str, Any]) -> float:
        self.asked += 1
        return float(sum(np.asarray(leaf, np.float64).sum() for leaf in params.values()))


def values(number: float, dtype: Any = np.float32) -> dict[str, Any]:  # noqa: ANN401  (any dtype)
    """Return parameters that are new arrays each time, as each reading of a run makes them."""
    return {"w": np.full((2, 3), number, dtype), "scale": np.asarray(number, dtype)}


def test_the_last_point_of_a_curve_and_the_export_are_one_measurement() -> None:
    """Newest values and average are each measured once, though the run's model is read anew for the export."""
    counting = CountedMeasure()
    measure = MeasureOnce(counting)
    curve, export = (
        measure_merged(MergedModel(values(2.0), 7, 7, values(1.0)), measure, tokens, clock=lambda: 0.0)
        for tokens in (90, 100)
    )

    assert counting.asked == 2
    assert msgspec.structs.replace(curve, run_tokens=100) == export
    assert (export.bits_per_byte, export.average) == (14.0, 7.0)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_other_values_at_the_same_versions_are_measured(dtype: Any) -> None:  # noqa: ANN401
    """A run that went back to a checkpoint gives versions out a second time; one bit in one leaf is another model."""
    counting = CountedMeasure()
    measure = MeasureOnce(counting)
    other = values(2.0, dtype)
    other["scale"] = np.asarray(3.0, dtype)

    assert measure(values(2.0, dtype)) != measure(other)
    assert measure(values(2.0, dtype)) == 14.0
    assert counting.asked == 2


@pytest.mark.parametrize(
    ("target", "former", "now_tokens", "first"),
    [
        (1000, Moment(500, 10.0, 3.0), 900, True),
        (1000, Moment(500, 10.0, 1.0), 900, False),
        (1000, Moment(500, 10.0, 3.0), 1000, True),
        (0, Moment(500, 10.0, 3.0), 900, False),
        (1000, Moment(900, 10.0, 3.0), 900, False),
        (1000, Moment(), 900, False),
    ],
    ids=["two seconds are left", "there is time", "at the target", "no target", "nobody trains", "the first one"],
)
def test_a_measurement_that_the_end_would_overtake_is_left_to_the_end(
    target: int, former: Moment, now_tokens: int, *, first: bool
) -> None:
    assert ends_before(target, former, Moment(now_tokens, 18.0)) == first
