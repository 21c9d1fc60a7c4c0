"""Large arrays that need not lie in memory: in files without a name, whose pages come and go.

A shard of a very large fragment holds its values, its momentum and every contribution that waits, each as large as the
fragment; only the sum that is being made must be at hand. A learner holds the version that it counts from and the one that
comes. So what is at least `bytes_min` large may lie in a scratch file
that is mapped into the process: whoever reads or writes it does so part by part, and lets each part go when he is done
(`let_go`). Its pages then belong to the system, which keeps them cached while it has memory to spare, and the process is as
large as the parts in use. Arrays are the same to all who compute with them; for those in memory `let_go` does nothing.

Nothing is spilled unless a process says so. The file is gone with the last array that looks into it, or with the process.
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
    """From what size arrays are spilled, and where to (None: where the system keeps temporary files)."""

    bytes_min: float = math.inf
    folder: Path | None = None


policy = Policy()


class Spilled(mmap.mmap):
    """A mapped file; `address` is where it begins in this process."""

    address: int


def spare(count: int, dtype: npt.DTypeLike) -> Array:
    """Return an array of anything that need not lie in memory.

    Where the system's folder for temporary files has no room it does: nobody has asked for that folder.

    Raises:
        StorageFull: the scratch folder that was asked for has no room, or cannot be used.
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
    """Return an array of zeros that need not lie in memory; a new file is zeros that nobody has written."""
    kind = np.dtype(dtype)
    if count * kind.itemsize < policy.bytes_min:
        return np.zeros(count, dtype=kind)
    array = spare(count, kind)
    if home_of(array) is None:
        array[:] = 0
    return array


def anything() -> bool:
    """Return whether this process spills at all."""
    return policy.bytes_min < math.inf


def home_of(array: Array) -> Spilled | None:
    """Return the file that an array looks into, None for one in memory."""
    below: object = array
    while isinstance(below, np.ndarray | memoryview):
        below = below.base if isinstance(below, np.ndarray) else below.obj
    return below if isinstance(below, Spilled) else None


def release_pages(*arrays: Array) -> None:
    """Let the pages of these arrays leave the process; what is in them stays. Contiguous arrays only."""
    if not anything():
        return
    for array in arrays:
        home = home_of(array)
        if home is None or not array.nbytes:
            continue
        begin = array.ctypes.data - home.address
        first, last = -(-begin // mmap.PAGESIZE), (begin + array.nbytes) // mmap.PAGESIZE
        if last > first:
            home.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
