r"""Merging displacements: token weights, the weighted mean and radial-directional averaging, folded on arrival.

For learners m with displacements v_m and weights w_m (Sec. 3.2 and App. D.2 of arXiv 2604.21428):

.. math::

    w &= c_{tokens}^2 / c_{steps} \\
    mean &= \tfrac{\sum w_m v_m}{\sum w_m} \\
    RDA &= \tfrac{\sum w_m \lVert v_m \rVert}{\sum w_m}\; \varphi\!\left(\tfrac{\sum w_m \varphi(v_m)}{\sum w_m}\right),
    \quad \varphi(x) = x / \lVert x \rVert,\ \varphi(0) = 0

What is late weighs less, and a round is only as long as its freshest contribution lets it: with freshness f_m = lambda^age,
f_m w_m stands for w_m, and the result is multiplied by max f_m. So what is late counts as a small learner would: shortened
at its full weight, it would make the mean shorter for all, and with RDA its direction would count in full. Alone in its
round it is shortened: a factor on weights alone would vanish there, and learners that miss each other's rounds would each
move the global values by their full step. One fresh contribution, however small, is enough for the full length.

RDA is taken per slice (`Span`): the mean of M nearly orthogonal vectors of length R is only R / sqrt(M) long, RDA keeps
R. Slices marked `direct` (embeddings) take the mean. Where directions cancel RDA has no direction to keep and falls
back to the mean: where the mean direction is shorter than 1e-12, or than the rounding of the M float32 directions in it
(M 2^-23). Below that length what is left is noise, which RDA would blow up to full size. A slice shorter than 1e-20
counts as zero: float32 could not hold the inverse of its norm.

A fold holds one running mean (two for RDA: of directions, and of values for the fallback), so memory is O(fragment)
whatever M is. With W the weights so far, a contribution of weight w enters as mean <- (1 - w/W) mean + (w/W) v: both
factors lie within 0..1, so no weight, however large its claim, makes finite displacements merge to infinity. Work is
done block by block with one small scratch array. The order of additions decides the last bits; it is the order in which
the head lists the contributions, so a replay gives the same bits. One fresh contribution alone is returned as it came, bit
for bit. A fold gives its result once and is then spent: the result is its own memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from atoll.errors import FrameRejected, ProtocolMisuse
from atoll.layout import Span

Vector = npt.NDArray[np.float32]
Method = Literal["mean", "rda"]

BLOCK_ELEMENTS = 1 << 14
DIRECTION_MIN = 1e-12
ROUNDING = 2.0**-23
NORM_MIN = 1e-20
CLAIM_TOLERANCE = 0.02


def token_weight(tokens: int, steps: int) -> float:
    """Return w = tokens^2 / steps: quantity times rate (Sec. 3.2)."""
    return tokens * tokens / steps


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged displacement, flat float32, with the weights that counted and the number of contributions behind it."""

    displacement: Vector
    weight_sum: float
    count: int


