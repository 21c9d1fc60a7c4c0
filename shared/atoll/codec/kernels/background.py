"""Compiling where it pays, on a thread of its own, while the NumPy form does the work.

A set of kernels takes seconds to compile, and the NumPy form gives the same bits at once. So the NumPy form begins, and the
elements that it does are counted. At `WORTH_ELEMENTS` a thread begins to compile, or loads what numba has kept; no caller
waits. Processes of a machine take turns (`atoll.base.user_cache`): one compiles, and the others load what it has made.

The thread is no daemon: the interpreter would end under a compiler at work, which crashes. It stops between two functions once
the main thread has ended (`ends_with_the_process`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from atoll.base.logs import get
from atoll.base.user_cache import turn, user_cache

log = get(__name__)

T = TypeVar("T")

WORTH_ELEMENTS: Final = 1 << 26
"""From a tenth of a second (sums) to three seconds (rounding a step) of NumPy; compiling takes about five."""


class ProcessEnds(Exception):
    """The process ends: nothing more is compiled."""


def ends_with_the_process() -> None:
    """Raise `ProcessEnds` if the main thread has ended."""
    if not threading.main_thread().is_alive():
        raise ProcessEnds


class CompiledLater(Generic[T]):
    """The compiled form of something that has a plain form, too; usable from any thread.

    `make` returns it, or None where there is no numba; `name` is for the log. `made` is the compiled form once it is there.
    """

    def __init__(self, name: str, make: Callable[[], T | None], worth_elements: int = WORTH_ELEMENTS) -> None:
        self._name = name
        self._make = make
        self._worth_elements = worth_elements
        self._elements = 0
        self._begun = False
        self.made: T | None = None
        self._done = False
        self._lock = threading.Lock()

    def found(self, elements: int) -> T | None:
        """Return the compiled form, or None while the plain form has to do these `elements`."""
        if self._done:
            return self.made
        self._elements += elements  # two threads may lose a count, which only delays
        if self._elements >= self._worth_elements and not self._begun:
            self._begun = True
            try:
                threading.Thread(target=self._compile, name="atoll-compiler").start()
            except RuntimeError:  # no thread to be had, or the interpreter ends: the plain form goes on
                log.warning("kernels.not_compiled", kernels=self._name, reason="no thread could be started")
        return None

    def now(self) -> T | None:
        """Return the compiled form, and wait for it; None where there is no numba."""
        if not self._done:
            with self._turn():
                self._make_once()
        return self.made

    def _turn(self) -> contextlib.AbstractContextManager[bool]:
        return turn(user_cache("kernels"), at_each_look=ends_with_the_process)

    def _make_once(self) -> None:
        with self._lock:  # another thread may have made it meanwhile
            if not self._done:
                self.made, self._done = self._make(), True

    def _compile(self) -> None:
        try:
            with self._turn():
                began_s = time.monotonic()
                log.info("kernels.compiling", kernels=self._name, why="large vectors; NumPy does the work meanwhile")
                self._make_once()
        except ProcessEnds:
            return
        except Exception as error:  # noqa: BLE001  (numba, LLVM and the file system have their own)
            self._done = True
            log.warning("kernels.not_compiled", kernels=self._name, reason=repr(error))
            return
        if self.made is None:
            todo = "pip install 'atoll[synchronizer]' makes merging and encoding several times faster"
            log.warning("kernels.not_compiled", kernels=self._name, reason="numba is not installed", todo=todo)
        else:
            log.info("kernels.compiled", kernels=self._name, took_s=round(time.monotonic() - began_s, 2))
