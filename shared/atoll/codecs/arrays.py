"""Named arrays as bytes, for outer-optimizer state: a bounded JSON header, then the arrays one after the other.

    8 bytes little-endian header length, header JSON [[name, dtype, shape], …], raw little-endian data in that order

Only plain numeric dtypes by name, bfloat16 among them; no objects, nothing executable. Sizes are checked before
anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from atoll.errors import PeerMisbehaved

HEADER_BYTES_MAX = 1 << 20
INTEGERS = frozenset(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
DTYPES = INTEGERS | {"bool", "bfloat16", "float16", "float32", "float64"}


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One array: its name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def pack_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return `arrays` as bytes, in their order."""
    return b"".join(packed(arrays))


def packed(arrays: Mapping[str, npt.NDArray[Any]]) -> list[bytes | memoryview]:
    """Return what `pack_arrays` puts together: views of the arrays, which must not change while they are used."""
    entries = [Entry(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    foreign = [entry.dtype for entry in entries if entry.dtype not in DTYPES]
    if foreign:
        raise PeerMisbehaved("arrays of these dtypes cannot be packed", got=foreign, allowed=sorted(DTYPES))
    header = msgspec.json.encode(entries)
    raw = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values()]
    return [len(header).to_bytes(8, "little"), header, *raw]


def unpack_arrays(data: bytes, bytes_max: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of `pack_arrays`, writable copies; raise `PeerMisbehaved` for anything else."""
    if len(data) > bytes_max or len(data) < 8:
        raise PeerMisbehaved("packed arrays of a wrong size", got=len(data), allowed=f"8..{bytes_max} bytes")
    length = int.from_bytes(data[:8], "little")
    if length > min(HEADER_BYTES_MAX, len(data) - 8):
        raise PeerMisbehaved("packed arrays with a wrong header", got=length, allowed=HEADER_BYTES_MAX)
    try:
        entries = msgspec.json.decode(data[8 : 8 + length], type=list[Entry])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerMisbehaved("packed arrays with an unreadable header", got=str(error)) from error
    arrays: dict[str, npt.NDArray[Any]] = {}
    at = 8 + length
    for entry in entries:
        if entry.dtype not in DTYPES or any(n < 0 for n in entry.shape) or entry.name in arrays:
            raise PeerMisbehaved("packed arrays with an unusable entry", got=entry)
        dtype, count = _dtype(entry.dtype), math.prod(entry.shape)
        if at + count * dtype.itemsize > len(data):
            raise PeerMisbehaved("packed arrays are truncated", got=len(data), allowed=at + count * dtype.itemsize)
        flat = np.frombuffer(data, dtype=dtype, count=count, offset=at)
        try:
            arrays[entry.name] = flat.reshape(entry.shape).copy()
        except (ValueError, OverflowError) as error:  # too many axes, or an empty array with an absurd one
            raise PeerMisbehaved("packed arrays with an unusable shape", got=str(error)) from error
        at += count * dtype.itemsize
    if at != len(data):
        raise PeerMisbehaved("packed arrays with bytes left over", got=len(data), allowed=at)
    return arrays


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
