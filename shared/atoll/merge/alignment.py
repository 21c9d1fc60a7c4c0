r"""How well the contributions of a round agree: with the merge that came out, and with each other.

A machine that computes wrongly, or on damaged data, sends pseudo-gradients that are finite and as long as the others', so no
norm gives it away. Their direction does. For contributions v_m and the merged pseudo-gradient u a shard notes

.. math::

    merged_m = \cos(v_m, u), \qquad others_m = \cos\Bigl(v_m, \sum_{k \ne m} \varphi(v_k)\Bigr)

with one vote per learner in the sum (`atoll.merge.robust.others_cosines`). A contribution is part of u, so noise alone reaches
a `merged` of about 1 / sqrt(M) in a round of M. `others` leaves it out: noise is near 0 there, a flipped sign is negative. In a
round of two both have the same `others`, so only three or more learners tell which one is wrong.

Both are estimated on a *sample* of the fragment's elements, the same one for all: `SAMPLE` of them, in runs that are spread
evenly. A random direction then has a cosine of standard deviation 1 / sqrt(SAMPLE), about 0.016. So the cost of a contribution
does not grow with the fragment. The figures are noted and decide nothing; `atoll.merge.robust` has the rules that do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll.base.buffer_pool import Vector
from atoll.codec.encoded import Encoded
from atoll.merge.fold import NORM_MIN
from atoll.merge.robust import others_cosines, votes_of

SAMPLE: Final = 4096
RUN: Final = 512
COMPARED_MAX: Final = 128
"""Contributions of a round that are compared with each other: their number counts squared."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """The cosines of one contribution: with the merge, and with the other learners' mean direction (None: it has none)."""

    merged: float | None
    others: float | None


def sampled_runs(elements: int) -> list[tuple[int, int]]:
    """Return the bounds of the runs that are compared of a fragment: all of a small one."""
    if elements <= 2 * SAMPLE:
        return [(0, elements)] if elements else []
    count = SAMPLE // RUN
    stride = elements // count
    return [(at * stride, at * stride + RUN) for at in range(count)]


def sample_of(pseudo_gradient: Encoded) -> Vector:
    """Return the compared elements of a pseudo-gradient, float32; it is a copy."""
    parts = [pseudo_gradient.part(*run) for run in sampled_runs(pseudo_gradient.elements)]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def alignments(samples: Sequence[Vector], learners: Sequence[str], merged: Vector) -> list[Alignment]:
    """Return the alignment of each contribution of a round, from its sample and that of its merge.

    Only the first `COMPARED_MAX` contributions are compared with each other.
    """
    if not samples:
        return []
    rows = np.stack(samples).astype(np.float64)
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    target = merged.astype(np.float64)
    length = math.sqrt(float(target @ target))
    with_merged = rows @ target
    few, names = rows[:COMPARED_MAX], list(learners[:COMPARED_MAX])
    several = len(set(names)) > 1
    beside = others_cosines(few @ few.T, names, votes_of(names)) if several else np.zeros(0)
    found = []
    for number, own in enumerate(lengths):
        known = float(own) > NORM_MIN
        found.append(
            Alignment(
                float(with_merged[number]) / (float(own) * length) if known and length > NORM_MIN else None,
                float(beside[number]) if known and number < beside.size else None,
            )
        )
    return found
