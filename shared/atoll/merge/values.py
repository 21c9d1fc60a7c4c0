r"""Merges by value: the mean of what all learners have, also of those that are not in this round.

Running statistics are estimates from the data that an island has seen. The best common estimate is the mean over all islands,

.. math::

    v = \tfrac{\sum w_m x_m}{\sum w_m}

with the newest value x_m of every learner m. A round holds only who pushed in time. So the shard keeps the last values of the
others (memory, a part of the outer state) and counts them as if they had been pushed again. The weight is that of the push,
but at least `FADING` of the one before: who pushes a few steps more before it leaves has not seen less than the others.

The memory is bounded: `KEPT` learners, whoever pushed last, each for `KEPT_VERSIONS` versions, in fragments of up to
`KEPT_ELEMENTS` elements; else a round counts without the rest. An absent learner whose values are `outlier_ratio` times longer
than the median of all counts no more: it may have left because it had diverged. Two contributions of one learner in a round
count as their mean, with the larger weight of both.

**Robust** (`protocol.robust`): from three learners on, each element is the median of what the learners have, one vote each. A
minority cannot move it beyond the values of honest learners.

A mean of variances is no variance if one of them is negative, and a learner may push what it likes. So a negative number in a
leaf that is a variance by its name (`atoll.model.leaf_conventions`) counts as zero: here in each contribution, and for
fragments without a memory in what is merged (`atoll.merge.round_merge`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atoll.base.errors import ProtocolMisuse
from atoll.base.large_arrays import Vector
from atoll.codec.encoded import Encoded
from atoll.merge.fold import Corrections, Judgement, MergeResult, l2_norm
from atoll.merge.outer import OuterOptimizer, State
from atoll.merge.robust import cap_weights, is_judged
from atoll.model.layout import FragmentSlice
from atoll.model.leaf_conventions import is_variance
from atoll.protocol.settings import MAJORITY_MIN, ProtocolSettings

KEPT: Final = 12
KEPT_VERSIONS: Final = 24
KEPT_ELEMENTS: Final = 1 << 18
FADING: Final = 0.9

LEARNERS: Final = "learners"
WEIGHTS: Final = "weights"
VERSIONS: Final = "versions"
VALUES: Final = "values"
"""The arrays of a memory in an outer state."""

_PART: Final = 1 << 14


def is_remembered(elements: int) -> bool:
    """Return whether a fragment of so many elements is small enough for a memory."""
    return 0 < elements <= KEPT_ELEMENTS


class MeanOfValues(OuterOptimizer):
    """No optimizer: the new values are those that the merged difference *from zero* leads to, the mean of the learners'."""

    def init(self, params: Vector) -> State:
        """Return a memory of nobody, or no memory for a large fragment."""
        return _packed([], params.size) if is_remembered(params.size) else {}

    def update(self, params: Vector, pseudo_gradient: Vector, state: State) -> tuple[Vector, State]:
        """Take the mean, whatever the values were before; `state` is the memory that came with it."""
        del params
        return np.negative(pseudo_gradient), state


@dataclass(frozen=True, slots=True)
class LastValues:
    """The last values of a learner: a digest of its id, values, their weight, and the version that they were merged into."""

    learner: int
    values: Vector
    weight: float
    version: int


class ValuesFold:
    """The merge of one round of a fragment that is merged by value; all contributions of the round wait for its end."""

    def __init__(self, slices: Sequence[FragmentSlice], settings: ProtocolSettings) -> None:
        self._slices = len(slices)
        self._variances = variances_in(slices)
        self._settings = settings
        self._waiting: list[tuple[int, Vector, float]] = []

    def add(
        self,
        pseudo_gradient: Encoded,
        norms: Sequence[float],
        weight: float,
        staleness_weight: float = 1.0,
        corrections: Corrections | None = None,
        *,
        learner: str,
    ) -> None:
        """Take a learner's difference from zero with a positive weight; values have no direction, so nothing corrects them."""
        del norms, corrections
        values = lift(np.negative(pseudo_gradient.part(0, pseudo_gradient.elements)), self._variances)
        self._waiting.append((digest_of(learner), values, weight * staleness_weight))

    def result(self, memory: State, version: int) -> MergeResult:
        """Return the mean over the round that makes `version` and over `memory`, with the memory after it.

        Raises `ProtocolMisuse`: nothing was added, or the result was given already.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting:
            raise ProtocolMisuse("nothing was folded, or the result was given already")
        former = {each.learner: each for each in _unpacked(memory, version)}
        newest = [_faded(each, former.get(each.learner)) for each in _by_learner(waiting, version)]
        absent = [former[learner] for learner in former if learner not in {each.learner for each in newest}]
        known = [*newest, *_credible(absent, [*newest, *absent], self._settings.outlier_ratio)]
        kept = sorted(known, key=lambda each: -each.version)[:KEPT]
        return MergeResult(
            np.negative(self._mean(known)),
            sum(weight for _, _, weight in waiting),
            len(waiting),
            (Judgement.untouched(self._slices),) * len(waiting) if is_judged(self._settings) else (),
            _packed(kept, newest[0].values.size),
        )

    def _mean(self, known: Sequence[LastValues]) -> Vector:
        if self._settings.robust != "none" and len(known) >= MAJORITY_MIN:
            return _medians([each.values for each in known])
        weights = [each.weight for each in known]
        if self._settings.share_max < 1.0:
            weights = cap_weights(weights, self._settings.share_max)
        return _mean([(each.values, weight) for each, weight in zip(known, weights, strict=True)])


def variances_in(slices: Iterable[FragmentSlice]) -> tuple[tuple[int, int], ...]:
    """Return where the variances among these slices are in the fragment's vector."""
    return tuple(each.bounds for each in slices if is_variance(each.tensor_name))


