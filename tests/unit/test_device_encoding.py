"""Pseudo-gradients made on a device: the bits that the host would send, where that is possible, and who says that it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from atoll.base.errors import FrameRejected
from atoll.base.large_arrays import Vector
from atoll.client.device_encoding import Encoder, choose_encoder
from atoll.client.driver import AdoptableFragment
from atoll.client.step_hook import adopt
from atoll.codec import FORMATS, Encoded, format_of
from atoll.model.layout import plan_layout
from atoll.model.pytrees import describe, gather
from atoll.protocol.settings import ProtocolSettings
from atoll.run.heads import GlobalFragment

TWO_DEVICES = Path(__file__).with_name("two_devices.py")
CODECS = list(FORMATS)


def drawn(elements: int, seed: int, spread: float = 3.0) -> Vector:
    rng = np.random.default_rng(seed)
    vector: Vector = (rng.normal(size=elements) * 10.0 ** rng.uniform(-spread, spread, elements)).astype(np.float32)
    vector[elements // 3 : elements // 2] = 0.0
    return vector


TREE = {
    "embed": np.zeros((40, 24), np.float32),
    "half": np.zeros((30, 8, 2), jnp.bfloat16),
    "none": np.zeros((0, 4), np.float32),
    "norm": np.zeros((), np.float32),
    "out": np.zeros((17, 5), np.float16),
}


class TrainedRun:
    """A model of several dtypes in three fragments that cut its tensors by rows, its anchors, and where it has got to."""

    def __init__(self, codec: str = "int4", **changes: object) -> None:
        base: dict[str, object] = {"fragments": 3, "shards": 1, "codec_up": codec, "error_feedback": True}
        self.protocol = msgspec.convert(base | changes, ProtocolSettings).check()
        self.layout = plan_layout(describe(TREE), 3)
        rng = np.random.default_rng(3)
        self.leaves: dict[str, Any] = {
            name: jnp.asarray(leaf + rng.normal(size=leaf.shape)).astype(leaf.dtype) for name, leaf in TREE.items()
        }
        moved = {name: leaf + rng.normal(size=leaf.shape) * 0.01 for name, leaf in self.leaves.items()}
        self.anchors = [gather(self.layout, moved, p).copy() for p in range(3)]

    def encoder(self, choice: str = "device", *, donated: bool = False) -> tuple[Encoder | None, str]:
        """Return who encodes on the device, and why or why not."""
        return choose_encoder(choice, self.layout, self.protocol, self.leaves, donated=donated)


@pytest.mark.parametrize("codec", CODECS)
def test_a_fragment_is_encoded_as_on_the_host(codec: str) -> None:
    """Rows of several tensors, bfloat16 among them, with and without what was kept."""
    trained = TrainedRun(codec)
    encoder, _ = trained.encoder()
    assert encoder is not None
    for p, anchor in enumerate(trained.anchors):
        placed, kept = encoder.place(p, anchor), drawn(anchor.size, p, 1.0)
        assert encoder.reads(p, trained.leaves)
        for rest in (None, kept, jnp.asarray(kept)):
            pseudo_gradient = anchor - gather(trained.layout, trained.leaves, p)
            pseudo_gradient = pseudo_gradient if rest is None else pseudo_gradient + kept
            host = Encoded.of(pseudo_gradient, format_of(codec))
            with jax.transfer_guard("disallow"):  # as a careful loop may have it: what we bring over is a few numbers
                vector, residue = encoder.encode(p, placed, trained.leaves, rest)
            assert vector.codes.tobytes() == host.codes.tobytes()
            assert vector.scales.tobytes() == host.scales.tobytes()
            assert np.asarray(residue).tobytes() == (pseudo_gradient - host.expanded()).tobytes()


def test_nothing_stays_on_the_device_but_anchor_and_residue() -> None:
    trained = TrainedRun()
    encoder, _ = trained.encoder()
    assert encoder is not None
    placed = encoder.place(1, trained.anchors[1])
    before = jax.live_arrays()  # type: ignore[no-untyped-call]
    encoded, residue = encoder.encode(1, placed, trained.leaves)
    after = jax.live_arrays()  # type: ignore[no-untyped-call]
    assert {id(array) for array in after} - {id(array) for array in before} == {id(residue)}
    assert residue.size == encoded.elements


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_what_would_not_arrive_finite_is_not_sent(codec: str, value: float) -> None:
    """Wherever it is; a large number is refused by those encodings that cannot hold it."""
    trained = TrainedRun(codec)
    encoder, _ = trained.encoder()
    assert encoder is not None
    spoilt = trained.leaves | {"embed": trained.leaves["embed"].at[1, 3].set(value)}
    placed = encoder.place(0, trained.anchors[0])
    if np.isfinite(value) and value <= format_of(codec).largest:
        encoder.encode(0, placed, spoilt)
        return
    with pytest.raises(FrameRejected) as refused:
        encoder.encode(0, placed, spoilt)
    assert refused.value.reason == "not_finite"


@pytest.mark.parametrize("adoption", ["overwrite", "blend"])
@pytest.mark.parametrize("committed", [True, False])
def test_a_fragment_is_adopted_as_on_the_host(adoption: str, committed: bool) -> None:  # noqa: FBT001
    """The same bits, arrays as committed to their device as before; and an array that went elsewhere is adopted by the host."""
    trained = TrainedRun(adoption=adoption, blend_alpha=0.3)
    if committed:
        trained.leaves = {name: jax.device_put(leaf, jax.devices()[0]) for name, leaf in trained.leaves.items()}
    encoder, _ = trained.encoder()
    assert encoder is not None
    assert encoder.committed == committed
    for p, anchor in enumerate(trained.anchors):
        frame = GlobalFragment(p, 1, anchor)
        plain, placed = AdoptableFragment(frame, anchor), AdoptableFragment(frame, anchor, encoder.place(p, anchor))
        wanted = adopt(trained.layout, trained.protocol, trained.leaves, [plain])
        with jax.transfer_guard("disallow"):
            got = adopt(trained.layout, trained.protocol, trained.leaves, [placed])
        assert {leaf.committed for leaf in got.values()} == {committed}
        assert all(got[name].dtype == trained.leaves[name].dtype for name in TREE)
        assert all(np.asarray(got[name]).tobytes() == np.asarray(wanted[name]).tobytes() for name in TREE)
        on_host: dict[str, Any] = {name: np.array(leaf) for name, leaf in trained.leaves.items()}
        again = adopt(trained.layout, trained.protocol, on_host, [placed])
        assert all(np.asarray(again[name]).tobytes() == np.asarray(wanted[name]).tobytes() for name in TREE)


def test_the_host_encodes_where_a_device_cannot_and_says_why() -> None:
    trained = TrainedRun()
    assert trained.encoder("host") == (None, "so it was asked for")
    assert trained.encoder("auto") == (None, "parameters lie in the host's memory")
    assert trained.encoder(donated=True)[1] == "snapshots of donated parameters are copies on the host"
    for changes in ({"adoption": "carry"}, {"ending": "together"}):
        assert "need what was sent" in TrainedRun(**changes).encoder()[1]
    encoder, why = trained.encoder()
    assert encoder is not None
    assert why == "parameters lie on 1 x cpu"
    merged = len(trained.layout.tensors)
    offloaded = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    trained.leaves["norm"] = jax.device_put(trained.leaves["norm"], offloaded)
    assert trained.encoder() == (None, f"'norm' lies in pinned_host memory (1 of {merged} tensors)")
    trained.leaves["norm"] = np.zeros((), np.float32)
    assert trained.encoder() == (None, f"'norm' is no array of JAX (1 of {merged} tensors)")
    assert [encoder.reads(p, trained.leaves) for p in range(3)].count(False) == 1


def test_sharded_arrays_are_brought_together_piece_by_piece() -> None:
    """Two devices, in a process that has them: `two_devices.py` says what is compared."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(  # noqa: PLW1510
        [sys.executable, str(TWO_DEVICES)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout.strip()) == (0, "as on the host"), done.stderr
