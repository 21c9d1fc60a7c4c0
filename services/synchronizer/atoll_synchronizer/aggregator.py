"""The tensors of a shard: contributions on their way in, and the running sum of each fragment's round.

The machine decides by keys; the aggregator applies its commands to the arrays behind those keys. It reads and validates a
contribution (`read_contribution`, as the synchronizer of a region does) before the machine hears that it is ready: right
layout, right size, finite, its norms as claimed and within bounds. A contribution stays encoded as it came, and few wait in
the fold (`atoll.merge.fold`), so a shard needs O(fragment), whatever M is; a run that judges the contributions of a round
together (`atoll.merge.robust`) keeps all of a round. Contributions that their region has folded already (`regions`) are here
as one sum, which enters with the last of them.

A fold frees a contribution's memory, so the aggregator notes, for people, how much it counted, its correction and a small
sample of it (`FoldNote`). With the merge of the round the samples become cosines, which the `round` event carries; they decide
nothing. A contribution that its region has folded has no note.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from atoll.base.errors import BlobCorrupt, BlobGone, FrameRejected, PeerMisbehaved, ProtocolMisuse
from atoll.base.large_arrays import Vector
from atoll.base.parallel import off_loop
from atoll.base.retry import patiently
from atoll.bus.interface import Bus
from atoll.codec.encoded import Encoded
from atoll.merge.correction import MomentumReference, correction_of
from atoll.merge.fold import Corrections, MergeResult, PartialMerge, validated_norms
from atoll.merge.outer import State
from atoll.merge.robust import Alignment, alignments, sample_of
from atoll.merge.round_merge import RoundMerge
from atoll.protocol.events import Fold, PushKey
from atoll.run.delta_chain import FrameReader, is_inline
from atoll.wire.messages import CHUNKS_GONE, Contribution, RunRecord
from atoll.wire.subjects import is_push_nonce
from atoll_synchronizer.archivist import Retention

REPLACED: Final = "replaced"
"""The bytes under a contribution's name are not those that its manifest names."""
READS_AT_ONCE = 8
READS_PER_LEARNER = 2
"""Of those: a learner whose chunks never come must not take the places of the others."""
KNOWN_S = 600.0
"""For so long a learner counts that has sent compressed frames: it reads versions of rounds, too, that end without it."""


@dataclass(frozen=True, slots=True)
class PendingContribution:
    """A validated contribution, encoded as it came, its L2 norms per slice, and whether its sender had it compressed."""

    pseudo_gradient: Encoded
    norms: list[float]
    compressed: bool = True

    @property
    def norm(self) -> float:
        """Return its L2 norm."""
        return math.hypot(*self.norms)


def check_manifest(manifest: Contribution, run: RunRecord) -> None:
    """Raise `PeerMisbehaved` unless a manifest is of this founding and layout, names its own chunks, and may have its frame."""
    if manifest.run_nonce != run.nonce:
        raise PeerMisbehaved("a manifest of another founding of the run", got=manifest.run_nonce, allowed=run.nonce)
    if manifest.layout != run.layout.fingerprint:
        raise PeerMisbehaved("another layout", got=manifest.layout, allowed=run.layout.fingerprint)
    own = run.subjects.contribution_stem(manifest.learner, manifest.fragment, manifest.incarnation, manifest.push, "")
    if not is_push_nonce(manifest.blob.stem.removeprefix(own)):
        raise PeerMisbehaved("a manifest that names foreign chunks", got=manifest.blob.stem, allowed=f"{own}<nonce>")
    if manifest.frame and not is_inline(run, manifest.fragment):
        raise PeerMisbehaved(
            "a manifest that carries a frame", got=len(manifest.frame), allowed="chunks, in this fragment"
        )


