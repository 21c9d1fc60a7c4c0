r"""One version of a fragment to the next: the outer step, what is sent of it, and the average kept beside it.

**Rounding.** Let R be the values that every learner holds and e the sum of what rounding has taken so far. The outer optimizer
works on the values as they would be without rounding. A delta is sent of what they should become:

.. math::

    \Theta = R + e \qquad \Theta' = outer(\Theta, \Delta) \qquad q = Q(\Theta' - R) \qquad R' = R + q \qquad e' = \Theta' - R'

R' is what learners compute from R and q, to the bit, so it is also the shard's own truth, and only the shard knows e. It is
part of the outer state (`CARRY`, bfloat16). With `codec_down` "f32" there is no e: R' is Theta'. `atoll.merge.outer` says
which of this is stored.

**Average.** With `average_versions` N the shard keeps an exponential average of the values of all versions since the first,
for evaluation and export only. The weight that versions before the first lack is divided out:

.. math::

    w \leftarrow d w + (1 - d), \qquad a \leftarrow a + \tfrac{1 - d}{w} (\Theta - a), \qquad d = 1 - 1 / N

It is part of the outer state, so it travels to the next owner and into the archive, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from atoll.base import large_arrays
from atoll.base.large_arrays import Vector
from atoll.base.parallel import for_each, parts
from atoll.codec import KEYFRAME, Encoded, format_of
from atoll.merge.outer import NO_CARRY, OuterOptimizer, PartwiseOptimizer, State, derivable
from atoll.protocol.settings import ProtocolSettings

CARRY: Final = "carry"
AVERAGE: Final = "average"
WEIGHT: Final = "average_weight"
_HEADER_BYTES_MAX: Final = 2 << 20
_NUMBER_BYTES_MAX: Final = 64
_AVERAGES: Final = frozenset({AVERAGE, WEIGHT})


def averaged_in(weight: float, horizon_versions: int) -> tuple[float, float]:
    """Return w after one more version, and the share by which the average moves towards it; w begins at 0."""
    gain = 1.0 / horizon_versions
    weight = (1.0 - gain) * weight + gain
    return weight, gain / weight


def state_bytes_max(elements: int) -> int:
    """Return an upper bound for a packed state of so many elements, for any outer optimizer."""
    return _HEADER_BYTES_MAX + _NUMBER_BYTES_MAX * elements


@dataclass(frozen=True, slots=True)
class UpdatedFragment:
    """A version's values and state, and the delta from the version before (None: the version is sent whole)."""

    values: Vector
    state: State
    delta: Encoded | None = None


class DownlinkQuantiser:
    """The rounding of a run's versions in its codec."""

    def __init__(self, codec: str) -> None:
        self.format = format_of(codec)
        self.exact = codec == KEYFRAME

    def init(self, values: Vector) -> State:
        """Return the residue at version 0: nothing."""
        return {} if self.exact else {CARRY: large_arrays.zeros(values.size, ml_dtypes.bfloat16)}

    def unrounded(self, values: Vector, state: State) -> Vector:
        """Return the values as they would be without rounding."""
        return values if self.exact else values + state[CARRY].astype(np.float32)

    def settle(self, values: Vector, following: Vector, delta: Encoded, carry: npt.NDArray[Any]) -> None:
        """Round the step from `values` to `following`: write the sent part to `delta`, the result to `following`.

        The residue goes to `carry`, bfloat16; all have the length of `delta`. Raises `FrameRejected`: `not_finite`; the codec
        cannot hold the difference.
        """
        self.format.check(delta.settle(values, following, carry.view(np.uint16)))


