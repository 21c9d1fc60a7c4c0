r"""HeLoCo: a pseudo-gradient that disagrees with the outer momentum is corrected before the merge (arXiv 2606.00271).

A learner that computed on old values, or on data unlike the others', may point against the direction of the run, which the
outer momentum m of the fragment gives. Per slice, with pseudo-gradient v, its cosine c with m, unit vectors written with a
hat, and the confidence

.. math::

    q = \frac{\lVert v \rVert}{\lVert v \rVert + \kappa \lVert m \rVert}

a slice is kept, shortened along the momentum, or turned towards it at its own length:

.. math::

    c \ge c_{ok}: \quad & v \\
    c < 0: \quad & v - \beta c \lVert v \rVert \hat m, \qquad \beta = \min(-k_s c q,\ \beta_{max}) \\
    otherwise: \quad & \lVert v \rVert\, \varphi((1 - \lambda) \hat v + \lambda \hat m), \qquad
    \lambda = \min(k_d (1 - c) q,\ 1)

Pseudo-gradients and momentum are both *subtracted* from the global values, so their signs agree. Slices of length zero, and
fragments whose momentum is zero, are kept. So are slices whose correction float32 could not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.base.large_arrays import Vector
from atoll.codec.encoded import Encoded
from atoll.merge.fold import NORM_MIN, Corrections, SliceCorrection, slice_norms
from atoll.model.layout import FragmentSlice
from atoll.protocol.settings import ProtocolSettings

FACTOR_MAX = float(np.finfo(np.float32).max) / 2.0
"""The limit of factors and lengths: each part of a combination is at most sqrt(2) times as long as the slice."""

CANCELLED = 2.0**-8
"""A share of a slice's length: a shorter rest has no direction. The square of the rest is a difference of sums that are
right to 2^-22 (`atoll.codec.kernels`), so at least 31 in 32 parts of a longer rest are known."""


@dataclass(frozen=True, slots=True)
class MomentumReference:
    """An outer momentum (flat float32, layout order) and its L2 norms per slice: the reference of a round."""

    momentum: Vector
    norms: Sequence[float]

    @classmethod
    def of(cls, momentum: Vector, slices: Sequence[FragmentSlice]) -> MomentumReference:
        """Measure a momentum, once for all contributions of a round."""
        return cls(momentum, slice_norms(slices, Encoded.exact(momentum)))


@dataclass(frozen=True, slots=True)
class Heloco:
    """The constants: c_ok, k_s, beta_max, k_d, kappa of the paper, in this order.

    The momentum is that of the round's base version; the head names it with the values. Nothing is kept here, so a replay in
    the order that the head lists corrects to the same bits. Norms and cosines are sums in float64, and so is the length of the
    result. A slice is changed by one float32 combination of v and m.
    """

    cosine: float = 0.2
    shrink: float = 0.5
    shrink_max: float = 0.5
    rotate: float = 1.0
    doubt: float = 3.0

    def corrections(
        self,
        pseudo_gradient: Encoded,
        norms: Sequence[float],
        momentum_reference: MomentumReference,
        slices: Sequence[FragmentSlice],
    ) -> Corrections:
        """Return the correction of each slice of a pseudo-gradient whose slices have the lengths `norms`."""
        bounds = [tensor_slice.bounds for tensor_slice in slices]
        products = pseudo_gradient.products(bounds, momentum_reference.momentum)
        by_slice = [self._bend(*of_slice) for of_slice in zip(norms, momentum_reference.norms, products, strict=True)]
        return Corrections(momentum_reference.momentum, by_slice)

    def _bend(self, length: float, reference: float, product: float) -> SliceCorrection | None:
        if not NORM_MIN < length <= FACTOR_MAX or reference <= NORM_MIN:
            return None
        cosine = product / (length * reference)
        if cosine >= self.cosine:
            return None
        confidence = length / (length + self.doubt * reference)
        if cosine < 0.0:
            beta = min(-self.shrink * cosine * confidence, self.shrink_max)
            keep, add = 1.0, -beta * cosine * length / reference
            norm = math.sqrt(max(0.0, length**2 + 2.0 * add * product + (add * reference) ** 2))
            norm = norm if norm > CANCELLED * length else 0.0
        else:
            turn = min(self.rotate * (1.0 - cosine) * confidence, 1.0)
            # The length of (1 - turn) v^ + turn m^: never below sqrt(1/2), because the angle is at most 90 degrees.
            mixed = ((1.0 - turn) ** 2 + turn**2 + 2.0 * turn * (1.0 - turn) * cosine) ** 0.5
            keep, add, norm = (1.0 - turn) / mixed, turn * length / (mixed * reference), length
        return SliceCorrection(keep, add, norm) if abs(add) <= FACTOR_MAX else None


def correction_of(settings: ProtocolSettings) -> Heloco | None:
    """Return the correction in the run's settings, or None if there is none."""
    return None if settings.correction == "none" else Heloco()