async def read_contribution(
    bus: Bus, run: RunRecord, manifest: Contribution, keep: dict[int, bytes] | None = None
) -> PendingContribution | str:
    """Return the validated contribution of a manifest, or why it cannot be used; while the broker is away, wait for chunks.

    `keep` receives its pieces as they came.
    """
    fragment = manifest.fragment
    elements, slices = run.layout.fragment_sizes()[fragment], run.layout.slices(fragment)
    protocol = run.protocol.of(fragment)
    arrival: FrameReader | None = None
    try:
        begun = partial(off_loop, elements, FrameReader.of, manifest.blob, elements, protocol.codec_up, slices)
        arrival = await patiently(begun, "a contribution")
        if manifest.frame:
            arrival.take_whole(bus, manifest.frame, keep)
        else:
            await patiently(partial(arrival.receive, bus, keep), "a contribution")
    except FrameRejected as error:  # also a manifest whose blob is larger than any honest frame
        return error.reason if arrival is None or await _is_as_signed(bus, manifest) else REPLACED
    except BlobGone:
        return CHUNKS_GONE
    except BlobCorrupt:
        return "corrupt" if manifest.frame else REPLACED
    except PeerMisbehaved:
        return "corrupt"
    try:
        norms = validated_norms(arrival.frame.norms(), slices, manifest.norms, protocol.norm_max)
    except FrameRejected as error:
        return error.reason
    return PendingContribution(arrival.frame.vector, norms, arrival.frame.compressed)


async def _is_as_signed(bus: Bus, manifest: Contribution) -> bool:
    """Return whether the bytes of a contribution are those that its manifest names; nobody is to blame for others.

    The broker's operator can write others. Bytes that end in the middle of a frame were never compared.
    """
    if not manifest.frame:
        with contextlib.suppress(BlobGone, PeerMisbehaved):
            try:
                await patiently(lambda: bus.get_blob(manifest.blob, manifest.blob.size_bytes), "a contribution")
            except BlobCorrupt:
                return False
    return True


def corrections_of(
    run: RunRecord, fragment: int, waiting: PendingContribution, reference: MomentumReference | None
) -> Corrections | None:
    """Return how the run corrects a contribution by the outer momentum, None where it corrects none."""
    correction = correction_of(run.protocol.of(fragment))
    if correction is None or reference is None:
        return None
    return correction.corrections(waiting.pseudo_gradient, waiting.norms, reference, run.layout.slices(fragment))


@dataclass(slots=True)
class WaitingSum:
    """A region's sum (its weights are token weights), and the contributions in it that are to be folded still."""

    partial: PartialMerge
    unfolded: set[PushKey]


