"""A thread with its own event loop: an island's coroutines run there while the caller's thread trains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

STOP_S = 10.0


class LoopThread:
    """Starts at once; `submit` runs a coroutine there, `stop` ends the loop and the thread. Several islands may share."""

    def __init__(self, name: str) -> None:
        """Start the thread; it does not keep the process alive."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` on the loop and return its future."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self) -> None:
        """Cancel what still runs on the loop, end it, wait for the thread; idempotent."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        unfinished = asyncio.all_tasks(self.loop)
        for task in unfinished:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*unfinished, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
