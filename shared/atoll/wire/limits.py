"""Bounds that every bus keeps: the size of a message, and the content of its `info`."""

from __future__ import annotations

from collections.abc import Mapping

Buffer = bytes | bytearray | memoryview
CHUNK_BYTES = 1 << 20
"""Payload bytes of one chunk of a blob: larger messages cost the broker ten times the memory and bring no gain."""
MESSAGE_BYTES_MAX = CHUNK_BYTES
"""Payload bytes of any other message; beyond it `ProtocolMisuse`, since the broker would close the connection."""
INLINE_BYTES_MAX = 4096
"""Bytes of a contribution's frame that its manifest carries (`atoll.run.delta_chain`)."""
INFO_BYTES_MAX = 4096
"""Bytes of `info` as compact JSON."""
INFO_HEADER = "Atoll-Info"
"""The header under which taps find `info`."""
Info = Mapping[str, str | int | float | bool]
