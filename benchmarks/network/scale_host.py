"""A process that holds many dummy learners of one run: they join, hold values, push, adopt and leave, and train nothing.

    scale_host REQUEST        a JSON object, a `HostRequest`

Every learner is an island of its own, as `atoll.join` makes it; all of a process share one loop, as two cores cannot hold a
process for each of 128 learners. A step is a pause: the loop walks from island to island, so that their steps are spread over
`step_s`. A learner contributes a constant move of each fragment that it adopted. The process writes a line of JSON when all of
its learners have joined, and one when all have left, which they do when the run record says that the run is closing.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import msgspec
import numpy as np

from atoll import join
from atoll.base import large_arrays
from atoll.base.background_tasks import LoopThread
from atoll.client.join import IslandHandle
from atoll.client.options import JoinOptions
from atoll.codec import KEYFRAME
from atoll.protocol.settings import ProtocolSettings
from benchmarks.lib.compiled import compile_kernels, read_only

MOVE: Final = 1e-3
TOKENS: Final = 64
DRAIN_S: Final = 900.0
Arrays = dict[str, np.ndarray[Any, Any]]


class HostRequest(msgspec.Struct, frozen=True):
    """Which learners of which run a host holds, how large their fragments are, and how long a step takes.

    Arrays of at least `spill_bytes` bytes go to scratch files, as those of a learner process do.
    """

    broker: str
    run: str
    learners: list[str]
    elements: int
    step_s: float
    protocol: ProtocolSettings
    spill_bytes: int = 1 << 30
    stream_bytes_max: int | None = None


def main(request: HostRequest) -> None:
    large_arrays.policy.bytes_min = request.spill_bytes
    protocol, home = request.protocol, LoopThread("host")
    compile_kernels({protocol.codec_up, protocol.codec_down, KEYFRAME})
    islands = [HeldIsland(request, name, home) for name in request.learners]
    tell("joined", len(islands))
    held_until_closed(islands, request.step_s)
    tell("left", len(islands))
    home.stop()


def held_until_closed(islands: list[HeldIsland], step_s: float) -> None:
    """Step all islands in turn; let each one leave when it hears that the run is closing."""
    leaving: list[Future[None]] = []
    training = list(islands)
    with ThreadPoolExecutor(max(1, len(islands))) as leavers:
        due_s = time.monotonic()
        while training:
            for island in list(training):
                due_s += step_s / len(islands)
                if (pause_s := due_s - time.monotonic()) > 0.0:
                    time.sleep(pause_s)
                if island.handle.done:
                    training.remove(island)
                    leaving.append(leavers.submit(island.handle.close, DRAIN_S))
                else:
                    island.step()
            # A host that is behind is slow; it does not catch up for ever.
            due_s = max(due_s, time.monotonic() - step_s)
        for each in leaving:
            each.result()


class HeldIsland:
    """One learner: its island and the arrays that it goes on with."""

    def __init__(self, request: HostRequest, name: str, home: LoopThread) -> None:
        self._move = np.float32(MOVE * (1.0 + int(name.rpartition("-")[2]) % 8))
        tensors = request.protocol.fragments
        first = {f"t{number}": read_only(np.zeros(request.elements, np.float32)) for number in range(tensors)}
        options = JoinOptions(home=home, stream_bytes_max=request.stream_bytes_max)
        self.handle: IslandHandle = join(
            request.broker, run=request.run, learner=name, params=first, protocol=request.protocol, options=options
        )
        self._arrays: Arrays = {}
        self._go_on(self.handle.params)

    def step(self) -> None:
        self._go_on(self.handle.step(self._arrays, tokens=TOKENS, loss=1.0))

    def _go_on(self, arrays: Arrays) -> None:
        """Move what was adopted a little, so that there is something to contribute."""
        held = self._arrays
        self._arrays = {
            name: array if held.get(name) is array else read_only(array + self._move) for name, array in arrays.items()
        }


def tell(what: str, count: int) -> None:
    """Write a line for the process that has started this one."""
    sys.stdout.write(json.dumps({"host": what, "learners": count}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=HostRequest))
