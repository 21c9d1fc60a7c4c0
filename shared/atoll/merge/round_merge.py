"""One fragment's round: the merge and the step to the next version, by the rules of its run.

    contributions, in the order of `Fold` ──► RoundMerge.add ──► result ──► GlobalUpdate.step (`update_of`) ──► next version

This is the whole arithmetic of a round, and it is pure. A shard does it while contributions arrive
(`atoll_synchronizer.aggregator`, `store`), a replay does it once more from what was retained (`atoll.archive.replay`). Both
give the same bits because both are this code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atoll.base.errors import ProtocolMisuse
from atoll.codec.encoded import Encoded
from atoll.merge.correction import MomentumReference, correction_of
from atoll.merge.fold import Corrections, FragmentFold, MergeResult, PartialMerge
from atoll.merge.global_update import GlobalUpdate
from atoll.merge.outer import MOMENTUM, OuterOptimizer, State
from atoll.merge.robust import CollectedFold, fold_of
from atoll.merge.values import MeanOfValues, ValuesFold, is_remembered, lift, variances_in
from atoll.model.layout import FragmentSlice
from atoll.protocol.events import Fold
from atoll.protocol.settings import ProtocolSettings


def update_of(protocol: ProtocolSettings, fragment: int, outer: OuterOptimizer) -> GlobalUpdate:
    """Return the rules for a fragment's values: the run's outer optimizer, unless the fragment is merged by value."""
    return GlobalUpdate(MeanOfValues() if protocol.by_value(fragment) else outer, protocol.of(fragment))


class RoundMerge:
    """The running merge of one round of `fragment`, which has these `slices`; `protocol` are the settings of the run."""

    def __init__(self, protocol: ProtocolSettings, fragment: int, slices: Sequence[FragmentSlice]) -> None:
        self._slices, self._settings = slices, protocol.of(fragment)
        self._fold: FragmentFold | CollectedFold | ValuesFold
        self._variances = variances_in(slices) if protocol.by_value(fragment) else ()
        if protocol.by_value(fragment) and is_remembered(sum(each.size for each in slices)):
            self._fold = ValuesFold(slices, self._settings)
        else:
            self._fold = fold_of(slices, self._settings)
        self._reference: MomentumReference | None = None

    def add(self, pseudo_gradient: Encoded, norms: Sequence[float], command: Fold, state: State) -> Corrections | None:
        """Fold in a pseudo-gradient with these norms per slice, at the command's `scale`; return how the run corrected it.

        `state` is the outer state of the base version. The pseudo-gradient must not change until the result is there.
        """
        corrections = None
        correction = correction_of(self._settings)
        if correction is not None:
            momentum = state[MOMENTUM]
            if self._reference is None or self._reference.momentum is not momentum:
                self._reference = MomentumReference.of(momentum, self._slices)
            corrections = correction.corrections(pseudo_gradient, norms, self._reference, self._slices)
        folded = corrections
        if command.scale != 1.0:  # the others of its round see it as it is folded, too
            folded = Corrections.clipped(corrections, norms, command.scale)
            norms = [command.scale * norm for norm in norms]
        taken = pseudo_gradient, norms, command.weight, command.staleness_weight, folded
        if isinstance(self._fold, FragmentFold):
            self._fold.add(*taken)
        else:
            self._fold.add(*taken, learner=command.key.learner)
        return corrections

    def enter(self, partial: PartialMerge, staleness_weight: float) -> None:
        """Enter a region's sum, with the staleness weight that all of its contributions have."""
        if not isinstance(self._fold, FragmentFold):
            raise ProtocolMisuse("this run has no partial sums", got=type(self._fold).__name__)
        weight = partial.weight_sum * staleness_weight
        self._fold.enter(replace(partial, weight_sum=weight, freshest=staleness_weight))

    def result(self, state: State, version: int) -> MergeResult:
        """Return the merge of the round that makes `version` on the outer state of its base; the round is then spent."""
        merged = self._fold.result(state, version) if isinstance(self._fold, ValuesFold) else self._fold.result()
        if self._variances:  # a memory, or a sum of others, may hold what no contribution here did
            values = np.negative(merged.pseudo_gradient, out=merged.pseudo_gradient)
            np.negative(lift(values, self._variances), out=values)
        return merged
