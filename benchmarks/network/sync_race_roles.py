"""Atoll's participant in the race of syncs: a loop of one's own that holds values and pauses instead of training.

    sync_race_roles REQUEST

REQUEST is the JSON object that the workers of `benchmarks.peers.syncing` get, too, with `broker`, `run` and `protocol`. Each
adoption is one line of JSON: when it was, and for how long all calls of `island.step` since the one before kept this thread.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

import atoll
from atoll.codec import KEYFRAME
from atoll.protocol.settings import ProtocolSettings
from benchmarks.lib.compiled import compile_kernels

MOVE = 1e-3


def main(request: dict[str, Any]) -> None:
    protocol = ProtocolSettings(**request["protocol"])
    compile_kernels({protocol.codec_up, protocol.codec_down, KEYFRAME})
    rows = request["elements"] // request["columns"]
    dice = np.random.default_rng(request["rank"])
    move = np.float32(MOVE) * dice.standard_normal((rows, request["columns"]), np.float32)
    name = f"worker-{request['rank']}"
    first = fixed(np.zeros((rows, request["columns"]), np.float32))
    with atoll.join(
        request["broker"], run=request["run"], learner=name, params={"w": first}, protocol=protocol
    ) as island:
        params, held, blocked_s, number = island.params, None, 0.0, 0
        while True:
            if params["w"] is not held:  # adopted: train a little, so that there is something to contribute
                params = {"w": fixed(params["w"] + move)}
                held = params["w"]
            time.sleep(request["step_s"])
            began_s = time.perf_counter()
            params = island.step(params, tokens=1, loss=1.0)
            blocked_s += time.perf_counter() - began_s
            if params["w"] is not held:
                number += 1
                told = {"sync": number, "at_s": time.time(), "blocked_s": blocked_s}
                sys.stdout.write(json.dumps(told) + "\n")  # at once: other threads write lines of log
                sys.stdout.flush()
                blocked_s = 0.0


def fixed(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Make an array that nobody may write to, as JAX's are: no copy of it is needed."""
    values.flags.writeable = False
    return values


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
