"""The tensors of a shard: contributions on their way in, and the running sum of each fragment's round.

The machine decides by keys; the workbench does what the commands say with the arrays behind those keys. A contribution
is read and *validated* before the machine hears that it is ready: right layout, right size, finite, its norms as claimed
and within bounds. Each of its segments is checked and measured as it arrives. It stays encoded, and waits in the fold for no
more than as many as are as large as a sum (`atoll.passes`), so a shard needs O(fragment), whatever M is. No more than
`READS_AT_ONCE` are on their way in at once, also through an outage, after which hundreds are queued.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass

from atoll.advance import MOMENTUM
from atoll.bus.interface import Bus
from atoll.bus.pieces import Download
from atoll.codecs import Arriving, Encoded, Framing
from atoll.correction import Compass, correction_of
from atoll.errors import FrameRejected
from atoll.hop import off_loop
from atoll.kernels import Vector
from atoll.merge import FragmentFold, validated_norms
from atoll.outer import State
from atoll.protocol.events import Fold, PushKey
from atoll.wire.messages import Contribution, RunRecord
from atoll_synchronizer.tape import patiently

READS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Waiting:
    """A validated contribution, as it came, and its L2 norms per slice."""

    displacement: Encoded
    norms: list[float]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A contribution on its way in; where the broker goes away meanwhile, it goes on where it was."""

    download: Download
    frame: Arriving


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

    async def fetch(self, key: PushKey, manifest: Contribution) -> float:
        """Read and validate a contribution, keep it, and return its L2 norm; a broker that is away is waited for.

        Raises:
            FrameRejected: with the reason; also for a manifest whose blob is larger than any honest frame.
            BlobGone, BlobCorrupt: the chunks are not what the manifest says.
        """
        elements = self._sizes[key.fragment]
        async with self._reading:
            arrival = await patiently(lambda: off_loop(elements, self._expected, key.fragment, manifest))
            await patiently(lambda: self._receive(arrival))
        spans, norm_max = self._run.layout.spans(key.fragment), self._run.protocol.norm_max
        norms = validated_norms(arrival.frame.norms(), spans, manifest.norms, norm_max)
        self._ready[key] = Waiting(arrival.frame.encoded(), norms)
        return math.hypot(*norms)

    def _expected(self, fragment: int, manifest: Contribution) -> Arrival:
        """Return what is about to arrive; nothing is allocated for what no honest learner sends."""
        elements, codec = self._sizes[fragment], self._run.protocol.codec_up
        framing = Framing(elements, codec)
        if manifest.blob.size_bytes > framing.size_bytes:
            got = manifest.blob.size_bytes
            raise FrameRejected("oversized", "a frame is too large", got=got, allowed=framing.size_bytes)
        if manifest.blob.chunks != len(framing):
            raise FrameRejected("size", "a frame of another length", got=manifest.blob.chunks, allowed=len(framing))
        download = Download(manifest.blob, framing.size_bytes)
        return Arrival(download, Arriving(elements, codec, self._run.layout.spans(fragment)))

    async def _receive(self, arrival: Arrival) -> None:
        """Check, keep and measure each segment as it comes."""
        elements = arrival.frame.framing.elements
        async with contextlib.aclosing(self._bus.pieces(arrival.download)) as pieces:
            async for portion in pieces:
                self._bus.stats.frame_bytes_down += sum(len(piece) for _, piece in portion)
                await off_loop(elements, arrival.frame.take_all, portion)

    async def fold(self, command: Fold, state: State) -> None:
        """Add a ready contribution to its fragment's sum and let its memory go; `state` is the fragment's outer state."""
        key = command.key
        waiting = self._ready.pop(key)
        fold = self._folds.get(key.fragment)
        if fold is None:
            fold = FragmentFold(self._run.layout.spans(key.fragment), self._run.protocol.merge)
            self._folds[key.fragment] = fold
        await off_loop(waiting.displacement.elements, self._add, fold, waiting, command, state)

    async def merged(self, fragment: int) -> Vector:
        """Return the merged displacement of the fragment's round and begin a new sum."""
        fold = self._folds.pop(fragment)
        self._compasses.pop(fragment, None)
        result = await off_loop(self._sizes[fragment], fold.result)
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
