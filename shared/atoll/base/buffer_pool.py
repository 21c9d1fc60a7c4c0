"""A pool of memory for large vectors.

New memory comes from the operating system in pages, and the system clears and maps each page at the first touch. For
large vectors that costs as much as the arithmetic. A shard needs the same sizes in every round: a sum, the next values,
the next momentum, waiting contributions. So the pool keeps the last `KEPT` vectors that became free, or fewer if they are
more than `KEPT_BYTES_MAX` together, and hands them out again.

A vector becomes free when the interpreter drops the last array, view or buffer over it. `empty` returns an array with
undefined content. Vectors below `KEPT_ELEMENTS` stay with the allocator, which pools them itself. Vectors above
`KEPT_ELEMENTS_MAX` do too: that much idle memory costs more than the time it saves.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

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

    A piece arrives, is checked, put where it belongs and forgotten, a hundred times for a fragment. New memory for each would
    be a quarter of what fetching costs. `ROOMS_KEPT` rooms are enough for a reader's two pages and the one in use.
    """
    if not _ROOM_BYTES_MIN <= size <= ROOM_BYTES:
        return bytearray(size)
    try:
        memory = _spent_rooms.popleft()
    except IndexError:
        memory = bytearray(ROOM_BYTES)
    return lend(memory, _spent_rooms.append, ROOM_BYTES, np.uint8).data[:size]


def _keep(memory: mmap.mmap) -> None:
    """Keep spent memory for the next taker, unless that is more than a process can spare."""
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
