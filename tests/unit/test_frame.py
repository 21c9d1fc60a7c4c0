"""Tensor frames: round trips, segments in any order, what is refused and when, and what arrives."""

from __future__ import annotations

import random
import tracemalloc

import msgspec
import numpy as np
import pytest
import xxhash
import zstandard

from atoll.base.errors import FrameRejected, PeerMisbehaved, SettingsError
from atoll.base.large_arrays import Vector
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.codec import (
    FORMATS,
    Encoded,
    EncodedFrame,
    FrameDecoder,
    FrameEncoder,
    Framing,
    StoredFrame,
    decode_frame,
    encode_frame,
    format_of,
    frame_bytes,
)
from atoll.codec.formats.interface import BLOCK
from atoll.codec.frames import COMPRESSED, HEADER, MAGIC, VERSION
from atoll.model.layout import FragmentSlice
from atoll.run.delta_chain import FrameReader
from atoll.wire.blobs import BlobRef, Upload
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.messages import decode
from atoll.wire.subjects import Subjects

CODECS = {encoding.number: name for name, encoding in FORMATS.items()}


def drawn(elements: int) -> Vector:
    return np.random.default_rng(elements).normal(size=elements).astype(np.float32)


def sliced(*sizes: int) -> list[FragmentSlice]:
    starts = np.cumsum((0, *sizes))
    return [
        FragmentSlice(str(n), 0, size, int(start), size, direct=False)
        for n, (start, size) in enumerate(zip(starts, sizes, strict=False))
    ]


def sending(vector: Vector, codec: str, slices: list[FragmentSlice] | None = None) -> FrameEncoder:
    return FrameEncoder(Framing(vector.size, codec), lambda start, stop: vector[start:stop], slices or [])


F32, BF16, INT8, INT4, E3M0 = (FORMATS[name].number for name in ("f32", "bf16", "int8", "int4", "e3m0"))


def made(payload: bytes, elements: int, number: int = F32, flags: int = 0) -> bytes:
    """Return a frame of one segment with a right checksum around any payload."""
    digest = xxhash.xxh3_64_intdigest(payload)
    head = HEADER.pack(MAGIC, VERSION, number, flags, 0, elements, 0, elements, len(payload), digest)
    return head + payload


def reason(data: bytes | bytearray, elements: int, codec: str = "f32") -> str:
    """Return why the frame is refused."""
    with pytest.raises(FrameRejected) as caught:
        decode_frame(data, elements_expected=elements, codec=codec)
    return caught.value.reason


@pytest.mark.parametrize("elements", [0, 1, 127, 128, 1000, 1 << 18, (1 << 21) + 77])
@pytest.mark.parametrize("codec", list(FORMATS))
def test_a_reader_sees_what_its_sender_saw(codec: str, elements: int) -> None:
    """Compressed or not; no segment is longer than a message, and no frame longer than the bound."""
    vector = drawn(elements)
    sent, seen = sending(vector, codec), Encoded.of(vector, format_of(codec))
    pieces = [sent.piece(number) for number in range(len(sent))]
    assert max(map(len, pieces)) <= CHUNK_BYTES
    assert sum(map(len, pieces)) <= frame_bytes(elements, codec)
    expected = seen.expanded().tobytes()
    whole = encode_frame(vector, codec)
    assert whole == b"".join(pieces) == b"".join(StoredFrame(whole).piece(number) for number in range(len(sent)))
    for form in (whole, bytes(whole), memoryview(whole)):
        assert decode_frame(form, elements_expected=elements, codec=codec).tobytes() == expected
    frame = EncodedFrame(codec, seen)
    assert [frame.piece(number) for number in range(len(frame))] == pieces


@pytest.mark.parametrize("codec", list(FORMATS))
def test_segments_may_come_in_any_order_and_again(codec: str) -> None:
    """The vector and its norms are the sender's, bit for bit, whichever way its segments take."""
    vector = drawn(5_000_000)
    slices = sliced(1, 300_000, 3_000_000, 77, 1_699_922)
    sent = sending(vector, codec, slices)
    pieces = {number: sent.piece(number) for number in reversed(range(len(sent)))}
    order = [*pieces, *pieces]
    random.Random(codec).shuffle(order)
    arriving = FrameDecoder(vector.size, codec, slices)
    arriving.take([(number, pieces[number]) for number in order])
    assert len(pieces) > 1
    assert arriving.norms() == sent.norms()
    expanded = Encoded.of(vector, format_of(codec)).expanded()
    assert arriving.values().tobytes() == arriving.vector.expanded().tobytes() == expanded.tobytes()
    exact = [np.linalg.norm(expanded[s.offset : s.offset + s.size].astype(np.float64)) for s in slices]
    assert sent.norms() == pytest.approx(exact, rel=1e-6)


