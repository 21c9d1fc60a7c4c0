"""Large arrays in scratch files, so that they need not stay in memory.

A shard of a very large fragment holds its values, its momentum and every waiting contribution, each as large as the
fragment. Only the sum in progress must be in memory. A learner holds the version that it counts from and the next one. So
arrays of at least `bytes_min` bytes may be backed by a mapped file without a name. Code works on them part by part and
calls `release_pages` after each part. The system then owns those pages and caches them while it has memory to spare, and
the process is only as large as the parts in use. Code that computes sees ordinary arrays; `release_pages` does nothing for
arrays in memory.

Nothing is backed by files unless the process asks for it. A file disappears with the last array over it, or with the
process.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.base import buffer_pool
from atoll.base.errors import StorageFull
from atoll.base.logs import get

log = get(__name__)

Array = npt.NDArray[Any]


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
    return buffer_pool.empty(-(-size // 4)).view(np.uint8)[:size].view(kind)


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
