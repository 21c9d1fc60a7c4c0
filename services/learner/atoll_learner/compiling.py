"""Compiling once per machine and beside the joining: a cache of programs on disk, turns, and a step that is compiled ahead.

XLA's persistent cache makes a restart cheap. But learners that start together on one machine all find it empty, compile the
same step at the same time and share the cores: four learners on two cores took 56 s to their first step. So they take turns
(`atoll.base.user_cache`).

A learner knows the shapes of its step before it has joined, so it compiles in a thread meanwhile (`CompiledAhead`). Tracing
needs no turn, only the compiler does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from atoll.base.logs import get
from atoll.base.user_cache import turn

log = get(__name__)


def enable_compile_cache(folder: Path | None) -> None:
    """Keep compiled programs in `folder` for later processes; None keeps none."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    update: Callable[[str, object], None] = jax.config.update
    update("jax_compilation_cache_dir", str(folder))
    update("jax_persistent_cache_min_compile_time_secs", 0.0)
    update("jax_persistent_cache_min_entry_size_bytes", 0)


class CompiledAhead:
    """A jitted function, compiled for arguments like some in a thread; a process that ends waits for its compiler."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], cache: Path | None) -> None:  # noqa: ANN401  (jax.stages.Wrapped)
        """Begin; `arguments` may be shapes (`jax.ShapeDtypeStruct`) in place of arrays."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._work = pool.submit(_compile, function, arguments, cache)
        pool.shutdown(wait=False)

    def result(self) -> Any:  # noqa: ANN401  (jax.stages.Compiled)
        """Return the compiled function, once it is ready. Raises what the compiler raised."""
        return self._work.result()


def _compile(function: Any, arguments: tuple[Any, ...], cache: Path | None) -> Any:  # noqa: ANN401
    began_s = time.monotonic()
    lowered = function.lower(*arguments)
    traced_s = time.monotonic() - began_s
    with turn(cache):
        compiled = lowered.compile()
    log.info("step.compiled", traced_s=round(traced_s, 2), took_s=round(time.monotonic() - began_s, 2))
    return compiled
