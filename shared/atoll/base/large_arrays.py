"""Memory for large arrays: pooled, so that no page is mapped anew, or in scratch files, so that it need not stay in memory.

**Pool.** The system clears and maps each page of new memory at the first touch, which costs as much as the arithmetic of large
vectors. A shard needs the same sizes in every round. So the pool keeps the last `KEPT` vectors that became free, or fewer if
they are more than `KEPT_BYTES_MAX` together. A vector becomes free when the interpreter drops the last array, view or buffer
over it; `empty` returns an array with undefined content. Vectors below `KEPT_ELEMENTS` stay with the allocator, which pools
them itself, and so do those above `KEPT_ELEMENTS_MAX`: that much idle memory costs more than the time it saves.

**Scratch files.** A shard of a very large fragment holds its values, its momentum and every waiting contribution, each as large
as the fragment; only the sum in progress must be in memory. So arrays of at least `policy.bytes_min` bytes may be backed by a
mapped file without a name, which disappears with the last array over it. Code works on them part by part and calls
`release_pages` after each part: the system then owns those pages, and the process is only as large as the parts in use. Nothing
is backed by files unless the process asks for it.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from atoll.base.errors import StorageFull
from atoll.base.logs import get

log = get(__name__)

Array = npt.NDArray[Any]
Vector = npt.NDArray[np.float32]
"""A flat vector of float32."""

M = TypeVar("M", mmap.mmap, bytearray)

KEPT: Final = 8
KEPT_BYTES_MAX: Final = 1 << 30
KEPT_ELEMENTS: Final = 1 << 20
KEPT_ELEMENTS_MAX: Final = 1 << 26

ROOM_BYTES: Final = (1 << 20) + (1 << 12)
"""Room for a piece of a blob with all that a broker sends along."""
ROOMS_KEPT: Final = 24
_ROOM_BYTES_MIN: Final = ROOM_BYTES // 2

# Their ends are safe to use from any thread, also from a garbage collection in the midst of `_take`.
_spent: deque[mmap.mmap] = deque(maxlen=KEPT)
_spent_rooms: deque[bytearray] = deque(maxlen=ROOMS_KEPT)


class _Lent(np.ndarray[Any, Any]):
    """The whole of a kept memory; a class of its own, so that every view keeps this array and not the memory below it."""


def lend(memory: M, keep: Callable[[M], None], count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array over `memory`; `keep` gets the memory, in any thread, when the last view of it is gone."""
    lent = np.ndarray.__new__(_Lent, (count,), dtype, memory)
    weakref.finalize(lent, keep, memory).atexit = False
    return lent.view(np.ndarray)


def empty(elements: int) -> Vector:
    """Return a float32 vector with undefined content."""
    if not KEPT_ELEMENTS <= elements <= KEPT_ELEMENTS_MAX:
        return np.empty(elements, dtype=np.float32)
    return lend(_take(4 * elements), _keep, elements, np.float32)


def room(size: int) -> bytearray | memoryview:
    """Return so many bytes of anything, for the caller alone: new ones if they are few, or more than a piece of a blob.

    New memory for each of a fragment's hundred pieces would be a quarter of what fetching costs. `ROOMS_KEPT` rooms are enough
    for a reader's two pages and the one in use.
    """
    if not _ROOM_BYTES_MIN <= size <= ROOM_BYTES:
        return bytearray(size)
    try:
        memory = _spent_rooms.popleft()
    except IndexError:
        memory = bytearray(ROOM_BYTES)
    return lend(memory, _spent_rooms.append, ROOM_BYTES, np.uint8).data[:size]


def _keep(memory: mmap.mmap) -> None:
    try:
        kept_bytes = sum(map(len, _spent))
    except RuntimeError:  # another thread, or a collection of garbage, has just changed what is kept
        return
    if kept_bytes + len(memory) <= KEPT_BYTES_MAX:
        _spent.append(memory)


def _take(size: int) -> mmap.mmap:
    for _ in range(len(_spent)):
        try:
            memory = _spent.popleft()
        except IndexError:  # another thread was faster
            break
        if len(memory) == size:
            return memory
        _spent.append(memory)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@dataclass(slots=True)
class Policy:
    """From which size arrays go to files, and in which folder (None: the system's folder for temporary files)."""

    bytes_min: float = math.inf
    folder: Path | None = None

    @property
    def is_used(self) -> bool:
        """Return whether any array of this process may be in a file."""
        return self.bytes_min < math.inf


policy = Policy()


class Spilled(mmap.mmap):
    """A mapped file; `address` is where the mapping begins in this process."""

    address: int


def spare(count: int, dtype: npt.DTypeLike) -> Array:
    """Return an array with undefined content that need not stay in memory.

    If the system's own temporary folder is full, the array is made in memory: the person asked for no folder.

    Raises:
        StorageFull: the scratch folder from the settings is full or cannot be used.
    """
    kind = np.dtype(dtype)
    size = count * kind.itemsize
    if not count or size < policy.bytes_min:
        return _in_memory(size, kind)
    try:
        with tempfile.TemporaryFile(dir=policy.folder, prefix="atoll-") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error now, and no signal later
            else:
                os.ftruncate(file.fileno(), size)
            home = Spilled(file.fileno(), size)
    except OSError as error:
        why = errno.errorcode.get(error.errno or 0, error)
        if policy.folder is None:
            log.warning("scratch.in_memory", bytes=size, folder=tempfile.gettempdir(), reason=str(why))
            return _in_memory(size, kind)
        raise StorageFull(
            "no room for a scratch file",
            got=f"{size} bytes in {policy.folder}: {why}",
            todo="free the disk, set synchronizer.scratch_dir (learner.scratch_dir) to a folder on one, or raise spill_bytes "
            "there and have the memory",
        ) from error
    array: Array = np.frombuffer(home, dtype=kind)
    home.address = array.ctypes.data
    return array


def _in_memory(size: int, kind: np.dtype[Any]) -> Array:
    return empty(-(-size // 4)).view(np.uint8)[:size].view(kind)


def zeros(count: int, dtype: npt.DTypeLike) -> Array:
    """Return an array of zeros that need not stay in memory; a new file reads as zeros."""
    kind = np.dtype(dtype)
    if count * kind.itemsize < policy.bytes_min:
        return np.zeros(count, dtype=kind)
    array = spare(count, kind)
    if home_of(array) is None:
        array[:] = 0
    return array


def home_of(array: Array) -> Spilled | None:
    """Return the file behind an array, or None for an array in memory."""
    below: object = array
    while isinstance(below, np.ndarray | memoryview):
        below = below.base if isinstance(below, np.ndarray) else below.obj
    return below if isinstance(below, Spilled) else None


def release_pages(*arrays: Array) -> None:
    """Return the pages of these contiguous arrays to the system; their content stays."""
    if not policy.is_used:
        return
    for array in arrays:
        home = home_of(array)
        if home is None or not array.nbytes:
            continue
        begin = array.ctypes.data - home.address
        first, last = -(-begin // mmap.PAGESIZE), (begin + array.nbytes) // mmap.PAGESIZE
        if last > first:
            home.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
