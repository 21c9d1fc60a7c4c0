"""A thread with its own event loop, for coroutines that must go on while the caller's thread or loop is busy.

An island's coroutines run in one while the caller's thread trains. A bus may do its network work in one: a caller that blocks
its own loop for seconds then loses no connection. The loop is asyncio's own: over our transport, which copies nothing,
uvloop was measured to be no faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_S = 2.0
STOP_S = 10.0


class LoopThread:
    """Starts at once; `submit` runs a coroutine there, `stop` ends the loop and the thread. Several islands may share."""

    def __init__(self, name: str) -> None:
        """Start the thread; it does not keep the process alive."""
        self.loop = asyncio.new_event_loop()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` on the loop and return its future."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self) -> None:
        """Cancel what still runs on the loop, end it, wait for the thread; idempotent."""
        if not self._is_stopping:
            self._is_stopping = True  # once: a second stop would end what the first one waits for
            with contextlib.suppress(RuntimeError):  # its loop has been left, and is closed
                self.loop.call_soon_threadsafe(self.loop.stop)
        self.join(STOP_S)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            unfinished = asyncio.all_tasks(self.loop)
            for task in unfinished:
                task.cancel()
            if unfinished:
                # Not longer than this: nats-py may swallow a cancellation while a send is stalled.
                self.loop.run_until_complete(asyncio.wait(unfinished, timeout=CANCEL_S))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()
