"""How long vectors are: what a sender claims of its pseudo-gradient, and what its reader finds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from atoll.base.buffer_pool import Vector
from atoll.base.errors import FrameRejected
from atoll.codec.encoded import Encoded
from atoll.model.layout import FragmentSlice

CLAIM_TOLERANCE: Final = 1e-3


def slice_norms(slices: Sequence[FragmentSlice], pseudo_gradient: Encoded) -> list[float]:
    """Return the L2 norm of each slice, accumulated in float64."""
    bounds = [tensor_slice.bounds for tensor_slice in slices]
    return [math.sqrt(squares) for squares in pseudo_gradient.products(bounds)]


def validated_norms(
    norms: Sequence[float], slices: Sequence[FragmentSlice], norms_claimed: Sequence[float], norm_max: float
) -> list[float]:
    """Return the computed norms per slice of a finite pseudo-gradient, if they match the claims and are not absurd.

    A norm is a claim that RDA would divide by, so the shard computes it again and uses its own result. Senders claim
    the norms of what they send, after its rounding, so the tolerance is small.

    Raises:
        FrameRejected: `norm_claim` or `norm_bound`.
    """
    if len(norms_claimed) != len(norms):
        raise FrameRejected("norm_claim", "norms for another layout", got=len(norms_claimed), allowed=len(norms))
    for tensor_slice, norm, claimed in zip(slices, norms, norms_claimed, strict=True):
        if not abs(norm - claimed) <= CLAIM_TOLERANCE * norm + 1e-6:
            raise FrameRejected(
                "norm_claim", f"{tensor_slice.tensor_name} is not as long as claimed", got=claimed, allowed=norm
            )
        if norm > norm_max:
            raise FrameRejected("norm_bound", f"{tensor_slice.tensor_name} is too long", got=norm, allowed=norm_max)
    return list(norms)


def are_plausible(norms_claimed: Sequence[float], slices: Sequence[FragmentSlice], norm_max: float) -> bool:
    """Return whether claims can be those of a pseudo-gradient that is used: one per slice, finite, none too long."""
    return len(norms_claimed) == len(slices) and all(0.0 <= norm <= norm_max for norm in norms_claimed)


def l2_norm(vector: Vector) -> float:
    """Return the L2 norm of a float32 vector, accumulated in float64: no overflow, no large temporary."""
    return math.sqrt(*Encoded.exact(vector).products([(0, vector.size)]))
