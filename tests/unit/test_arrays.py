"""Named arrays as bytes: round trips, and refusal of everything else."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from atoll.base.errors import PeerMisbehaved
from atoll.codec import pack_arrays, unpack_arrays
from atoll.codec.arrays import DTYPES, HEADER_BYTES_MAX

BYTES_MAX = 1 << 22


def made(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def refused(data: bytes, bytes_max: int = BYTES_MAX) -> str:
    with pytest.raises(PeerMisbehaved) as caught:
        unpack_arrays(data, bytes_max)
    return caught.value.what


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_arrays_survive(dtype: str) -> None:
    """Names, order, dtypes, shapes and bits of matrices, scalars and empty arrays survive; results are writable."""
    grid = (np.arange(12).reshape(3, 4) % 5).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    arrays = {"z": grid, "a/ä": grid.T, "scalar": np.asarray(grid[1, 2]), "empty": np.zeros((0, 3), grid.dtype)}
    back = unpack_arrays(pack_arrays(arrays), BYTES_MAX)
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        np.testing.assert_array_equal(back[name], array)
        assert back[name].flags.writeable


def test_no_arrays_survive_too() -> None:
    assert unpack_arrays(pack_arrays({}), BYTES_MAX) == {}


@pytest.mark.parametrize("dtype", [np.dtype(object), np.dtype("complex64"), np.dtype(ml_dtypes.int4)])
def test_other_dtypes_are_not_packed(dtype: np.dtype[np.generic]) -> None:
    with pytest.raises(PeerMisbehaved, match=dtype.name):
        pack_arrays({"x": np.zeros(2, dtype)})


def test_sizes_are_bounded() -> None:
    """More bytes than allowed, and fewer than a length field, are refused."""
    data = pack_arrays({"x": np.zeros(4, np.float32)})
    assert list(unpack_arrays(data, len(data))) == ["x"]
    assert "wrong size" in refused(data, len(data) - 1)
    assert "wrong size" in refused(b"\x00" * 7)


def test_a_header_is_bounded() -> None:
    """A header longer than the data or than the limit is refused before it is read."""
    assert "wrong header" in refused((1 << 60).to_bytes(8, "little") + b"[]")
    assert "wrong header" in refused(made(b" " * (HEADER_BYTES_MAX + 1)))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}",
        b"[[1,2,3]]",
        b'[["a","int8"]]',
        b'[["\xff","int8",[1]]]',
        b'[["a","int8",[1.5]]]',
        b'[["a","int8",[1],' + b"[" * 50_000 + b"]" * 50_000 + b"]]",
    ],
)
def test_an_unreadable_header_is_refused(header: bytes) -> None:
    """Bad JSON, bad types, bad UTF-8 and bottomless nesting are the peer's mistakes, not ours."""
    assert "unreadable" in refused(made(header, b"\x00"))


@pytest.mark.parametrize(
    "header",
    [
        b'[["a","object",[1]]]',
        b'[["a","O",[1]]]',
        b'[["a","<f4",[1]]]',
        b'[["a","int8",[-1]]]',
        b'[["a","int8",[1]],["a","int8",[0]]]',
    ],
)
def test_an_unusable_entry_is_refused(header: bytes) -> None:
    assert "unusable entry" in refused(made(header, b"\x00"))


@pytest.mark.parametrize(
    "shape", [",".join(["1"] * 70), "0,99999999999999999999999999", "0,9223372036854775807,9223372036854775807"]
)
def test_an_unusable_shape_is_refused(shape: str) -> None:
    assert "unusable shape" in refused(made(f'[["a","int8",[{shape}]]]'.encode(), b"\x00" * ("0" not in shape)))


def test_data_must_be_as_long_as_declared() -> None:
    data = pack_arrays({"x": np.zeros(4, np.float32)})
    assert "truncated" in refused(data[:-1])
    assert "left over" in refused(data + b"x")
    assert "truncated" in refused(made(b'[["a","float64",[1099511627776,1099511627776]]]', b"\x00"))
