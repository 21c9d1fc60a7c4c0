"""What `island.step` copies, and what it costs: NumPy arrays against JAX arrays; and Keras with its callback against without.

A NumPy array that may be written to is copied after every step, for the next step may write to it. One that is read-only, and
any JAX array, is kept by reference. A JAX array that the step donates is copied to the host's memory (`donated=True`).

Keras's callback clocks itself, but the copies it has made for Keras are the device's work, which no clock on the host sees. So
`fit` runs with the callback and without, in turns, and the medians of their epochs are compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax.numpy as jnp
import numpy as np

from atoll.base.logs import configure
from atoll.base.loop_thread import LoopThread
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.join import join
from atoll.client.options import JoinOptions
from atoll.protocol.settings import ProtocolSettings
from atoll_synchronizer.process import serve_run
from benchmarks.lib.harness import Figure, fact

MEGABYTES = 64
TENSORS = 16
STEPS = 40
TURNS = 6
KERAS_ROWS, KERAS_WIDTH, KERAS_BATCH = 16_384, 768, 2048
PROTOCOL = ProtocolSettings(fragments=4, shards=1)


def copies(seed: int) -> list[Figure]:
    """Return the cost of a step for each kind of array, and of Keras's callback."""
    configure("console", "error", role="copies")
    rows = (MEGABYTES << 20) // (4 * 1024 * TENSORS)
    arrays = [np.zeros((rows, 1024), np.float32) for _ in range(TENSORS)]
    kinds: dict[str, tuple[Callable[[np.ndarray], Any], bool]] = {
        "NumPy arrays": (np.copy, False),
        "read-only NumPy arrays": (read_only, False),
        "JAX arrays": (jnp.asarray, False),
        "donated JAX arrays": (jnp.asarray, True),
    }
    figures = []
    for kind, (made, donated) in kinds.items():
        step_ms = 1e3 * step_s([made(array) for array in arrays], donated=donated)
        how = f"median of {STEPS} steps without a call"
        figures.append(fact(f"island.step, {MEGABYTES} MiB in {kind}", step_ms, "ms", how))
    return [*figures, keras_callback(seed)]


def read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def step_s(params: list[Any], *, donated: bool) -> float:
    """Return how long `island.step` takes for these arrays."""
    home, broker = LoopThread("copies"), MemoryBroker()

    async def bus() -> MemoryBus:
        return MemoryBus("copies", broker)

    options = JoinOptions(home=home, donated=donated)
    taken = []
    with join(bus, run="copies", learner="a", params=params, protocol=PROTOCOL, options=options) as island:
        for _ in range(STEPS):
            began_s = time.perf_counter()
            island.step(params, tokens=1)
            taken.append(time.perf_counter() - began_s)
    home.stop()
    return median(taken)


def keras_callback(seed: int) -> Figure:
    """Return by which share a batch of `fit` takes longer with the callback."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras  # noqa: PLC0415  (reads the environment)

    from atoll.keras import IslandCallback  # noqa: PLC0415

    class EpochClock(keras.callbacks.Callback):  # type: ignore[misc]
        """Clocks an epoch: without the island Keras does not wait for its batches, only for the last."""

        began_s = took_s = 0.0

        def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            del epoch, logs
            self.began_s = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            del epoch, logs
            self.took_s = time.perf_counter() - self.began_s

    home, broker = LoopThread("keras"), MemoryBroker()

    async def bus() -> MemoryBus:
        return MemoryBus("keras", broker)

    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(KERAS_WIDTH, activation="relu", name=f"dense{i}") for i in range(4)]
    model = keras.Sequential([keras.Input((KERAS_WIDTH,)), *layers])
    model.compile("adam", "mse")
    x = np.random.default_rng(seed).normal(size=(KERAS_ROWS, KERAS_WIDTH)).astype(np.float32)

    def batch_s(*more: Any) -> float:  # noqa: ANN401  (Keras has no types)
        clock = EpochClock()
        model.fit(x, x, batch_size=KERAS_BATCH, epochs=1, verbose=0, shuffle=False, callbacks=[clock, *more])
        return clock.took_s * KERAS_BATCH / KERAS_ROWS

    batch_s()
    bare, inside = [], []
    shard = home.submit(serve_run(bus, "keras", shard=0))
    island = IslandCallback(
        bus, run="keras", learner="a", tokens=KERAS_BATCH, protocol=PROTOCOL, options=JoinOptions(home=home)
    )
    for _ in range(TURNS):
        bare.append(batch_s())
        inside.append(batch_s(island))
    shard.cancel()
    home.stop()
    ratio = median(inside) / median(bare) - 1.0
    size = sum(int(np.prod(v.shape)) for v in model.trainable_variables) / 1e6
    how = (
        f"batches of {1e3 * median(bare):.0f} ms, {size:.1f} million parameters, {TURNS} epochs of either kind in turns"
    )
    return fact("a batch of Keras with the callback over one without, less 1", ratio, "ratio", how)
