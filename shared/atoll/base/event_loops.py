"""The event loop of islands and shards: uvloop's, and asyncio's own where there is none.

A round of a tiny fragment is some forty turns of a shard's loop, and a turn of uvloop costs a fraction of one of asyncio's
(ADR 65). For large blobs it makes no difference.
"""

from __future__ import annotations

import asyncio

try:
    import uvloop
except ImportError:  # there is none for this system
    uvloop = None  # type: ignore[assignment]


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new loop; its caller closes it."""
    return asyncio.new_event_loop() if uvloop is None else uvloop.new_event_loop()
