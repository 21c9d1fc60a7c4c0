"""`model.fit` of Keras as an island: what a batch trains on is what `island.step` returned, and nothing is taken away."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pytest

from atoll.base.background_tasks import LoopThread
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.join import IslandHandle
from atoll.client.options import JoinOptions
from atoll.protocol.settings import ProtocolSettings


class LazyModule:
    """A module that is loaded when something of it is first used, not by every worker that collects tests."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:  # noqa: ANN401  (whatever the module has)
        if attribute.startswith("_"):  # asked by pytest, which looks for tests in all that a test module holds
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    import keras

    import atoll.keras as atoll_keras
    from atoll.keras import IslandCallback
else:  # with Keras come scikit-learn and SciPy: a quarter of all that is loaded to collect the tests
    keras, atoll_keras = map(LazyModule, ("keras", "atoll.keras"))

BATCH = 8
ROWS = 40
PROTOCOL = ProtocolSettings(fragments=2, shards=1)


class MemoryRun:
    """A run on an in-memory broker, and the callbacks of its learners."""

    def __init__(self, home: LoopThread) -> None:
        self._home, self._broker = home, MemoryBroker()

    def learner(self, name: str, protocol: ProtocolSettings = PROTOCOL) -> IslandCallback:
        async def bus() -> MemoryBus:
            return MemoryBus("r", self._broker)

        options = JoinOptions(home=self._home)
        return atoll_keras.IslandCallback(bus, run="r", learner=name, tokens=BATCH, protocol=protocol, options=options)


@pytest.fixture
def a_run() -> Iterator[MemoryRun]:
    """A run of nobody yet; its loop ends with the test."""
    home = LoopThread("keras")
    yield MemoryRun(home)
    home.stop()


def small_model(rate: float, seed: int = 0) -> Any:  # noqa: ANN401  (Keras has no types)
    """Return a small model with all kinds of variables; at the rate 0 a step changes no trainable one."""
    keras.utils.set_random_seed(seed)
    keras.backend.clear_session()
    layers = [
        keras.layers.Dense(6, name="first"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.5, name="dropout"),
        keras.layers.Dense(2, name="last"),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


def rows(count: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    dice = np.random.default_rng(0)
    return dice.normal(size=(count, 4)).astype(np.float32), dice.normal(size=(count, 2)).astype(np.float32)


def fitted(model: Any, island: IslandCallback, epochs: int = 1) -> None:  # noqa: ANN401
    x, y = rows()
    model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[island])


def same(one: Any, other: Any) -> bool:  # noqa: ANN401  (pytrees)
    return jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), one, other))


class Stepping:
    """Stands between callback and island: keeps what `step` gets and returns, and adds `more` to every value."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, more: float = 1.0) -> None:
        self.handed: list[Any] = []
        self.seen: list[Any] = []
        self.returned: list[Any] = []
        self.tokens: list[int] = []
        self.losses: list[Any] = []
        step = IslandHandle.step

        def raised(handle: IslandHandle, params: Any, *, tokens: int, loss: Any) -> Any:  # noqa: ANN401
            self.handed.append(params)
            self.seen.append(jax.tree.map(np.array, params))
            step(handle, params, tokens=tokens, loss=loss)
            higher = jax.tree.map(lambda leaf: leaf + more, params)
            self.returned.append(jax.tree.map(np.array, higher))
            self.tokens.append(tokens)
            self.losses.append(loss)
            return higher

        monkeypatch.setattr(IslandHandle, "step", raised)


def test_a_batch_trains_on_what_the_step_returned(a_run: MemoryRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the rate 0 a batch hands over, to the bit, the trainable values that the step before it returned."""
    stepping = Stepping(monkeypatch)
    model, island = small_model(0.0), a_run.learner("a")
    fitted(model, island, epochs=2)
    trained = [values["trainable"] for values in stepping.seen]
    returned = [values["trainable"] for values in stepping.returned]

    assert len(trained) == 2 * ROWS // BATCH
    assert all(same(now, before) for now, before in zip(trained[1:], returned, strict=False))
    assert not same(trained[1], trained[0])
    assert same(atoll_keras.TravellingVariables(model).values()["trainable"], returned[-1])


def test_moving_averages_go_on_from_what_the_step_returned(a_run: MemoryRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras moves them by a hundredth of the way to the batch's; what was added to them is still there."""
    stepping = Stepping(monkeypatch)
    fitted(small_model(0.0), a_run.learner("a"))
    now, before = stepping.seen[1]["statistics"], stepping.returned[0]["statistics"]

    assert sorted(now) == ["norm/moving_mean", "norm/moving_variance"]
    assert all(np.abs(now[name] - 0.99 * before[name]).max() < 0.1 for name in now)
    assert all(before[name].min() > 0.9 for name in before)


@pytest.mark.second_tier
def test_what_the_island_holds_is_not_donated(a_run: MemoryRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras donates its state to every batch; the arrays that were handed over are there with their values."""
    stepping = Stepping(monkeypatch)
    fitted(small_model(0.1), a_run.learner("a"))

    assert same(stepping.handed, stepping.seen)


def test_batches_are_counted_with_tokens_and_loss(a_run: MemoryRun, monkeypatch: pytest.MonkeyPatch) -> None:
    stepping = Stepping(monkeypatch, more=0.0)
    model = small_model(0.1)
    model.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=2)
    island = a_run.learner("a")
    x, y = rows(4 * BATCH)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[island]).history

    assert stepping.tokens == [2 * BATCH] * 4
    assert stepping.losses[-1] == pytest.approx(history["loss"][-1])
    assert 0.0 < island.overhead < 1.0


def test_fit_ends_with_the_run_and_a_second_fit_takes_no_step(
    a_run: MemoryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far before its epochs are over; who begins when the run is over keeps the run's values."""
    stepping = Stepping(monkeypatch, more=0.0)
    model, island = small_model(0.1), a_run.learner("a")
    monkeypatch.setattr(IslandHandle, "done", property(lambda _: len(stepping.seen) >= 3))
    fitted(model, island, epochs=10_000)
    taken = len(stepping.seen)
    fitted(model, island, epochs=10_000)

    assert taken == 3
    assert len(stepping.seen) == taken
    assert same(atoll_keras.TravellingVariables(model).values(), island.island.params)


def test_a_joining_model_takes_the_runs_values(a_run: MemoryRun) -> None:
    """Both begin with the founder's; `merged` puts them into the model again."""
    one, other = small_model(0.0, seed=1), small_model(0.5, seed=2)
    first, second = a_run.learner("a"), a_run.learner("b")
    founded = jax.tree.map(np.array, atoll_keras.TravellingVariables(one).values()["trainable"])
    fitted(one, first)
    fitted(other, second)
    trained = atoll_keras.TravellingVariables(other).values()["trainable"]

    assert not same(trained, founded)
    assert second.merged(settle_s=0.0).versions_min == 0
    assert same(atoll_keras.TravellingVariables(other).values()["trainable"], founded)


def test_seeds_and_the_optimizer_stay(a_run: MemoryRun) -> None:
    """What travels are trainable values and moving averages, by the names that Keras gives them."""
    model = small_model(0.1)
    island = a_run.learner("a")
    fitted(model, island)
    layout = island.island.layout
    names = [tensor.name for tensor in layout.tensors]

    assert names == [
        "statistics/norm/moving_mean",
        "statistics/norm/moving_variance",
        "trainable/first/bias",
        "trainable/first/kernel",
        "trainable/last/bias",
        "trainable/last/kernel",
        "trainable/norm/beta",
        "trainable/norm/gamma",
    ]
    assert list(layout.by_value) == names[:2]
