"""Arithmetic beside an event loop: small work runs at once, large work runs in a worker thread.

Handing work to a thread costs about as much as folding the smallest fragments. A loop that large work holds up answers
no message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

INLINE_ELEMENTS_MAX: Final = 1 << 16


async def off_loop(elements: int, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Return what `work` on so many elements returns."""
    if elements <= INLINE_ELEMENTS_MAX:
        return work(*arguments, **named)
    return await asyncio.to_thread(work, *arguments, **named)
