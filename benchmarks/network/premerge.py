"""What pre-merge saves of a region's link, and what it costs the model: `make bench-premerge`.

    bytes      one learner, then four, in a region whose link goes through a relay that counts; with the region's synchronizer
               and without. Counted are the bytes towards the hub and back for each version that is made
    loss       four learners train a perceptron on handwritten digits to the same number of tokens, with and without, from
               several seeds: the loss of the merged model over all digits

The learners of the first part train nothing: they move large arrays by a little each step, which is what travels.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import track
from sklearn.datasets import load_digits

import atoll
from atoll.base.background_tasks import LoopThread
from atoll.base.clock import SystemClock
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.client.options import JoinOptions
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.messages import Event, decode
from atoll_synchronizer.process import serve_run, wait_for_run
from atoll_synchronizer.region_service import RegionService
from benchmarks.lib.harness import Figure, at_most, fact, run_benchmark
from benchmarks.lib.runs import stored_events
from support.links import unique_run
from support.memory_world import MemoryWorld
from support.regions import RelayedRegion
from support.restarting_loop import BATCH, OPTIMIZER, init, step

REGION: Final = "eu"
LEARNERS: Final = 4
ELEMENTS: Final = 1 << 22
STEP_S: Final = 0.2
INTERVAL: Final = 10
FRAGMENTS: Final = 4
BYTES_GOAL: Final = 1.05
NAMES: Final = tuple("abcd")
SETTLE_S: Final = 120.0
PREMERGE: Final = ", pre-merge"


@dataclass(frozen=True, slots=True)
class Mark:
    """Bytes that the link had carried, towards the hub and back, by a time of the wall clock."""

    at_s: float
    up_bytes: int
    down_bytes: int


class Folding:
    """The synchronizer of a region, on a loop."""

    def __init__(self, home: LoopThread, opener: Callable[[], Coroutine[Any, Any, Bus]], run: str, region: str) -> None:
        self._opener, self._run, self._region = opener, run, region
        self.served: Future[str] = home.submit(self._serve())

    async def _serve(self) -> str:
        bus, stop = await self._opener(), asyncio.Event()
        try:
            record = await wait_for_run(bus, self._run, stop)
            return await RegionService(bus, record, self._region, SystemClock()).serve(stop) if record else "unfounded"
        finally:
            await bus.close()


# -- bytes ------------------------------------------------------------------------------------------------------------


def carried_bytes(there: RelayedRegion, learners: int, seconds: float, *, premerge: bool) -> tuple[float, float]:
    """Return the bytes that the link carries for each version, towards the hub and back, beside those of one bf16 fragment."""
    run, region = unique_run(), REGION if premerge else ""
    steps = max(8 * INTERVAL, round(seconds / STEP_S))
    protocol = ProtocolSettings(
        fragments=FRAGMENTS, shards=1, interval_steps=INTERVAL, silence_s=5.0, tokens_target=learners * steps
    ).check()
    home = LoopThread("hub and region")
    opener = partial(open_bus, there.leaf.url, run, name="eu", options=BusOptions(region=REGION))
    folding = Folding(home, opener, run, REGION) if premerge else None
    shard = home.submit(serve_run(partial(open_bus, there.hub.url, run, name="shard"), run, shard=0))
    ready, marks = threading.Barrier(learners), list[Mark]()
    at_steps = (2 * INTERVAL, steps - 2 * INTERVAL)  # how learners come and go is not what is measured

    def train(name: str) -> None:
        values = np.random.default_rng(0).normal(size=(FRAGMENTS, ELEMENTS // FRAGMENTS)).astype(np.float32)
        options = JoinOptions(region=region)
        with atoll.join(
            there.leaf.url, run=run, learner=name, params={"w": values}, protocol=protocol, options=options
        ) as island:
            params, drift, done = island.params, np.float32(1e-4), 0
            ready.wait(SETTLE_S)
            time.sleep(STEP_S * NAMES.index(name) / learners)  # learners of a real region do not step together
            while not island.done:
                time.sleep(STEP_S)
                params, done = island.step({"w": params["w"] + drift}, tokens=1, loss=0.0), done + 1
                if name == NAMES[0] and done in at_steps:
                    marks.append(Mark(time.time(), there.link.carried_bytes["up"], there.link.carried_bytes["down"]))

    threads = [threading.Thread(target=train, args=(name,)) for name in NAMES[:learners]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shard.result(SETTLE_S)
    if folding is not None:
        folding.served.result(SETTLE_S)
    first, last = marks
    home.stop()
    rounds = [decode(Event, data) for data in asyncio.run(stored_events(there.hub.url, run, "round"))]
    made = sum(first.at_s <= event.at_s < last.at_s for event in rounds)
    unit = made * 2 * ELEMENTS / FRAGMENTS
    return (last.up_bytes - first.up_bytes) / unit, (last.down_bytes - first.down_bytes) / unit


# -- loss -------------------------------------------------------------------------------------------------------------


def trained_loss(seed: int, tokens: int, *, premerge: bool) -> float:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    protocol = ProtocolSettings(fragments=2, shards=1, interval_steps=20, silence_s=2.0, tokens_target=tokens).check()
    world = MemoryWorld(unique_run(), protocol)
    folding = Folding(world.home, world.bus, world.run, REGION) if premerge else None

    def train(name: str) -> None:
        chance, key = np.random.default_rng([seed, ord(name)]), jax.random.key(seed + ord(name))
        with world.join(name, init(), region=REGION if premerge else "") as island:
            params, opt = island.params, OPTIMIZER.init(island.params)
            while not island.done:
                chosen = chance.integers(0, len(images), BATCH)
                params, opt, key, loss = step(params, opt, key, images[chosen], labels[chosen])
                time.sleep(0.005)
                params = island.step(params, tokens=BATCH, loss=float(loss))

    world.go(*(partial(train, name) for name in NAMES))
    merged = {name: jnp.asarray(leaf) for name, leaf in world.merged().params.items()}
    if folding is not None:
        folding.served.result(SETTLE_S)
    world.home.stop()
    by_name = {path.strip("/"): leaf for path, leaf in merged.items()}
    scores = jax.nn.relu(images @ by_name["w1"]) @ by_name["w2"]
    return float(optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean())


# -- figures ----------------------------------------------------------------------------------------------------------


def figures_of(moved: dict[tuple[int, bool], tuple[float, float]], losses: dict[bool, list[float]]) -> list[Figure]:
    """Return the figures; `moved` by learners and pre-merge, `losses` by pre-merge, a loss for each seed."""
    how = f"bytes at a relay for each version, beside a fragment of {ELEMENTS // FRAGMENTS >> 20} M numbers in bf16"
    found = [
        fact(f"up, {_named(learners)}{PREMERGE if premerge else ''}", up, "x", how)
        for (learners, premerge), (up, _) in moved.items()
    ]
    for way, place in (("up", 0), ("down", 1)):
        for premerge in (False, True):
            ratio = moved[LEARNERS, premerge][place] / moved[1, premerge][place]
            has_goal = premerge or way == "down"
            name = f"{way}, four learners beside one{PREMERGE if premerge else ''}"
            found.append(at_most(name, ratio, "x", BYTES_GOAL if has_goal else None, how))
    plain, added = losses[False], losses[True]
    apart = [b - a for a, b in zip(plain, added, strict=True)]
    noise = statistics.stdev(plain) if len(plain) > 1 else 0.0
    gap = statistics.mean(apart)
    means = f"loss without {statistics.mean(plain):.4f}, with {statistics.mean(added):.4f}"
    told = f"{len(plain)} seeds, four learners on digits; {means}"
    within = abs(gap) <= 2.0 * max(noise, statistics.stdev(apart) if len(apart) > 1 else 0.0)
    return [
        *found,
        Figure("loss with pre-merge minus without", gap, "", "within twice the noise", within, told),
        fact("noise of the loss over seeds", noise, "", "standard deviation without pre-merge"),
    ]


def _named(learners: int) -> str:
    return "one learner" if learners == 1 else "four learners"


def main(
    *,
    minutes: Annotated[float, "of training for each count of bytes"] = 0.8,
    seeds: Annotated[int, "how many"] = 4,
    tokens: Annotated[int, "to which digits are trained"] = 120_000,
    seed: int = 0,
) -> list[Figure]:
    moved = {}
    with tempfile.TemporaryDirectory() as name, RelayedRegion(Path(name)) as there:
        cases = [(learners, premerge) for learners in (1, LEARNERS) for premerge in (False, True)]
        for learners, premerge in track(cases, "bytes", transient=True):
            moved[learners, premerge] = carried_bytes(there, learners, 60.0 * minutes, premerge=premerge)
    losses: dict[bool, list[float]] = {False: [], True: []}
    for number in track(range(seeds), "losses", transient=True):
        for premerge in (False, True):
            losses[premerge].append(trained_loss(seed + number, tokens, premerge=premerge))
    return figures_of(moved, losses)


if __name__ == "__main__":
    run_benchmark("bench-premerge", main)
