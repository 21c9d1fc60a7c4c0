"""A loop of NumPy arrays is an island without JAX: it joins, trains, lends, reads the model and leaves; what is copied when."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from atoll.base.background_tasks import LoopThread
from atoll.base.errors import SettingsError
from atoll.bus.interface import Bus
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.join import IslandHandle, join
from atoll.client.options import JoinOptions
from atoll.protocol.settings import ProtocolSettings

DEADLINE_S = 240.0
WITHOUT_JAX = '''
import sys


class Blocked:
    """As if these were not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jax", "jaxlib", "flax", "optax", "orbax"}:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)


sys.meta_path.insert(0, Blocked())

import threading
from typing import NamedTuple

import numpy as np

import atoll
from atoll.base.background_tasks import LoopThread
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.options import JoinOptions
from atoll.protocol.settings import ProtocolSettings
from atoll_synchronizer.process import serve_run


class Layer(NamedTuple):
    w: np.ndarray
    b: np.ndarray


broker, home = MemoryBroker(), LoopThread("world")
protocol = ProtocolSettings(
    fragments=3, interval_steps=6, shards=1, tokens_target=3_000, silence_s=2.0,
    quorum=2, merge="mean", outer_lr=1.0, outer_momentum=0.0, correction="none",
)
GOALS = {"a": 1.0, "b": 3.0}
ready = threading.Barrier(2)
lent, refused = {}, {}


async def opened():
    return MemoryBus("r", broker)


shard = home.submit(serve_run(opened, "r", shard=0))
merged, taken = {}, dict.fromkeys(GOALS, 0)


def train(name):
    first = {"in": Layer(np.zeros((6, 3), np.float32), np.zeros(3, np.float32)), "out": [np.zeros(5), np.int64(7)]}
    options = JoinOptions(home=home)
    with atoll.join(opened, run="r", learner=name, params=first, protocol=protocol, options=options) as island:
        try:
            island.checkpoints("nowhere", like=first)
        except atoll.SettingsError as error:
            refused[name] = error.todo
        params, state = island.params, {"mu": np.full(4, 0.5, np.float32), "count": 3}
        ready.wait()
        pause = threading.Event()
        while not island.done:
            if taken[name] > min(taken.values()) + 12:  # neither trains alone, however the processors are shared out
                island.share(state)
                pause.wait(0.003)
                continue
            for leaf in (params["in"].w, params["in"].b, params["out"][0]):
                leaf += 0.1 * (GOALS[name] - leaf)
            params = island.step(params, tokens=10, loss=float(taken[name]))
            island.share(state)
            taken[name] += 1
            pause.wait(0.003)
            if name == "b" and taken[name] == 60:
                lent["b"] = island.recovered_state({"mu": np.zeros(4, np.float32), "count": 0}, within_s=30.0)
    merged[name] = island.merged().params


threads = [threading.Thread(target=train, args=(name,)) for name in GOALS]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(shard.result(240.0))
print("loaded", sorted({"jax", "jaxlib", "orbax", "optax", "flax"} & set(sys.modules)))
for name, params in sorted(merged.items()):
    print(name, type(params["in"]).__name__, round(float(params["in"].w.mean()), 1), params["out"][1])
print(*sorted(refused.items()))
print(lent["b"].state["mu"].tolist(), lent["b"].state["count"], lent["b"].lender)
home.stop()
'''


def test_an_island_of_numpy_arrays_needs_no_jax() -> None:
    """Two of them, from joining to the merged model, a loan of optimizer state among it, in a process that cannot load it."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    said = [line for line in done.stdout.splitlines() if not line.startswith(("20", "{"))]

    assert done.returncode == 0, done.stderr
    assert said[:2] == ["token target reached", "loaded []"]
    assert [line.split()[:2] for line in said[2:4]] == [["a", "Layer"], ["b", "Layer"]]
    # Where between the two depends on the last rounds, which a busy machine may leave to one of them.
    assert all(0.8 < float(line.split()[2]) < 3.2 for line in said[2:4]), "the model is between what they sought"
    assert all(line.endswith(" 7") for line in said[2:4])
    told = "pip install 'atoll[learner]'"
    assert said[4] == f"{('a', told)} {('b', told)}", "checkpoints need Orbax, and say so"
    assert said[5] == "[0.5, 0.5, 0.5, 0.5] 3 a"


def test_a_process_that_loads_jax_after_it_joined_goes_on(tmp_path: Path) -> None:
    program = tmp_path / "late.py"
    program.write_text(
        """
import sys
import numpy as np
import atoll
from atoll.base.background_tasks import LoopThread
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.options import JoinOptions

broker, home = MemoryBroker(), LoopThread("world")


async def opened():
    return MemoryBus("r", broker)


params = {"w": np.zeros((4, 2), np.float32)}
with atoll.join(opened, run="r", learner="a", params=params, options=JoinOptions(home=home)) as island:
    params = island.step(island.params, tokens=1)
    before = "jax" in sys.modules
    import jax.numpy as jnp

    params = island.step(params, tokens=1)
    try:
        island.step({"w": jnp.zeros((4, 3))}, tokens=1)
    except atoll.SettingsError as error:
        print(before, error.got)
home.stop()
""",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    assert done.returncode == 0, done.stderr
    assert "False float32 of shape [4, 3]" in done.stdout


def joined(home: LoopThread, params: Any, **changes: Any) -> IslandHandle:  # noqa: ANN401
    broker = MemoryBroker()

    async def opened() -> Bus:
        return MemoryBus("r", broker)

    protocol = ProtocolSettings(fragments=2, shards=1, interval_steps=8)
    return join(
        opened, run="r", learner="a", params=params, protocol=protocol, options=JoinOptions(home=home, **changes)
    )


def test_only_arrays_that_may_change_in_place_are_copied(home: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writable NumPy leaves once per step; read-only ones and JAX's never."""
    fixed = np.ones((3, 2), np.float32)
    with joined(home, {"fixed": fixed, "free": np.ones((5, 2), np.float32), "jax": jnp.ones(4)}) as island:
        params = island.params
        params["fixed"].flags.writeable = False
        driver, completed, continued = island.session.driver, dict[str, Any](), dict[str, Any]()
        monkeypatch.setattr(driver, "end_step", lambda _, snapshot: completed.update(snapshot) or [])
        monkeypatch.setattr(driver, "go_on", lambda snapshot, *_: continued.update(snapshot))
        given = island.step(params, tokens=1)
        monkeypatch.undo()

    assert all(given[name] is params[name] for name in params), "the loop goes on with its own arrays"
    assert {name for name in params if completed[name] is params[name]} == {"fixed", "jax"}
    assert not np.shares_memory(completed["free"], params["free"])
    assert continued["free"] is completed["free"], "what was not adopted is copied once"


def test_arrays_of_another_framework_are_named_with_what_to_do(home: LoopThread) -> None:
    class Tensor:
        dtype, shape = "torch.float32", (3,)

    with pytest.raises(SettingsError, match="Tensor is no array") as refused:
        joined(home, {"w": Tensor()})

    assert "tensor.numpy()" in str(refused.value)
