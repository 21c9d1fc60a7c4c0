"""Named arrays as bytes, for outer-optimizer state: a bounded JSON header, then the arrays one after the other.

    8 bytes little-endian header length, header JSON [[name, dtype, shape], …], raw little-endian data in that order

Only plain numeric dtypes by name, bfloat16 among them; no objects, nothing executable. The decoder checks all sizes
before it allocates anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from atoll.base import large_arrays
from atoll.base.errors import PeerMisbehaved
from atoll.base.parsing import parsed
from atoll.wire.blobs import Cut
from atoll.wire.limits import CHUNK_BYTES, Buffer

HEADER_BYTES_MAX = 1 << 20
INTEGERS = frozenset(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
DTYPES = INTEGERS | {"bool", "bfloat16", "float16", "float32", "float64"}


class ArrayEntry(msgspec.Struct, frozen=True, array_like=True):
    """One array: its name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def pack_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return `arrays` as bytes, in their order."""
    packed = PackedArrays(arrays)
    return b"".join(packed.piece(number) for number in range(len(packed)))


class PackedArrays(Cut):
    """Named arrays as the pieces of a blob, in the bytes of `pack_arrays`; they must not change while they are sent."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        entries = [ArrayEntry(name, array.dtype.name, array.shape) for name, array in arrays.items()]
        foreign = [entry.dtype for entry in entries if entry.dtype not in DTYPES]
        if foreign:
            raise PeerMisbehaved("arrays of these dtypes cannot be packed", got=foreign, allowed=sorted(DTYPES))
        header = msgspec.json.encode(entries)
        raw = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values()]
        super().__init__(len(header).to_bytes(8, "little"), header, *raw)

    def piece(self, number: int) -> Buffer:
        """Return one piece; pages of arrays in scratch files stay in memory only while it is copied."""
        piece = super().piece(number)
        looked_at = np.frombuffer(piece, dtype=np.uint8)
        if large_arrays.home_of(looked_at) is None:
            return piece
        copied = bytes(piece)
        large_arrays.release_pages(looked_at)
        return copied


class ArraysDecoder:
    """Named arrays on their way in, as pieces of `CHUNK_BYTES` in any order; large ones may be in scratch files.

    Raises `PeerMisbehaved`: from `take` and `arrays`, for anything that `pack_arrays` did not make.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._early: dict[int, bytes] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._places: list[tuple[int, npt.NDArray[np.uint8]]] = []

    def take(self, number: int, piece: Buffer) -> None:
        """Put a piece in its place, once the first piece has told where that is."""
        if number and not self._places:
            self._early[number] = bytes(piece)
            return
        if number == 0:
            self._begin(piece)
        for waiting, early in self._early.items():
            self._put(waiting, early)
        self._early.clear()
        self._put(number, piece)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays, once every piece is here."""
        if not self._places:
            raise PeerMisbehaved("packed arrays without a header")
        return self._arrays

    def _begin(self, piece: Buffer) -> None:
        view = memoryview(piece)
        length = int.from_bytes(view[:8], "little")
        if len(view) < 8 or length > min(HEADER_BYTES_MAX, min(self._size_bytes, len(view)) - 8):
            raise PeerMisbehaved("packed arrays with a wrong header", got=length, allowed=HEADER_BYTES_MAX)
        at = 8 + length
        for name, dtype, shape in _entries(bytes(view[8:at])):
            count = math.prod(shape)
            if at + count * dtype.itemsize > self._size_bytes:
                raise PeerMisbehaved("packed arrays are truncated", got=self._size_bytes)
            flat = large_arrays.spare(count, dtype)
            self._places.append((at, flat.view(np.uint8)))
            try:
                self._arrays[name] = flat.reshape(shape)
            except (ValueError, OverflowError) as error:  # too many axes, or an empty array with an absurd one
                raise PeerMisbehaved("packed arrays with an unusable shape", got=str(error)) from error
            at += count * dtype.itemsize
        if at != self._size_bytes:
            raise PeerMisbehaved("packed arrays with bytes left over", got=self._size_bytes, allowed=at)
        self._places.append((at, np.empty(0, dtype=np.uint8)))

    def _put(self, number: int, piece: Buffer) -> None:
        data, start = np.frombuffer(piece, dtype=np.uint8), number * CHUNK_BYTES
        for at, place in self._places:
            low, high = max(start, at), min(start + data.size, at + place.size)
            if low < high:
                target = place[low - at : high - at]
                target[:] = data[low - start : high - start]
                large_arrays.release_pages(target)


def unpack_arrays(data: bytes, bytes_max: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of `pack_arrays`, writable copies; raise `PeerMisbehaved` for anything else."""
    if len(data) > bytes_max or len(data) < 8:
        raise PeerMisbehaved("packed arrays of a wrong size", got=len(data), allowed=f"8..{bytes_max} bytes")
    arriving = ArraysDecoder(len(data))
    arriving.take(0, data)
    return arriving.arrays()


def _entries(header: bytes) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    try:
        entries = parsed(header, list[ArrayEntry])
    except msgspec.MsgspecError as error:
        raise PeerMisbehaved("packed arrays with an unreadable header", got=str(error)) from error
    seen: set[str] = set()
    for entry in entries:
        if entry.dtype not in DTYPES or any(n < 0 for n in entry.shape) or entry.name in seen:
            raise PeerMisbehaved("packed arrays with an unusable entry", got=str(entry)[:200])
        seen.add(entry.name)
    return [(entry.name, _dtype(entry.dtype), entry.shape) for entry in entries]


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes  # noqa: PLC0415  (an extra: the command line loads this module without it)

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)
