r"""Pre-merge: some contributions of a round are folded where they are, and only their sum travels.

A fold keeps a mean over weights (`FragmentFold`), so the mean over all follows from the means over parts:

.. math::

    \bar x = \tfrac{W_a \bar x_a + W_b \bar x_b}{W_a + W_b}

for the sum of values, of directions :math:`w\,\varphi(v)` and of lengths :math:`w \lVert v \rVert` alike. The decisions (which
contributions, in which order, with which weights) are the shard's; a region only adds up. Only a plain fold has partial sums.

**What travels.** One frame: the running mean, then the mean values of small slices (`atoll.merge.fold.SMALL`), in the run's
`codec_up` if that is exact or bfloat16, else in bfloat16. Lengths travel as numbers.

**Belief.** A region can say of its own learners what it likes; it cannot say more than they could. A slice of the mean is no
longer than the mean of the lengths that the learners claim (triangle inequality), and a correction makes none longer. A mean
of directions is no longer than the share of the weight that has one, in the unit that the region tells: so a unit, however
short, gives a region no more of a direction than its weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll.base.errors import FrameRejected
from atoll.base.large_arrays import Vector
from atoll.codec import Encoded, FrameEncoder, Framing
from atoll.merge.fold import NORM_MIN, SMALL, PartialMerge, SliceLength
from atoll.merge.robust import is_judged
from atoll.merge.values import is_remembered
from atoll.model.layout import FragmentSlice
from atoll.protocol.settings import ProtocolSettings

EXACT_ENOUGH: Final = frozenset({"f32", "bf16"})
CLAIM: Final = "partial_claim"
ROUNDED: Final = 2.0**-7
"""By how much a slice may become longer by rounding to bfloat16, and by how much a sum of claims may differ from what is."""


def is_partial(settings: ProtocolSettings, fragment: int, elements: int) -> bool:
    """Return whether rounds of a fragment have partial sums: contributions are neither judged together nor remembered."""
    remembered = settings.by_value(fragment) and is_remembered(elements)
    return not remembered and not is_judged(settings.of(fragment))


def partial_codec(settings: ProtocolSettings) -> str:
    """Return in which codec a partial sum travels."""
    return settings.codec_up if settings.codec_up in EXACT_ENOUGH else "bf16"


@dataclass(frozen=True, slots=True)
class RegionShare:
    """A contribution that a region folds: the lengths of its slices as its learner claims them, and its two weights."""

    norms: Sequence[float]
    weight: float
    staleness_weight: float


@dataclass(frozen=True, slots=True)
class PartialShape:
    """The part of a fragment that travels: its slices, then the values of the `small` ones; `measured` are the slices of both.

    `radial` says which slices are merged by direction and length.
    """

    elements: int
    slices: tuple[FragmentSlice, ...]
    radial: tuple[bool, ...]
    small: tuple[int, ...]
    measured: tuple[FragmentSlice, ...]

    @classmethod
    def of(cls, slices: Sequence[FragmentSlice], elements: int, settings: ProtocolSettings) -> PartialShape:
        """Return the shape of the partial sums of a fragment of `elements` numbers, by the settings that hold for it."""
        radial = tuple(settings.merge == "rda" and not one.direct for one in slices)
        small = [n for n, one in enumerate(slices) if radial[n] and one.size <= SMALL]
        ends = itertools.accumulate((slices[n].size for n in small), initial=elements)
        tail = [
            FragmentSlice(slices[n].tensor_name, 0, slices[n].size, at, slices[n].size, direct=True)
            for n, at in zip(small, ends, strict=False)
        ]
        return cls(elements, tuple(slices), radial, tuple(small), (*slices, *tail))

    @property
    def elements_sent(self) -> int:
        """Return the number of elements of the vector that travels."""
        return self.elements + sum(self.slices[n].size for n in self.small)

    def encode(self, partial: PartialMerge, codec: str) -> FrameEncoder:
        """Return the frame of a partial sum, flat in layout order; a piece that is not finite raises `FrameRejected`."""
        values = [partial.values.get(n, np.zeros(self.slices[n].size, dtype=np.float32)) for n in self.small]
        tail = np.concatenate([np.zeros(0, dtype=np.float32), *values])
        end = self.elements

        def read(start: int, stop: int) -> Vector:
            of_total = partial.total.part(min(start, end), min(stop, end))
            if stop <= end:
                return of_total
            joined: Vector = np.concatenate([of_total, tail[max(0, start - end) : stop - end]])
            return joined

        return FrameEncoder(Framing(self.elements_sent, codec), read)

    def decode(
        self, vector: Encoded, norms: Sequence[float], lengths: Sequence[SliceLength], shares: Sequence[RegionShare]
    ) -> PartialMerge:
        """Return the partial sum of `shares` that arrived as `vector`, whose `measured` slices have the lengths `norms`.

        Raises `FrameRejected`: `partial_claim`; these contributions cannot have such a sum.
        """
        weights = [one.weight * one.staleness_weight for one in shares]
        self._check(norms, lengths, shares, weights)
        tail = zip(self.small, self.measured[len(self.slices) :], strict=True)
        return PartialMerge(
            total=vector.stretch(0, self.elements),
            lengths=lengths,
            values={n: vector.part(*one.bounds) for n, one in tail},
            weight_sum=sum(weights),
            count=len(shares),
            freshest=max((one.staleness_weight for one in shares), default=0.0),
        )

    def _check(
        self,
        norms: Sequence[float],
        lengths: Sequence[SliceLength],
        shares: Sequence[RegionShare],
        weights: Sequence[float],
    ) -> None:
        if len(lengths) != len(self.slices):
            raise FrameRejected(CLAIM, "lengths of another layout", got=len(lengths), allowed=len(self.slices))
        whole = sum(weights) or 1.0
        means = [
            sum(weight * share.norms[n] for weight, share in zip(weights, shares, strict=True)) / whole
            for n in range(len(self.slices))
        ]
        for n, length in enumerate(lengths):
            if not self.radial[n]:
                if length != SliceLength():
                    raise self._refusal(n, "unit", length.unit, 0.0)
                self._at_most(n, "sum", norms[n], means[n])
                continue
            longest = max((share.norms[n] for share in shares), default=0.0)
            self._at_most(n, "unit", length.unit, longest)
            self._at_most(n, "length", length.radial, means[n])
            if not length.unit:
                self._at_most(n, "share that has a direction", length.heard, 0.0)
                self._at_most(n, "sum", norms[n], 0.0)
                continue
            self._at_most(n, "share that has a direction", length.heard, 1.0)
            # Others are divided by the unit: without slack, for a slack is long beside a unit that is short enough.
            if length.unit <= NORM_MIN or norms[n] > length.unit * length.heard * (1.0 + ROUNDED):
                raise self._refusal(n, "sum", norms[n], length.unit * length.heard)
        for n, norm in zip(self.small, norms[len(self.slices) :], strict=True):
            self._at_most(n, "mean of values", norm, means[n])

    def _at_most(self, number: int, what: str, got: float, most: float) -> None:
        if not 0.0 <= got <= most * (1.0 + ROUNDED) + 2.0 * NORM_MIN:
            raise self._refusal(number, what, got, most)

    def _refusal(self, number: int, what: str, got: float, most: float) -> FrameRejected:
        name = self.slices[number].tensor_name
        return FrameRejected(CLAIM, f"{name}: its contributions have no such {what}", got=got, allowed=most)
