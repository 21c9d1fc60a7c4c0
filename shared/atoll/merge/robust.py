r"""Robust merging: what a lying or broken learner can do to a round is bounded by what the others of the round say.

The rules are a founder's choice. They need all contributions at once, so the fold waits for the round's end (`CollectedFold`).
A learner has one vote, whatever it claims to weigh and however many of its contributions are in the round. A majority needs
three: in a round of one or two learners nobody is judged.

**Share** (`share_max`). No learner has more than this share of a round's weight: w_m is cut to the c at which min(w_m, c) <=
s_max sum_k min(w_k, c) holds for all. Where fewer than 1 / s_max contribute, all weigh the same.

**Clipping** (`robust` "clip"). No slice is longer than `CLIP` times the median of the round's lengths of that slice: no
minority can move a median beyond the honest ones' lengths.

**Gate** (`robust` "gate", with clipping). Per slice, a contribution is compared with the mean direction of *other learners*.
If

.. math::  \cos(v_m, \sum_{k \ne m} \varphi(v_k)) < -\max(OPPOSED, 2 / \sqrt n)

it is not heard there: FLTrust (Cao et al., arXiv 2012.13995) with the others in place of a trusted direction. n elements are
compared; a random direction has a cosine of standard deviation 1 / sqrt(n), so chance excludes hardly anybody. If not more
than half agree, there is no majority to believe, and all are heard.

**Alignment** (`alignments`) is noted, whatever the rules, and decides nothing: the cosines of a contribution v_m with the
merged pseudo-gradient u, and with the others' mean direction as above. v_m is part of u, so noise alone reaches 1 / sqrt(M)
with u in a round of M; with the others noise is near 0, a flipped sign is negative. Both are estimated on `NOTED_RUNS` runs of
a fragment, whatever its size, to about 0.016.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atoll.base.errors import ProtocolMisuse
from atoll.base.large_arrays import Vector
from atoll.codec.encoded import Encoded
from atoll.merge.fold import NORM_MIN, Corrections, FragmentFold, Judgement, MergeResult
from atoll.model.layout import FragmentSlice
from atoll.protocol.settings import MAJORITY_MIN, ProtocolSettings

CLIP: Final = 2.0
OPPOSED: Final = 0.05
RUN: Final = 1 << 12
SAMPLE: Final = 1 << 15
"""The least number of elements of a large slice that are compared."""
SAMPLE_SHARE: Final = 256
NOTED_RUN: Final = 512
NOTED_RUNS: Final = 8
COMPARED_MAX: Final = 128
"""Contributions of a round whose alignment with each other is noted: their number counts squared."""

ROUNDING: Final = 1e-12
FLAT: Final = 1e-12
"""A squared length: a shorter sum of directions has cancelled and points nowhere."""

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Waiting:
    pseudo_gradient: Encoded
    norms: Sequence[float]
    weight: float
    staleness_weight: float
    corrections: Corrections | None
    learner: str


class CollectedFold:
    """The merge of one fragment's round in which all contributions are judged together, when the round ends."""

    def __init__(self, slices: Sequence[FragmentSlice], settings: ProtocolSettings) -> None:
        self._slices = tuple(slices)
        self._settings = settings
        self._waiting: list[_Waiting] = []

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
        """Take a learner's pseudo-gradient as `FragmentFold.add` does; it waits, encoded as it came, until `result`."""
        self._waiting.append(_Waiting(pseudo_gradient, norms, weight, staleness_weight, corrections, learner))

    def result(self) -> MergeResult:
        """Return the merge of all contributions, with a judgement on each.

        Raises `ProtocolMisuse`: nothing was added, or the result was given already.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting:
            raise ProtocolMisuse("nothing was folded, or the result was given already")
        learners = [each.learner for each in waiting]
        weights = shares([each.weight * each.staleness_weight for each in waiting], learners, self._settings.share_max)
        vectors, norms = [each.pseudo_gradient for each in waiting], [each.norms for each in waiting]
        judgements = [Judgement.untouched(len(self._slices))] * len(waiting)
        if self._settings.robust != "none" and len(set(learners)) >= MAJORITY_MIN:
            judgements = judge(self._slices, vectors, norms, learners, gate=self._settings.robust == "gate")
        fold = FragmentFold(self._slices, self._settings.merge)
        for one, weight, judgement in zip(waiting, weights, judgements, strict=True):
            staleness = one.staleness_weight
            alone = weight / staleness if weight > 0.0 else one.weight
            fold.add(one.pseudo_gradient, one.norms, alone, staleness, one.corrections, judgement)
        merged = fold.result()
        return MergeResult(merged.pseudo_gradient, merged.weight_sum, merged.count, tuple(judgements))


def fold_of(slices: Sequence[FragmentSlice], settings: ProtocolSettings) -> FragmentFold | CollectedFold:
    """Return the fold of a round by the run's rules: on arrival, or at its end where contributions are judged together."""
    return CollectedFold(slices, settings) if is_judged(settings) else FragmentFold(slices, settings.merge)