def test_what_comes_as_float32_is_not_copied() -> None:
    arriving = FrameDecoder(1000, "f32")
    arriving.take([(0, sending(drawn(1000), "f32").piece(0))])
    assert np.shares_memory(arriving.values(), arriving.vector.codes)


def test_a_segment_in_another_place_is_refused() -> None:
    sent = sending(drawn(600_000), "f32")
    arriving = FrameDecoder(600_000, "f32")
    for number, piece in ((0, 1), (1, 0), (2, 1), (3, 0), (-1, 2)):
        with pytest.raises(FrameRejected) as caught:
            arriving.take([(number, sent.piece(piece))])
        assert caught.value.reason == "size"


def test_nibbles_lie_half_a_block_apart_and_scales_before_them() -> None:
    """The wire, byte by byte: a scale of 1 as bfloat16, then codes of 8 + q."""
    vector = np.zeros(2 * BLOCK, np.float32)
    vector[[0, 1, 64, 127]] = 7.0, -3.0, 2.0, -7.0
    codes = Encoded.of(vector, format_of("int4")).codes
    assert bytes(codes[:2]) == bytes([8 + 7 | (8 + 2) << 4, 8 - 3 | 8 << 4])
    assert codes[63] == 8 | (8 - 7) << 4
    frame = encode_frame(vector, "int4")
    assert decode_frame(frame, elements_expected=2 * BLOCK, codec="int4").tobytes() == vector.tobytes()


@pytest.mark.parametrize("codec", ["int4", "e3m0"])
def test_four_bits_are_shorter_than_four_bits_and_a_scale(codec: str) -> None:
    size = len(encode_frame(drawn(1 << 16), codec))
    assert size * 8 / (1 << 16) < 4.0


def test_what_zstd_cannot_shorten_is_sent_as_it_is() -> None:
    """Codes that are all as common as each other gain nothing, so they do not travel compressed."""
    frame = encode_frame(np.random.default_rng(0).uniform(-7, 7, BLOCK).astype(np.float32), "int4")
    assert len(frame) == frame_bytes(BLOCK, "int4")
    assert frame[6] == 0


def test_an_unknown_codec_is_a_setting_to_correct() -> None:
    with pytest.raises(SettingsError, match="f32, bf16, int8"):
        encode_frame(drawn(3), "fp4")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_sent(value: float) -> None:
    """The sender refuses it before anybody else has to."""
    with pytest.raises(FrameRejected) as caught:
        encode_frame(np.array([1.0, value], np.float32), "f32")
    assert caught.value.reason == "not_finite"


def test_a_short_frame_is_truncated() -> None:
    data = encode_frame(drawn(4), "f32")
    assert {reason(data[:length], 4) for length in (0, 1, HEADER.size - 1)} == {"truncated"}
    assert reason(data + b"x", 4) == "truncated"


@pytest.mark.parametrize(
    ("offset", "value", "expected"),
    [
        (0, ord("B"), "foreign"),
        (4, 1, "version"),
        (5, 0, "codec"),
        (5, BF16, "codec"),
        (5, 9, "codec"),
        (6, 2, "version"),
        (7, 1, "version"),
        (8, 5, "size"),
        (15, 255, "size"),
        (16, 1, "size"),
        (24, 0, "size"),
        (32, 0, "checksum"),
        (HEADER.size, 0x7F, "checksum"),
    ],
)
def test_a_changed_byte_is_refused(offset: int, value: int, expected: str) -> None:
    data = bytearray(encode_frame(np.ones(4, np.float32), "f32"))
    assert data[offset] != value
    data[offset] = value
    assert reason(bytes(data), 4) == expected


def test_another_number_of_elements_is_refused() -> None:
    data = encode_frame(drawn(4), "f32")
    assert reason(data, 5) == "size"
    assert reason(data[:-1], 4) == "size"
    assert reason(data + data, 4) == "size"


@pytest.mark.parametrize("number", [F32, BF16, INT8, INT4, E3M0])
def test_a_payload_of_another_length_is_refused(number: int) -> None:
    """A right checksum does not save a payload that its encoding cannot fill."""
    assert reason(made(bytes(3), 4, number), 4, CODECS[number]) == "size"
    assert reason(made(bytes(99), 4, number), 4, CODECS[number]) == "size"


@pytest.mark.parametrize("payload", [b"", b"not zstd at all", b"\x28\xb5\x2f\xfd"])
def test_a_payload_that_is_not_zstd_is_refused(payload: bytes) -> None:
    assert reason(made(payload, 4, flags=COMPRESSED), 4) == "compression"


