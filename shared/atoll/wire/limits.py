"""Bounds that every bus keeps: the size of a message, and the content of its `info`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from atoll.base.errors import ProtocolMisuse

Buffer = bytes | bytearray | memoryview
CHUNK_BYTES = 1 << 20
"""Payload bytes of one chunk of a blob: larger messages cost the broker ten times the memory and bring no gain."""
MESSAGE_BYTES_MAX = CHUNK_BYTES
"""Payload bytes of any other message; beyond it `ProtocolMisuse`, since the broker would close the connection."""
INFO_BYTES_MAX = 4096
"""Bytes of `info` as compact JSON."""
INFO_HEADER = "Atoll-Info"
"""The header under which taps find `info`."""
Info = Mapping[str, str | int | float | bool]


def check_size(subject: str, data: Buffer) -> None:
    """Refuse a message that is so large that the broker would close the connection."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise ProtocolMisuse(
            "a message is too large",
            got=f"{len(data)} bytes on {subject}",
            allowed=f"up to {MESSAGE_BYTES_MAX}",
            todo="store it with put_blob and send where it lies",
        )


def info_text(info: Info) -> str:
    """Return `info` as compact JSON on one line."""
    text = json.dumps(dict(info), separators=(",", ":"))
    if len(text) > INFO_BYTES_MAX:
        raise ProtocolMisuse("info is too large", got=len(text), allowed=f"up to {INFO_BYTES_MAX} bytes")
    return text
