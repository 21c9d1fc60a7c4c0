"""What a loop may hand over: every mistake is named by its leaf, when it is made."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from structlog.testing import capture_logs

from atoll.base.background_tasks import LoopThread
from atoll.base.errors import SettingsError
from atoll.bus.interface import Bus
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client import parameters
from atoll.client.join import IslandHandle, join
from atoll.client.model_reader import read_model
from atoll.client.options import JoinOptions
from atoll.client.parameters import checked_parameters, digest_of
from atoll.protocol.settings import ProtocolSettings

PROTOCOL = ProtocolSettings(fragments=2, shards=1, interval_steps=8)


def given() -> dict[str, Any]:
    return {"w": jnp.ones((4, 3)), "b": {"inner": jnp.zeros(3, jnp.bfloat16)}, "count": jnp.int32(3)}


def joined(home: LoopThread, params: Any, learner: str = "a", **changes: Any) -> IslandHandle:  # noqa: ANN401
    broker = changes.pop("broker", None) or MemoryBroker()

    async def opened() -> Bus:
        return MemoryBus("r", broker)

    protocol = changes.pop("protocol", PROTOCOL)
    options = JoinOptions(home=home, **changes)
    return join(opened, run="r", learner=learner, params=params, protocol=protocol, options=options)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": 0.1}, "lr: float is no array"),
        ({"z": jnp.ones(2, jnp.complex64)}, "z: complex64 numbers"),
        ({"bad": jnp.array([1.0, float("nan")])}, "bad: NaN, an infinity"),
        ({"bad": np.array([1.0, np.inf], np.float16)}, "bad: NaN, an infinity"),
        ({"abstract": jax.eval_shape(lambda: jnp.ones(2))}, "abstract: ShapeDtypeStruct is no array"),
        ({"text": "x"}, "text: str is no array"),
        ({"wide": np.full(3, 1e300)}, "wide: NaN, an infinity or a number beyond float32"),
        ({"names": np.array(["a", "b"])}, "names: <U1 is no kind of number"),
        ({"fields": np.zeros(2, dtype=[("a", "<f4")])}, "is no kind of number"),
    ],
)
def test_what_cannot_be_a_parameter_is_refused_at_the_door(changes: dict[str, Any], named: str) -> None:
    """Before anything is opened; once a complex array was accepted and never merged."""
    with pytest.raises(SettingsError) as refused:
        join("nats://127.0.0.1:1", run="r", learner="a", params=given() | changes)

    assert named in str(refused.value)
    with pytest.raises(SettingsError, match="there are no parameters"):
        checked_parameters({}, {})


FROZEN: dict[str, Any] = {"merge": {"base": "frozen"}}


def adapted(kind: Any = jnp) -> dict[str, Any]:  # noqa: ANN401  (NumPy or JAX)
    return {"w": kind.ones((4, 3), kind.float32), "base": kind.ones(5, kind.float32)}


@pytest.mark.parametrize("kind", [np, jnp])
def test_a_step_that_changes_a_frozen_leaf_is_refused_after_the_first_one(home: LoopThread, kind: Any) -> None:  # noqa: ANN401
    """Its values were compared when the island joined, and never again."""
    with pytest.raises(SettingsError) as refused, joined(home, adapted(kind), **FROZEN) as island:
        island.step({name: leaf * 0.5 for name, leaf in island.params.items()}, tokens=1)

    assert "the frozen leaf 'base' has changed" in str(refused.value)


def rewrite_its_base(home: LoopThread) -> None:
    """Be a loop that takes six steps and writes into its own frozen array after the first: the same array, other values."""
    with joined(home, adapted(np), **FROZEN) as island:
        params = island.step(island.params, tokens=1)
        params["base"] += 1.0
        for _ in range(5):
            params = island.step(params, tokens=1)


@pytest.mark.parametrize(("every", "found"), [(4, 4), (1000, 6)])
def test_a_frozen_leaf_that_changes_later_is_noticed_later(
    home: LoopThread, monkeypatch: pytest.MonkeyPatch, every: int, found: int
) -> None:
    monkeypatch.setattr(parameters, "FROZEN_EVERY", every)
    with pytest.raises(SettingsError, match="'base' has changed") as refused:
        rewrite_its_base(home)

    assert refused.value.got == f"other values at step {found}"


def test_a_frozen_leaf_costs_no_digest_while_it_is_the_same_array(
    home: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "FROZEN_EVERY", 2)
    read: list[str] = []

    def noted(name: str, leaf: Any) -> str:  # noqa: ANN401
        read.append(name)
        return digest_of(name, leaf)

    with joined(home, adapted(), **FROZEN) as island:
        monkeypatch.setattr(parameters, "digest_of", noted)
        step = jax.jit(lambda params: params | {"w": params["w"] * 0.5})
        params = island.params
        for _ in range(4):
            params = island.step(params | {"w": step(params)["w"]}, tokens=1)
        assert read == []
        for _ in range(4):
            params = island.step(step(params), tokens=1)
        assert read == ["base", "base"]


def test_a_founder_with_one_fragment_and_statistics_gets_two() -> None:
    """Leaves merged by value have fragments of their own; without statistics one fragment stays one."""
    found = {}
    for params in (given(), given() | {"bn.running_var": jnp.ones(2)}):
        home = LoopThread("world")
        with capture_logs() as logs, joined(home, params, protocol=ProtocolSettings(fragments=1, shards=1)) as island:
            found[island.run.protocol.fragments] = {line["event"] for line in logs}
        home.stop()

    assert set(found) == {1, 2}
    assert "fragments.raised" in found[2] - found[1]
    assert "protocol.ignored" not in found[2]


def renamed(params: dict[str, Any]) -> Any:  # noqa: ANN401
    return {"w": params["w"], "b": {"outer": params["b"]["inner"]}, "count": params["count"]}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (renamed, "'b/outer' is new, 'b/inner' is missing"),
        (lambda p: p["w"], "is missing"),
        (lambda p: p | {"w": p["w"][:2]}, "float32 of shape [2, 3]"),
        (lambda p: p | {"w": p["w"].astype(jnp.bfloat16)}, "bfloat16 of shape [4, 3]"),
        (lambda p: p | {"w": p["w"].reshape(12)}, "float32 of shape [12]"),
        (lambda p: p | {"count": 3}, "int"),
    ],
)
def test_a_step_with_other_parameters_is_refused_by_leaf(home: LoopThread, change: Any, named: str) -> None:  # noqa: ANN401
    with joined(home, given()) as island:
        with pytest.raises(SettingsError) as refused:
            island.step(change(island.params), tokens=1)
        island.step(island.params, tokens=1)

    assert named in str(refused.value)


def test_a_step_that_donates_its_parameters_is_noticed_at_once(home: LoopThread) -> None:
    """Its pushes were given up one by one, and the program left with 0; with `donated=True` it is fine."""

    @partial(jax.jit, donate_argnums=0)
    def step(params: Any) -> Any:  # noqa: ANN401
        return jax.tree.map(lambda leaf: leaf + 1, params)

    with joined(home, given()) as island, pytest.raises(SettingsError, match="donates its parameters") as refused:
        island.step(step(island.params), tokens=1)
    with joined(home, given(), donated=True) as island:
        params = island.params
        for _ in range(3):
            params = island.step(step(params), tokens=1)

    assert "JoinOptions(donated=True)" in str(refused.value)


@pytest.mark.parametrize("tokens", [2.5, float("nan"), -5, 1 << 60, "3", None, jnp.ones(2)])
def test_tokens_are_counted_in_whole_numbers(home: LoopThread, tokens: Any) -> None:  # noqa: ANN401
    """Half a token once lost the whole run in silence: its heartbeats and pushes were junk to the shards."""
    with joined(home, given()) as island:
        with pytest.raises(SettingsError, match="tokens"):
            island.step(island.params, tokens=tokens)
        for each in (np.int64(4), jnp.int32(3), jnp.ones(5, bool).sum(), True):
            island.step(island.params, tokens=each)  # type: ignore[arg-type]
        assert island.session.driver.failure is None


def test_numpy_parameters_that_are_changed_in_place_are_snapshots_all_the_same(
    home: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(home, {"w": np.zeros(4, np.float32), "j": jnp.zeros(4)}) as island:
        params = island.params
        params["w"] = np.array(params["w"])
        params["w"] += 1.0
        seen = dict[str, Any]()
        monkeypatch.setattr(island.session.driver, "end_step", lambda _, snapshot: seen.update(snapshot) or [])
        again = island.step(params, tokens=1)
        monkeypatch.undo()
        params["w"] += 1.0

    assert again["w"] is params["w"]
    assert seen["w"].tolist() == [1.0] * 4
    assert seen["j"] is params["j"]


def test_a_step_is_reported_from_outside_of_compiled_functions(home: LoopThread) -> None:
    with joined(home, given()) as island, pytest.raises(SettingsError, match="is a tracer"):
        jax.jit(lambda params: island.step(params, tokens=1))(island.params)


def test_keys_and_counters_do_not_keep_a_model_from_being_read(home: LoopThread) -> None:
    broker = MemoryBroker()

    async def opened() -> Bus:
        return MemoryBus("r", broker)

    params = given() | {"key": jax.random.key(0)}
    with joined(home, params, broker=broker) as island:
        merged = island.merged()
        read = read_model(opened, run="r", home=home)

    assert sorted(read.params) == ["b/inner", "w"]
    assert int(merged.params["count"]) == 3
    assert (jax.random.key_data(merged.params["key"]) == jax.random.key_data(params["key"])).all()
