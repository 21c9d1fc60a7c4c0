"""Compiles all kernels into one library: `python kernels.py FOLDER`, while an image is built (`atoll.codec.kernels.ready`).

numba compiles each kernel for a class of processors, not for the one of the machine that builds. Of what it makes, all is
dropped but the kernel itself: what calls it from Python is for numba's own use. A C compiler links the rest with the few
functions of numba's runtime that a kernel calls (`kernels.c`); what describes an exception is found in the interpreter. Then
every function is tried: it must give the bits of the NumPy form for vectors of many lengths, so a numba that calls its
functions in another way ends the build.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from atoll.codec.kernels.ready import (
    LIBRARY,
    MANIFEST,
    Declared,
    LibraryManifest,
    class_of_processor,
    opened,
    sources_digest,
)

CPU = class_of_processor()
# numba reads these when it is loaded. What it has kept of a former compilation has no text that could be looked at.
KEPT = tempfile.TemporaryDirectory()
os.environ |= {"NUMBA_CPU_NAME": CPU, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": KEPT.name}

import llvmlite.binding as llvm  # noqa: E402
import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from atoll.codec import kernels as sets  # noqa: E402
from atoll.codec.encoded import Encoded  # noqa: E402
from atoll.codec.formats import FORMATS, Format  # noqa: E402
from atoll.codec.formats.interface import BLOCK, TILE  # noqa: E402
from atoll.codec.kernels import compiled  # noqa: E402
from atoll.merge.nesterov import DERIVE, NAME, compiled_derive, compiled_step  # noqa: E402
from atoll.merge.outer import MOMENTUM, Nesterov  # noqa: E402

RUNTIME = Path(__file__).with_name("kernels.c")
LENGTHS = (1, BLOCK - 1, BLOCK, 3 * BLOCK + 5, TILE, 5 * TILE + 77)
OPERATIONS = (sets.COPY, sets.BLEND, sets.BEND, sets.MULTIPLY)


def main(folder: Path) -> None:
    """Compile, link and try all kernels."""
    began_s = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    kernels = {
        f"{form.name}_{kernel.__name__}": kernel
        for form in FORMATS.values()
        for kernel in compiled.loops(form)
        if not isinstance(kernel, functools.partial)
    } | {NAME: compiled_step.now(), DERIVE: compiled_derive.now()}
    with tempfile.TemporaryDirectory() as objects:
        machine = Machine()
        paths = [machine.compile(kernel, name, Path(objects) / f"{name}.o") for name, kernel in kernels.items()]
        words = ["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-s", "-o", folder / LIBRARY, RUNTIME, *paths]
        subprocess.run([*words, "-lm"], check=True)
    declared = {name: _declared(kernel) for name, kernel in kernels.items()}
    (folder / MANIFEST).write_bytes(msgspec.json.encode(LibraryManifest(CPU, sources_digest(), declared)) + b"\n")
    for form in FORMATS.values():
        _try(form, folder)
    _try_steps(folder)
    size_mb, took_s = (folder / LIBRARY).stat().st_size / 1e6, time.monotonic() - began_s
    print(f"{folder / LIBRARY}: {len(kernels)} kernels for {CPU}, {size_mb:.1f} MB, in {took_s:.0f} s")


class Machine:
    """Makes object files for a class of processors, for a shared library."""

    def __init__(self) -> None:
        """Describe the processor to LLVM."""
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        cpu = "" if CPU == "generic" else CPU
        target = llvm.Target.from_default_triple()
        self._machine = target.create_target_machine(cpu=cpu, opt=3, reloc="pic", codemodel="default")

    def compile(self, kernel: Any, name: str, path: Path) -> Path:  # noqa: ANN401  (of numba)
        """Write the object file of one kernel, which has this name there and shows no other."""
        (signature,) = kernel.signatures
        wanted = kernel.overloads[signature].fndesc.llvm_func_name
        module = llvm.parse_assembly(kernel.inspect_llvm(signature))
        for each in (*module.functions, *module.global_variables):
            if each.is_declaration:
                continue
            each.linkage = "external" if each.name == wanted else "internal"
        module.get_function(wanted).name = name
        passes = llvm.create_new_module_pass_manager()
        passes.add_global_dead_code_eliminate_pass()
        passes.add_strip_dead_prototype_pass()
        passes.run(module, llvm.create_pass_builder(self._machine, llvm.create_pipeline_tuning_options()))
        path.write_bytes(self._machine.emit_object(module))
        return path


def _declared(kernel: Any) -> Declared:  # noqa: ANN401  (of numba)
    (signature,) = kernel.signatures
    returns = str(kernel.overloads[signature].signature.return_type)
    return Declared(tuple(_word(each) for each in signature), returns)


def _word(kind: Any) -> str:  # noqa: ANN401  (of numba)
    """Return the word for a type of numba's."""
    dtype = getattr(kind, "dtype", None)
    return str(kind) if dtype is None else f"[{dtype}]{'!' if kind.mutable else ''}"


