"""The arithmetic of pushes and merges beside what memory allows: `make bench-arithmetic`.

Every figure is a ratio to a limit measured right before and after it, of which the faster counts, and the best of `REPEATS`
rounds on both sides. The limit of a fold is the compiled loop `a += s * d` over float32 on one thread, by the 12 bytes of a
number that it touches; that of a codec is `numpy.copyto`. All is on one thread, but what JAX does.

    fold        decode and accumulate, acc <- keep acc + take v: the codes once, the sum read and written once
    check       sums of squares per slice, which verify the norms that a learner claims, chunk by chunk as a vector arrives
    with it     the check and the fold from memory, as the share of the limit for the bytes of the fold
    bent        a fold that also adds a multiple of the momentum (HeLoCo): four bytes a number more
    NumPy       the same fold as textbook code
    jitted      the quantiser in JAX, which encodes where parameters lie; its limit is a copy on the same device
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np
from numba import njit
from rich.progress import track

from atoll.base.large_arrays import Vector
from atoll.base.parallel import PART
from atoll.codec import FORMATS, Encoded, Framing, encode_frame
from atoll.codec.formats import BF16, INT4, INT8
from atoll.codec.formats.interface import BLOCK
from atoll.codec.kernels import kernels
from atoll.codec.on_device import quantise
from atoll.merge.outer import MOMENTUM, NO_CARRY, Nesterov
from benchmarks.lib.compiled import compile_kernels
from benchmarks.lib.harness import Figure, at_least, fact, run_benchmark

ELEMENTS = 50_000_000 // 1024 * 1024
REPEATS = 9
FOLD_MIN, ENCODE_MIN, DECODE_MIN = 0.8, 0.4, 0.8
STEP_BYTES = 20
CHUNK_BYTES = 1 << 20


@njit(nogil=True, error_model="numpy")
def in_place(total: Vector, vector: Vector, factor: np.float32) -> None:
    """Do `total += factor * vector`: the limit."""
    for i in range(total.size):
        total[i] += factor * vector[i]


@dataclass(frozen=True, slots=True)
class ArithmeticBench:
    """Vectors of `elements` numbers, normally distributed, and how often everything is repeated."""

    vector: Vector
    total: Vector
    momentum: Vector
    repeats: int

    @classmethod
    def of(cls, elements: int, repeats: int, seed: int) -> ArithmeticBench:
        dice = np.random.default_rng(seed)
        vector, momentum = (dice.standard_normal(elements, dtype=np.float32) * np.float32(1e-3) for _ in range(2))
        return cls(vector, np.zeros_like(vector), momentum, repeats)

    def share(
        self, took: Callable[[], float], limit: Callable[[], object], work_bytes: float, limit_bytes: float
    ) -> float:
        """Return the best rate of what `took` does and times over the best rate of `limit`, in bytes a second."""
        best, bound = np.inf, np.inf
        for _ in range(self.repeats):
            bound, best = min(bound, seconds(limit)), min(best, took())
        bound = min(bound, seconds(limit))
        return float((work_bytes / best) / (limit_bytes / bound))

    def beside_memory(self, work: Callable[[], object], bytes_a_number: float) -> float:
        """Return the share of the in-place limit, by the bytes that `work` must touch."""
        return self.timed_beside_memory(lambda: seconds(work), bytes_a_number)

    def timed_beside_memory(self, took: Callable[[], float], bytes_a_number: float) -> float:
        """Return the same of what says itself how long it took."""
        count, half = self.vector.size, np.float32(0.5)
        return self.share(took, lambda: in_place(self.total, self.vector, half), bytes_a_number * count, 12.0 * count)

    def beside_copy(self, work: Callable[[], object]) -> float:
        """Return the share of the rate at which the float32 vector is copied."""
        copy = np.empty_like(self.vector)
        size = float(self.vector.nbytes)
        return self.share(lambda: seconds(work), lambda: np.copyto(copy, self.vector), size, size)


def main(*, elements: int = ELEMENTS, repeats: int = REPEATS, seed: int = 0) -> list[Figure]:
    compile_kernels()
    bench = ArithmeticBench.of(elements, repeats, seed)
    figures = []
    for codec in track(list(FORMATS), description="measuring"):
        figures += figures_of(bench, codec)
    figures += [*outer_steps(bench), encoded_on_device(bench)]
    return figures


def figures_of(bench: ArithmeticBench, codec: str) -> list[Figure]:
    form, count = FORMATS[codec], bench.vector.size
    sent, framing = Encoded.of(bench.vector, form), Framing(count, codec)
    segments = [bench.vector[slice(*framing.bounds(number))] for number in range(framing.segments)]
    fold_bytes = 8.0 + form.size(count) / count
    out = np.empty_like(bench.vector)

    def fold() -> None:
        sent.blend(bench.total, 0, count, 0.75, 0.25)

    def encode() -> None:
        for segment in segments:
            Encoded.of(segment, form)

    def bend() -> None:
        sent.bend(bench.total, (0, count), (0.75, 0.25, 0.125), bench.momentum)

    folded = bench.beside_memory(fold, fold_bytes)
    check_s = checked_s(sent, bench.repeats)
    both = bench.timed_beside_memory(lambda: check_s + seconds(fold), fold_bytes)
    encoded = bench.beside_copy(encode)
    decoded = bench.beside_copy(lambda: sent.copy(out, 0, count))
    wire = 8.0 * len(encode_frame(bench.vector, codec)) / count
    error, cosine = kept(bench.vector, sent)
    how = f"{count / 1e6:.0f}M numbers, best of {bench.repeats}"
    least = (ENCODE_MIN, DECODE_MIN) if codec == "int4" else (None, None)
    return [
        at_least(f"{codec}: fold", folded, "of limit", FOLD_MIN, how),
        at_least(f"{codec}: check and fold", both, "of limit", FOLD_MIN, how),
        fact(f"{codec}: check", 1e9 * check_s / count, "ns/number", how),
        fact(f"{codec}: bent fold", bench.beside_memory(bend, fold_bytes + 4.0), "of limit", how),
        fact(f"{codec}: NumPy fold", bench.beside_memory(textbook(bench, sent), fold_bytes), "of limit", how),
        at_least(f"{codec}: encode", encoded, "of memcpy", least[0], how),
        at_least(f"{codec}: decode", decoded, "of memcpy", least[1], how),
        fact(f"{codec}: on the wire", wire, "bits/number", "normally distributed; zstd where it is used"),
        fact(f"{codec}: relative error", error, "L2", "normally distributed"),
        fact(f"{codec}: cosine", cosine, "", "normally distributed"),
    ]


def outer_steps(bench: ArithmeticBench) -> list[Figure]:
    """Return how fast the outer step is, and what a delta of four bits adds to it.

    A step reads values, pseudo-gradient and momentum, and writes values and momentum. Settling reads the values before and
    after it, and writes the latter, codes, scales and the carry, each once.
    """
    count = bench.vector.size
    values, momentum, carry = np.empty_like(bench.vector), np.empty_like(bench.vector), np.empty(count, dtype=np.uint16)
    delta, outer = Encoded.blank(INT4, count), Nesterov(0.5, 0.5)

    def step() -> None:
        outer.step(bench.vector, NO_CARRY, bench.total, {MOMENTUM: bench.momentum}, values, {MOMENTUM: momentum})

    def settle() -> None:
        kernels(INT4, count).settle(bench.vector, values, delta.codes, delta.scales, carry)

    settled = 14.0 + INT4.size(count) / count
    return [
        fact("Nesterov step", bench.beside_memory(step, STEP_BYTES), "of limit", "20 bytes a number"),
        fact("int4: settle", bench.beside_memory(settle, settled), "of limit", f"{settled:.1f} bytes a number"),
    ]


def encoded_on_device(bench: ArithmeticBench) -> Figure:
    """Return how fast JAX's first device quantises a vector that lies there, beside a copy of the vector on that device."""
    vector = jax.device_put(bench.vector)
    size = float(bench.vector.nbytes)

    def encode() -> None:
        jax.block_until_ready(quantise(INT4, vector, 0, feedback=False))  # type: ignore[no-untyped-call]

    encode()
    share = bench.share(lambda: seconds(encode), lambda: vector.copy().block_until_ready(), size, size)
    how = f"on JAX's first device, {vector.device.platform}; codes stay there"
    return fact("int4: jitted encode", share, "of a copy", how)


