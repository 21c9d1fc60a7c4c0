"""Kernels that were compiled before the program came here: a library of machine code, which the build of an image makes.

LLVM takes 160 MB and is needed only to compile. So an image has the library and neither LLVM nor numba, and its processes
have compiled kernels from their first vector on. `infra/docker/kernels.py` makes it of the same kernels (`compiled`), for one
kind of processors; the bits are those of the other two sets.

A library counts if it was made of the very sources that are installed, and if this processor has what it was made for.
Otherwise it is as if there were none, and the log says why: numba compiles, or NumPy does the work.

The functions are called as numba calls them: where the result goes, where an error goes, then the arguments; a vector is
seven of them (owner, parent, elements, bytes of one, address, length, stride). They return 0 if all went well. ctypes calls
them without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from atoll.base.errors import EnvironmentFault, ProtocolMisuse
from atoll.base.logs import get
from atoll.base.machine import abilities
from atoll.base.parsing import parsed

log = get(__name__)

FOLDER: Final = Path(sys.prefix) / "share" / "atoll" / "kernels"
LIBRARY: Final = "kernels.so"
MANIFEST: Final = "kernels.json"
SOURCES: Final = ("codec/kernels/*.py", "codec/formats/*.py", "merge/nesterov.py")
"""What the machine code depends on, below the package; more than needed."""
NEEDS: Final = {
    "x86-64-v3": frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"]),
    "generic": frozenset[str](),
}
"""Classes of processors by LLVM's name, and what the kernel's list of a processor's abilities must say for each: those of the
psABI's level x86-64-v3 (Haswell, Zen and later)."""
SCALARS: Final[dict[str, Any]] = {"int64": ctypes.c_int64, "float32": ctypes.c_float, "float64": ctypes.c_double}


class Declared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One function: what it takes (a scalar, `[uint8]` for a vector, `[uint8]!` for one that it writes) and returns."""

    takes: tuple[str, ...]
    returns: str


class LibraryManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a library was made for and of, and its functions by name."""

    cpu: str
    sources: str
    functions: dict[str, Declared]


class Taken(NamedTuple):
    """One argument: the scalar that it is, or a vector of `dtype`, perhaps to be written."""

    scalar: Any
    dtype: npt.DTypeLike | None
    written: bool


def sources_digest() -> str:
    """Return a digest of the sources that are installed."""
    package, digest = Path(__file__).parents[2], xxhash.xxh3_64()
    for path in sorted(path for pattern in SOURCES for path in package.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def class_of_processor() -> str:
    """Return the class of processors for which a library is made on this kind of machine."""
    return "x86-64-v3" if platform.machine() in ("x86_64", "AMD64") else "generic"


def function(name: str) -> Callable[..., Any] | None:
    """Return a function of the library of this installation, None where there is no library that counts."""
    return opened(FOLDER).get(name)


@functools.cache
def opened(folder: Path) -> dict[str, Callable[..., Any]]:
    """Return the functions of the library in a folder by name; none if there is no library, or it does not count."""
    if not (folder / MANIFEST).is_file():
        return {}
    try:
        told = parsed((folder / MANIFEST).read_bytes(), LibraryManifest)
        if reason := _unfit(told):
            log.warning("kernels.not_ready", reason=reason)
            return {}
        library = ctypes.CDLL(str(folder / LIBRARY))
        found = {name: _bound(name, library[name], declared) for name, declared in told.functions.items()}
    except (OSError, AttributeError, KeyError, msgspec.MsgspecError) as error:
        log.warning("kernels.not_ready", reason=repr(error))
        return {}
    log.debug("kernels.ready", cpu=told.cpu, functions=len(found))
    return found


def _unfit(told: LibraryManifest) -> str:
    """Return why a library does not count here, "" if it does."""
    if told.sources != sources_digest():
        return "the library was made of other sources"
    if told.cpu not in NEEDS or told.cpu != class_of_processor():
        return f"the library was made for {told.cpu}"
    if lacking := NEEDS[told.cpu] - abilities() if NEEDS[told.cpu] else frozenset[str]():
        return f"the library was made for {told.cpu}, and this processor lacks {', '.join(sorted(lacking))}"
    return ""


def _bound(name: str, machine_code: Any, declared: Declared) -> Callable[..., Any]:  # noqa: ANN401  (of ctypes)
    """Return a function of vectors and numbers that calls machine code."""
    taken = [_taken(text) for text in declared.takes]
    result = ctypes.c_void_p if declared.returns == "none" else SCALARS[declared.returns]
    types: list[Any] = [ctypes.c_void_p, ctypes.c_void_p]
    for one in taken:
        types += [one.scalar] if one.scalar else [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2
        types += [] if one.scalar else [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    machine_code.argtypes, machine_code.restype = types, ctypes.c_int32

    def call(*given: Any) -> Any:  # noqa: ANN401  (as declared)
        """Call it; raise `ProtocolMisuse` for what it does not take, and `EnvironmentFault` if it finds no memory."""
        returned, refused = result(), ctypes.c_void_p()
        words: list[Any] = [ctypes.addressof(returned), ctypes.addressof(refused)]
        for value, one in zip(given, taken, strict=True):
            if one.scalar:
                words.append(value)
                continue
            flags = value.flags
            if value.dtype != one.dtype or value.ndim != 1 or not flags.c_contiguous or not flags.aligned:
                raise ProtocolMisuse(f"kernel {name} takes no such vector", got=f"{value.dtype}, {value.shape}")
            if one.written and not flags.writeable:
                raise ProtocolMisuse(f"kernel {name} writes to a vector that may not be written")
            address = value.ctypes.data if value.size else None  # NumPy takes a microsecond to say it
            words += (None, None, value.size, value.itemsize, address, value.size, value.itemsize)
        if status := machine_code(*words):
            raise EnvironmentFault(f"kernel {name} has failed", got=f"status {status}", todo="is there memory?")
        return returned.value

    return call


def _taken(text: str) -> Taken:
    if text in SCALARS:
        return Taken(SCALARS[text], None, written=False)
    return Taken(None, np.dtype(text.strip("[]!")), written=text.endswith("!"))
