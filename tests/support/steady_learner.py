"""A learner that does nothing but go on: the program of tests that watch a run and kill parts of it.

    python steady_learner.py URL RUN LEARNER IDENTITY REPLICAS

It trains a small array until it is ended, at `PACE_S` a step; SIGTERM has it say goodbye.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import numpy as np

from atoll.client.join import join
from atoll.client.options import JoinOptions
from atoll.protocol.settings import ProtocolSettings

PACE_S = 0.02
PROTOCOL = ProtocolSettings(
    fragments=2, shards=1, interval_steps=8, silence_s=2.0, lease_s=2.0, tokens_target=1_000_000_000, quorum=1
)
START = {"w": np.zeros((64, 8), np.float32)}


def main(url: str, run: str, learner: str, identity: Path, replicas: int) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    options = JoinOptions(identity=identity, replicas=replicas)  # type: ignore[arg-type]  # `join` checks it
    with join(url, run=run, learner=learner, params=START, protocol=PROTOCOL, options=options) as island:
        params = island.params
        while not stop.wait(PACE_S):
            params = island.step({"w": params["w"] + np.float32(0.001)}, tokens=4, loss=2.5)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