def checked_s(sent: Encoded, repeats: int) -> float:
    """Return how much longer all chunks take to arrive if each is checked when it has been put in its place."""
    size = min(CHUNK_BYTES // (sent.format.block_bytes // BLOCK or 1), PART)
    came, place = sent.stretch(0, size), Encoded.blank(sent.format, sent.elements)

    def arrive(*, checked: bool) -> None:
        for start in range(0, sent.elements - size + 1, size):
            here = place.stretch(start, start + size)
            here.codes[:], here.scales[:] = came.codes, came.scales
            if checked:
                here.products([(0, size)])

    with_it = without = np.inf
    for _ in range(repeats):
        with_it = min(with_it, seconds(lambda: arrive(checked=True)))
        without = min(without, seconds(lambda: arrive(checked=False)))
    return (with_it - without) * sent.elements / (sent.elements // size * size)


def textbook(bench: ArithmeticBench, sent: Encoded) -> Callable[[], None]:
    """Return a fold in plain NumPy, which expands the vector first."""
    bits = {BF16: ml_dtypes.bfloat16, INT8: np.int8}
    total, keep, take = bench.total, np.float32(0.75), np.float32(0.25)

    def fold() -> None:
        if sent.format in bits:
            vector = sent.codes.view(bits[sent.format])[: sent.elements].astype(np.float32)
        elif not sent.scales.size:
            vector = sent.codes.view(np.float32)
        else:
            pairs = sent.codes.reshape(-1, BLOCK // 2)
            codes = np.concatenate([pairs & 15, pairs >> 4], axis=1).reshape(-1)[: sent.elements]
            vector = codes.astype(np.float32) - np.float32(8.0)
        if sent.scales.size:
            vector = vector * np.repeat(sent.scales, BLOCK)[: sent.elements]
        np.add(keep * total, take * vector, out=total)

    return fold


def kept(vector: Vector, sent: Encoded) -> tuple[float, float]:
    """Return the relative L2 error and the cosine of what arrives."""
    arrived = sent.expanded()
    length = float(np.linalg.norm(vector))
    error = float(np.linalg.norm(arrived - vector)) / length
    return error, float(np.dot(arrived, vector)) / (length * float(np.linalg.norm(arrived)))


def seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    run_benchmark("bench-arithmetic", main)