class Aggregator:
    """Validated contributions by key and folds by fragment."""

    def __init__(self, bus: Bus, run: RunRecord, retention: Retention | None = None) -> None:
        self._retention = retention
        self._bus = bus
        self._run = run
        self._sizes = run.layout.fragment_sizes()
        self._ready: dict[PushKey, PendingContribution | WaitingSum] = {}
        self._rounds: dict[int, RoundMerge] = {}
        self._open_sums: dict[int, list[WaitingSum]] = {}
        self._notes: defaultdict[int, dict[PushKey, FoldNote]] = defaultdict(dict)
        self._compressed: defaultdict[int, dict[str, tuple[bool, float]]] = defaultdict(dict)
        """Of each fragment and learner, whether its last frame came compressed, and when, in the loop's seconds."""
        self._reading = asyncio.Semaphore(READS_AT_ONCE)
        self._reads_of: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(READS_PER_LEARNER))

    async def fetch(self, key: PushKey, manifest: Contribution) -> tuple[str, float]:
        """Read, validate and keep a contribution; return why it cannot be used (empty if it can) and its L2 norm.

        While the broker is away, wait.
        """
        async with self._reads_of[key.learner], self._reading:
            pieces: dict[int, bytes] | None = None if self._retention is None else {}
            read = await read_contribution(self._bus, self._run, manifest, pieces)
            if isinstance(read, str):
                return read, 0.0
            if self._retention is not None and pieces is not None:
                await self._retention.contribution(key, manifest, pieces)
        self._ready[key] = read
        self._compressed[key.fragment][key.learner] = read.compressed, asyncio.get_running_loop().time()
        return "", read.norm

    def keep_sum(self, keys: Collection[PushKey], partial: PartialMerge) -> None:
        """Keep the sum of contributions that their region has folded; its weights are those of `Fold`, nothing is late yet."""
        waiting, now_s = WaitingSum(partial, set(keys)), asyncio.get_running_loop().time()
        self._ready |= dict.fromkeys(keys, waiting)
        for key in keys:
            self._compressed[key.fragment][key.learner] = True, now_s

    async def fold(self, command: Fold, state: State) -> None:
        """Add a ready contribution to its fragment's sum and free its memory; `state` is the fragment's outer state."""
        key = command.key
        if (waiting := self._ready.pop(key, None)) is None:
            return  # it was refused after all, and an `Unfold` follows
        merge = self._rounds.get(key.fragment)
        if merge is None:
            slices = self._run.layout.slices(key.fragment)
            merge = self._rounds[key.fragment] = RoundMerge(self._run.protocol, key.fragment, slices)
        if isinstance(waiting, PendingContribution):
            await off_loop(waiting.pseudo_gradient.elements, self._add, merge, waiting, command, state)
            return
        waiting.unfolded.discard(key)
        self._open_sums.setdefault(key.fragment, []).append(waiting)
        if not waiting.unfolded:
            await off_loop(waiting.partial.total.elements, merge.enter, waiting.partial, command.staleness_weight)

    async def effects(self, fragment: int, merged: MergeResult) -> dict[PushKey, FoldEffect]:
        """Return what became of the contributions of a fragment's round, whose merge is `merged`, and forget their notes."""
        notes = self._notes.pop(fragment, {})
        return await off_loop(sum(note.sample.size for note in notes.values()), effects, notes, merged.pseudo_gradient)

    async def merged(self, fragment: int, state: State, version: int) -> MergeResult:
        """Return the merge of the round that makes `version`, on the fragment's outer state, and begin a new sum."""
        merge = self._rounds.pop(fragment)
        if torn := [key for waiting in self._open_sums.pop(fragment, []) for key in waiting.unfolded]:
            raise ProtocolMisuse("a sum entered its round in part", got=torn)  # never: the machine folds it whole
        return await off_loop(self._sizes[fragment], merge.result, state, version)

    def is_answer_compressed(self, fragment: int) -> bool:
        """Return whether to compress what answers the fragment's round: if any learner does that was heard of lately."""
        since_s, known = asyncio.get_running_loop().time() - KNOWN_S, self._compressed[fragment]
        for learner in [learner for learner, (_, at_s) in known.items() if at_s < since_s]:
            del known[learner]
        return not known or any(compressed for compressed, _ in known.values())

    def unfold(self, fragment: int) -> None:
        """Drop the sum of the fragment's round."""
        self._rounds.pop(fragment, None)
        self._open_sums.pop(fragment, None)
        self._notes.pop(fragment, None)

    def forget(self, key: PushKey) -> None:
        """Drop a contribution that no fold will use."""
        self._ready.pop(key, None)

    def _add(self, merge: RoundMerge, waiting: PendingContribution, command: Fold, state: State) -> None:
        corrections = merge.add(waiting.pseudo_gradient, waiting.norms, command, state)
        self._notes[command.key.fragment][command.key] = FoldNote.of(waiting, command, corrections)


@dataclass(frozen=True, slots=True)
class FoldNote:
    """One contribution as it was folded.

    `staleness_weight` is what it kept of its weight (0..1), `norm` its L2 norm as it came, `corrected_slices` the number of
    its slices that the correction changed, and `corrected_norm` its length after that. `sample` is a part of it.
    """

    staleness_weight: float
    norm: float
    corrected_slices: int
    corrected_norm: float
    sample: Vector

    @classmethod
    def of(cls, waiting: PendingContribution, command: Fold, corrections: Corrections | None) -> FoldNote:
        """Return the note of a contribution that is about to be folded."""
        changes = [None] * len(waiting.norms) if corrections is None else corrections.by_slice
        after = [norm if change is None else change.norm for norm, change in zip(waiting.norms, changes, strict=True)]
        changed = sum(change is not None for change in changes)
        sample = sample_of(waiting.pseudo_gradient)
        return cls(command.staleness_weight, waiting.norm, changed, math.hypot(*after), sample)


@dataclass(frozen=True, slots=True)
class FoldEffect:
    """A note, and how well the contribution agrees with its round."""

    note: FoldNote
    alignment: Alignment


def effects(notes: Mapping[PushKey, FoldNote], merged: Vector) -> dict[PushKey, FoldEffect]:
    """Return what became of the noted contributions of a round whose merge is `merged`, flat float32."""
    samples, learners = [note.sample for note in notes.values()], [key.learner for key in notes]
    found = alignments(samples, learners, sample_of(Encoded.exact(merged)))
    return {key: FoldEffect(note, one) for (key, note), one in zip(notes.items(), found, strict=True)}