def _try(form: Format, folder: Path) -> None:
    """End the build if a format's functions do not give the bits of the NumPy form."""
    plain, ready = sets.plain_kernels(form), sets.ready_kernels(form, folder)
    if ready is None:
        raise SystemExit(f"{folder} does not count here")
    for elements in LENGTHS:
        draw = np.random.default_rng(elements)
        vector, other = (draw.normal(size=elements).astype(np.float32) for _ in range(2))
        found = [_bits(each, form, vector, other) for each in (plain, ready)]
        if found[0] != found[1]:
            raise SystemExit(f"{form.name}, {elements} elements: other bits than NumPy's")


def _bits(made: sets.Kernels, form: Format, vector: Any, other: Any) -> list[Any]:  # noqa: ANN401  (vectors)
    """Return all that a set of functions makes of a vector."""
    sent = Encoded.blank(form, vector.size)
    said: list[Any] = [made.quantise(vector, sent.codes, sent.scales), sent.codes.tobytes(), sent.scales.tobytes()]
    start, stop = min(3, vector.size - 1), vector.size
    for operation in OPERATIONS:
        acc, lanes = other.copy(), np.zeros(BLOCK)
        made.over(operation, sent.codes, sent.scales, start, stop, other, acc, lanes, 0.5, 0.25, 0.125)
        said += [acc.tobytes(), lanes.tobytes()]
    said.append(made.squares(sent.codes, sent.scales, start, stop))
    following, carry = other.copy(), np.zeros(vector.size, np.uint16)
    said.append(made.settle(vector, following, sent.codes, sent.scales, carry))
    return [*said, following.tobytes(), carry.tobytes(), sent.codes.tobytes(), sent.scales.tobytes()]


def _try_steps(folder: Path) -> None:
    """End the build if the outer step does not give the bits of the NumPy form."""
    draw = np.random.default_rng(0)
    values, gradient, before = (draw.normal(size=3000).astype(np.float32) for _ in range(3))
    carry = draw.integers(0, 1 << 14, 3000).astype(np.uint16)
    after, kept, same, same_kept = (np.empty_like(values) for _ in range(4))
    Nesterov(0.6, 0.3).step(values, carry, gradient, {MOMENTUM: before}, after, {MOMENTUM: kept})
    opened(folder)[NAME](values, carry, gradient, before, 0.6, 0.3, same, same_kept)
    if after.tobytes() + kept.tobytes() != same.tobytes() + same_kept.tobytes():
        raise SystemExit("outer steps have other bits than NumPy's")
    optimizer = Nesterov(0.6, 0.3)
    optimizer.derive(before, values, gradient, kept)
    per_lr, share = (np.float32(each) for each in (1.0 / 0.6, 1.0 / 1.3))
    opened(folder)[DERIVE](before, values, gradient, 0.3, per_lr, share, same_kept)
    if kept.tobytes() != same_kept.tobytes():
        raise SystemExit("derived momenta have other bits than NumPy's")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
