"""The whole protocol in one process: two islands, one shard, an in-memory bus.

    python examples/two_islands.py                              under a minute

Two learners look for a straight line, but each sees points at one place only, through which many lines go: alone, the
left one finds the slope 2 and the right one 1. The merged model must go through both places, and so finds 3.
Everything here is what a real run uses, only the bus lives in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import jax
import jax.numpy as jnp

import atoll
from atoll.base.background_tasks import LoopThread
from atoll.base.logs import configure
from atoll.bus.interface import Bus
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.protocol.settings import ProtocolSettings
from atoll_synchronizer.process import serve_run

Opener = Callable[[], Coroutine[Any, Any, Bus]]
RUN = "tour"
# A line is found to the last digit: pseudo-gradients shrink by magnitudes, and one ten times longer than usual is
# nobody's fault.
PROTOCOL = ProtocolSettings(
    fragments=2, interval_steps=8, shards=1, silence_s=2.0, tokens_target=90_000, outlier_ratio=0.0
)
STEP_S = 0.005


def loss_of(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean squared error of the line `slope * x + offset`."""
    return jnp.mean((params["slope"] * x + params["offset"] - y) ** 2)


def island(name: str, bus: Opener, home: LoopThread, x: jax.Array, found: dict[str, float]) -> None:
    """Train one island on its own points until the run has seen its tokens; a step takes as long as a small model's."""
    gradient = jax.jit(jax.value_and_grad(loss_of))
    params = {"slope": jnp.zeros(1), "offset": jnp.zeros(1)}
    with atoll.join(
        bus, run=RUN, learner=name, params=params, protocol=PROTOCOL, options=atoll.JoinOptions(home=home)
    ) as me:
        params = me.params
        while not me.done:
            loss, slope = gradient(params, x, 3.0 * x - 1.0)
            params = jax.tree.map(lambda p, g: p - 0.02 * g, params, slope)
            time.sleep(STEP_S)
            params = me.step(params, tokens=x.size, loss=float(loss))
    found[name] = float(params["slope"][0])


def main() -> None:
    """Start the shard and both islands, wait, and print the slopes they agree on."""
    configure("console", "warning", role="tour")
    broker, home, found = MemoryBroker(), LoopThread("tour"), dict[str, float]()

    async def bus() -> Bus:
        return MemoryBus(RUN, broker)

    shard = home.submit(serve_run(bus, RUN, shard=0))
    places = {"left": jnp.full(32, -1.0), "right": jnp.full(32, 1.0)}
    islands = [threading.Thread(target=island, args=(name, bus, home, x, found)) for name, x in places.items()]
    for thread in islands:
        thread.start()
    for thread in islands:
        thread.join()
    reason = shard.result(timeout=30.0)
    home.stop()
    print(f"the shard ended: {reason}; slopes found: { {k: round(v, 2) for k, v in found.items()} } (true slope 3.0)")


if __name__ == "__main__":
    main()
