"""Checkpoints of a loop of one's own: the state comes back whole, from the best source, or is refused by name."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from structlog.testing import capture_logs

from atoll.base.background_tasks import LoopThread
from atoll.base.errors import SettingsError
from atoll.bus.interface import Bus
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.checkpoints import LoopCheckpoints, LoopState
from atoll.client.join import IslandHandle, join
from atoll.client.options import JoinOptions
from atoll.client.session import LENDING_STEPS_MIN
from atoll.protocol.settings import ProtocolSettings

DEADLINE_S = 60.0
PARAMS = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
ADAM = optax.adam(1e-3)
PROTOCOL = ProtocolSettings(fragments=2, shards=1, interval_steps=8)


class LoopWorld:
    """One in-memory broker, without shards, and the islands that join its run."""

    def __init__(self) -> None:
        self.home = LoopThread("world")
        self.broker = MemoryBroker()

    async def bus(self) -> Bus:
        return MemoryBus("r", self.broker)

    def join(self, learner: str = "a", params: Any = PARAMS) -> IslandHandle:  # noqa: ANN401
        return join(
            self.bus, run="r", learner=learner, params=params, protocol=PROTOCOL, options=JoinOptions(home=self.home)
        )


@pytest.fixture
def world() -> Iterator[LoopWorld]:
    world = LoopWorld()
    yield world
    world.home.stop()


def fresh() -> dict[str, Any]:
    return {
        "opt": ADAM.init(PARAMS),
        "key": jax.random.key(3),
        "other key": jax.random.key(1, impl="rbg"),
        "rng": np.random.default_rng(0).bit_generator.state,
        "read": 0,
        "best": 1.5,
        "mask": np.array([True, False]),
        "half": jnp.ones(3, jnp.bfloat16),
        "count": np.int64(7),
        "epochs": [np.zeros((0, 3)), None],
    }


def later(state: dict[str, Any], steps: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    for _ in range(steps):
        gradient = jax.tree.map(jnp.ones_like, PARAMS)
        _, opt = ADAM.update(gradient, state["opt"], PARAMS)
        rng.bit_generator.state = state["rng"]
        rng.random()
        state = {
            **state,
            "opt": opt,
            "key": jax.random.split(state["key"])[0],
            "other key": jax.random.split(state["other key"])[1],
            "rng": rng.bit_generator.state,
            "read": state["read"] + 1,
            "half": state["half"] + 1,
            "count": state["count"] + np.int64(1),
        }
    return state


def tree_of(state: Any) -> Any:  # noqa: ANN401
    return jax.tree.structure(state)


def bits(state: Any) -> list[Any]:  # noqa: ANN401
    data = [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in jax.tree.leaves(state)]
    return [(type(leaf).__name__, np.asarray(leaf).tolist()) for leaf in data]


def _is_key(leaf: Any) -> bool:  # noqa: ANN401
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def live(world: LoopWorld, folder: Path, steps: int, learner: str = "a", **more: Any) -> tuple[LoopCheckpoints, Any]:  # noqa: ANN401
    """Live for some steps, each of them kept, and be killed; return the keeper and the last state."""
    island = world.join(learner)
    kept = island.checkpoints(folder, like=fresh(), every_s=0, **more)
    state, params = kept.restored, island.params
    for _ in range(steps):
        state = later(state, 1)
        params = island.step(params, tokens=2)
        assert kept.finish()
        kept.save(state)
    assert kept.finish()
    island._shut()
    return kept, state


def test_every_kind_of_leaf_comes_back_bit_for_bit(world: LoopWorld, tmp_path: Path) -> None:
    """Optimizer state, keys of two kinds, a generator's 128-bit numbers, the place in the data; life after life."""
    first, state = live(world, tmp_path, 3)
    second, after = live(world, tmp_path, 2)
    third, _ = live(world, tmp_path, 0)

    assert [kept.source for kept in (first, second, third)] == ["fresh", "checkpoint", "checkpoint"]
    assert bits(second.restored) == bits(state) == bits(later(fresh(), 3))
    assert bits(third.restored) == bits(after) == bits(later(fresh(), 5))
    assert tree_of(third.restored) == tree_of(fresh())
    assert jax.random.key_impl(third.restored["other key"]) == jax.random.key_impl(fresh()["other key"])
    assert third.restored["count"] == np.int64(12)


