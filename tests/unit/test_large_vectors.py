"""Large work in parts: the same bits with any number of threads, in one pass or in many, in new memory or in used."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from atoll.base import large_arrays, parallel
from atoll.base.large_arrays import ROOM_BYTES, ROOMS_KEPT, Vector, room
from atoll.codec import FORMATS, Encoded
from atoll.merge.fold import (
    AccumulateEntry,
    AccumulateStep,
    BatchedAccumulation,
    Corrections,
    FragmentFold,
    SliceCorrection,
    slice_norms,
)
from atoll.merge.outer import Nesterov
from atoll.model.layout import FragmentSlice

ELEMENTS = parallel.SPREAD_ELEMENTS + 3 * 128 + 5
SIZES = [parallel.PART + 77, 100, ELEMENTS - parallel.PART - 177]


def slices() -> tuple[FragmentSlice, ...]:
    offsets = np.cumsum([0, *SIZES])
    return tuple(
        FragmentSlice(f"w{at}", 0, size, int(at), size, direct=False) for at, size in zip(offsets, SIZES, strict=False)
    )


def drawn(seed: int, elements: int = ELEMENTS) -> Vector:
    return np.random.default_rng(seed).standard_normal(elements, dtype=np.float32)


def sent(codec: str, seed: int) -> Encoded:
    return Encoded.of(drawn(seed), FORMATS[codec])


def a_round(codec: str) -> bytes:
    """Return the bits of a round of three contributions, one of them bent, and its outer step."""
    fold, momentum = FragmentFold(slices(), "rda"), drawn(9)
    for number, weight in enumerate([2.0, 1.0, 3.0]):
        pseudo_gradient = sent(codec, number)
        norms = slice_norms(slices(), pseudo_gradient)
        corrections = Corrections(momentum, [SliceCorrection(0.5, 0.25, norms[0]), None, None]) if number == 1 else None
        fold.add(pseudo_gradient, norms, weight, 1.0 if number else 0.5, corrections)
    merged = fold.result().pseudo_gradient
    values, state = Nesterov(0.6, 0.3).update(drawn(8), merged, {"momentum": momentum})
    return b"".join(vector.tobytes() for vector in (merged, values, state["momentum"]))


@pytest.fixture
def _helpers_made_anew() -> Iterator[None]:
    parallel._helpers.cache_clear()
    yield
    parallel._helpers.cache_clear()


@pytest.mark.parametrize("codec", list(FORMATS))
@pytest.mark.usefixtures("_helpers_made_anew")
def test_a_round_has_the_same_bits_with_any_number_of_threads(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = set()
    for cores in (1, 2, 5):
        parallel._helpers.cache_clear()
        monkeypatch.setattr(parallel, "cores", lambda cores=cores: cores)
        results.add(a_round(codec))
    assert len(results) == 1


def test_parts_are_cut_where_vectors_are_not_where_work_begins() -> None:
    part = parallel.PART
    assert parallel.parts(0, 2 * part) == [(0, part), (part, 2 * part)]
    assert parallel.parts(part - 1, 2 * part + 1) == [(part - 1, part), (part, 2 * part), (2 * part, 2 * part + 1)]
    assert parallel.parts(5, 7) == [(5, 7)]
    assert parallel.parts(5, 5) == []


def test_every_item_is_done_once_and_small_work_by_the_caller() -> None:
    """Whoever helps, and whoever else asks for help at the same time."""
    done: list[int] = []
    with ThreadPoolExecutor(4) as callers:
        for asked in [
            callers.submit(parallel.for_each, done.append, range(50), parallel.SPREAD_ELEMENTS) for _ in range(4)
        ]:
            asked.result()
    assert sorted(done) == sorted(4 * list(range(50)))
    by: set[int] = set()
    parallel.for_each(lambda _: by.add(threading.get_ident()), range(100), parallel.SPREAD_ELEMENTS - 1)
    assert by == {threading.get_ident()}


def test_what_the_work_raises_is_raised() -> None:
    def work(number: int) -> None:
        if number >= 0:
            raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        parallel.for_each(work, [0], 1)
    with pytest.raises(ValueError, match=r"\d"):
        parallel.for_each(work, range(20), parallel.SPREAD_ELEMENTS)


@pytest.mark.parametrize("codec", ["f32", "int8", "int4"])
def test_one_pass_does_what_many_would(codec: str) -> None:
    entries = [
        AccumulateEntry(
            sent(codec, number), [None if number == 0 else AccumulateStep(0.5, 0.25)] * 3, None, anew=number == 0
        )
        for number in range(10)
    ]
    by_itself, together = entries[0].pseudo_gradient.expanded(), BatchedAccumulation(slices())
    for entry in entries:
        together.enter(entry)
        if entry is not entries[0]:
            entry.pseudo_gradient.blend(by_itself, 0, ELEMENTS, 0.5, 0.25)
    assert together.total(ELEMENTS).tobytes() == by_itself.tobytes()


def test_no_more_waits_than_a_sum() -> None:
    """Eight contributions of four bits; one in float32 is entered at once."""
    for codec, most in (("f32", 0), ("bf16", 1), ("int8", 3), ("int4", 7)):
        waiting, entered = 0, BatchedAccumulation(slices())
        for number in range(9):
            entered.enter(AccumulateEntry(sent(codec, 1), [AccumulateStep(0.5, 0.5)] * 3, None, anew=number == 0))
            waiting = max(waiting, len(entered._waiting))
        assert waiting == most


def test_nothing_added_is_a_sum_of_zeros() -> None:
    assert not BatchedAccumulation(slices()).total(ELEMENTS).any()


def test_memory_is_used_again_when_nobody_holds_it() -> None:
    elements = large_arrays.KEPT_ELEMENTS + 11
    vector = large_arrays.empty(elements)
    assert (vector.dtype.name, vector.size, vector.flags.writeable) == ("float32", elements, True)
    place, view, buffer = vector.ctypes.data, vector[5:9].view(np.uint8), vector.data
    del vector
    held = [large_arrays.empty(elements) for _ in range(3)]
    del view
    held.append(large_arrays.empty(elements))
    assert place not in {other.ctypes.data for other in held}
    del buffer
    gc.collect()
    assert large_arrays.empty(elements).ctypes.data == place


def test_no_more_bytes_are_kept_than_a_process_can_spare() -> None:
    """Large vectors that lie idle are dearer than the time that they save; also smaller ones beside the largest."""
    large_arrays._spent.clear()
    most = large_arrays.KEPT_ELEMENTS_MAX
    held = [large_arrays.empty(elements) for elements in (most, most, most, most, most // 2, most // 2, most // 4)]
    while held:
        held.pop(0)
    gc.collect()
    assert 0 < sum(map(len, large_arrays._spent)) <= large_arrays.KEPT_BYTES_MAX
    large_arrays._spent.clear()


def test_a_room_comes_back_when_nobody_looks_any_more() -> None:
    large_arrays._spent_rooms.clear()
    first = memoryview(room(ROOM_BYTES))
    first[:4] = b"mine"
    part = first[:4]
    del first
    gc.collect()
    other = room(ROOM_BYTES - 1)
    other[:4] = b"hers"
    assert bytes(part) == b"mine"
    del part
    gc.collect()
    assert bytes(room(ROOM_BYTES)[:4]) == b"mine"


def test_no_more_than_some_are_kept() -> None:
    many = [room(ROOM_BYTES) for _ in range(ROOMS_KEPT + 3)]
    many.clear()
    gc.collect()
    assert len(large_arrays._spent_rooms) == ROOMS_KEPT


def test_other_sizes_are_memory_of_their_own() -> None:
    """A kept room for a few bytes would be a waste, and what is larger does not fit."""
    assert [type(room(size)) for size in (9_000, ROOM_BYTES + 1)] == [bytearray, bytearray]
