r"""The way down: which part of a new version is sent, and which part is kept for a later one.

Let R be the values that every learner holds and e the sum of what rounding has taken so far. The outer optimizer works
on the values as they would be without rounding. A delta is sent of what they should become:

.. math::

    \Theta = R + e \qquad \Theta' = outer(\Theta, \Delta) \qquad q = Q(\Theta' - R) \qquad R' = R + q \qquad e' = \Theta' - R'

R' is what learners compute from R and q, to the bit, so it is also the shard's own truth, and only the shard knows e.
It is part of the outer state (`CARRY`, bfloat16), so the next owner goes on with the same bits. It is within half a
step of the quantiser, and its own rounding loses a thousandth of that step. With `codec_down` "f32" there is no e: R'
is Theta'.
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
    """Return the bits of the residue carried in a state, uint16; an empty array if it carries none."""
    return state[CARRY].view(np.uint16) if CARRY in state else _NONE


class DownlinkQuantiser:
    """The rounding of a run's versions in its codec."""

    def __init__(self, codec: str) -> None:
        """Keep the codec; raise `SettingsError` for an unknown one."""
        self._format = format_of(codec)
        self.exact = codec == KEYFRAME

    def init(self, values: Vector) -> State:
        """Return the residue at version 0: nothing."""
        return {} if self.exact else {CARRY: scratch_arrays.zeros(values.size, ml_dtypes.bfloat16)}

    def unrounded(self, values: Vector, state: State) -> Vector:
        """Return the values as they would be without rounding."""
        return values if self.exact else values + state[CARRY].astype(np.float32)

    def blank(self, elements: int) -> Encoded | None:
        """Return room for the delta of so many elements, or None if there are no deltas."""
        return None if self.exact else Encoded.blank(self._format, elements)

    def settle(self, values: Vector, following: Vector, delta: Encoded, carry: Carry) -> None:
        """Round the step from `values` to `following`: write the sent part to `delta`, the result to `following`.

        The residue goes to `carry`, bfloat16 as the values are float32; all have the length of `delta`.

        Raises:
            FrameRejected: `not_finite`; the codec cannot hold the difference.
        """
        self._format.check(delta.settle(values, following, carry.view(np.uint16)))