class FragmentFold:
    """The running merge of one fragment's round."""

    def __init__(self, spans: Sequence[Span], method: Method = "mean") -> None:
        """Start empty; `spans` say which elements belong together."""
        self._spans = tuple(spans)
        self._method = method
        self._mean: Vector | None = None
        self._directions: Vector | None = None
        self._freshest = 0.0
        self._radial = np.zeros(len(self._spans), dtype=np.float64)
        self._spent = False
        self._scratch = np.empty(BLOCK_ELEMENTS, dtype=np.float32)
        self.weight_sum = 0.0
        self.count = 0

    def add(self, displacement: Vector, weight: float, freshness: float = 1.0) -> None:
        """Fold in a displacement (flat float32, layout order) with a positive weight; it is not kept.

        `freshness` is 1 for what is in time, and nothing is heard of what has none left, 0.
        """
        if self._spent:
            raise ProtocolMisuse("this fold has given its result already")
        if not (0.0 < weight < math.inf and 0.0 <= freshness <= 1.0):
            raise ProtocolMisuse(
                "a contribution needs a positive finite weight and a freshness from 0 to 1", got=(weight, freshness)
            )
        self.count += 1
        self._freshest = max(self._freshest, freshness)
        weight *= freshness
        if weight == 0.0:
            self._mean = np.zeros_like(displacement) if self._mean is None else self._mean
            return
        self.weight_sum += weight
        share = weight / self.weight_sum
        if self._mean is None or share == 1.0:
            self._mean = displacement.copy()
            self._radial[:] = 0.0
            self._directions = np.zeros_like(displacement) if self._method == "rda" else None
        else:
            self._blend(self._mean, displacement, share, 1.0)
        if self._directions is not None:
            for number, span in enumerate(self._spans):
                if span.direct:
                    continue
                here = slice(span.offset, span.offset + span.size)
                norm = l2_norm(displacement[here])
                self._radial[number] += (norm - self._radial[number]) * share
                self._blend(self._directions[here], displacement[here], share, norm)

    def result(self) -> Merged:
        """Return the merge of everything that was added; the fold is spent, for its memory is the result.

        Raises:
            ProtocolMisuse: nothing was added, or the result was given already.
        """
        if self._spent:
            raise ProtocolMisuse("this fold has given its result already")
        if self._mean is None:
            raise ProtocolMisuse("nothing was folded")
        self._spent = True
        merged, directions, self._mean, self._directions = self._mean, self._directions, None, None
        if directions is not None and self.count > 1:
            shortest = max(DIRECTION_MIN, self.count * ROUNDING)
            for number, span in enumerate(self._spans):
                here = slice(span.offset, span.offset + span.size)
                length = 0.0 if span.direct else l2_norm(directions[here])
                if length > shortest:
                    np.multiply(directions[here], np.float32(self._radial[number] / length), out=merged[here])
        if self._freshest != 1.0:
            np.multiply(merged, np.float32(self._freshest), out=merged)
        return Merged(merged, self.weight_sum, self.count)

    def _blend(self, mean: Vector, addend: Vector, share: float, norm: float) -> None:
        """Do `mean <- (1 - share) mean + share addend / norm` in blocks that stay in the cache."""
        keep = np.float32(1.0 - share)
        take = np.float32(share / norm) if norm > NORM_MIN else np.float32(0.0)
        for start in range(0, addend.size, BLOCK_ELEMENTS):
            stop = min(start + BLOCK_ELEMENTS, addend.size)
            scratch = self._scratch[: stop - start]
            np.multiply(addend[start:stop], take, out=scratch)
            np.multiply(mean[start:stop], keep, out=mean[start:stop])
            np.add(mean[start:stop], scratch, out=mean[start:stop])


def span_norms(spans: Sequence[Span], displacement: Vector) -> list[float]:
    """Return the L2 norm of each slice, accumulated in float64."""
    return [l2_norm(displacement[span.offset : span.offset + span.size]) for span in spans]


def validate_displacement(
    displacement: Vector, spans: Sequence[Span], norms_claimed: Sequence[float], norm_max: float
) -> float:
    """Return the L2 norm of a displacement that is finite, as long as its sender says, and not absurdly long.

    A norm is a claim that RDA would divide by, so it is computed again. Lossy codecs change it a little, hence the
    tolerance.

    Raises:
        FrameRejected: `not_finite`, `norm_claim` or `norm_bound`.
    """
    norms = span_norms(spans, displacement)
    if not all(np.isfinite(norm) for norm in norms):
        raise FrameRejected("not_finite", "a displacement holds infinities or NaN")
    if len(norms_claimed) != len(norms):
        raise FrameRejected("norm_claim", "norms for another layout", got=len(norms_claimed), allowed=len(norms))
    for span, norm, claimed in zip(spans, norms, norms_claimed, strict=True):
        if not abs(norm - claimed) <= CLAIM_TOLERANCE * norm + 1e-6:
            raise FrameRejected(
                "norm_claim", f"{span.tensor_name} is not as long as claimed", got=claimed, allowed=norm
            )
        if norm > norm_max:
            raise FrameRejected("norm_bound", f"{span.tensor_name} is too long", got=norm, allowed=norm_max)
    return math.hypot(*norms)


def l2_norm(vector: Vector) -> float:
    """Return the L2 norm, blockwise in float64: no overflow below 1e150, no large temporary."""
    total = 0.0
    for start in range(0, vector.size, BLOCK_ELEMENTS):
        block = vector[start : start + BLOCK_ELEMENTS].astype(np.float64)
        total += float(np.dot(block, block))
    return float(np.sqrt(total))
