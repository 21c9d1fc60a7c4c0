"""The loops of a format's compiled form; `atoll.codec.kernels` says what each one does, `in_numpy` the same in NumPy.

The code is written so that LLVM vectorises the inner loops by itself: rows of a view, indices from zero to a constant (no
wrap-around to check, no remainder), one plain statement per element, integers as narrow as their sums allow. There is no slice
per block: numba would count its references, which costs as much as the work. numba inlines the functions of a format:
functions that LLVM inlines later lose their vector loops. The largest magnitude of a block is found on the bits of its
numbers: as integers, magnitudes are in order, with infinity and NaN above all others.

Squares of floats are first added in float32, those at one place of the eight blocks of a *tile*, as a tree: half the work of
float64, with an error of a few parts in ten million at most. If a sum comes out infinite or tiny, all of it is done again in
float64. Tiles are counted from the beginning of the vector; the part of a tile outside a stretch is zero.

Kernels are compiled for fixed types, before the first call, and once per machine: numba keeps machine code in a folder. It
knows kept code by the function's source file, by its bytecode and by the values of its closure, and does not look at what a
kernel takes from *other* files: the code of a format, and constants. So a kernel that uses other files has their digest,
`stamp`, in its closure. A full, damaged or foreign folder is no reason to stop: then every process compiles for itself.
"""

from __future__ import annotations

import functools
import inspect
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import xxhash
from numba import config, njit, types
from numba.extending import register_jitable

from atoll.base.errors import EnvironmentFault
from atoll.base.large_arrays import Vector
from atoll.base.logs import get
from atoll.base.machine import abilities
from atoll.codec.formats import bf16, interface
from atoll.codec.formats.interface import BLOCK, SCALE_MIN, SQUARES_MIN, TILE, Bytes, Format, Halves, Lanes, Rows
from atoll.codec.kernels.background import ends_with_the_process
from atoll.codec.kernels.in_numpy import BEND, BLEND, COPY, MULTIPLY, Kernels

log = get(__name__)

F = TypeVar("F", bound=Callable[..., Any])
Place = tuple[int, int, int]
Factors = tuple[float, float, float, float]

EIGHT = TILE // BLOCK
CLASSES = {"x86_64": "x86-64-v3"}
"""The class of processors that an image's machine code is for, by LLVM's name; any processor of another kind."""
INFINITE = 0x7F800000

BYTES = types.Array(types.uint8, 1, "C", readonly=True)
BYTES_OUT = types.Array(types.uint8, 1, "C")
F32 = types.float32
F32_IN = types.Array(types.float32, 1, "C", readonly=True)
F32_OUT = types.Array(types.float32, 1, "C")
U16_IN = types.Array(types.uint16, 1, "C", readonly=True)
U16_OUT = types.Array(types.uint16, 1, "C")
LANES = types.Array(types.float64, 1, "C")


def compiled(*signatures: Any) -> Callable[[F], F]:  # noqa: ANN401  (of numba)
    """Compile for these signatures now, and keep the code if numba finds a place for it."""

    def wrap(function: F) -> F:
        ends_with_the_process()
        _choose_processor()
        made: Any
        try:
            made = njit(list(signatures), cache=True, nogil=True)(function)
        except Exception as error:  # noqa: BLE001  (numba, pickle and the file system have their own)
            log.warning("kernels.not_kept", kernel=function.__name__, reason=repr(error))
            made = njit(list(signatures), nogil=True)(function)
        return cast("F", made)

    return wrap


@functools.cache
def inline(function: F) -> F:
    """Make a plain function of another module callable from kernels: numba inlines its code.

    The function itself is returned. In a closure it counts by its name, which is the same in every process; a compiled
    function has no such name. So the code of a kernel that calls it can be kept.
    """
    return register_jitable(inline="always")(function)


def stamp(*sources: Any) -> int:  # noqa: ANN401  (modules, or functions of them)
    """Return a digest of the source files of these modules."""
    files = [Path(inspect.getfile(source)).read_bytes() for source in sources]
    return xxhash.xxh3_64_intdigest(b"".join(files)) >> 1


