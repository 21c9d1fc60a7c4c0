"""A learner that encodes on its device, forced on the CPU: the run that a learner makes that encodes on the host."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atoll.base.large_arrays import Vector
from atoll.client.device_encoding import Encoder, Placed
from atoll.client.driver import IslandDriver
from atoll.client.join import IslandHandle, join
from atoll.client.options import Encode, JoinOptions
from atoll.protocol.events import Push
from atoll.protocol.ledger import settle
from support.links import unique_run
from support.memory_world import MemoryWorld, settings

pytestmark = pytest.mark.second_tier

DEADLINE_S = 240.0


def trained() -> dict[str, jax.Array]:
    """Return parameters that steps have changed, each in its own way."""
    rng = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {"a": (40, 30), "b": (5,), "c": ()}
    tree = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    return tree | {"half": jnp.asarray(rng.normal(size=(30, 7)), jnp.bfloat16)}


def one_step(encode: Encode, codec: str) -> tuple[dict[str, bytes], str]:
    """Return the bits that a run of one learner's single step merges, and where it was encoded."""
    protocol = settings(fragments=3, codec_up=codec, codec_down="int4", error_feedback=True, tokens_target=10)
    world = MemoryWorld(unique_run(), protocol, encode)
    params = trained()

    def train() -> None:
        with world.join("a", jax.tree.map(jnp.zeros_like, params)) as island:
            where.append("host" if island.session.driver._encoder is None else "device")
            island.step(params, tokens=10, loss=1.0)

    where: list[str] = []
    world.go(train)
    merged, ledger = world.merged(), world.ledger()
    world.home.stop()
    assert settle(ledger, protocol.fragments).fates["merged"] == 10 * protocol.fragments
    return {name: np.asarray(leaf).tobytes() for name, leaf in merged.params.items()}, where[0]


@pytest.mark.parametrize("codec", ["bf16", "int4"])
def test_a_run_has_the_same_bits_wherever_pseudo_gradients_are_made(codec: str) -> None:
    host, device = one_step("host", codec), one_step("device", codec)
    assert (host[1], device[1]) == ("host", "device")
    assert host[0] == device[0]
    assert any(np.frombuffer(host[0]["a"], np.float32))


class Counting:
    """What a learner does where: fragments placed on its device, encoded there, and read on the host to be pushed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.placed: list[int] = []
        self.encoded: list[int] = []
        self.read: list[int] = []
        self.full = threading.Event()
        place, encode, read = Encoder.place, Encoder.encode, IslandDriver._read

        def placing(encoder: Encoder, fragment: int, values: Vector) -> Placed:
            if self.full.is_set():
                raise RuntimeError("RESOURCE_EXHAUSTED: no room")
            self.placed.append(fragment)
            return place(encoder, fragment, values)

        def encoding(encoder: Encoder, fragment: int, *arguments: Any) -> Any:  # noqa: ANN401
            self.encoded.append(fragment)
            return encode(encoder, fragment, *arguments)

        def reading(driver: IslandDriver, action: Push, *arguments: Any) -> Any:  # noqa: ANN401
            self.read.append(action.fragment)
            return read(driver, action, *arguments)

        monkeypatch.setattr(Encoder, "place", placing)
        monkeypatch.setattr(Encoder, "encode", encoding)
        monkeypatch.setattr(IslandDriver, "_read", reading)


def stepped(island: IslandHandle, pushed: list[int], pushes: int, *, numpy: bool = False) -> None:
    """Train on until `pushed` has grown by so many, with arrays of JAX or of NumPy."""
    params, wanted, deadline_s = island.params, len(pushed) + pushes, time.monotonic() + DEADLINE_S
    while len(pushed) < wanted and time.monotonic() < deadline_s:
        params = jax.tree.map(lambda leaf: leaf + 0.05 * (1.0 - leaf), params)
        time.sleep(0.004)
        params = island.step(jax.tree.map(np.array, params) if numpy else params, tokens=10, loss=1.0)
    assert len(pushed) >= wanted


def test_every_version_is_placed_and_every_push_encoded_there(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the join all fragments, then each version as it is fetched; nothing is read on the host."""
    counting, world = Counting(monkeypatch), MemoryWorld(run, settings(tokens_target=0), "device")
    with world.join("a") as island:
        assert sorted(counting.placed) == [0, 1, 2, 3]
        stepped(island, counting.encoded, 16)
    assert len(counting.placed) > 8
    assert not counting.read
    world.home.stop()


def test_a_learner_without_room_or_arrays_of_jax_pushes_from_the_host(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be placed, and what is no array of JAX any more; what rounding took goes along, wherever it lies."""
    counting = Counting(monkeypatch)
    world = MemoryWorld(run, settings(tokens_target=0, codec_up="int4", error_feedback=True), "device")
    with world.join("a") as island:
        stepped(island, counting.encoded, 8)
        counting.full.set()
        stepped(island, counting.read, 8)
        counting.full.clear()
        stepped(island, counting.encoded, 8)
    with world.join("b") as island:
        before = len(counting.encoded)
        stepped(island, counting.read, 8, numpy=True)
        assert len(counting.encoded) == before
    world.home.stop()


def test_who_asks_for_the_device_in_vain_is_warned(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str, dict[str, str]]] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            f"atoll.client.driver.log.{level}", lambda name, level=level, **facts: said.append((level, name, facts))
        )
    world = MemoryWorld(run, settings())
    ways: tuple[tuple[str, Encode, bool], ...]
    ways = (("a", "auto", False), ("b", "device", False), ("c", "device", True))
    for learner, encode, donated in ways:
        with join(
            world.bus,
            run=run,
            learner=learner,
            params={"w": jnp.zeros((8, 2))},
            protocol=world.protocol,
            options=JoinOptions(home=world.home, encode=encode, donated=donated),
        ):
            pass
    world.home.stop()
    told = [(level, facts["where"]) for level, name, facts in said if name == "pseudo_gradients.encoded"]
    assert told == [("info", "host"), ("info", "device"), ("warning", "host")]
