"""Rooms for large payloads: used again, but never while somebody looks."""

from __future__ import annotations

import gc

from atoll.base import buffer_pool
from atoll.base.buffer_pool import ROOM_BYTES, ROOMS_KEPT, room


def test_a_room_comes_back_when_nobody_looks_any_more() -> None:
    """Whoever holds a part of it keeps all of it; then it is the next one's."""
    buffer_pool._spent_rooms.clear()
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
    assert len(buffer_pool._spent_rooms) == ROOMS_KEPT


def test_other_sizes_are_memory_of_their_own() -> None:
    """A kept room for a few bytes would be a waste, and what is larger does not fit."""
    assert [type(room(size)) for size in (9_000, ROOM_BYTES + 1)] == [bytearray, bytearray]
