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

from typing import Final

import ml_dtypes
import numpy as np

from atoll.codecs import KEYFRAME, Encoded, encoding_of
from atoll.kernels import BF16, Vector, spill
from atoll.outer import State

CARRY: Final = "carry"

_NO_SCALES = np.empty(0, dtype=np.float32)


class Downleg:
    """The rounding of a run's versions in its codec."""

    def __init__(self, codec: str) -> None:
        """Keep the codec; raise `SettingsError` for an unknown one."""
        self._encoding = encoding_of(codec)
        self.exact = codec == KEYFRAME

    def init(self, values: Vector) -> State:
        """Return what is carried at version 0: nothing."""
        return {} if self.exact else {CARRY: spill.zeros(values.size, ml_dtypes.bfloat16)}

    def unrounded(self, values: Vector, state: State) -> Vector:
        """Return the values as they would be without rounding."""
        if self.exact:
            return values
        target = values.copy()
        carry = state[CARRY].view(np.uint8)
        Encoded(BF16, values.size, carry, _NO_SCALES).blend(target, 0, values.size, 1.0, 1.0)
        return target

    def blank(self, elements: int) -> Encoded | None:
        """Return a place for the delta of so many elements, None where there is none."""
        return None if self.exact else Encoded.blank(self._encoding.number, elements)

    def rounded(self, values: Vector, target: Vector, delta: Encoded | None) -> tuple[Vector, State]:
        """Return the next values, which are near `target`, and what is carried; write what makes them into `delta`.

        Raises:
            FrameRejected: `not_finite`; the codec cannot hold the difference.
        """
        if delta is None:
            return target, {}
        sent = self._encoding.encoded(np.subtract(target, values))
        delta.hold(sent)
        following = values.copy()
        sent.blend(following, 0, values.size, 1.0, 1.0)
        carry = encoding_of("bf16").encoded(np.subtract(target, following))
        return following, {CARRY: carry.codes.view(ml_dtypes.bfloat16)}
