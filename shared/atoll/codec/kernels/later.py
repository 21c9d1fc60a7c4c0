"""Compiles where it pays, on a thread of its own, while the NumPy form does the work.

A set of kernels takes seconds to compile, and the NumPy form gives the same bits at once. So the NumPy form begins. It
counts the elements that it was asked for. At `WORTH_ELEMENTS` a thread begins to compile, or loads what numba has kept.
No caller waits: the NumPy form works until the compiled one is there. A process that reads a model once never compiles. A
process that merges large fragments compiles within its first seconds, and its log says when and how long. What was compiled
beforehand (`atoll.codec.kernels.ready`) is there at once.

Processes of a machine that begin together want the same kernels at about the same time. They take turns
(`atoll.base.user_cache`): one compiles, with the cores to itself, and the others load what it has made.

The thread is no daemon: the interpreter would end under a compiler at work, which crashes. It stops between two functions
once the main thread has ended (`ends_with_the_process`).
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
    """The compiled form of something that has a plain form, too; usable from any thread."""

    def __init__(
        self,
        name: str,
        make: Callable[[], T | None],
        worth_elements: int = WORTH_ELEMENTS,
        *,
        brought: Callable[[], T | None] | None = None,
    ) -> None:
        """Keep how to make it; `make` returns None where there is no numba. `name` is for the log.

        `brought` returns the form that was compiled beforehand, or None.
        """
        self._name = name
        self._make = make
        self._brought = brought
        self._worth_elements = worth_elements
        self._elements = 0
        self._begun = False
        self._made: T | None = None
        self._done = False
        self._lock = threading.Lock()

    def there(self) -> T | None:
        """Return the compiled form if it is there; never make it."""
        return self._made if self._done or self._is_brought() else None

    def found(self, elements: int) -> T | None:
        """Return the compiled form, or None while the plain form has to do these `elements`."""
        if self._done or self._is_brought():
            return self._made
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
        if not self._done and not self._is_brought():
            with self._turn():
                self._make_once()
        return self._made

    def _turn(self) -> contextlib.AbstractContextManager[bool]:
        return turn(user_cache("kernels"), at_each_look=ends_with_the_process)

    def _make_once(self) -> None:
        """Compile, unless another thread has, which held the turn before us or compiles without one."""
        with self._lock:
            if not self._done:
                self._made, self._done = self._make(), True

    def _is_brought(self) -> bool:
        """Return whether the compiled form was made beforehand; it is looked for once, and two threads may both look."""
        brought, self._brought = self._brought, None
        made = None if brought is None else brought()
        if made is not None:
            self._made, self._done = made, True
        return made is not None

    def _compile(self) -> None:
        """Compile beside the others' work, and say so."""
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
        if self._made is None:
            todo = "pip install 'atoll[synchronizer]' makes merging and encoding several times faster"
            log.warning("kernels.not_compiled", kernels=self._name, reason="numba is not installed", todo=todo)
        else:
            log.info("kernels.compiled", kernels=self._name, took_s=round(time.monotonic() - began_s, 2))
