r"""The way down: what of a new version is sent, and what is kept for a later one.

Let R be the values that everybody holds and e what rounding has taken from what was sent so far. The outer optimizer
works on what the values would be without rounding, and a delta is sent of what they should become:

.. math::

    \Theta = R + e \qquad \Theta' = outer(\Theta, \Delta) \qquad q = Q(\Theta' - R) \qquad R' = R + q \qquad e' = \Theta' - R'

R' is what learners compute from R and q, to the bit, so it is the shard's own truth, and only the shard knows e. It is part
of the outer state (`CARRY`, bfloat16: the shard that takes over goes on with the same bits), lies within half a step of
the quantiser, and what its own rounding loses is a thousandth of that step. With `codec_down` "f32" there is no e: R' is
Theta'.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from atoll.base import scratch_arrays
from atoll.base.buffer_pool import Vector
from atoll.codec import KEYFRAME, Encoded, format_of
from atoll.merge.outer import State

Carry = npt.NDArray[Any]

CARRY: Final = "carry"

_NONE = np.empty(0, dtype=np.uint16)


def carry_of(state: State) -> Carry:
    """Return the bits of what is carried in a state, uint16; none where nothing is."""
    return state[CARRY].view(np.uint16) if CARRY in state else _NONE


class DownlinkQuantiser:
    """The rounding of a run's versions in its codec."""

    def __init__(self, codec: str) -> None:
        """Keep the codec; raise `SettingsError` for an unknown one."""
        self._format = format_of(codec)
        self.exact = codec == KEYFRAME

    def init(self, values: Vector) -> State:
        """Return what is carried at version 0: nothing."""
        return {} if self.exact else {CARRY: scratch_arrays.zeros(values.size, ml_dtypes.bfloat16)}

    def unrounded(self, values: Vector, state: State) -> Vector:
        """Return the values as they would be without rounding."""
        return values if self.exact else values + state[CARRY].astype(np.float32)

    def blank(self, elements: int) -> Encoded | None:
        """Return a place for the delta of so many elements, None where there is none."""
        return None if self.exact else Encoded.blank(self._format, elements)

    def settle(self, values: Vector, following: Vector, delta: Encoded, carry: Carry) -> None:
        """Round the way from `values` to `following`: write what is sent of it into `delta`, where it leads into `following`.

        What it leaves goes to `carry`, bfloat16 as the values are float32; all are as long as `delta`.

        Raises:
            FrameRejected: `not_finite`; the codec cannot hold the difference.
        """
        self._format.check(delta.settle(values, following, carry.view(np.uint16)))
