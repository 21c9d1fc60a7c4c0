"""How kernels are compiled: for fixed types, when they are loaded, and once per machine.

numba keeps machine code in a folder and knows it by time and size of the function's source file. So a constant that is
compiled in must stand in that file; `agree` holds it against the one that everybody else uses. A folder that is full,
damaged or not ours is no reason to stop: then every process compiles for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

from numba import njit, types

from atoll.base.logs import get
from atoll.codec import kernels

log = get(__name__)

F = TypeVar("F", bound=Callable[..., Any])

BYTES = types.Array(types.uint8, 1, "C", readonly=True)
BYTES_OUT = types.Array(types.uint8, 1, "C")
F32_IN = types.Array(types.float32, 1, "C", readonly=True)
F32_OUT = types.Array(types.float32, 1, "C")
U16_IN = types.Array(types.uint16, 1, "C", readonly=True)
U16_OUT = types.Array(types.uint16, 1, "C")


def compiled(*signatures: Any, fastmath: Collection[str] = ()) -> Callable[[F], F]:  # noqa: ANN401  (of numba)
    """Compile for these signatures now, and keep the code where numba finds a place for it.

    `fastmath` names the liberties that LLVM may take with floating point: none unless they change no bit.
    """
    options: dict[str, Any] = {"nogil": True, "fastmath": set(fastmath)}

    def wrap(function: F) -> F:
        made: Any
        try:
            made = njit(list(signatures), cache=True, **options)(function)
        except Exception as error:  # noqa: BLE001  (numba, pickle and the file system have their own)
            log.warning("kernels.not_kept", kernel=function.__name__, reason=repr(error))
            made = njit(list(signatures), **options)(function)
        return cast("F", made)

    return wrap


def agree(constants: dict[str, Any], *names: str) -> None:
    """Raise `AssertionError` unless these are the constants of `atoll.codec.kernels`."""
    others = {name: (constants[name], getattr(kernels, name)) for name in names}
    wrong = {name: pair for name, pair in others.items() if pair[0] != pair[1]}
    if wrong:
        raise AssertionError(f"constants that are not those of atoll.codec.kernels: {wrong}")
