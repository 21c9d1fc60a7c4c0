"""Memory for large payloads, used again when nobody looks into it any more.

A piece of a blob arrives, is checked, put where it belongs and forgotten, a hundred times for a fragment. New memory for
each is cleared and mapped page by page when it is first touched: a quarter of what fetching costs. So the last `KEPT` rooms
that were let go are kept, for a reader's two pages and the one in his hands. Whether a room is let go is not ours to
say: it is when the interpreter drops the last buffer that looks into it, in whatever thread.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Final

import numpy as np

ROOM_BYTES: Final = (1 << 20) + (1 << 12)
KEPT: Final = 24
_LEAST_BYTES: Final = ROOM_BYTES // 2

# Its ends are safe to use from any thread, also from a garbage collection.
_spent: deque[bytearray] = deque(maxlen=KEPT)


class _Lent(np.ndarray[Any, Any]):
    """The whole of a room; a class of its own, so that every view keeps this array and not the memory below it."""


def room(size: int) -> bytearray | memoryview:
    """Return so many bytes of anything, for the caller alone. What is small, or too large, is new."""
    if not _LEAST_BYTES <= size <= ROOM_BYTES:
        return bytearray(size)
    try:
        memory = _spent.popleft()
    except IndexError:
        memory = bytearray(ROOM_BYTES)
    lent = np.ndarray.__new__(_Lent, (ROOM_BYTES,), np.uint8, memory)
    weakref.finalize(lent, _spent.append, memory).atexit = False
    return memoryview(lent)[:size]  # type: ignore[arg-type]  # an array is a buffer