def test_a_compressed_payload_of_another_size_is_refused() -> None:
    """The declared size must be the encoding's, and must be declared."""
    other = zstandard.ZstdCompressor().compress(bytes(17))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(16))
    cut = zstandard.ZstdCompressor().compress(np.random.default_rng(0).bytes(16))[:-4]
    longer = zstandard.ZstdCompressor().compress(bytes(16)) + b"x"
    for payload in (other, unsized, cut, longer):
        assert reason(made(payload, 4, flags=COMPRESSED), 4) == "compression"


def test_a_bomb_allocates_no_more_than_an_honest_frame() -> None:
    """64 MiB of zeros in a few kilobytes are refused, whether declared or hidden behind a false size."""
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    assert len(bomb) < 1 << 14
    lying = bytearray(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20)))
    honest = zstandard.ZstdCompressor().compress(bytes(16))
    spliced = honest[:6] + bytes(lying[6:])
    tracemalloc.start()
    try:
        for payload in (bomb, bytes(lying), spliced):
            assert reason(made(payload, 4, flags=COMPRESSED), 4) == "compression"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_a_frame_in_another_codec_than_agreed_is_refused() -> None:
    """A run has one codec; a few bytes of zeros in a larger one would take its memory."""
    assert reason(encode_frame(np.zeros(1 << 12, np.float32), "bf16"), 1 << 12, "int4") == "codec"


@pytest.mark.parametrize("elements", [1, 1 << 18])
@pytest.mark.parametrize(("number", "bits"), [(F32, b"\x01\x00\x80\x7f"), (BF16, b"\x81\x7f")])
def test_signalling_not_a_number_is_refused_without_a_warning(number: int, bits: bytes, elements: int) -> None:
    count = min(elements, Framing(elements, CODECS[number]).width)
    assert reason(made(bits * count, count, number), count, CODECS[number]) == "not_finite"


def test_hidden_infinities_are_refused() -> None:
    """What no sender of ours would send is refused in every encoding."""
    assert reason(made(np.array([np.nan, 1.0], "<f4").tobytes(), 2), 2) == "not_finite"
    assert reason(made(b"\x80\x7f", 1, BF16), 1, "bf16") == "not_finite"
    for number, code in ((INT8, b"\x01"), (INT4, b"\x99"), (E3M0, b"\x11")):
        codes = code * (BLOCK if number == INT8 else BLOCK // 2)
        assert reason(made(b"\x80\x7f" + codes, BLOCK, number), BLOCK, CODECS[number]) == "not_finite"
        assert reason(made(b"\xc0\xff" + codes, BLOCK, number), BLOCK, CODECS[number]) == "not_finite"


def test_a_finite_scale_that_makes_infinite_numbers_is_refused() -> None:
    codes = b"\x7f" * BLOCK
    assert reason(made(b"\x7f\x7f" + codes, BLOCK, INT8), BLOCK, "int8") == "not_finite"
    read = decode_frame(made(b"\x80\x7b" + codes, BLOCK, INT8), elements_expected=BLOCK, codec="int8")
    assert np.isfinite(read).all()
    with pytest.raises(FrameRejected, match="cannot hold"):
        encode_frame(np.array([2.0**121], np.float32), "int8")


SIZE = 600_000
STEM = Subjects("r").global_stem(0, 1, "n")


async def test_what_was_sent_arrives_and_is_counted() -> None:
    """Every segment once; a frame's bytes are those of the blob."""
    values = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    bus = MemoryBus("r", MemoryBroker())
    ref = await bus.put_blob(STEM, Upload(FrameEncoder(Framing(SIZE, "f32"), lambda start, stop: values[start:stop])))
    arrival = FrameReader.of(ref, SIZE, "f32")
    await arrival.receive(bus)
    assert arrival.frame.values().tobytes() == values.tobytes()
    assert bus.stats.frame_bytes_down == ref.size_bytes


@pytest.mark.parametrize(
    ("chunks", "size_bytes", "reason"),
    [(3, frame_bytes(SIZE, "f32") + 1, "oversized"), (2, frame_bytes(SIZE, "f32"), "size"), (4, 100, "size")],
)
def test_what_no_honest_sender_names_is_refused(chunks: int, size_bytes: int, reason: str) -> None:
    with pytest.raises(FrameRejected) as caught:
        FrameReader.of(BlobRef(STEM, chunks, size_bytes, ""), SIZE, "f32")
    assert caught.value.reason == reason


@pytest.mark.parametrize("stem", ["a.*", "a.>", "", "a..b", ".a", "a b", "a\n", "a" * 600])
def test_a_reference_to_no_subject_is_refused(stem: str) -> None:
    """A wildcard would read, and remove, what others wrote."""
    data = msgspec.json.encode(BlobRef(stem, 3, 100, "d" * 32))
    with pytest.raises(PeerMisbehaved, match="stem"):
        decode(BlobRef, data)
