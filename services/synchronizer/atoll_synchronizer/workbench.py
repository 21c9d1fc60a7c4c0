"""The tensors of a shard: contributions on their way in, and the running sum of each fragment's round.

The machine decides by keys; the workbench does what the commands say with the arrays behind those keys. A contribution
is read and *validated* before the machine hears that it is ready: right layout, right size, finite, its norms as claimed
and within bounds. Each of its segments is checked and measured as it arrives. It stays encoded, and waits in the fold for no
more than as many as are as large as a sum (`atoll.passes`), so a shard needs O(fragment), whatever M is. No more than
`READS_AT_ONCE` are on their way in at once, also through an outage, after which hundreds are queued.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from functools import partial

from atoll.arrival import Arrival
from atoll.bus.interface import Bus
from atoll.codecs import Encoded
from atoll.correction import Compass, correction_of
from atoll.hop import off_loop
from atoll.kernels import Vector
from atoll.merge import FragmentFold, validated_norms
from atoll.outer import MOMENTUM, State
from atoll.protocol.events import Fold, PushKey
from atoll.wire.messages import Contribution, RunRecord
from atoll_synchronizer.tape import patiently

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

    async def fetch(self, key: PushKey, manifest: Contribution) -> float:
        """Read and validate a contribution, keep it, and return its L2 norm; a broker that is away is waited for.

        Raises:
            FrameRejected: with the reason; also for a manifest whose blob is larger than any honest frame.
            BlobGone, BlobCorrupt: the chunks are not what the manifest says.
        """
        elements, spans, protocol = self._sizes[key.fragment], self._run.layout.spans(key.fragment), self._run.protocol
        async with self._reading:
            begun = partial(off_loop, elements, Arrival.of, manifest.blob, elements, protocol.codec_up, spans)
            arrival = await patiently(begun)
            await patiently(lambda: arrival.receive(self._bus))
        norms = validated_norms(arrival.frame.norms(), spans, manifest.norms, protocol.norm_max)
        self._ready[key] = Waiting(arrival.frame.encoded(), norms)
        return math.hypot(*norms)

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