def _choose_processor() -> None:
    # An image compiles for a class of processors; a program dies of an instruction that its processor does not know.
    settings: Any = config
    if os.environ.get("NUMBA_CACHE_LOCATOR_CLASSES"):
        settings.CPU_NAME, settings.CPU_FEATURES = CLASSES.get(platform.machine(), "generic"), ""
    wanted = settings.CPU_NAME
    if wanted == CLASSES["x86_64"] and "avx2" not in abilities():
        raise EnvironmentFault(
            "kernels for a newer processor", got="one without AVX2", allowed=wanted, todo="nothing: NumPy does the work"
        )


half_of = inline(bf16.half_of)


def kernels(form: Format) -> Kernels:
    """Compile the set of a format, or load it."""
    mark = stamp(interface, bf16, form.compiled.encode)
    squares = _squares_of_floats if form.levels is None else _squares_of_whole_numbers
    return Kernels("fast", _over(form, mark), squares(form, mark), _quantise(form, mark), _settle(form, mark))


def _over(form: Format, mark: int) -> Callable[..., None]:
    made = {change: _over_blocks(form, inline(change), mark) for change in CHANGES.values()}
    by_operation = [made[CHANGES[operation]] for operation in sorted(CHANGES)]

    def over(operation: int, *what: Any) -> None:  # noqa: ANN401  (see `Kernels`)
        by_operation[operation](*what)

    return over