class GlobalUpdate:
    """The rules of a run for its global values; pure, as the outer optimizer it wraps.

    `derived`: its outer state follows from the values of versions (`atoll.merge.outer.derivable`).
    """

    def __init__(self, outer: OuterOptimizer, settings: ProtocolSettings) -> None:
        self._outer = outer
        self._native = outer if isinstance(outer, PartwiseOptimizer) else None
        self._downlink = DownlinkQuantiser(settings.codec_down)
        self._average_versions = settings.average_versions
        self.derived = self._native is not None and derivable(settings)

    def init(self, values: Vector) -> State:
        """Return the state of version 0 with these values, flat float32."""
        averages: State = {AVERAGE: values, WEIGHT: np.zeros(())} if self._average_versions else {}
        return self._outer.init(values) | self._downlink.init(values) | averages

    def stored(self, state: State) -> State:
        """Return what of a state is stored with the version that it belongs to."""
        return {name: array for name, array in state.items() if name != CARRY} if self.derived else state

    def taken_over(self, values: Vector, stored: State) -> State:
        """Return the state with which an owner goes on, from what is `stored` of a version, or was derived from that."""
        return stored | self._downlink.init(values) if self.derived else stored

    def derive(self, state: State, before: Vector, after: Vector) -> None:
        """Move `state` on from the version with values `before` to that with values `after`; any stretch of a fragment."""
        if self._native is not None and self.derived:
            self._native.derive(state, before, after, state)

    def step(self, values: Vector, pseudo_gradient: Vector, state: State) -> UpdatedFragment:
        """Return values and state of a version, from those of the version before it and a merged pseudo-gradient.

        It works part by part, so that a part is in a cache while it is stepped and rounded, and arrays in scratch files
        need not be in memory. Only an optimizer that is not our own sees a fragment as a whole.
        """
        mine = {name: array for name, array in state.items() if name not in _AVERAGES}
        delta = None if self._downlink.exact else Encoded.blank(self._downlink.format, values.size)
        if self._native is None:
            following, kept = self._step_whole(values, pseudo_gradient, mine, delta)
        else:
            following, kept = self._step_parts(self._native, values, pseudo_gradient, mine, delta)
        averages: State = self._averaged(state, following) if self._average_versions else {}
        return UpdatedFragment(following, kept | averages, delta)

    def _step_parts(
        self, outer: PartwiseOptimizer, values: Vector, pseudo_gradient: Vector, state: State, delta: Encoded | None
    ) -> tuple[Vector, State]:
        following = large_arrays.spare(values.size, np.float32)
        kept = {name: large_arrays.spare(values.size, array.dtype) for name, array in state.items()}

        def take(part: tuple[int, int]) -> None:
            now = slice(*part)
            former, target = values[now], following[now]
            ours, newer = ({name: array[now] for name, array in arrays.items()} for arrays in (state, kept))
            carry = ours[CARRY].view(np.uint16) if CARRY in ours else NO_CARRY
            outer.step(former, carry, pseudo_gradient[now], ours, target, newer)
            if delta is not None:
                self._downlink.settle(former, target, delta.stretch(*part), newer[CARRY])
            if self.derived:
                outer.derive(ours, former, target, newer)
            large_arrays.release_pages(former, target, *ours.values(), *newer.values())

        for_each(take, parts(0, values.size), values.size)
        return following, kept

    def _step_whole(
        self, values: Vector, pseudo_gradient: Vector, state: State, delta: Encoded | None
    ) -> tuple[Vector, State]:
        own = {name: array for name, array in state.items() if name != CARRY}
        following, kept = self._outer.update(self._downlink.unrounded(values, state), pseudo_gradient, own)
        if delta is None:
            return following, kept
        following = np.array(following)  # rounding writes to it, and a state may share its memory
        carry = large_arrays.spare(values.size, state[CARRY].dtype)

        def settle(part: tuple[int, int]) -> None:
            now = slice(*part)
            self._downlink.settle(values[now], following[now], delta.stretch(*part), carry[now])
            large_arrays.release_pages(values[now], following[now])

        for_each(settle, parts(0, values.size), values.size)
        return following, kept | {CARRY: carry}

    def _averaged(self, state: State, values: Vector) -> State:
        weight, newest = averaged_in(float(state[WEIGHT]), self._average_versions)
        share, average = np.float32(newest), large_arrays.spare(values.size, np.float32)

        def take(part: tuple[int, int]) -> None:
            here = slice(*part)
            former, newer = state[AVERAGE][here], values[here]
            average[here] = newer if share == 1.0 else np.add(former, share * (newer - former), dtype=np.float32)
            large_arrays.release_pages(former, newer, average[here])

        for_each(take, parts(0, values.size), values.size)
        return {AVERAGE: average, WEIGHT: np.asarray(weight)}