@pytest.mark.parametrize(
    ("like", "named"),
    [
        ({**fresh(), "more": jnp.zeros(2)}, "its leaf 'more' is not there and in this loop float32[2]"),
        (
            {**fresh(), "opt": optax.sgd(0.1, momentum=0.9).init(PARAMS)},
            "its leaf 'opt/0/count' is int32[] and in this",
        ),
        ({**fresh(), "half": jnp.ones(3)}, "its leaf 'half' is bfloat16[3] and in this loop float32[3]"),
        ({**fresh(), "other key": jax.random.key(1)}, "its leaf 'other key' is key<rbg>[] and in this loop key<fry>[]"),
        ({**fresh(), "read": 0.0}, "its leaf 'read' is int and in this loop float"),
    ],
)
def test_a_checkpoint_of_another_tree_is_refused_by_its_leaf(
    world: LoopWorld,
    tmp_path: Path,
    like: Any,  # noqa: ANN401
    named: str,
) -> None:
    live(world, tmp_path, 1)
    island = world.join()
    with capture_logs() as said:
        kept = island.checkpoints(tmp_path, like=like)
    island._shut()
    (refused,) = [line for line in said if line["event"] == "checkpoint.refused"]

    assert named in refused["reason"]
    assert (kept.source, kept.restored is like) == ("fresh", True)
    assert live(world, tmp_path, 0)[0].source == "checkpoint"


