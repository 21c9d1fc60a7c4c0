"""Messages from anybody: what is exactly one of ours is understood, everything else is refused in one way."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import PeerMisbehaved, ProtocolMisuse
from atoll.base.quantities import TOKENS_MAX
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import DOCUMENT_BYTES_MAX, SCHEMA_NEWEST, Beat, Call, Contribution, Head, decode, encode

MANIFEST = Contribution(
    learner="a",
    incarnation=1,
    fragment=0,
    push=1,
    base_version=0,
    tokens=1024,
    steps=1,
    trained_tokens=1024,
    loss=5.5,
    norms=(1.0,),
    layout="f" * 16,
    run_nonce="n",
    blob=BlobRef(stem="stem", size_bytes=10, chunks=1, digest="d" * 32),
)


def changed(**fields: object) -> bytes:
    """Return the manifest as JSON with some fields as a hostile peer would have them."""
    document: dict[str, Any] = json.loads(encode(MANIFEST))
    return json.dumps(document | fields).encode()


def test_a_message_survives_the_wire() -> None:
    assert decode(Contribution, encode(MANIFEST)) == MANIFEST


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": -1},
        {"tokens": 10**300},
        {"tokens": TOKENS_MAX + 1},
        {"steps": -5},
        {"steps": 1.5},
        {"push": "1"},
        {"fragment": -1},
        {"trained_tokens": 2**70},
        {"learner": "a" * 10_000},
        {"norms": ["x"]},
        {"norms": [0.0] * 70_000},
        {"blob": None},
        {"schema": SCHEMA_NEWEST + 1},
    ],
    ids=str,
)
def test_a_claim_out_of_bounds_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(PeerMisbehaved, match="Contribution"):
        decode(Contribution, changed(**fields))


def test_what_nobody_could_read_is_not_written() -> None:
    """The bound of the reader is the writer's too: the largest message survives, one byte more does not leave."""
    most = msgspec.structs.replace(MANIFEST, cause_id="")
    room = DOCUMENT_BYTES_MAX - len(encode(most))

    assert len(encode(msgspec.structs.replace(most, cause_id="a" * room))) == DOCUMENT_BYTES_MAX
    with pytest.raises(ProtocolMisuse, match="too large"):
        encode(msgspec.structs.replace(most, cause_id="a" * (room + 1)))


@pytest.mark.parametrize("kind", [Beat, Call, Contribution, Head])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"learner":"\x80"}',
        b"[" * 5000,
        b'{"learner":NaN}',
        b" " * (DOCUMENT_BYTES_MAX + 1),
    ],
)
def test_what_is_no_message_is_refused(kind: type[msgspec.Struct], data: bytes) -> None:
    with pytest.raises(PeerMisbehaved):
        decode(kind, data)


@given(data=st.binary(max_size=200), cut=st.integers(0, 400))
def test_any_bytes_are_a_message_or_refused(data: bytes, cut: int) -> None:
    """Nothing else is ever raised, for noise and for honest messages that were cut."""
    for candidate in (data, encode(MANIFEST)[:cut] + data):
        with contextlib.suppress(PeerMisbehaved):
            assert isinstance(decode(Contribution, candidate), Contribution)


@pytest.mark.parametrize("kind", [Beat, Call, Contribution, Head])
def test_a_message_that_nests_deeply_is_refused_like_any_other(kind: type[msgspec.Struct]) -> None:
    for text in (b'{"x":' * 100_000, b"[" * 500_000, b'{"schema":1,"y":' + b"[" * 100_000):
        with pytest.raises(PeerMisbehaved, match=f"not a {kind.__name__}"):
            decode(kind, text)
