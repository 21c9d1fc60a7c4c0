"""The tensors of a shard: contributions on their way in, and the running sum of each fragment's round.

The machine decides by keys; the aggregator applies its commands to the arrays behind those keys. It reads and
*validates* a contribution before the machine hears that it is ready: right layout, right size, finite, its norms as
claimed and within bounds. It checks and measures each segment as it arrives. A contribution stays encoded. At most as
many wait in the fold as are together as large as a sum (`atoll.merge.accumulate`), so a shard needs O(fragment),
whatever M is. A run that judges the contributions of a round together (`atoll.merge.robust`) keeps all of a round.
At most `READS_AT_ONCE` contributions are read at once, also after an outage, when hundreds are queued.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

from atoll.base.errors import BlobCorrupt, BlobGone, FrameRejected, PeerMisbehaved
from atoll.base.parallel import off_loop
from atoll.base.retry import patiently
from atoll.bus.interface import Bus
from atoll.codec import Encoded
from atoll.merge.correction import MomentumReference, correction_of
from atoll.merge.fold import FragmentFold, MergeResult, validated_norms
from atoll.merge.outer import MOMENTUM, State
from atoll.merge.robust import CollectedFold, fold_of
from atoll.merge.values import ValuesFold, is_remembered
from atoll.protocol.events import Fold, PushKey
from atoll.run.delta_chain import FrameReader
from atoll.wire.messages import Contribution, RunRecord

AnyFold = FragmentFold | CollectedFold | ValuesFold

READS_AT_ONCE = 8
READS_PER_LEARNER = 2
"""Of those: a learner whose chunks never come must not take the places of the others."""


@dataclass(frozen=True, slots=True)
class PendingContribution:
    """A validated contribution, encoded as it came, and its L2 norms per slice."""

    pseudo_gradient: Encoded
    norms: list[float]


class Aggregator:
    """Validated contributions by key and folds by fragment."""

    def __init__(self, bus: Bus, run: RunRecord) -> None:
        """Start empty."""
        self._bus = bus
        self._run = run
        self._sizes = run.layout.fragment_sizes()
        self._ready: dict[PushKey, PendingContribution] = {}
        self._momentum_references: dict[int, MomentumReference] = {}
        self._folds: dict[int, AnyFold] = {}
        self._reading = asyncio.Semaphore(READS_AT_ONCE)
        self._reads_of: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(READS_PER_LEARNER))

    async def fetch(self, key: PushKey, manifest: Contribution) -> tuple[str, float]:
        """Read, validate and keep a contribution; return why it cannot be used (empty if it can) and its L2 norm.

        While the broker is away, wait.
        """
        elements, slices = self._sizes[key.fragment], self._run.layout.slices(key.fragment)
        protocol = self._run.protocol.of(key.fragment)
        try:
            async with self._reads_of[key.learner], self._reading:
                begun = partial(off_loop, elements, FrameReader.of, manifest.blob, elements, protocol.codec_up, slices)
                arrival = await patiently(begun, "a contribution")
                await patiently(lambda: arrival.receive(self._bus), "a contribution")
            norms = validated_norms(arrival.frame.norms(), slices, manifest.norms, protocol.norm_max)
        except FrameRejected as error:  # also a manifest whose blob is larger than any honest frame
            return error.reason, 0.0
        except BlobGone:
            return "chunks_gone", 0.0
        except (BlobCorrupt, PeerMisbehaved):
            return "corrupt", 0.0
        self._ready[key] = PendingContribution(arrival.frame.vector, norms)
        return "", math.hypot(*norms)

    async def fold(self, command: Fold, state: State) -> None:
        """Add a ready contribution to its fragment's sum and free its memory; `state` is the fragment's outer state."""
        key = command.key
        if (waiting := self._ready.pop(key, None)) is None:
            return  # it was refused after all, and an `Unfold` follows
        fold = self._folds.get(key.fragment)
        if fold is None:
            fold = self._folds[key.fragment] = self._begun(key.fragment)
        await off_loop(waiting.pseudo_gradient.elements, self._add, fold, waiting, command, state)

    async def merged(self, fragment: int, state: State, version: int) -> MergeResult:
        """Return the merge of the round that makes `version`, on the fragment's outer state, and begin a new sum."""
        fold = self._folds.pop(fragment)
        self._momentum_references.pop(fragment, None)
        if isinstance(fold, ValuesFold):
            return await off_loop(self._sizes[fragment], fold.result, state, version)
        return await off_loop(self._sizes[fragment], fold.result)

    def unfold(self, fragment: int) -> None:
        """Drop the sum of the fragment's round."""
        self._folds.pop(fragment, None)
        self._momentum_references.pop(fragment, None)

    def forget(self, key: PushKey) -> None:
        """Drop a contribution that no fold will use."""
        self._ready.pop(key, None)

    def _begun(self, fragment: int) -> AnyFold:
        """Return an empty fold by the rules that hold for the fragment."""
        slices, protocol = self._run.layout.slices(fragment), self._run.protocol
        if protocol.by_value(fragment) and is_remembered(self._sizes[fragment]):
            return ValuesFold(slices, protocol.of(fragment))
        return fold_of(slices, protocol.of(fragment))

    def _add(self, fold: AnyFold, waiting: PendingContribution, command: Fold, state: State) -> None:
        """Fold a pseudo-gradient in with its staleness weight, corrected if the run has a correction."""
        corrections, fragment = None, command.key.fragment
        correction = correction_of(self._run.protocol.of(fragment))
        if correction is not None:
            momentum = state[MOMENTUM]
            slices = self._run.layout.slices(fragment)
            reference = self._momentum_references.get(fragment)
            if reference is None or reference.momentum is not momentum:  # measured again after every commit
                reference = self._momentum_references[fragment] = MomentumReference.of(momentum, slices)
            corrections = correction.corrections(waiting.pseudo_gradient, waiting.norms, reference, slices)
        taken = waiting.pseudo_gradient, waiting.norms, command.weight, command.staleness_weight, corrections
        if isinstance(fold, FragmentFold):
            fold.add(*taken)
        else:
            fold.add(*taken, learner=command.key.learner)
