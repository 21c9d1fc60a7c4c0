"""Tensor frames: round trips, and every reason for which a frame is refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
import zstandard

from atoll.codecs import ENCODINGS, decode_frame, encode_frame, frame_bytes_max
from atoll.codecs.frame import COMPRESSED, HEADER, MAGIC, VERSION
from atoll.errors import FrameRejected, SettingsError

Vector = npt.NDArray[np.float32]


def drawn(elements: int) -> Vector:
    """Return random values."""
    return np.random.default_rng(elements).normal(size=elements).astype(np.float32)


def made(payload: bytes, elements: int, number: int = 1, flags: int = 0) -> bytes:
    """Return a frame with a right checksum around any payload."""
    digest = xxhash.xxh3_64_intdigest(payload)
    return HEADER.pack(MAGIC, VERSION, number, flags, 0, elements, len(payload), digest) + payload


def reason(data: bytes, elements: int) -> str:
    """Return why the frame is refused."""
    with pytest.raises(FrameRejected) as caught:
        decode_frame(data, elements_expected=elements)
    return caught.value.reason


@pytest.mark.parametrize("elements", [0, 1, 127, 1000])
@pytest.mark.parametrize("level", [None, 1, 3])
@pytest.mark.parametrize("codec", list(ENCODINGS))
def test_a_frame_carries_what_its_encoding_keeps(codec: str, level: int | None, elements: int) -> None:
    """Compression changes nothing, and no frame is longer than the bound."""
    vector = drawn(elements)
    data = encode_frame(vector, codec, level)
    assert len(data) <= frame_bytes_max(elements)
    encoding = ENCODINGS[codec]
    expected = encoding.decode(memoryview(encoding.encode(vector)), elements)
    for form in (data, memoryview(data)):
        assert decode_frame(form, elements_expected=elements).tobytes() == expected.tobytes()


def test_compression_shortens_what_repeats() -> None:
    """A frame of zeros is far shorter with zstd."""
    zeros = np.zeros(10_000, np.float32)
    assert len(encode_frame(zeros, "f32", 1)) * 100 < len(encode_frame(zeros, "f32"))


def test_an_unknown_codec_is_a_setting_to_correct() -> None:
    """The message lists the codecs."""
    with pytest.raises(SettingsError, match="f32, bf16, int8"):
        encode_frame(drawn(3), "fp4")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_sent(value: float) -> None:
    """The sender refuses it before anybody else has to."""
    with pytest.raises(FrameRejected) as caught:
        encode_frame(np.array([1.0, value], np.float32), "f32")
    assert caught.value.reason == "not_finite"


def test_a_short_frame_is_truncated() -> None:
    """Less than a header is no frame."""
    data = encode_frame(drawn(4), "f32")
    assert {reason(data[:length], 4) for length in (0, 1, HEADER.size - 1)} == {"truncated"}


@pytest.mark.parametrize(
    ("offset", "value", "expected"),
    [
        (0, ord("B"), "foreign"),
        (4, 2, "version"),
        (5, 0, "codec"),
        (5, 9, "codec"),
        (6, 2, "version"),
        (7, 1, "version"),
        (8, 5, "size"),
        (15, 255, "size"),
        (16, 0, "size"),
        (24, 0, "checksum"),
        (HEADER.size, 0x7F, "checksum"),
    ],
)
def test_a_changed_byte_is_refused(offset: int, value: int, expected: str) -> None:
    """Each field of the header has its reason."""
    data = bytearray(encode_frame(np.ones(4, np.float32), "f32"))
    assert data[offset] != value
    data[offset] = value
    assert reason(bytes(data), 4) == expected


def test_another_number_of_elements_is_refused() -> None:
    """The reader decides how many elements there are, not the frame."""
    data = encode_frame(drawn(4), "f32")
    assert reason(data, 5) == "size"
    assert reason(data[:-1], 4) == "size"
    assert reason(data + b"x", 4) == "size"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_payload_of_another_length_is_refused(number: int) -> None:
    """A right checksum does not save a payload that its encoding cannot fill."""
    assert reason(made(bytes(3), 4, number), 4) == "size"
    assert reason(made(bytes(99), 4, number), 4) == "size"


@pytest.mark.parametrize("payload", [b"", b"not zstd at all", b"\x28\xb5\x2f\xfd"])
def test_a_payload_that_is_not_zstd_is_refused(payload: bytes) -> None:
    """Garbage under the compressed flag is refused as such."""
    assert reason(made(payload, 4, flags=COMPRESSED), 4) == "compression"


def test_a_compressed_payload_of_another_size_is_refused() -> None:
    """The declared size must be the encoding's, and must be declared."""
    other = zstandard.ZstdCompressor().compress(bytes(17))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(16))
    cut = zstandard.ZstdCompressor().compress(np.random.default_rng(0).bytes(16))[:-4]
    for payload in (other, unsized, cut):
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


def test_hidden_infinities_are_refused() -> None:
    """What no sender of ours would send is refused in every encoding."""
    assert reason(made(np.array([np.nan, 1.0], "<f4").tobytes(), 2), 2) == "not_finite"
    assert reason(made(b"\x80\x7f", 1, number=2), 1) == "not_finite"
    assert reason(made(np.array([np.inf], "<f4").tobytes() + b"\x00", 1, number=3), 1) == "not_finite"
    assert reason(made(np.array([3e38], "<f4").tobytes() + b"\x7f", 1, number=3), 1) == "not_finite"