def is_judged(settings: ProtocolSettings) -> bool:
    """Return whether the contributions of a round are judged by each other, so that all of them are needed together."""
    return settings.robust != "none" or settings.share_max < 1.0


def shares(weights: Sequence[float], learners: Sequence[str], share_max: float) -> list[float]:
    """Return the weights of contributions, cut so that no learner's are more than `share_max` of all together."""
    sums = dict.fromkeys(learners, 0.0)
    for learner, weight in zip(learners, weights, strict=True):
        sums[learner] += weight
    cut = dict(zip(sums, cap_weights(list(sums.values()), share_max), strict=True))
    return [
        weight * cut[learner] / sums[learner] if weight > 0.0 else 0.0
        for learner, weight in zip(learners, weights, strict=True)
    ]


def cap_weights(weights: Sequence[float], share_max: float) -> list[float]:
    """Return the weights, not negative, of which none is more than `share_max` of their sum, as far as that can be.

    The heaviest k are cut to the weight c that is the share: c = s (k c + rest), so c = s rest / (1 - s k).
    """
    heard = sorted((weight for weight in weights if weight > 0.0), reverse=True)
    if share_max * len(heard) <= 1.0 + ROUNDING:
        lightest = heard[-1] if heard else 0.0
        return [min(weight, lightest) for weight in weights]
    rest, cut = math.fsum(heard), math.inf
    for count, weight in enumerate(heard):
        if share_max * count > 1.0 - ROUNDING:
            break  # those before it are at the cap already, but for rounding
        cut = share_max * rest / (1.0 - share_max * count)
        if weight <= cut:
            break
        rest = math.fsum(heard[count + 1 :])
    return [min(weight, cut) for weight in weights]


def judge(
    slices: Sequence[FragmentSlice],
    vectors: Sequence[Encoded],
    norms: Sequence[Sequence[float]],
    learners: Sequence[str],
    *,
    gate: bool,
) -> list[Judgement]:
    """Return a judgement on each contribution of a round: by how much each slice is shortened, and whether it is heard."""
    count = len(vectors)
    clips = np.ones((len(slices), count))
    heard = np.ones((len(slices), count), dtype=bool)
    seed = hashlib.blake2b(b"".join(struct.pack("<d", norm) for of_one in norms for norm in of_one), digest_size=8)
    votes = votes_of(learners)
    offset = int.from_bytes(seed.digest(), "little")
    for number, tensor_slice in enumerate(slices):
        lengths = [of_one[number] for of_one in norms]
        longest = CLIP * median_by_votes(lengths, votes)
        if longest > NORM_MIN:
            clips[number] = [longest / length if length > longest else 1.0 for length in lengths]
        if gate:
            heard[number] = _agree(tensor_slice, vectors, learners, votes, offset)
    return [Judgement(tuple(map(float, clips[:, one])), tuple(map(bool, heard[:, one]))) for one in range(count)]


def votes_of(learners: Sequence[str]) -> Numbers:
    """Return the vote of each contribution: a learner's contributions share one."""
    return np.array([1.0 / learners.count(learner) for learner in learners])


def median_by_votes(lengths: Sequence[float], votes: Numbers) -> float:
    """Return the shortest length that at least half of all votes do not exceed."""
    order = np.argsort(lengths, kind="stable")
    reached = np.cumsum(votes[order]) >= 0.5 * float(votes.sum()) - 1e-9
    return float(lengths[order[int(np.argmax(reached))]])


