"""A retained round, opened: what each learner's part of it was, and what the round would have made without one of them.

The parts are exact, because all of each contribution is there; the cosines in the event log are of samples
(`atoll.merge.alignment`). Without a learner the round is merged anew by the same rules: shares of weight grow for the others,
lengths and judgements are taken anew. It tells nothing of later rounds: learners would have gone on
from other values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.archive.rounds import RetainedFold, RetainedRound
from atoll.base.buffer_pool import Vector
from atoll.base.parallel import parts
from atoll.codec import Encoded
from atoll.merge.norms import l2_norm
from atoll.merge.outer import OuterOptimizer, State
from atoll.merge.round_merge import RoundMerge, update_of
from atoll.protocol.events import Fold
from atoll.run.push_keys import key_of
from atoll.wire.messages import RunRecord


@dataclass(frozen=True, slots=True)
class OpenContribution:
    """A contribution as it was folded, decoded and validated, with its L2 norms per slice."""

    fold: RetainedFold
    vector: Encoded
    norms: Sequence[float]

    @property
    def learner(self) -> str:
        """Return whose it is."""
        return self.fold.manifest.learner

    @property
    def weight(self) -> float:
        """Return the weight with which it counted."""
        return self.fold.weight * self.fold.staleness_weight


@dataclass(frozen=True, slots=True)
class RoundPart:
    """One learner's part of a round.

    Attributes:
        weight_share: its share of all weight, 0..1, after the staleness weight.
        aligned: the cosine with the merge of what it sent, of several contributions the mean; None where one has no direction.
        step_without: how long the fragment's step would be without it, over how long it was; None where there was no step.
        turned_without: the cosine between these two steps; None where one of the two has no length.
    """

    learner: str
    contributions: int
    tokens: int
    weight_share: float
    aligned: float | None
    step_without: float | None
    turned_without: float | None


@dataclass(frozen=True, slots=True)
class OpenRound:
    """A round on its base: `values` and `state` before it, and its contributions in order."""

    run: RunRecord
    outer: OuterOptimizer
    made: RetainedRound
    values: Vector
    state: State
    contributions: Sequence[OpenContribution]

    @property
    def learners(self) -> list[str]:
        """Return who is in it, by name."""
        return sorted({each.learner for each in self.contributions})

    def merged(self, without: str = "") -> tuple[Vector, Vector]:
        """Return the merged pseudo-gradient and the next values, of all contributions or of those of the others.

        Without any contribution nothing moves.
        """
        fragment = self.made.head.fragment
        merge = RoundMerge(self.run.protocol, fragment, self.run.layout.slices(fragment))
        counted = [each for each in self.contributions if each.learner != without]
        if not counted:
            return np.zeros_like(self.values), self.values
        for each in counted:
            merge.add(each.vector, each.norms, command_of(each.fold), self.state)
        result = merge.result(self.state, self.made.head.version)
        state = self.state | (result.memory or {})
        direction = result.pseudo_gradient.copy()
        return direction, update_of(self.run.protocol, fragment, self.outer).step(self.values, direction, state).values

    def parts(self) -> list[RoundPart]:
        """Return every learner's part, by name."""
        direction, values = self.merged()
        step = values - self.values
        total = sum(each.weight for each in self.contributions)
        found = []
        for learner in self.learners:
            own = [each for each in self.contributions if each.learner == learner]
            sent: Vector = sum((each.vector.expanded() for each in own[1:]), own[0].vector.expanded()) / np.float32(
                len(own)
            )
            other = self.merged(learner)[1] - self.values
            length = l2_norm(step)
            found.append(
                RoundPart(
                    learner,
                    len(own),
                    sum(each.fold.manifest.tokens for each in own),
                    sum(each.weight for each in own) / total if total else 0.0,
                    cosine(sent, direction),
                    l2_norm(other) / length if length else None,
                    cosine(other, step),
                )
            )
        return found


def cosine(one: Vector, other: Vector) -> float | None:
    """Return the cosine between two vectors, None where one has no length; sums are in float64, part by part."""
    product = squares = others = 0.0
    for start, stop in parts(0, one.size):
        here, there = one[start:stop].astype(np.float64), other[start:stop].astype(np.float64)
        product += float(here @ there)
        squares += float(here @ here)
        others += float(there @ there)
    lengths = math.sqrt(squares) * math.sqrt(others)
    return max(-1.0, min(1.0, float(product / lengths))) if lengths else None  # rounding may pass the ends by a little


def command_of(fold: RetainedFold) -> Fold:
    """Return the command by which a contribution was folded."""
    key = key_of(fold.manifest)
    return Fold(key=key, weight=fold.weight, staleness_weight=fold.staleness_weight, age=fold.age, scale=fold.scale)
