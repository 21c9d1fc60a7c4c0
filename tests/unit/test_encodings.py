"""Encodings of flat vectors: sizes, exactness of f32, error bounds of the others."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from atoll.base.errors import FrameRejected
from atoll.codec import ENCODINGS
from atoll.codec.kernels import BLOCK, Vector

LENGTHS = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 1000]


def drawn(elements: int) -> Vector:
    """Return values of many magnitudes."""
    rng = np.random.default_rng(elements)
    vector: Vector = (rng.normal(size=elements) * 10.0 ** rng.integers(-6, 6, elements)).astype(np.float32)
    return vector


def carried(codec: str, vector: Vector) -> Vector:
    """Return what arrives."""
    encoding = ENCODINGS[codec]
    sent = encoding.encoded(vector)
    payload = np.zeros(encoding.size(vector.size), np.uint8)
    encoding.pack(payload, sent.codes, sent.scales)
    arrived: Vector = encoding.view(payload, vector.size).expanded()
    assert arrived.tobytes() == sent.expanded().tobytes()
    return arrived


@pytest.mark.parametrize("elements", LENGTHS)
@pytest.mark.parametrize("codec", list(ENCODINGS))
def test_sizes_are_known_beforehand(codec: str, elements: int) -> None:
    """In whole blocks where they have scales; the vector comes back as long as it was, writable."""
    vector = drawn(elements)
    blocks = -(-elements // BLOCK)
    sizes = {"f32": 4 * elements, "bf16": 2 * elements, "int8": 130 * blocks, "int4": 66 * blocks, "e3m0": 66 * blocks}
    assert ENCODINGS[codec].size(elements) == sizes[codec]
    back = carried(codec, vector)
    assert back.shape == vector.shape
    assert back.dtype == np.float32
    assert back.flags.writeable


def test_wire_numbers_differ() -> None:
    """The numbers on the wire are fixed: a change would misread older frames."""
    assert {name: encoding.number for name, encoding in ENCODINGS.items()} == {
        "f32": 1,
        "bf16": 2,
        "int8": 4,
        "int4": 5,
        "e3m0": 6,
    }


def test_f32_is_exact() -> None:
    """Every bit survives, negative zero and subnormal numbers included."""
    vector = np.concatenate([drawn(1000), np.array([-0.0, 1e-45, 3.4028235e38], np.float32)])
    assert carried("f32", vector).tobytes() == vector.tobytes()


def test_bf16_rounds_to_nearest() -> None:
    """The relative error is at most 2^-8, and the values are those of the bfloat16 type."""
    vector = drawn(1000)
    back = carried("bf16", vector)
    assert (np.abs(back - vector) <= np.abs(vector) * 2.0**-8).all()
    np.testing.assert_array_equal(back, vector.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("elements", LENGTHS[1:])
@pytest.mark.parametrize(("codec", "levels"), [("int8", 127), ("int4", 7)])
def test_integers_err_by_half_a_step_of_their_block(codec: str, levels: int, elements: int) -> None:
    """At most half of max|x| / levels, and what rounding that up to bfloat16 adds; one outlier spoils only its block."""
    vector = drawn(elements)
    back = carried(codec, vector)
    for start in range(0, elements, BLOCK):
        block = slice(start, start + BLOCK)
        step = float(np.abs(vector[block]).max()) / levels * (1 + 2.0**-7)
        assert np.abs(back[block] - vector[block]).max() <= step * 0.501


def test_e3m0_takes_the_nearest_power_of_its_scale() -> None:
    """Seven powers of two of the block's largest magnitude, zero, and signs."""
    vector = np.array([1.0, 0.76, 0.74, -0.3, 2.0**-6, 0.0079, 0.0077, 0.0], np.float32)
    assert carried("e3m0", vector).tolist() == [1.0, 1.0, 0.5, -0.25, 2.0**-6, 2.0**-6, 0.0, 0.0]
    rng = np.random.default_rng(0)
    block = rng.uniform(-1.0, 1.0, BLOCK).astype(np.float32)
    block[0] = 1.0
    levels = np.array([0.0, *(2.0**-k for k in range(7))])
    nearest = levels[np.abs(np.abs(block)[:, None] - levels).argmin(axis=1)] * np.sign(block)
    np.testing.assert_array_equal(carried("e3m0", block), nearest.astype(np.float32))


@pytest.mark.parametrize("codec", ["int8", "int4", "e3m0"])
def test_zeros_and_subnormal_numbers_become_zero(codec: str) -> None:
    """Blocks too small to scale become zero without a warning."""
    assert carried(codec, np.zeros(200, np.float32)).tolist() == [0.0] * 200
    assert carried(codec, np.full(3, 1e-40, np.float32)).tolist() == [0.0] * 3


@pytest.mark.parametrize("codec", ["int8", "int4", "e3m0"])
def test_the_extremes_of_a_block_are_kept(codec: str) -> None:
    """The largest magnitude comes back to the rounding of its scale, never shorter, on both sides."""
    back = carried(codec, np.array([-8.1, 8.1, 0.0], np.float32))
    assert back[0] == -back[1]
    assert 8.1 * (1 - 1e-6) <= back[1] <= 8.1 * (1 + 2.0**-7)


@pytest.mark.parametrize("scale", [0x7F80, 0xFF80, 0x7FC0, 0x7C00])
def test_a_hostile_scale_is_refused_and_warns_nobody(scale: int) -> None:
    """Infinite, not a number, or larger than any sender of ours would use."""
    payload = np.zeros(ENCODINGS["int8"].size(2), np.uint8)
    payload[:2].view("<u2")[0] = scale
    with pytest.raises(FrameRejected, match="scale"):
        ENCODINGS["int8"].view(payload, 2)
