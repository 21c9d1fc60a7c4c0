"""Arrays that need not lie in memory: the same numbers, a smaller process, and a full disk in a sentence."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import psutil
import pytest

from atoll.base import large_arrays
from atoll.base.errors import PeerMisbehaved, StorageFull
from atoll.base.large_arrays import Vector
from atoll.codec import ArraysDecoder, Encoded, EncodedFrame, FrameDecoder, PackedArrays, format_of, pack_arrays
from atoll.merge.fold import FragmentFold, slice_norms
from atoll.merge.global_update import GlobalUpdate, UpdatedFragment
from atoll.merge.outer import make_outer
from atoll.model.layout import FragmentSlice
from atoll.protocol.settings import ProtocolSettings

SIZE = 1_500_000
MIB = 1 << 20


@pytest.fixture
def spilling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(large_arrays, "policy", large_arrays.Policy(float(MIB), tmp_path))
    yield tmp_path
    gc.collect()


def drawn(seed: int, size: int = SIZE) -> Vector:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "float64", "int64", ml_dtypes.bfloat16])
def test_an_array_is_an_array_wherever_it_lies(spilling: Path, dtype: np.typing.DTypeLike) -> None:
    for count, outside in ((0, False), (7, False), (MIB, True)):
        array = large_arrays.spare(count, dtype)
        assert (array.dtype, array.size, array.flags.writeable) == (np.dtype(dtype), count, True)
        array[:] = np.arange(count) % 100
        large_arrays.release_pages(array)
        assert (array == (np.arange(count) % 100).astype(dtype)).all()
        assert (large_arrays.home_of(array) is not None) == outside
        if outside:
            assert large_arrays.home_of(array[5:99].view(np.uint8)) is large_arrays.home_of(
                np.frombuffer(array.view(np.uint8).data)
            )
        assert not large_arrays.zeros(count, dtype).astype(np.float32).any()
    assert list(spilling.iterdir()) == []


@pytest.mark.usefixtures("spilling")
def test_what_is_let_go_leaves_the_process() -> None:
    before = resident_bytes()
    array = large_arrays.spare(64 * MIB, np.uint8)
    array[:] = 7
    full = resident_bytes()
    large_arrays.release_pages(array[5:])
    assert full - before > 60 * MIB
    assert resident_bytes() - before < 8 * MIB
    assert int(array.sum(dtype=np.int64)) == 7 * 64 * MIB
    large_arrays.release_pages(array)
    assert resident_bytes() - before < 8 * MIB


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
@pytest.mark.usefixtures("spilling")
def test_a_folder_without_room_is_said(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFull, match=f"(?s){errno.errorcode[number]}.*scratch_dir"):
        large_arrays.spare(MIB, np.float32)


def test_a_folder_that_nobody_asked_for_may_be_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's temporary files lie in little memory: then arrays lie in memory, as if nothing were spilled."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(large_arrays, "policy", large_arrays.Policy(float(MIB)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    array = large_arrays.zeros(MIB, np.float32)
    assert large_arrays.home_of(array) is None
    assert not array.any()


def stepped(codec: str) -> tuple[Vector, UpdatedFragment, bytes]:
    """Return a sum of two contributions, the step that it leads to, and the frame that is sent of it."""
    slices = [
        FragmentSlice("a", 0, 1, 0, 700_000, direct=False),
        FragmentSlice("b", 0, 1, 700_000, 800_000, direct=True),
    ]
    fold = FragmentFold(slices, "rda")
    for seed in (1, 2):
        frame = EncodedFrame("f32", Encoded.exact(drawn(seed)))
        arriving = FrameDecoder(SIZE, "f32", slices)
        for number in range(len(frame)):
            arriving.take([(number, frame.piece(number))])
        assert arriving.norms() == pytest.approx(slice_norms(slices, arriving.vector))
        fold.add(arriving.vector, arriving.norms(), float(seed))
    merged = fold.result().pseudo_gradient
    settings = ProtocolSettings(codec_down=codec).check()
    advance = GlobalUpdate(make_outer("nesterov", 0.6, 0.3), settings)
    new = advance.step(drawn(3), merged, advance.init(drawn(3)))
    new = advance.step(new.values, merged, new.state)
    assert new.delta is not None
    frame = EncodedFrame(codec, new.delta)
    return merged, new, b"".join(frame.piece(number) for number in range(len(frame)))


@pytest.mark.parametrize("codec", ["int4", "bf16"])
def test_a_round_has_the_same_bits_wherever_its_arrays_lie(
    codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, new, sent = stepped(codec)
    monkeypatch.setattr(large_arrays, "policy", large_arrays.Policy(float(MIB), tmp_path))
    there, other, sent_too = stepped(codec)
    assert large_arrays.home_of(other.values) is not None
    assert (here.tobytes(), new.values.tobytes(), sent) == (there.tobytes(), other.values.tobytes(), sent_too)
    assert pack_arrays(new.state) == pack_arrays(other.state)
    assert format_of(codec).size(SIZE) >= len(sent) - 400


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.usefixtures("spilling")
def test_arrays_travel_in_pieces(order: int) -> None:
    """To and from files, in any order, to the bytes of `pack_arrays`."""
    arrays = {
        "a": large_arrays.spare(SIZE, np.float32),
        "b": np.arange(5),
        "c": large_arrays.spare(SIZE, ml_dtypes.bfloat16).reshape(2, -1),
    }
    arrays["a"][:], arrays["c"][:] = drawn(1), 1.5
    packed = PackedArrays(arrays)
    whole = pack_arrays(arrays)
    pieces = {number: packed.piece(number) for number in range(len(packed))}
    assert b"".join(pieces.values()) == whole
    arriving = ArraysDecoder(len(whole))
    for number in sorted(pieces, reverse=order < 0):
        arriving.take(number, pieces[number])
    got = arriving.arrays()
    assert pack_arrays(got) == whole
    assert [large_arrays.home_of(array) is not None for array in got.values()] == [True, False, True]


def test_pieces_of_something_else_are_refused() -> None:
    whole = pack_arrays({"a": np.zeros(9)})
    for size, piece in ((len(whole) + 1, whole), (len(whole) - 1, whole[:-1]), (4, b"\0\0\0\0"), (40, b"\xff" * 40)):
        with pytest.raises(PeerMisbehaved):
            ArraysDecoder(size).take(0, piece)
    with pytest.raises(PeerMisbehaved, match="header"):
        ArraysDecoder(10).arrays()
