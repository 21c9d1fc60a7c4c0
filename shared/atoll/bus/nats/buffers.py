"""Memory for large payloads, used again when nobody looks into it any more.

A piece of a blob arrives, is checked, put where it belongs and forgotten, a hundred times for a fragment. New memory for
each is cleared and mapped page by page when it is first touched: a quarter of what fetching costs. So the last `KEPT` rooms
that were let go are kept, for a reader's two pages and the one in his hands. Whether a room is let go is not ours to
say: it is when the interpreter drops the last buffer that looks into it, in whatever thread.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from atoll.base.buffer_pool import lend

ROOM_BYTES: Final = (1 << 20) + (1 << 12)
KEPT: Final = 24
_LEAST_BYTES: Final = ROOM_BYTES // 2

# Its ends are safe to use from any thread, also from a garbage collection.
_spent: deque[bytearray] = deque(maxlen=KEPT)


def room(size: int) -> bytearray | memoryview:
    """Return so many bytes of anything, for the caller alone. What is small, or too large, is new."""
    if not _LEAST_BYTES <= size <= ROOM_BYTES:
        return bytearray(size)
    try:
        memory = _spent.popleft()
    except IndexError:
        memory = bytearray(ROOM_BYTES)
    return lend(memory, _spent.append, ROOM_BYTES, np.uint8).data[:size]
