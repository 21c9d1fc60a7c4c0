"""Blobs in pieces: cutting, going on after a failure, and what a reader finds out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator

import pytest

from atoll.base.errors import BlobCorrupt, PeerMisbehaved, ProtocolMisuse, StorageFull
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.bus.nats.blobs import UploadWindow
from atoll.wire.blobs import PAGE_PIECES, BlobRef, Cut, Download, Portion, Upload, digest_of, whole
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.subjects import Subjects

STEM = Subjects("r").state_stem(0, 1, "n")


class WrittenPiece:
    """Pieces that are made when they are due, and say how often."""

    def __init__(self, *pieces: bytes) -> None:
        self.kept = pieces
        self.asked: list[int] = []
        self.size_bytes_max = sum(map(len, pieces))

    def __len__(self) -> int:
        return len(self.kept)

    def piece(self, number: int) -> bytes:
        self.asked.append(number)
        return self.kept[number]


@pytest.mark.parametrize("sizes", [(0,), (1,), (CHUNK_BYTES,), (CHUNK_BYTES + 1,), (5, CHUNK_BYTES, 7), (3, 0, 4)])
def test_buffers_are_cut_into_full_pieces(sizes: tuple[int, ...]) -> None:
    """What lies one behind the other is cut as if it were one, and is copied only across a border."""
    buffers = [bytes([number]) * size for number, size in enumerate(sizes)]
    joined = b"".join(buffers)
    cut, one = Cut(*buffers), Cut(joined)
    assert len(cut) == len(one) == -(-len(joined) // CHUNK_BYTES)
    assert [bytes(cut.piece(n)) for n in range(len(cut))] == [bytes(one.piece(n)) for n in range(len(one))]
    assert b"".join(one.piece(n) for n in range(len(one))) == joined
    assert digest_of(cut) == digest_of(one)


def test_any_buffer_is_flat_bytes() -> None:
    numbers = memoryview(bytearray(range(8))).cast("Q")
    assert bytes(Cut(numbers).piece(0)) == bytes(range(8))


async def test_an_upload_goes_on_where_it_was() -> None:
    """What the broker has is neither made nor stored again; the reference is that of an upload without a failure."""
    pieces = WrittenPiece(*(bytes([n]) * (CHUNK_BYTES - n) for n in range(5)))
    small = MemoryBus("r", MemoryBroker(stream_bytes_max=3 * CHUNK_BYTES))
    upload = Upload(pieces)
    with pytest.raises(StorageFull):
        await small.put_blob(STEM, upload)
    assert upload.missing() == [2, 3, 4]
    roomy = MemoryBus("r", MemoryBroker())
    pieces.asked.clear()
    ref = await roomy.put_blob(STEM, upload)
    assert sorted(pieces.asked) == [2, 3, 4]  # made by threads, in any order
    assert ref == await roomy.put_blob(STEM, Upload(pieces))
    assert await roomy.get_blob(ref, ref.size_bytes) == b"".join(pieces.kept)


def test_a_piece_that_is_too_large_is_our_mistake() -> None:
    """The broker would hang up on us."""
    with pytest.raises(ProtocolMisuse, match="too large"):
        Upload(WrittenPiece(bytes(CHUNK_BYTES + 1))).make(0)


async def test_a_download_goes_on_where_it_was() -> None:
    bus = MemoryBus("r", MemoryBroker())
    ref = await bus.put_blob(STEM, bytes(3 * CHUNK_BYTES + 1))
    download = Download(ref, ref.size_bytes)
    first = await anext(bus.pieces(download))
    rest = [piece async for portion in bus.pieces(download) for piece in portion]
    assert [number for number, _ in (*first, *rest)] == [0, 1, 2, 3]
    assert [portion async for portion in bus.pieces(download)] == []


async def test_pages_hold_what_is_missing() -> None:
    """A bounded number of pieces is asked for at once."""
    bus = MemoryBus("r", MemoryBroker())
    ref = await bus.put_blob(STEM, Upload(WrittenPiece(*[b"x"] * (PAGE_PIECES + 3))))
    download = Download(ref, ref.size_bytes)
    download.take(1, b"x")
    again = download.copy()
    again.take(0, b"x")
    assert [len(page) for page in download.pages()] == [PAGE_PIECES, 2]
    assert [len(page) for page in again.pages()] == [PAGE_PIECES, 1]


async def test_what_is_not_what_was_announced_is_corrupt() -> None:
    """Too long at once, too short or changed at the end; pieces in another order are another blob."""
    ref = Upload(WrittenPiece(b"ab", b"cd"))
    ref.make(0), ref.make(1)
    good = ref.ref(STEM)

    async def read(*pieces: bytes) -> bytes:
        class CountedSource:
            async def pieces(self, download: Download) -> AsyncGenerator[Portion]:
                for number, piece in enumerate(pieces):
                    download.take(number, piece)
                    yield [(number, piece)]
                download.verify()

        return await whole(CountedSource(), Download(good, 4))

    assert await read(b"ab", b"cd") == b"abcd"
    for wrong, why in (((b"ab", b"cde"), "longer"), ((b"ab", b"c"), "size"), ((b"cd", b"ab"), "digest")):
        with pytest.raises(BlobCorrupt, match=why):
            await read(*wrong)


def test_an_impossible_reference_is_refused_before_anything_is_read() -> None:
    for ref in (BlobRef(STEM, 3, 2, ""), BlobRef(STEM, 1, 11, "")):
        with pytest.raises(PeerMisbehaved):
            Download(ref, 10)


async def test_the_window_follows_the_link() -> None:
    """Late answers close it by one each, down to one; prompt ones open it again; whoever waits is let in."""
    window, moments = UploadWindow(8, patience_s=10.0), itertools.count()
    assert window.size == 4
    for _ in range(6):
        await window.enter(lambda: next(moments))
        window.leave(took_s=3.0, now_s=next(moments))
    assert window.size == 1
    assert window.busy_s == 6.0
    await window.enter(lambda: next(moments))
    waiting = asyncio.create_task(window.enter(lambda: next(moments)))
    await asyncio.sleep(0)
    assert not waiting.done()
    window.leave(took_s=0.1, now_s=next(moments))
    await waiting
    for _ in range(9):
        window.leave(took_s=0.1, now_s=next(moments))
        await window.enter(lambda: next(moments))
    assert window.size == 8
