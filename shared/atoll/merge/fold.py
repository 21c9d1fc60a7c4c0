r"""Merges pseudo-gradients: token weights, the weighted mean and radial-directional averaging, folded on arrival.

For learners m with pseudo-gradients v_m and weights w_m (Sec. 3.2 and App. D.2 of arXiv 2604.21428):

.. math::

    w &= c_{tokens}^2 / c_{steps} \\
    mean &= \tfrac{\sum w_m v_m}{\sum w_m} \\
    RDA &= \tfrac{\sum w_m \lVert v_m \rVert}{\sum w_m}\; \varphi\!\left(\tfrac{\sum w_m \varphi(v_m)}{\sum w_m}\right),
    \quad \varphi(x) = x / \lVert x \rVert,\ \varphi(0) = 0

Late contributions weigh less: with staleness weight f_m, f_m w_m replaces w_m, and the result is multiplied by max f_m. So a
late contribution counts like a small learner's, and one that is alone in its round is shortened, because a factor on weights
would cancel: learners that miss each other's rounds would each move the global values by a full step.

RDA is taken per slice (`FragmentSlice`): the mean of M nearly orthogonal vectors of length R is only R / sqrt(M) long, RDA
keeps R. Slices marked `direct` (embeddings) take the mean. The comment at `SMALL` describes directions that cancel. A
pseudo-gradient may be corrected (`atoll.merge.correction`) and then shortened (`atoll.protocol.quarantine`) on its way in: v
is then a v + b m, in the same pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np

from atoll.base import large_arrays
from atoll.base.errors import FrameRejected, ProtocolMisuse
from atoll.base.large_arrays import Vector
from atoll.base.parallel import for_each, parts
from atoll.codec.encoded import Encoded
from atoll.codec.formats import F32
from atoll.codec.formats.interface import blocks
from atoll.merge.outer import State
from atoll.model.layout import FragmentSlice

Method = Literal["mean", "rda"]

CLAIM_TOLERANCE: Final = 1e-3
ROUNDING = 2.0**-23
NORM_MIN = 1e-20
# If directions cancel, there is no direction to keep. They cancel if their mean is shorter than the rounding of the M
# float32 directions in it: M 2^-23 of the share of all weight that has a direction. The rest is noise, which RDA would
# scale up to full size. A large slice then stays put, as phi(0) = 0 says; in practice large slices do not cancel. Small
# ones do: the smallest, a single number, has only two directions. So for slices of at most `SMALL` numbers the fold also
# keeps the mean of values, and uses it then. A slice shorter than 1e-20 counts as zero: float32 could not hold the
# inverse of its norm.
SMALL = 128


def slice_norms(slices: Sequence[FragmentSlice], pseudo_gradient: Encoded) -> list[float]:
    """Return the L2 norm of each slice, accumulated in float64."""
    bounds = [tensor_slice.bounds for tensor_slice in slices]
    return [math.sqrt(squares) for squares in pseudo_gradient.products(bounds)]


def validated_norms(
    norms: Sequence[float], slices: Sequence[FragmentSlice], norms_claimed: Sequence[float], norm_max: float
) -> list[float]:
    """Return the computed norms per slice of a finite pseudo-gradient, if they match the claims and are not absurd.

    A norm is a claim that RDA would divide by, so the shard computes it again. Senders claim the norms of what they send,
    after its rounding, so the tolerance is small. Raises `FrameRejected`: `norm_claim` or `norm_bound`.
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


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict of the others of its round on a contribution (`atoll.merge.robust`), slice by slice.

    `clips` are the factors by which slices are shortened, 1 for none; `heard` says in which slices it counts at all.
    """

    clips: tuple[float, ...]
    heard: tuple[bool, ...]

    @classmethod
    def untouched(cls, slices: int) -> Judgement:
        """Return the judgement on a contribution that is taken as it came."""
        return cls((1.0,) * slices, (True,) * slices)


@dataclass(frozen=True, slots=True)
class MergeResult:
    """A merged pseudo-gradient, flat float32, with the weights that counted and the number of contributions behind it.

    `judgements` are those on the contributions, in order, where a run merges robustly. `memory` is what the outer state keeps
    of the round where it was merged by value (`atoll.merge.values`).
    """

    pseudo_gradient: Vector
    weight_sum: float
    count: int
    judgements: tuple[Judgement, ...] = ()
    memory: State | None = None


@dataclass(frozen=True, slots=True)
class SliceCorrection:
    """A slice is folded in as `keep` v + `add` m; the result has the length `norm`."""

    keep: float
    add: float
    norm: float

    def times(self, factor: float) -> SliceCorrection:
        """Return the correction whose result is shorter by a factor."""
        return SliceCorrection(factor * self.keep, factor * self.add, factor * self.norm)


@dataclass(frozen=True, slots=True)
class Corrections:
    """The correction of each slice of a pseudo-gradient, None for a kept slice, and the momentum m, None for none."""

    momentum: Vector | None
    by_slice: Sequence[SliceCorrection | None]

    @classmethod
    def clipped(cls, corrections: Corrections | None, norms: Sequence[float], scale: float) -> Corrections:
        """Return the corrections of a pseudo-gradient with these norms per slice that is shortened by `scale` after them."""
        momentum = None if corrections is None else corrections.momentum
        return cls(momentum, _shortened(corrections, norms, [scale] * len(norms)))


class SliceLength(NamedTuple):
    """The numbers that RDA keeps of a slice beside the mean of its directions.

    A direction is `unit` long in that mean, 0 while nothing has a direction; `radial` is the mean length, and `heard` the
    share of all weight that has a direction.
    """

    unit: float = 0.0
    radial: float = 0.0
    heard: float = 0.0

    @classmethod
    def of(cls, norm: float) -> SliceLength:
        """Return that of one contribution."""
        return cls(norm, norm, 1.0) if norm > NORM_MIN else cls(0.0, norm, 0.0)


@dataclass(frozen=True, slots=True)
class PartialMerge:
    """The sums of a fold, for another fold to enter: sums of some of a round's contributions.

    `total` is the running mean (layout order), in each slice as `lengths` say; `values` are the mean values of small slices by
    number. `weight_sum`, `count` and `freshest` are the weights that counted, the number of contributions and their largest
    staleness weight.
    """

    total: Encoded
    lengths: Sequence[SliceLength]
    values: Mapping[int, Vector]
    weight_sum: float
    count: int
    freshest: float


class FragmentFold:
    """The running merge of one fragment's round: one running mean, so memory is O(fragment) whatever M is.

    With W the weights so far, one of weight w enters as mean <- (1 - w/W) mean + (w/W) v. Both factors are within 0..1, so no
    weight, however large its claim, makes finite pseudo-gradients merge to infinity. Under RDA the mean of a slice is that of
    directions, in units of the first one's length r: v enters as r phi(v). Its length is corrected at the end. The order of
    additions decides the last bits; it is the order in which the head lists the contributions, so a replay gives the same
    bits. One fresh contribution alone is returned as it came, bit for bit.
    """

    def __init__(self, slices: Sequence[FragmentSlice], method: Method = "mean") -> None:
        self._slices = tuple(slices)
        self._radially = tuple(method == "rda" and not tensor_slice.direct for tensor_slice in self._slices)
        self._keeps_values = tuple(
            radial and one.size <= SMALL for radial, one in zip(self._radially, self._slices, strict=True)
        )
        self._pass = BatchedAccumulation(self._slices)
        self._elements: int | None = None
        self._freshest = 0.0
        self._lengths = [SliceLength()] * len(self._slices)
        self._weights = [0.0] * len(self._slices)
        self._values: dict[int, Vector] = {}
        self._spent = False
        self.weight_sum = 0.0
        self.count = 0

    def add(
        self,
        pseudo_gradient: Encoded,
        norms: Sequence[float],
        weight: float,
        staleness_weight: float = 1.0,
        corrections: Corrections | None = None,
        judgement: Judgement | None = None,
    ) -> None:
        """Fold in a pseudo-gradient (layout order) with a positive weight; it must not change until the result is there.

        `norms` are its L2 norms per slice (`slice_norms`). The staleness weight is 1 for a timely contribution; one with 0
        is ignored. A `judgement` shortens slices, after their correction, and leaves out those that are not heard.
        """
        self._refuse_if_spent()
        if not (0.0 < weight < math.inf and 0.0 <= staleness_weight <= 1.0):
            raise ProtocolMisuse(
                "a contribution needs a positive finite weight and a staleness weight from 0 to 1",
                got=(weight, staleness_weight),
            )
        self.count += 1
        self._freshest = max(self._freshest, staleness_weight)
        self._elements = pseudo_gradient.elements
        weight *= staleness_weight
        if weight == 0.0:
            return
        self.weight_sum += weight
        # With judgements, what a contribution outweighs may still be all that is heard in a slice.
        anew = weight / self.weight_sum == 1.0 if judgement is None else weight == self.weight_sum
        momentum = None if corrections is None else corrections.momentum
        by_slice = _shortened(corrections, norms, [1.0] * len(norms) if judgement is None else judgement.clips)
        steps: list[AccumulateStep | None] = []
        for number, correction in enumerate(by_slice):
            if judgement is not None and not judgement.heard[number]:
                steps.append(AccumulateStep(0.0, 0.0) if anew else None)
                continue
            self._weights[number] += weight
            share = weight / self._weights[number]
            length = SliceLength.of(norms[number] if correction is None else correction.norm)
            take = self._share(number, length, share)
            if self._keeps_values[number]:
                values = pseudo_gradient.part(*self._slices[number].bounds)
                self._keep(number, self._corrected(number, values, momentum, correction), share)
            steps.append(_step_of(share, take, correction, anew=anew))
        self._pass.enter(AccumulateEntry(pseudo_gradient, steps, momentum, anew))

    def enter(self, partial: PartialMerge) -> None:
        """Fold in what another fold of the same slices and method has folded.

        The result is that of its contributions one by one, but for the rounding of sums in another order. The memory of
        `partial` must not change until the result is there.
        """
        self._refuse_if_spent()
        self.count += partial.count
        self._freshest = max(self._freshest, partial.freshest)
        self._elements = partial.total.elements
        if partial.weight_sum == 0.0:
            return
        self.weight_sum += partial.weight_sum
        anew = partial.weight_sum / self.weight_sum == 1.0
        steps: list[AccumulateStep | None] = []
        for number, length in enumerate(partial.lengths):
            self._weights[number] += partial.weight_sum
            share = partial.weight_sum / self._weights[number]
            take = self._share(number, length, share)
            if number in partial.values:
                self._keep(number, partial.values[number], share)
            steps.append(None if anew else AccumulateStep(1.0 - share, take))
        self._pass.enter(AccumulateEntry(partial.total, steps, None, anew))

    def partial(self) -> PartialMerge:
        """Return what is folded, for another fold to `enter`; this one is then spent, because its memory is in it.

        Raises `ProtocolMisuse`: nothing was added, or the result was given already.
        """
        total = Encoded.exact(self._spend())
        return PartialMerge(total, self._lengths, self._values, self.weight_sum, self.count, self._freshest)

    def result(self) -> MergeResult:
        """Return the merge of all contributions; the fold is then spent, because its memory is the result.

        Raises `ProtocolMisuse`: nothing was added, or the result was given already.
        """
        merged = self._spend()
        lengths = self._corrected_lengths(merged) if self.count > 1 else [1.0] * len(self._slices)
        pieces: list[tuple[tuple[int, int], np.float32]] = []
        for number, tensor_slice in enumerate(self._slices):
            start, stop = tensor_slice.bounds
            if lengths[number] == 0.0 and number in self._values:
                merged[start:stop], lengths[number] = self._values[number], 1.0
            factor = self._freshest * lengths[number]
            if factor != 1.0:
                pieces += [(part, np.float32(factor)) for part in parts(start, stop)]

        def scale(piece: tuple[tuple[int, int], np.float32]) -> None:
            here = merged[slice(*piece[0])]
            np.multiply(here, piece[1], out=here)

        for_each(scale, pieces, merged.size)
        return MergeResult(merged, self.weight_sum, self.count)

    def _refuse_if_spent(self) -> None:
        if self._spent:
            raise ProtocolMisuse("this fold has given its result already")

    def _spend(self) -> Vector:
        self._refuse_if_spent()
        if self._elements is None:
            raise ProtocolMisuse("nothing was folded")
        self._spent = True
        return self._pass.total(self._elements)

    def _share(self, number: int, length: SliceLength, share: float) -> float:
        """Note that a slice of this length enters with `share` of all weight; return its factor."""
        if not self._radially[number]:
            return share
        before = SliceLength() if share == 1.0 else self._lengths[number]
        unit = before.unit or length.unit
        radial = before.radial + (length.radial - before.radial) * share
        self._lengths[number] = SliceLength(unit, radial, before.heard + (length.heard - before.heard) * share)
        if not length.unit:
            return 0.0 if before.unit else share
        return share * unit / length.unit

    def _corrected(
        self, number: int, values: Vector, momentum: Vector | None, correction: SliceCorrection | None
    ) -> Vector:
        if correction is None:
            return values
        corrected: Vector = np.float32(correction.keep) * values
        if momentum is not None and correction.add:
            corrected = corrected + np.float32(correction.add) * momentum[slice(*self._slices[number].bounds)]
        return corrected

    def _keep(self, number: int, values: Vector, share: float) -> None:
        before = self._values.get(number)
        if before is not None and share != 1.0:
            values = np.float32(1.0 - share) * before + np.float32(share) * values
        self._values[number] = values

    def _corrected_lengths(self, merged: Vector) -> list[float]:
        factors = [1.0] * len(self._slices)
        radial = [number for number in range(len(self._slices)) if self._radially[number]]
        norms = slice_norms([self._slices[number] for number in radial], Encoded.exact(merged))
        for number, norm in zip(radial, norms, strict=True):
            length = self._lengths[number]
            shortest = length.unit * length.heard * self.count * ROUNDING
            factors[number] = length.radial / norm if length.unit and norm > shortest else 0.0
        return factors


@dataclass(frozen=True, slots=True)
class AccumulateStep:
    """The step of one slice of a sum: `keep` of itself, `take` of a contribution, and `add` of the momentum, if any."""

    keep: float
    take: float
    add: float | None = None


@dataclass(frozen=True, slots=True)
class AccumulateEntry:
    """A contribution and its step per slice, or None for nothing to do; `anew`: the sum begins as a copy of it."""

    pseudo_gradient: Encoded
    steps: Sequence[AccumulateStep | None]
    momentum: Vector | None
    anew: bool


def _shortened(
    corrections: Corrections | None, norms: Sequence[float], clips: Sequence[float]
) -> list[SliceCorrection | None]:
    by_slice: Sequence[SliceCorrection | None] = [None] * len(norms) if corrections is None else corrections.by_slice
    return [
        each if clip == 1.0 else (each or SliceCorrection(1.0, 0.0, norm)).times(clip)
        for each, norm, clip in zip(by_slice, norms, clips, strict=True)
    ]


def _step_of(share: float, take: float, correction: SliceCorrection | None, *, anew: bool) -> AccumulateStep | None:
    if correction is not None:
        return AccumulateStep(1.0 - share, take * correction.keep, take * correction.add if correction.add else None)
    return None if anew else AccumulateStep(1.0 - share, take)


class BatchedAccumulation:
    """A sum over these slices, and the entries that wait for it.

    The sum of a large fragment is larger than any cache, so entering one contribution costs as much as reading and writing the
    sum. Waiting contributions share that cost: all of them are entered into one part of the sum while that is in the cache.
    Every element sees the same operations in the same order, with any number of threads, so the bits are the same. Codes wait
    up to the size of a sum: eight contributions of four bits, two in bfloat16, and none in float32, which is entered at once.
    """

    def __init__(self, slices: Sequence[FragmentSlice]) -> None:
        self._slices = tuple(slices)
        self._waiting: list[AccumulateEntry] = []
        self._total: Vector | None = None

    def enter(self, entry: AccumulateEntry) -> None:
        """Put an entry on the waiting list, and enter all of them when they are many."""
        if entry.anew:
            self._waiting.clear()
            self._total = None
        self._waiting.append(entry)
        elements = entry.pseudo_gradient.elements
        if (len(self._waiting) + 1) * entry.pseudo_gradient.codes.nbytes > blocks(elements) * F32.block_bytes:
            self.total(elements)

    def total(self, elements: int) -> Vector:
        """Enter all waiting entries and return the sum, zeros if it has none; it is the same memory until `anew`."""
        total = self._total
        if total is None:
            total = self._total = large_arrays.empty(elements)
            if not self._waiting:
                total[:] = 0.0
        entries, self._waiting = self._waiting, []
        pieces = [
            (number, *part) for number, tensor_slice in enumerate(self._slices) for part in parts(*tensor_slice.bounds)
        ]

        def enter_all(piece: tuple[int, int, int]) -> None:
            number, start, stop = piece
            for entry in entries:
                step = entry.steps[number]
                if entry.anew:
                    entry.pseudo_gradient.copy(total, start, stop)
                if step is not None and step.add is not None and entry.momentum is not None:
                    factors = step.keep, step.take, step.add
                    entry.pseudo_gradient.bend(total, (start, stop), factors, entry.momentum)
                elif step is not None:
                    entry.pseudo_gradient.blend(total, start, stop, step.keep, step.take)

        for_each(enter_all, pieces, elements if entries else 0)
        return total
