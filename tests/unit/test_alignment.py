"""How well contributions agree with their round: the cosines of a sample, beside those of the whole vectors."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from atoll.codec import Encoded
from atoll.merge.robust import NOTED_RUN, NOTED_RUNS, Alignment, alignments, sample_of, spread_runs

Vector = npt.NDArray[np.float32]
ELEMENTS = 300_000
SAMPLE = NOTED_RUN * NOTED_RUNS


def cosine(a: Vector, b: Vector) -> float:
    return float(a.astype(np.float64) @ b / (np.linalg.norm(a.astype(np.float64)) * np.linalg.norm(b)))


def mean(*vectors: Vector) -> Vector:
    merged: Vector = np.stack(vectors).mean(axis=0, dtype=np.float32)
    return merged


def round_of(*vectors: Vector) -> list[Alignment]:
    merged = mean(*vectors)
    samples = [sample_of(Encoded.exact(vector)) for vector in vectors]
    learners = [f"learner-{number}" for number in range(len(vectors))]
    return alignments(samples, learners, sample_of(Encoded.exact(merged)))


def drawn(seed: int, elements: int = ELEMENTS) -> Vector:
    return np.random.default_rng(seed).standard_normal(elements, dtype=np.float32)


def mixed(common: Vector, own: Vector) -> Vector:
    """Return what learners have in common, and something of a learner's own."""
    both: Vector = (common + 0.7 * own).astype(np.float32)
    return both


def test_a_sample_tells_the_cosine_of_the_whole() -> None:
    common = drawn(0)
    vectors = [mixed(common, drawn(seed)) for seed in (1, 2, 3)]
    merged = mean(*vectors)

    for one, vector in zip(round_of(*vectors), vectors, strict=True):
        assert one.merged == pytest.approx(cosine(vector, merged), abs=5 / SAMPLE**0.5)


@pytest.mark.parametrize(("lie", "low", "high"), [("noise", -0.08, 0.08), ("negated", -1.0, -0.5)])
def test_a_bad_island_is_told_by_the_others_and_not_by_its_length(lie: str, low: float, high: float) -> None:
    common = drawn(0)
    honest = [mixed(common, drawn(seed)) for seed in (1, 2, 3)]
    bad = drawn(9) if lie == "noise" else -honest[0]
    bad *= np.float32(np.linalg.norm(honest[0]) / np.linalg.norm(bad))
    *good, found = round_of(*honest, bad)

    assert found.others is not None
    assert low <= found.others <= high
    assert all(one.others is not None and one.others > 0.1 for one in good)


def test_a_small_fragment_is_compared_whole_and_a_large_one_in_runs_of_the_same_places() -> None:
    assert spread_runs(0, NOTED_RUNS, NOTED_RUN) == []
    assert spread_runs(2 * SAMPLE, NOTED_RUNS, NOTED_RUN) == [(0, 2 * SAMPLE)]
    runs = spread_runs(2 * SAMPLE + 1, NOTED_RUNS, NOTED_RUN)
    assert sum(stop - start for start, stop in runs) == SAMPLE
    assert all(before[1] <= after[0] for before, after in pairwise(runs))
    assert runs[-1][1] <= 2 * SAMPLE + 1


def test_what_has_no_direction_has_no_alignment() -> None:
    zeros, alone = np.zeros(64, np.float32), drawn(1, 64)

    nothing, beside = round_of(zeros, alone)
    assert nothing == Alignment(None, None)
    assert beside.merged == pytest.approx(1.0)
    (only,) = round_of(alone)
    assert only.merged == pytest.approx(1.0)
    assert only.others is None
    assert alignments([], [], alone) == []
