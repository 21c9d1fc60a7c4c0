"""A blob's pieces may arrive in any order, and make one blob only: the one whose pieces stand in their places."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import BlobCorrupt
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.codec import ArraysDecoder, PackedArrays
from atoll.wire.blobs import BlobRef, Download, Portion, Upload, whole
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.subjects import Subjects

pieces_of_blobs = st.lists(st.binary(min_size=1, max_size=6), min_size=2, max_size=6)


class KeptPieces:
    """Pieces in memory, the sender's side of a blob."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.size_bytes_max = sum(map(len, pieces))

    def __len__(self) -> int:
        return len(self.pieces)

    def piece(self, number: int) -> bytes:
        return self.pieces[number]


class Arriving:
    """A broker that hands pieces over in an order of its own; `places` says which piece it believes to be which."""

    def __init__(self, pieces: Sequence[bytes], order: Sequence[int], places: Sequence[int]) -> None:
        self._pieces, self._order, self._places = pieces, order, places

    async def pieces(self, download: Download) -> AsyncGenerator[Portion]:
        for number in self._order:
            piece = self._pieces[self._places[number]]
            download.take(number, piece)
            yield [(number, piece)]
        download.verify()


def sent(pieces: Sequence[bytes], order: Sequence[int]) -> BlobRef:
    """Return the reference of a blob whose pieces were made in this order."""
    upload = Upload(KeptPieces(pieces))
    for number in order:
        upload.make(number)
        upload.stored.add(number)
    assert upload.missing() == []
    return upload.ref("s")


@given(pieces=pieces_of_blobs, data=st.data())
async def test_pieces_arrive_in_any_order_and_stand_in_one(pieces: list[bytes], data: st.DataObject) -> None:
    """Whichever way they were made and come, the reader has the sender's bytes; one exchanged for another is noticed."""
    numbers = range(len(pieces))
    made, come, places = (data.draw(st.permutations(numbers)) for _ in range(3))
    ref = sent(pieces, made)

    assert ref == sent(pieces, list(numbers))
    assert await whole(Arriving(pieces, come, numbers), Download(ref, ref.size_bytes)) == b"".join(pieces)
    if [pieces[place] for place in places] != pieces:
        with pytest.raises(BlobCorrupt, match="digest"):
            await whole(Arriving(pieces, come, places), Download(ref, ref.size_bytes))


async def test_what_a_broker_lost_is_there_again_after_it_is_sent_again() -> None:
    """A broker knows the ids of what it was given, not that it has lost it: the same ids would be taken for granted."""
    bus, pieces = MemoryBus("r", MemoryBroker()), [b"one", b"two"]
    stem = Subjects("r").state_stem(0, 1, "n")
    upload = Upload(KeptPieces(pieces))
    ref = await bus.put_blob(stem, upload)
    await bus.purge(f"{stem}.>")

    upload.forget()

    assert upload.missing() == [0, 1]
    assert await bus.put_blob(stem, upload) == ref
    assert await bus.get_blob(ref, 99) == b"onetwo"
    await bus.close()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1), (1, 3, 0, 2)])
def test_arrays_are_put_together_from_pieces_in_any_order(order: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    state: dict[str, npt.NDArray[Any]] = {
        "momentum": rng.normal(size=3 * CHUNK_BYTES // 4).astype(np.float32),
        "count": np.arange(5),
    }
    packed = PackedArrays(state)
    pieces = [bytes(packed.piece(number)) for number in range(len(packed))]
    assert len(pieces) == len(order)

    decoder = ArraysDecoder(sum(len(piece) for piece in pieces))
    for number in order:
        decoder.take(number, pieces[number])

    got = decoder.arrays()
    assert set(got) == set(state)
    assert all(np.array_equal(got[name], state[name]) for name in state)