def _over_blocks(form: Format, change: Callable[..., None], mark: int) -> Callable[..., None]:
    code, decode, load = form.code, inline(form.compiled.decode), inline(_load_nibble if form.packed else _load_whole)
    constants = (form.items, form.part, np.float32(form.unit), mark)

    @compiled(types.void(BYTES, F32_IN, types.intp, types.intp, F32_IN, F32_OUT, LANES, F32, F32, F32))
    def over(
        payload: Bytes,
        scales: Vector,
        start: int,
        stop: int,
        others: Vector,
        acc: Vector,
        lanes: Lanes,
        keep: float,
        take: float,
        add: float,
    ) -> None:
        """Do it with elements `start` to `stop`: a part of a block, whole blocks, and a part of a block again."""
        items, width, unit = constants[0], constants[1], constants[2]
        codes, scaled, at = payload.view(code), scales.size > 0, start
        while at < stop:
            first = at // BLOCK
            if at == first * BLOCK and stop - at >= BLOCK:
                end = stop // BLOCK * BLOCK
                rows = codes[first * items : end // BLOCK * items].reshape(-1, items)
                here, beside = acc[at:end].reshape(-1, BLOCK), others[at:end].reshape(-1, BLOCK)
                for row in range(rows.shape[0]):
                    scale = unit * scales[first + row] if scaled else unit
                    share = take * scale
                    for i in range(width):
                        for part in range(BLOCK // width):
                            v, lane = decode(load(rows, row, part, i)), part * width + i
                            change(here, beside, lanes, (row, lane, lane), v, (scale, keep, share, add))
            else:
                end = min((first + 1) * BLOCK, stop)
                scale = unit * scales[first] if scaled else unit
                share, rows = take * scale, codes[first * items : (first + 1) * items].reshape(1, -1)
                here, beside, low = acc[at:end].reshape(1, -1), others[at:end].reshape(1, -1), at - first * BLOCK
                for place in range(end - at):
                    lane = low + place
                    v = decode(load(rows, 0, lane // width, lane % width))
                    change(here, beside, lanes, (0, place, lane), v, (scale, keep, share, add))
            at = end

    return over


# What one operation does with an element whose decoded code is `v`. Its place is a row of `acc` and `others`, an element of
# that row, and a lane of its block. The factors are the block's scale, `keep`, take * scale, and `add`.


def _copy(acc: Rows, _: Rows, __: Lanes, place: Place, v: float, factors: Factors) -> None:
    row, at, _lane = place
    scale, _keep, _share, _add = factors
    acc[row, at] = scale * np.float32(v)


def _blend(acc: Rows, _: Rows, __: Lanes, place: Place, v: float, factors: Factors) -> None:
    row, at, _lane = place
    _scale, keep, share, _add = factors
    acc[row, at] = keep * acc[row, at] + share * np.float32(v)


def _bend(acc: Rows, others: Rows, _: Lanes, place: Place, v: float, factors: Factors) -> None:
    row, at, _lane = place
    _scale, keep, share, add = factors
    acc[row, at] = keep * acc[row, at] + (share * np.float32(v) + add * others[row, at])


def _multiply(_: Rows, others: Rows, lanes: Lanes, place: Place, v: float, factors: Factors) -> None:
    row, at, lane = place
    scale, _keep, _share, _add = factors
    lanes[lane] += np.float64(scale) * (np.float64(v) * np.float64(others[row, at]))


CHANGES = {COPY: _copy, BLEND: _blend, BEND: _bend, MULTIPLY: _multiply}


def _squares_of_whole_numbers(form: Format, mark: int) -> Callable[..., float]:
    code, load = form.code, inline(_load_nibble if form.packed else _load_whole)
    magnitude = inline(form.compiled.magnitude or form.compiled.decode)
    constants, most = (
        (form.items, form.part, np.float32(form.unit), mark),
        (form.levels or 1) / form.unit + 1,
    )
    short = np.int16 if BLOCK * most**2 < 1 << 15 else np.int32  # twice as many in a vector register

    @compiled(types.float64(BYTES, F32_IN, types.intp, types.intp))
    def squares(payload: Bytes, scales: Vector, start: int, stop: int) -> float:
        """Return the sum of squares of elements `start` to `stop`, block by block."""
        items, width, unit = constants[0], constants[1], constants[2]
        rows, total, at = payload.view(code).reshape(-1, items), 0.0, start
        while at < stop:
            first = at // BLOCK
            if at == first * BLOCK and stop - at >= BLOCK:
                end = stop // BLOCK * BLOCK
                here, own = rows[first : end // BLOCK], scales[first : end // BLOCK]
                for row in range(here.shape[0]):
                    sum_of_block = short(0)
                    for i in range(width):
                        for part in range(BLOCK // width):
                            v = short(magnitude(load(here, row, part, i)))
                            sum_of_block = short(sum_of_block + short(v * v))
                    wide = np.float64(unit * own[row])
                    total += wide * wide * np.float64(sum_of_block)
            else:
                end, sum_of_part = min((first + 1) * BLOCK, stop), np.int32(0)
                for lane in range(at - first * BLOCK, end - first * BLOCK):
                    v_of_lane = np.int32(magnitude(load(rows, first, lane // width, lane % width)))
                    sum_of_part = np.int32(sum_of_part + np.int32(v_of_lane * v_of_lane))
                wide = np.float64(unit * scales[first])
                total += wide * wide * np.float64(sum_of_part)
            at = end
        return total

    return squares


def _squares_of_floats(form: Format, mark: int) -> Callable[..., float]:
    code, number = form.code, inline(form.compiled.decode)
    constants = (form.items, mark)

    @compiled(types.float64(BYTES, F32_IN, types.intp, types.intp))
    def squares(payload: Bytes, _: Vector, start: int, stop: int) -> float:
        """Return the sum of squares of elements `start` to `stop`: in float32 by eights, or all in float64."""
        codes, lanes = payload.view(code), np.zeros(constants[0], np.float64)
        for exactly in (False, True):
            lanes[:] = 0.0
            at = start
            while at < stop:
                tile = at // TILE
                if at == tile * TILE and stop - at >= TILE and not exactly:
                    end = stop // TILE * TILE
                    tiles = codes[at:end].reshape(-1, EIGHT, BLOCK)
                else:
                    end = min((tile + 1) * TILE, stop)
                    part = np.zeros(TILE, code)
                    part[at - tile * TILE : end - tile * TILE] = codes[at:end]
                    tiles = part.reshape(-1, EIGHT, BLOCK)
                if exactly:
                    for i in range(BLOCK):
                        lanes[i] += _tree(
                            np.float64(number(tiles[0, 0, i])),
                            np.float64(number(tiles[0, 1, i])),
                            np.float64(number(tiles[0, 2, i])),
                            np.float64(number(tiles[0, 3, i])),
                            np.float64(number(tiles[0, 4, i])),
                            np.float64(number(tiles[0, 5, i])),
                            np.float64(number(tiles[0, 6, i])),
                            np.float64(number(tiles[0, 7, i])),
                        )
                else:
                    for t in range(tiles.shape[0]):
                        for i in range(BLOCK):
                            a, b, c = number(tiles[t, 0, i]), number(tiles[t, 1, i]), number(tiles[t, 2, i])
                            d, e, f = number(tiles[t, 3, i]), number(tiles[t, 4, i]), number(tiles[t, 5, i])
                            lanes[i] += np.float64(
                                _tree(a, b, c, d, e, f, number(tiles[t, 6, i]), number(tiles[t, 7, i]))
                            )
                at = end
            largest, total = 0.0, 0.0
            for i in range(BLOCK):
                largest = max(largest, lanes[i])
                total += lanes[i]
            if total < np.inf and largest >= SQUARES_MIN:
                return total
        return total

    return squares


def _quantise(form: Format, mark: int) -> Callable[..., float]:
    code, encode, pack = form.code, inline(form.compiled.encode), inline(_pack_nibbles if form.packed else _pack_whole)
    levels, constants = np.float32(form.levels or 1), (form.items, mark)

    @compiled(F32(F32_IN, BYTES_OUT, F32_OUT))
    def quantise(vector: Vector, payload: Bytes, scales: Vector) -> float:
        """Write the codes and the scales of a vector; return its largest magnitude."""
        items = constants[0]
        codes, scaled, largest = payload.view(code), scales.size > 0, np.int32(0)
        whole, work = vector.size // BLOCK, np.empty((1, BLOCK), code)
        for last in range(2):
            if last:
                first, rows = whole, _padded(vector, whole * BLOCK, vector.size)
                packed, count = np.zeros((1, items), code), min(1, vector.size - whole * BLOCK)
            else:
                first, rows = 0, vector[: whole * BLOCK].reshape(-1, BLOCK)
                packed, count = codes[: whole * items].reshape(-1, items), whole
            for row in range(count):
                here = np.int32(0)
                for i in range(BLOCK):
                    here = max(here, _magnitude(rows[row, i]))
                largest = max(largest, here)
                if largest >= INFINITE:
                    return np.inf
                inverse = np.float32(1.0)
                if scaled:
                    scale = _scale(levels, here)
                    scales[first + row], inverse = scale, _inverse(scale)
                staged, place = (packed, row) if items == BLOCK else (work, 0)
                for i in range(BLOCK):
                    staged[place, i] = encode(rows[row, i], inverse)
                pack(packed, row, work)
            if last and count:
                left = codes[whole * items :]
                left[:] = packed[0, : left.size]
        return float(np.int32(largest).view(np.float32))

    return quantise


def _settle(form: Format, mark: int) -> Callable[..., float]:
    code, encode, pack = form.code, inline(form.compiled.encode), inline(_pack_nibbles if form.packed else _pack_whole)
    decode, levels = inline(form.compiled.decode), np.float32(form.levels or 1)
    constants = (form.items, np.float32(form.unit), mark)

    @compiled(F32(F32_IN, F32_OUT, BYTES_OUT, F32_OUT, U16_OUT))
    def settle(values: Vector, following: Vector, payload: Bytes, scales: Vector, carry: Halves) -> float:
        """Write the codes and scales of `following - values`, what they make of `values`, and what they leave."""
        items, unit = constants[0], constants[1]
        codes, scaled, largest = payload.view(code), scales.size > 0, np.int32(0)
        size, whole, work = values.size, values.size // BLOCK, np.empty((1, BLOCK), code)
        wanted = np.empty(BLOCK, np.float32)
        for last in range(2):
            if last:
                first, start = whole, whole * BLOCK
                now, then = _padded(values, start, size), _padded(following, start, size)
                packed, rest = np.zeros((1, items), code), np.zeros((1, BLOCK), np.uint16)
                count = min(1, size - start)
            else:
                first, start, count = 0, whole * BLOCK, whole
                now, then = values[:start].reshape(-1, BLOCK), following[:start].reshape(-1, BLOCK)
                packed, rest = codes[: whole * items].reshape(-1, items), carry[:start].reshape(-1, BLOCK)
            for row in range(count):
                here, share, inverse = np.int32(0), unit, np.float32(1.0)
                for i in range(BLOCK):
                    wanted[i] = then[row, i] - now[row, i]
                    here = max(here, _magnitude(then[row, i] - now[row, i]))
                if here >= INFINITE:
                    return np.inf
                if scaled:
                    scale = _scale(levels, here)
                    scales[first + row], inverse = scale, _inverse(scale)
                    share = unit * scale
                staged, place = (packed, row) if items == BLOCK else (work, 0)
                for i in range(BLOCK):
                    staged[place, i] = encode(wanted[i], inverse)
                pack(packed, row, work)
                for i in range(BLOCK):
                    settled = now[row, i] + share * np.float32(decode(staged[place, i]))
                    left = then[row, i] - settled
                    then[row, i] = settled
                    rest[row, i] = half_of(left)
                    here = max(here, _magnitude(left))
                largest = max(largest, here)
                if largest >= INFINITE:
                    return np.inf
            if last and count:
                following[start:], carry[start:] = then[0, : size - start], rest[0, : size - start]
                end = codes[whole * items :]
                end[:] = packed[0, : end.size]
        return float(np.int32(largest).view(np.float32))

    return settle


def _load_whole(rows: Rows, row: int, _: int, i: int) -> Any:  # noqa: ANN401  (of any type)
    return rows[row, i]


def _load_nibble(rows: Rows, row: int, part: int, i: int) -> np.uint8:
    return np.uint8(np.uint8(rows[row, i] >> np.uint8(4 * part)) & np.uint8(15))


def _pack_whole(_: Rows, __: int, ___: Rows) -> None:
    """Do nothing: codes that are stored as they are were written to their places."""


def _pack_nibbles(rows: Rows, row: int, codes: Rows) -> None:
    for i in range(BLOCK // 2):
        high = np.uint8(codes[0, BLOCK // 2 + i] << np.uint8(4))
        rows[row, i] = np.uint8(np.uint8(codes[0, i] & np.uint8(15)) | high)


@njit(inline="always")
def _padded(vector: Vector, start: int, stop: int) -> Rows:
    out = np.zeros((1, BLOCK), np.float32)
    if vector.size:
        low = start % BLOCK
        out[0, low : low + stop - start] = vector[start:stop]
    return out


@njit(inline="always")
def _magnitude(number: np.float32) -> np.int32:
    """Return the bits of a magnitude: as integers they are in order, and NaN is above infinity."""
    return np.int32(np.float32(number).view(np.int32) & np.int32(0x7FFFFFFF))


@njit(inline="always")
def _scale(levels: np.float32, largest: np.int32) -> np.float32:
    """Return what the largest magnitude of a block is so many levels of, rounded up to bfloat16; 0 below `SCALE_MIN`."""
    bits = np.float32(np.int32(largest).view(np.float32) / levels).view(np.int32)
    scale = np.int32(np.int32(bits + np.int32(0xFFFF)) & np.int32(-65536)).view(np.float32)
    return scale if scale > SCALE_MIN else np.float32(0.0)


@njit(inline="always")
def _inverse(scale: np.float32) -> np.float32:
    return np.float32(1.0) / scale if scale > 0.0 else np.float32(0.0)


@njit(inline="always")
def _tree(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:  # noqa: ANN401  (floats of one type)
    return ((a * a + b * b) + (c * c + d * d)) + ((e * e + f * f) + (g * g + h * h))