def lift(values: Vector, variances: Iterable[tuple[int, int]]) -> Vector:
    """Return a fragment's values, changed in place: negative numbers in its variances become zero."""
    for start, stop in variances:
        here = values[start:stop]
        np.maximum(here, 0.0, out=here)
    return values


def digest_of(learner: str) -> int:
    """Return 64 bits that stand for a learner id."""
    return int.from_bytes(hashlib.blake2b(learner.encode(), digest_size=8).digest(), "little")


def _by_learner(waiting: Iterable[tuple[int, Vector, float]], version: int) -> Iterable[LastValues]:
    theirs: dict[int, list[tuple[Vector, float]]] = {}
    for learner, values, weight in waiting:
        theirs.setdefault(learner, []).append((values, weight))
    for learner, parts in theirs.items():
        yield LastValues(learner, _mean(parts), max(weight for _, weight in parts), version)


def _faded(newest: LastValues, former: LastValues | None) -> LastValues:
    """Return what a learner has, with a weight that one short push does not take away."""
    if former is None or newest.weight >= FADING * former.weight:
        return newest
    return replace(newest, weight=FADING * former.weight)


def _credible(absent: Sequence[LastValues], known: Sequence[LastValues], ratio: float) -> Sequence[LastValues]:
    if ratio == 0.0 or len(known) < MAJORITY_MIN:
        return absent
    longest = ratio * float(np.median([l2_norm(each.values) for each in known]))
    return [each for each in absent if l2_norm(each.values) <= longest]


def _mean(parts: Sequence[tuple[Vector, float]]) -> Vector:
    """Return a weighted mean, taken in float64: that of equal values is the value, to the bit but for the sign of a zero."""
    total = np.zeros(parts[0][0].size, dtype=np.float64)
    weight_sum = sum(weight for _, weight in parts)
    for values, weight in parts:
        total += values.astype(np.float64) * (weight / weight_sum)
    return total.astype(np.float32)


def _medians(vectors: Sequence[Vector]) -> Vector:
    size = vectors[0].size
    found = np.empty(size, dtype=np.float32)
    for start in range(0, size, _PART):
        here = slice(start, start + _PART)
        found[here] = np.median(np.stack([vector[here] for vector in vectors]).astype(np.float64), axis=0)
    return found


def _packed(kept: Sequence[LastValues], elements: int) -> State:
    places: dict[str, npt.NDArray[Any]] = {
        LEARNERS: np.zeros(KEPT, dtype=np.uint64),
        WEIGHTS: np.zeros(KEPT, dtype=np.float64),
        VERSIONS: np.zeros(KEPT, dtype=np.int64),
        VALUES: np.zeros((KEPT, elements), dtype=np.float32),
    }
    for place, each in enumerate(kept):
        places[LEARNERS][place], places[WEIGHTS][place] = each.learner, each.weight
        places[VERSIONS][place], places[VALUES][place] = each.version, each.values
    return places


def _unpacked(memory: State, version: int) -> Iterable[LastValues]:
    """Yield what a memory holds that may count in `version`, newest first; what no shard of ours has written is passed over."""
    for place in range(len(memory[WEIGHTS])):
        learner, weight, merged = (memory[name][place] for name in (LEARNERS, WEIGHTS, VERSIONS))
        values = memory[VALUES][place]
        recent = version - KEPT_VERSIONS <= int(merged) < version
        if recent and 0.0 < weight < math.inf and np.isfinite(values).all():
            yield LastValues(int(learner), values, float(weight), int(merged))
