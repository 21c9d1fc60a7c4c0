"""How kernels are compiled: for fixed types, before their first call, and once per machine.

numba keeps machine code in a folder (beside the module, in a cache of the user, or in `NUMBA_CACHE_DIR`). It identifies
kept code by time and size of the function's source file, by the function's bytecode and by the values of its closure.
It does not look at what a kernel takes from *other* files: the code of a format, and constants. So a kernel that uses
other files has their digest, `stamp`, in its closure: after a change in one of them numba finds no kept code and
compiles anew.

A full, damaged or foreign folder is no reason to stop: then every process compiles for itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar, cast

import xxhash
from numba import njit, types
from numba.extending import register_jitable

from atoll.base.logs import get
from atoll.codec.kernels.later import ends_with_the_process

log = get(__name__)

F = TypeVar("F", bound=Callable[..., Any])

BYTES = types.Array(types.uint8, 1, "C", readonly=True)
BYTES_OUT = types.Array(types.uint8, 1, "C")
F32_IN = types.Array(types.float32, 1, "C", readonly=True)
F32_OUT = types.Array(types.float32, 1, "C")
U16_IN = types.Array(types.uint16, 1, "C", readonly=True)
U16_OUT = types.Array(types.uint16, 1, "C")
LANES = types.Array(types.float64, 1, "C")


def compiled(*signatures: Any, fastmath: Collection[str] = ()) -> Callable[[F], F]:  # noqa: ANN401  (of numba)
    """Compile for these signatures now, and keep the code if numba finds a place for it.

    `fastmath` names the liberties that LLVM may take with floating point: none unless they change no bit.
    """
    options: dict[str, Any] = {"nogil": True, "fastmath": set(fastmath)}

    def wrap(function: F) -> F:
        ends_with_the_process()
        made: Any
        try:
            made = njit(list(signatures), cache=True, **options)(function)
        except Exception as error:  # noqa: BLE001  (numba, pickle and the file system have their own)
            log.warning("kernels.not_kept", kernel=function.__name__, reason=repr(error))
            made = njit(list(signatures), **options)(function)
        return cast("F", made)

    return wrap


@functools.cache
def inlined(function: F) -> F:
    """Make a plain function of another module callable from kernels: numba inlines its code.

    The function itself is returned. In a closure it counts by its name, which is the same in every process; a compiled
    function has no such name. So the code of a kernel that calls it can be kept.
    """
    return register_jitable(inline="always")(function)


def stamp(*sources: Any) -> int:  # noqa: ANN401  (modules, or functions of them)
    """Return a digest of the source files of these modules."""
    files = [Path(inspect.getfile(source)).read_bytes() for source in sources]
    return xxhash.xxh3_64_intdigest(b"".join(files)) >> 1
