"""Arithmetic beside an event loop: small work is done at once, large work in a worker thread.

A hop to a thread and back costs about as much as folding the smallest fragments, and a loop that is held up for long
answers nobody.
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
