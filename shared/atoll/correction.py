r"""HeLoCo: a displacement that disagrees with the outer momentum is bent before it is merged (arXiv 2606.00271).

A learner that computed on old values, or on data unlike the others', may point against the way the run is going. The
outer momentum m of the fragment says which way that is. Per slice, with displacement v, its cosine c with m, unit
vectors written with a hat, and the confidence

.. math::

    q = \frac{\lVert v \rVert}{\lVert v \rVert + \kappa \lVert m \rVert}

a slice is kept, shortened along the momentum, or turned towards it at its own length:

.. math::

    c \ge c_{ok}: \quad & v \\
    c < 0: \quad & v - \beta c \lVert v \rVert \hat m, \qquad \beta = \min(-k_s c q,\ \beta_{max}) \\
    otherwise: \quad & \lVert v \rVert\, \varphi((1 - \lambda) \hat v + \lambda \hat m), \qquad
    \lambda = \min(k_d (1 - c) q,\ 1)

Displacements and momentum are both *subtracted* from the global values, so they are compared as they are. A slice is
what RDA takes for a tensor, too: the rows of one tensor in one fragment. Slices without length, and fragments whose
momentum is zero (version 0, or after a restart), are kept, and so are slices whose correction float32 could not hold: a
displacement that is finite never becomes one that is not.

The momentum is that of the version the round is on, which the same head names as its values; a contribution is corrected
when it is folded, before its age counts. So a replay in the order that the head lists corrects to the same bits,
whoever owns the shard: nothing is kept here. Norms and cosines are sums in float64, each slice is then changed by one
float32 combination of v and m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atoll.layout import Span
from atoll.merge import BLOCK_ELEMENTS, NORM_MIN, l2_norm
from atoll.protocol.settings import ProtocolSettings

Vector = npt.NDArray[np.float32]

FACTOR_MAX = float(np.finfo(np.float32).max) / 2.0
"""Of factors and lengths: neither part of a combination is longer than the square root of two times the slice."""


@dataclass(frozen=True, slots=True)
class Heloco:
    """The constants: c_ok, k_s, beta_max, k_d, kappa of the paper, in this order."""

    cosine: float
    shrink: float
    shrink_max: float
    rotate: float
    doubt: float

    def corrected(self, displacement: Vector, momentum: Vector, spans: Sequence[Span]) -> Vector:
        """Return `displacement` (flat float32, layout order) with every slice corrected; the argument is left alone."""
        changed: Vector | None = None
        for span in spans:
            here = slice(span.offset, span.offset + span.size)
            factors = self._factors(displacement[here], momentum[here])
            if factors is None or abs(factors[1]) > FACTOR_MAX:
                continue
            if changed is None:
                changed = displacement.copy()
            keep, add = np.float32(factors[0]), np.float32(factors[1])
            np.add(keep * displacement[here], add * momentum[here], out=changed[here])
        return displacement if changed is None else changed

    def _factors(self, v: Vector, m: Vector) -> tuple[float, float] | None:
        """Return (a, b) such that a v + b m is the corrected slice, None when it is kept."""
        length, reference = l2_norm(v), l2_norm(m)
        if not NORM_MIN < length <= FACTOR_MAX or reference <= NORM_MIN:
            return None
        cosine = _dot(v, m) / (length * reference)
        if cosine >= self.cosine:
            return None
        confidence = length / (length + self.doubt * reference)
        if cosine < 0.0:
            beta = min(-self.shrink * cosine * confidence, self.shrink_max)
            return 1.0, -beta * cosine * length / reference
        turn = min(self.rotate * (1.0 - cosine) * confidence, 1.0)
        # Of (1 - turn) v^ + turn m^; at an angle of at most 90 degrees it is never shorter than the square root of a half.
        mixed = ((1.0 - turn) ** 2 + turn**2 + 2.0 * turn * (1.0 - turn) * cosine) ** 0.5
        return (1.0 - turn) / mixed, turn * length / (mixed * reference)


def correction_of(settings: ProtocolSettings) -> Heloco | None:
    """Return the correction that a run has agreed on, None for none."""
    if settings.correction == "none":
        return None
    return Heloco(
        cosine=settings.heloco_cosine,
        shrink=settings.heloco_shrink,
        shrink_max=settings.heloco_shrink_max,
        rotate=settings.heloco_rotate,
        doubt=settings.heloco_doubt,
    )


def _dot(a: Vector, b: Vector) -> float:
    """Return the scalar product, blockwise in float64."""
    total = 0.0
    for start in range(0, a.size, BLOCK_ELEMENTS):
        stop = start + BLOCK_ELEMENTS
        total += float(np.dot(a[start:stop].astype(np.float64), b[start:stop].astype(np.float64)))
    return total