def test_a_checkpoint_is_written_below_a_number_that_somebody_left(world: LoopWorld, tmp_path: Path) -> None:
    """Orbax would pass over it without a word, and the next life would begin from an older one."""
    live(world, tmp_path, 1)
    [folder] = {path.parent for path in tmp_path.glob("*/a/*") if path.name.isdigit()}
    newest = max((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    shutil.copytree(newest, folder / str(1 << 60))
    (folder / str(1 << 60) / "note" / "metadata").write_text("{}", encoding="utf-8")
    live(world, tmp_path, 2)

    kept, _ = live(world, tmp_path, 0)
    assert (kept.source, kept.restored["read"]) == ("checkpoint", 3)


@pytest.mark.parametrize(
    "plain", [{}, {"read": "3", "rate": 0.5}, {"read": 3, "rate": float("nan")}, {"read": True, "rate": 0.5}]
)
def test_numbers_that_are_not_those_of_the_tree_are_not_adopted(plain: dict[str, Any]) -> None:
    """A note may have been changed by hand; a missing name would else take its value from `like`."""
    state = LoopState({"read": 0, "rate": 0.25, "w": np.ones(2)})

    assert state.fits({"read": 3, "rate": 0.5})
    assert not state.fits(plain)


def test_without_a_checkpoint_only_the_optimizer_is_borrowed(world: LoopWorld, tmp_path: Path) -> None:
    """A peer's key and place in the data are the peer's: two islands with one key would draw the same numbers."""
    lender = world.join("b")
    kept = lender.checkpoints(tmp_path / "theirs", like=fresh(), lend="opt")
    params, state = lender.params, fresh()
    for _ in range(LENDING_STEPS_MIN):
        state = later(state, 1)
        params = lender.step(params, tokens=2)
        kept.save(state)
    joiner = world.join("a")
    joiner.session.driver.progress.prove(16, 0)  # as a head or a call would: in this world no shard merges
    found: list[LoopCheckpoints] = []
    asking = threading.Thread(
        target=lambda: found.append(joiner.checkpoints(tmp_path / "ours", like=fresh(), lend="opt")), daemon=True
    )
    asking.start()
    deadline_s = time.monotonic() + DEADLINE_S
    while asking.is_alive():
        assert time.monotonic() < deadline_s, "the joiner still asks"
        kept.save(state)
        asking.join(0.01)
    (mine,) = found
    for island in (lender, joiner):
        island._shut()

    assert (kept.source, mine.source) == ("fresh", "peer")
    assert bits(mine.restored["opt"]) == bits(state["opt"])
    assert bits({**mine.restored, "opt": 0}) == bits({**fresh(), "opt": 0})


def test_the_newest_few_stay_and_the_last_is_written_when_the_island_leaves(world: LoopWorld, tmp_path: Path) -> None:
    live(world, tmp_path, 5, kept=3)
    assert len([path for path in tmp_path.glob("*/a/*") if path.name.isdigit()]) == 3
    island = world.join()
    kept = island.checkpoints(tmp_path, like=fresh(), every_s=3600)
    state = later(kept.restored, 4)
    kept.save(later(kept.restored, 2))
    kept.save(state)
    island.close()
    again, _ = live(world, tmp_path, 0)

    assert bits(again.restored) == bits(state)


def test_an_island_that_is_refused_at_its_end_keeps_nothing_more(world: LoopWorld, tmp_path: Path) -> None:
    """What it reached was trained on another base; the next life begins where the last checkpoint is."""
    _, state = live(world, tmp_path, 2)
    island = world.join()
    kept = island.checkpoints(tmp_path, like=fresh(), every_s=3600)
    kept.save(later(kept.restored, 4))

    def refuse() -> None:
        raise SettingsError("the frozen leaf 'base' has changed")

    island.frozen.check = refuse  # type: ignore[method-assign]
    with pytest.raises(SettingsError, match="has changed"):
        island.close()

    assert bits(live(world, tmp_path, 0)[0].restored) == bits(state)


@pytest.mark.parametrize("poor", [{"best": float("nan")}, {"half": jnp.array([1.0, jnp.inf, 0.0], jnp.bfloat16)}])
def test_a_state_that_is_not_finite_is_not_kept(world: LoopWorld, tmp_path: Path, poor: dict[str, Any]) -> None:
    _, state = live(world, tmp_path, 2)
    island = world.join()
    kept = island.checkpoints(tmp_path, like=fresh(), every_s=0)
    with capture_logs() as said:
        kept.save({**state, **poor})
        assert kept.finish()
    island._shut()

    assert [line["leaf"] for line in said if line["event"] == "checkpoint.not_kept"] == list(poor)
    assert live(world, tmp_path, 0)[0].restored["read"] == 2


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"like": {"f": object()}}, "f: object cannot be kept"),
        ({"like": {"names": np.array(["x"])}}, "names: <U1 is no kind of number"),
        ({"like": {}}, "no leaf"),
        ({"like": {"a/b": 1, "a": {"b": 2}}}, "two leaves of one name"),
        ({"like": {"opt": 1}, "lend": "optimizer"}, "'optimizer'"),
        ({"like": [1], "lend": "opt"}, "a dict of parts"),
        ({"like": {"a": 1}, "every_s": -1}, "every_s is out of range"),
        ({"like": {"a": 1}, "every_s": "often"}, "every_s is out of range"),
        ({"like": {"a": 1}, "kept": 0}, "kept is out of range"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_once(
    world: LoopWorld, tmp_path: Path, given: dict[str, Any], named: str
) -> None:
    island = world.join()
    with pytest.raises(SettingsError) as refused:
        island.checkpoints(tmp_path, **given)
    island._shut()

    assert named in str(refused.value)


def test_an_island_has_one_keeper(world: LoopWorld, tmp_path: Path) -> None:
    """Two would number their checkpoints alike."""
    island = world.join()
    island.checkpoints(tmp_path, like={"a": 1})
    with pytest.raises(SettingsError, match="already"):
        island.checkpoints(tmp_path, like={"b": 1})
    island._shut()


@pytest.mark.parametrize("ends", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_loop_leaves_a_whole_checkpoint(
    world: LoopWorld, tmp_path: Path, ends: type[BaseException]
) -> None:
    """The one that is being written is finished; the state of the step that failed, or was interrupted, is none to keep."""

    def loop() -> None:
        with world.join() as island:
            kept = island.checkpoints(tmp_path, like=fresh(), every_s=0)
            kept.save(later(fresh(), 1))
            kept.save(later(fresh(), 2))
            raise ends("the loop's own")

    with pytest.raises(ends, match="the loop's own"):
        loop()

    assert live(world, tmp_path, 0)[0].restored["read"] == 1


def test_a_folder_that_cannot_be_is_refused_at_once(world: LoopWorld, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    island = world.join()
    with pytest.raises(SettingsError, match="cannot hold checkpoints"):
        island.checkpoints(tmp_path / "file", like={"a": 1})
    island._shut()


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"read": np.int64(1), "w": np.zeros(2)}, "the leaf 'read' is int64[], and in `like` int"),
        ({"read": 1}, "the leaf 'w' is not there"),
        ({"read": 1, "w": np.zeros(3)}, "the leaf 'w' is float64[3], and in `like` float64[2]"),
        ({"read": 1, "w": np.zeros(2), "x": 1}, "the leaf 'x' is int, and in `like` not there"),
    ],
)
def test_a_state_that_like_did_not_promise_is_refused_by_its_leaf(state: Any, named: str) -> None:  # noqa: ANN401
    """By the first `save`: at the restart it would be too late."""
    with pytest.raises(SettingsError) as refused:
        LoopState({"read": 0, "w": np.zeros(2)}).split(state)

    assert named in str(refused.value)