def _agree(
    tensor_slice: FragmentSlice, vectors: Sequence[Encoded], learners: Sequence[str], votes: Numbers, offset: int
) -> npt.NDArray[np.bool_]:
    """Return who does not point away from the others in a slice; everybody where those are not more than half."""
    runs = compared_runs(tensor_slice.size, offset)
    start = tensor_slice.offset
    products = np.zeros((len(vectors), len(vectors)))
    # In float32 within a run, in float64 over all: right to a millionth, which is far finer than any bound here.
    room = np.empty((len(vectors), max((high - low for low, high in runs), default=0)), np.float32)
    for low, high in runs:
        here = room[:, : high - low]
        for number, vector in enumerate(vectors):
            here[number] = vector.part(start + low, start + high)
        products += here @ here.T
    cosines = others_cosines(products, learners, votes)
    compared = max(1, sum(high - low for low, high in runs))  # a tensor may have no elements
    agrees: Any = cosines >= -max(OPPOSED, 2.0 / math.sqrt(compared))
    return agrees if float(votes[agrees].sum()) > 0.5 * float(votes.sum()) + 1e-9 else np.ones_like(agrees)


def others_cosines(products: Numbers, learners: Sequence[str], votes: Numbers) -> Numbers:
    """Return the cosine of each vector with the mean direction of other learners, from all scalar products; 0 of zeros."""
    lengths = np.sqrt(np.diag(products))
    inverse = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > NORM_MIN)
    cosines = products * np.outer(inverse, inverse)
    found = np.zeros(len(learners))
    for number, learner in enumerate(learners):
        others = votes * [other != learner for other in learners]
        squared = float(others @ cosines @ others)
        if squared > FLAT:
            found[number] = float(cosines[number] @ others) / math.sqrt(squared)
    return found


def compared_runs(size: int, offset: int) -> list[tuple[int, int]]:
    """Return the parts of a slice of so many elements that are compared: all of a small one, runs of a large one.

    The `offset` follows from the lengths of all contributions: a replay finds the same, and nobody knows it before all have
    sent.
    """
    return spread_runs(size, max(SAMPLE, size // SAMPLE_SHARE) // RUN, RUN, offset)


def spread_runs(size: int, count: int, run: int, offset: int = 0) -> list[tuple[int, int]]:
    """Return the bounds of `count` evenly spread runs of `run` elements; all of a vector that is at most twice as long."""
    if size <= 2 * count * run:
        return [(0, size)] if size else []
    stride = size // count
    first = offset % (stride - run + 1)
    return [(at * stride + first, at * stride + first + run) for at in range(count)]


@dataclass(frozen=True, slots=True)
class Alignment:
    """The cosines of one contribution: with the merge, and with the other learners' mean direction (None: it has none)."""

    merged: float | None
    others: float | None


def sample_of(pseudo_gradient: Encoded) -> Vector:
    """Return the noted sample of a pseudo-gradient, float32; it is a copy."""
    runs = spread_runs(pseudo_gradient.elements, NOTED_RUNS, NOTED_RUN)
    parts = [pseudo_gradient.part(*run) for run in runs]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def alignments(samples: Sequence[Vector], learners: Sequence[str], merged: Vector) -> list[Alignment]:
    """Return the alignment of each contribution of a round, from its sample and that of its merge.

    Only the first `COMPARED_MAX` contributions are compared with each other.
    """
    if not samples:
        return []
    rows = np.stack(samples).astype(np.float64)
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    target = merged.astype(np.float64)
    length = math.sqrt(float(target @ target))
    with_merged = rows @ target
    few, names = rows[:COMPARED_MAX], list(learners[:COMPARED_MAX])
    several = len(set(names)) > 1
    beside = others_cosines(few @ few.T, names, votes_of(names)) if several else np.zeros(0)
    found = []
    for number, own in enumerate(lengths):
        known = float(own) > NORM_MIN
        found.append(
            Alignment(
                float(with_merged[number]) / (float(own) * length) if known and length > NORM_MIN else None,
                float(beside[number]) if known and number < beside.size else None,
            )
        )
    return found
