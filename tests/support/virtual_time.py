"""Coroutines whose time passes when everybody waits for it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from atoll_simulator.loop import VirtualLoop

P = ParamSpec("P")
T = TypeVar("T")


def virtually(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns on a virtual loop of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make a test of a coroutine that runs on a virtual loop."""

    @functools.wraps(test)
    def run(*args: P.args, **named: P.kwargs) -> T:
        return virtually(test(*args, **named))

    return run
