"""Encodings of flat vectors: sizes, exactness of f32, error bounds of bf16 and int8."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from atoll.codecs.encodings import BLOCK, ENCODINGS

Vector = npt.NDArray[np.float32]
LENGTHS = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 1000]


def drawn(elements: int) -> Vector:
    """Return values of many magnitudes."""
    rng = np.random.default_rng(elements)
    return (rng.normal(size=elements) * 10.0 ** rng.integers(-6, 6, elements)).astype(np.float32)


def carried(codec: str, vector: Vector) -> Vector:
    """Return what arrives."""
    return ENCODINGS[codec].decode(memoryview(ENCODINGS[codec].encode(vector)), vector.size)


@pytest.mark.parametrize("elements", LENGTHS)
@pytest.mark.parametrize("codec", list(ENCODINGS))
def test_sizes_are_known_beforehand(codec: str, elements: int) -> None:
    """The payload is as long as `size` says, and the vector comes back as long as it was, writable."""
    vector = drawn(elements)
    assert len(ENCODINGS[codec].encode(vector)) == ENCODINGS[codec].size(elements)
    back = carried(codec, vector)
    assert back.shape == vector.shape
    assert back.dtype == np.float32
    assert back.flags.writeable


def test_wire_numbers_differ() -> None:
    """The numbers on the wire are fixed: a change would misread older frames."""
    assert {name: encoding.number for name, encoding in ENCODINGS.items()} == {"f32": 1, "bf16": 2, "int8": 3}


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
def test_int8_errs_by_half_a_step_of_its_block(elements: int) -> None:
    """The error is at most half of max|x| / 127 in each block of 128, so one outlier spoils only its block."""
    vector = drawn(elements)
    back = carried("int8", vector)
    for start in range(0, elements, BLOCK):
        block = slice(start, start + BLOCK)
        step = float(np.abs(vector[block]).max()) / 127
        assert np.abs(back[block] - vector[block]).max() <= step * 0.501


def test_int8_of_zeros_and_subnormal_numbers() -> None:
    """Blocks too small to scale become zero without a warning."""
    assert carried("int8", np.zeros(200, np.float32)).tolist() == [0.0] * 200
    assert carried("int8", np.full(3, 1e-40, np.float32)).tolist() == [0.0] * 3


def test_int8_keeps_the_extremes() -> None:
    """The largest magnitude of a block is kept to rounding, on both sides."""
    back = carried("int8", np.array([-8.0, 8.0, 0.0], np.float32))
    np.testing.assert_allclose(back, [-8.0, 8.0, 0.0], rtol=1e-6)


def test_int8_with_a_hostile_scale_is_not_finite_and_warns_nobody() -> None:
    """An infinite scale gives NaN, which the frame refuses."""
    payload = np.array([np.inf], "<f4").tobytes() + b"\x00\x01"
    assert not np.isfinite(ENCODINGS["int8"].decode(memoryview(payload), 2)).any()
