"""The way of one contribution, counted: `make trace`.

A learner and a shard train over a real broker in this process. A tracer (`sys.setprofile`, in every thread) counts calls of
functions of ours from the end of one step until `CONTRIBUTIONS` contributions have been pushed, merged, committed and
adopted. What was called at least once for each of them lies on a contribution's way; what comes once per founding, per
heartbeat or per lease does not. Lambdas, comprehensions and generator expressions belong to their function.

A reader who wants to follow a contribution opens these modules and meets these functions. The raw table names them all.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import jax
import jax.numpy as jnp

from atoll.base.background_tasks import LoopThread
from atoll.base.files import write_whole
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.server import EmbeddedBroker
from atoll.client.join import IslandHandle, join
from atoll.protocol.settings import ProtocolSettings
from atoll_synchronizer.process import serve_run
from benchmarks.lib.harness import RESULTS, BenchmarkResult, Figure, at_most, fact, run_benchmark

CONTRIBUTIONS: Final = 20
WARM_UP: Final = 3
ELEMENTS: Final = 1 << 16
INTERVAL_STEPS: Final = 4
STEP_S: Final = 0.02
PATIENCE_S: Final = 120.0
MODULES_MAX: Final = 55
ROOMS: Final = ("shared/atoll/", "services/")
RUN: Final = "trace"
RAW: Final = RESULTS / "trace-functions.json"


class CallCounter:
    """Counts calls by code object while it is `counting`."""

    def __init__(self) -> None:
        self.counting = False
        self._calls: Counter[CodeType] = Counter()

    def install(self) -> None:
        """Listen in this thread and in every one that is started from now on."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def remove(self) -> None:
        self.counting = False
        threading.setprofile(None)
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event == "call" and self.counting:
            self._calls[frame.f_code] += 1

    def on_the_way(self, calls_min: int) -> dict[str, dict[str, int]]:
        """Return calls by function by module of ours, of what was called so often; a resumed coroutine counts as called."""
        found: dict[str, dict[str, int]] = defaultdict(dict)
        for code, calls in self._calls.items():
            room = next((room for room in ROOMS if room in code.co_filename), None)
            if room is not None and calls >= calls_min and not code.co_name.startswith("<"):
                module = code.co_filename.rpartition(room)[2].removeprefix("synchronizer/")
                found[module][code.co_qualname] = calls
        return {module: dict(sorted(found[module].items())) for module in sorted(found)}


def train_until(island: IslandHandle, versions: int, params: Any) -> Any:  # noqa: ANN401  (a pytree)
    """Step until the learner has adopted so many versions of its one fragment; return the parameters."""
    deadline_s = time.monotonic() + PATIENCE_S
    while island.session.driver.machine.intervals[0].anchor < versions:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"version {versions} does not come")
        params = jax.tree.map(lambda leaf: leaf + 0.01, params)
        time.sleep(STEP_S)
        params = island.step(params, tokens=8, loss=1.0)
    return params


def trace_way() -> dict[str, dict[str, int]]:
    protocol = ProtocolSettings(fragments=1, shards=1, interval_steps=INTERVAL_STEPS).check()
    params = {"w": jnp.zeros((ELEMENTS // 64, 64))}
    counter = CallCounter()
    counter.install()
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder)) as broker:
        home = LoopThread("shard")

        async def open_shard_bus() -> Bus:
            return await open_bus(broker.url, RUN, name="shard")

        shard = home.submit(serve_run(open_shard_bus, RUN, shard=0))
        try:
            with join(broker.url, run=RUN, learner="a", params=params, protocol=protocol) as island:
                params = train_until(island, WARM_UP, island.params)
                counter.counting = True
                train_until(island, WARM_UP + CONTRIBUTIONS, params)
                counter.counting = False
        finally:
            counter.remove()
            shard.cancel()
            home.stop()
    return counter.on_the_way(CONTRIBUTIONS)


def figures(way: dict[str, dict[str, int]]) -> Iterable[Figure]:
    functions = sum(len(calls) for calls in way.values())
    how = (
        f"functions of ours called at least {CONTRIBUTIONS} times while as many contributions of {ELEMENTS} numbers went from "
        "a step to their adoption, over JetStream, learner and shard in one process"
    )
    yield at_most("modules on a contribution's way", float(len(way)), "", MODULES_MAX, how)
    yield fact("functions on a contribution's way", float(functions), "", how)
    for room in dict.fromkeys(module.partition("/")[0] for module in way):
        inside = {module: calls for module, calls in way.items() if module.partition("/")[0] == room}
        count = sum(len(calls) for calls in inside.values())
        yield fact(f"functions in {len(inside)} modules of {room}", float(count), "", how)


def main() -> BenchmarkResult:
    way = trace_way()
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_whole(RAW, (json.dumps(way, indent=1) + "\n").encode())
    return BenchmarkResult(list(figures(way)), [RAW])


if __name__ == "__main__":
    run_benchmark("trace", main)
