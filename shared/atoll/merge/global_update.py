r"""One version of a fragment to the next: the outer step, and the average kept beside it.

**Average.** With `average_versions` N the shard keeps, beside the values, an exponential average of the values of all
versions since the first. The weight that versions before the first lack is divided out:

.. math::

    w \leftarrow d w + (1 - d), \qquad a \leftarrow a + \tfrac{1 - d}{w} (\Theta - a), \qquad d = 1 - 1 / N

It is for evaluation and export only: no learner trains on it. Version 0 is not in it. It is part of the outer state:
the head names it with the values it belongs to, so it survives its shard, travels to the next owner and into the
archive, bit for bit. It costs four bytes per parameter in the shard's memory, and as many on the way to the broker with
every commit.

**Rounding.** The part of a version that is sent may be rounded; the values are what its readers compute
(`atoll.merge.downlink`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from atoll.base import scratch_arrays
from atoll.base.parallel import each, parts
from atoll.codec import Encoded
from atoll.merge.downlink import CARRY, DownlinkQuantiser, carry_of
from atoll.merge.outer import Nesterov, OuterOptimizer, State
from atoll.protocol.settings import ProtocolSettings

Vector = npt.NDArray[np.float32]

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


class GlobalUpdate:
    """The rules of a run for its global values; pure, as the outer optimizer it wraps."""

    def __init__(self, outer: OuterOptimizer, settings: ProtocolSettings) -> None:
        """Keep the rules."""
        self._outer = outer
        self._downleg = DownlinkQuantiser(settings.codec_down)
        self._average_versions = settings.average_versions

    def init(self, values: Vector) -> State:
        """Return the state of version 0 with these values, flat float32."""
        averaged = self._averaged({AVERAGE: values, WEIGHT: np.zeros(())}, None)
        return self._outer.init(values) | self._downleg.init(values) | averaged

    def step(self, values: Vector, pseudo_gradient: Vector, state: State) -> UpdatedFragment:
        """Return values and state of a version, from those of the version before it and a merged pseudo-gradient.

        It works part by part, so that a part is in a cache while it is stepped and rounded, and arrays in scratch files
        need not be in memory. Only a transformation of optax sees a fragment as a whole.
        """
        count = values.size
        mine = {name: array for name, array in state.items() if name not in _AVERAGES}
        delta = self._downleg.blank(count)
        outer = self._outer if isinstance(self._outer, Nesterov) else None
        if outer is not None:
            following = scratch_arrays.spare(count, np.float32)
            kept = {name: scratch_arrays.spare(count, array.dtype) for name, array in mine.items()}
        else:
            following, kept = self._whole(values, pseudo_gradient, mine)

        def take(part: tuple[int, int]) -> None:
            now = slice(*part)
            former, target = values[now], following[now]
            if outer is not None:
                ours, newer = ({name: array[now] for name, array in arrays.items()} for arrays in (mine, kept))
                outer.step(former, carry_of(ours), pseudo_gradient[now], ours, target, newer)
                scratch_arrays.release_pages(*ours.values(), *newer.values())
            if delta is not None:
                self._downleg.settle(former, target, delta.stretch(*part), kept[CARRY][now])
            scratch_arrays.release_pages(former, target)

        each(take, parts(0, count), count)
        return UpdatedFragment(following, kept | self._averaged(state, following), delta)

    def _whole(self, values: Vector, pseudo_gradient: Vector, state: State) -> tuple[Vector, State]:
        """Return the target values (a copy if they will be rounded), and the next state with room for the residue."""
        outer = {name: array for name, array in state.items() if name != CARRY}
        target, kept = self._outer.update(self._downleg.unrounded(values, state), pseudo_gradient, outer)
        carried = {
            name: scratch_arrays.spare(array.size, array.dtype) for name, array in state.items() if name == CARRY
        }
        return np.array(
            target
        ) if carried else target, kept | carried  # rounding writes to it; a state may share its memory

    def _averaged(self, state: State, values: Vector | None) -> State:
        """Return the average after `values`, None for those of version 0; nothing if the run keeps none."""
        if not self._average_versions:
            return {}
        if values is None:
            return dict(state)
        weight, newest = averaged_in(float(state[WEIGHT]), self._average_versions)
        share, average = np.float32(newest), scratch_arrays.spare(values.size, np.float32)

        def take(part: tuple[int, int]) -> None:
            here = slice(*part)
            former, newer = state[AVERAGE][here], values[here]
            average[here] = newer if share == 1.0 else np.add(former, share * (newer - former), dtype=np.float32)
            scratch_arrays.release_pages(former, newer, average[here])

        each(take, parts(0, values.size), values.size)
        return {AVERAGE: average, WEIGHT: np.asarray(weight)}
