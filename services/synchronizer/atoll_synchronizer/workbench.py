"""The tensors of a shard: contributions on their way in, and the running sum of each fragment's round.

The machine decides by keys; the workbench does what the commands say with the arrays behind those keys. A contribution
is read and *validated* before the machine hears that it is ready: right layout, right size, finite, its norms as claimed
and within bounds. It stays encoded until it is folded in, and its memory is let go with the fold, so a shard needs
O(fragment) for the sums plus the few contributions between `ready` and `fold`, as small as they came. No more than
`READS_AT_ONCE` are read at once: after an outage hundreds are queued.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from atoll.advance import MOMENTUM
from atoll.bus.interface import Bus
from atoll.codecs import Encoded, frame_bytes, open_frame
from atoll.correction import Compass, correction_of
from atoll.errors import FrameRejected
from atoll.kernels import Vector
from atoll.merge import FragmentFold, validated_norms
from atoll.outer import State
from atoll.protocol.events import Fold, PushKey
from atoll.wire.messages import Contribution, RunRecord

T = TypeVar("T")

INLINE_ELEMENTS_MAX = 1 << 16
READS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Waiting:
    """A validated contribution, as it came, and its L2 norms per slice."""

    displacement: Encoded
    norms: list[float]


class Workbench:
    """Validated contributions by key and folds by fragment."""

    def __init__(self, bus: Bus, run: RunRecord) -> None:
        """Start empty."""
        self._bus = bus
        self._run = run
        self._sizes = run.layout.fragment_sizes()
        self._correction = correction_of(run.protocol)
        self._ready: dict[PushKey, Waiting] = {}
        self._compasses: dict[int, Compass] = {}
        self._folds: dict[int, FragmentFold] = {}
        self._reading = asyncio.Semaphore(READS_AT_ONCE)
        self.bytes_in = 0

    async def fetch(self, key: PushKey, manifest: Contribution) -> float:
        """Read and validate a contribution, keep it, and return its L2 norm.

        Raises:
            FrameRejected: with the reason; also for a manifest whose blob is larger than any honest frame.
            BlobGone, BlobCorrupt: the chunks are not what the manifest says.
        """
        elements = self._sizes[key.fragment]
        limit = frame_bytes(elements, self._run.protocol.codec_up)
        if manifest.blob.size_bytes > limit:
            raise FrameRejected("oversized", "a frame is too large", got=manifest.blob.size_bytes, allowed=limit)
        async with self._reading:
            data = await self._bus.get_blob(manifest.blob, limit)
            self.bytes_in += len(data)
            waiting = await self._off_loop(elements, self._opened, key.fragment, data, manifest)
        self._ready[key] = waiting
        return math.hypot(*waiting.norms)

    async def fold(self, command: Fold, state: State) -> None:
        """Add a ready contribution to its fragment's sum and let its memory go; `state` is the fragment's outer state."""
        key = command.key
        waiting = self._ready.pop(key)
        fold = self._folds.get(key.fragment)
        if fold is None:
            fold = FragmentFold(self._run.layout.spans(key.fragment), self._run.protocol.merge)
            self._folds[key.fragment] = fold
        await self._off_loop(waiting.displacement.elements, self._add, fold, waiting, command, state)

    async def merged(self, fragment: int) -> Vector:
        """Return the merged displacement of the fragment's round and begin a new sum."""
        fold = self._folds.pop(fragment)
        self._compasses.pop(fragment, None)
        result = await self._off_loop(self._sizes[fragment], fold.result)
        return result.displacement

    def forget(self, key: PushKey) -> None:
        """Let go of a contribution that will not be folded."""
        self._ready.pop(key, None)

    def _add(self, fold: FragmentFold, waiting: Waiting, command: Fold, state: State) -> None:
        """Fold a displacement in as fresh as it is, corrected where the run wants that."""
        bends = None
        if self._correction is not None:
            spans = self._run.layout.spans(command.key.fragment)
            compass = self._compass(command.key.fragment, state[MOMENTUM])
            bends = self._correction.bends(waiting.displacement, waiting.norms, compass, spans)
        fold.add(waiting.displacement, waiting.norms, command.weight, command.freshness, bends)

    def _compass(self, fragment: int, momentum: Vector) -> Compass:
        """Return the measured momentum of a fragment; it is measured again when it is another one."""
        compass = self._compasses.get(fragment)
        if compass is None or compass.momentum is not momentum:
            compass = self._compasses[fragment] = Compass.of(momentum, self._run.layout.spans(fragment))
        return compass

    def _opened(self, fragment: int, data: bytes, manifest: Contribution) -> Waiting:
        codec = self._run.protocol.codec_up
        displacement = open_frame(data, elements_expected=self._sizes[fragment], codec=codec)
        spans = self._run.layout.spans(fragment)
        return Waiting(displacement, validated_norms(displacement, spans, manifest.norms, self._run.protocol.norm_max))

    @staticmethod
    async def _off_loop(elements: int, work: Callable[..., T], *arguments: Any) -> T:  # noqa: ANN401  (as given)
        """Run small work here and large work in a thread: a hop costs more than folding a small fragment."""
        if elements <= INLINE_ELEMENTS_MAX:
            return work(*arguments)
        return await asyncio.to_thread(work, *arguments)
