"""Caches that all tests share, with the processes that they start: compiled programs of JAX and numba, and bytecode.

They live in build/cache and outlast a run of the tests. All are safe beside each other: JAX and numba name an entry by what
it was compiled from, and a reader that finds half an entry (its writer was killed) compiles for itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "cache"
PROGRAMS = FOLDER / "jax"
KERNELS = FOLDER / "numba"


def share() -> None:
    """Name the caches in the environment, for this process and for its children; call it before JAX and numba are loaded."""
    if late := {"jax", "numba"} & sys.modules.keys():
        raise RuntimeError(f"loaded before their caches were named: {late}")
    for folder in (PROGRAMS, KERNELS):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
    os.environ["NUMBA_CACHE_DIR"] = str(KERNELS)
    # Without bytecode every process of a test compiles all that it imports again: more than a second each.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
