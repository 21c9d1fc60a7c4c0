"""Cuts a broker's bytes into control lines and messages: no socket, no loop, and no copy of large payloads.

`MSG subject sid [reply] size` and `HMSG subject sid [reply] header-size size` are followed by so many bytes and a line end;
every other line stands alone:

    line --(MSG, HMSG)--> header --> payload --> line end --> line

Lines and small parts are cut from one buffer that is used over and over. A part that is larger than `SMALL_BYTES` and not there
yet gets a buffer of its own, and the next room *is* that buffer: the kernel writes the payload where it stays. Bytes that break
the grammar become an error frame, and everything after them is ignored.

**Headers** are read by our own rules, because anybody who may write may write headers, too:

    NATS/1.0[ <status>[ <description>]]
    <name>: <value>
    ...

Only the broker speaks by a *status* (the end of a batch, no more messages, nobody there). nats-py takes a field of that name,
or a status in a message that somebody has stored, for the broker's word. Here a status counts on the first line only, and never
in a message that a stream has stored: the broker marks those with the stream's name, in a field behind the writer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
from nats.errors import ProtocolError

from atoll.base.large_arrays import room

ROOM_BYTES = 32 << 10
"""The buffer for lines and small parts, and so the longest line."""
SMALL_BYTES = 8 << 10
FRAMED_BYTES_MAX = 64 << 20
"""More than any broker of ours allows, headers included; a line that announces more is refused."""
_END = b"\r\n"


class Message(msgspec.Struct, frozen=True):
    """One message for subscription `sid`; a large payload is a buffer of its own."""

    sid: int
    subject: bytes
    reply: bytes
    header: bytes
    payload: bytes | bytearray | memoryview


Frame = bytes | Message | ProtocolError
"""A line with its end, a message, or what was wrong."""


class Framer:
    """Cuts one connection's bytes. Fill what `room` returns, give the count to `filled`, take from `take`."""

    def __init__(self) -> None:
        self.waiting_bytes = 0
        self.frames: list[Frame] = []
        """Complete frames that are not taken yet."""
        self._buffer = bytearray(ROOM_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._is_deaf = False
        # What a line has announced, empty between messages: its words, and the sizes of header, payload and line end.
        self._head: list[bytes] = []
        self._sizes: tuple[int, ...] = ()
        self._parts: list[bytes | bytearray | memoryview] = []
        self._large: bytearray | memoryview | None = None
        self._got = 0

    def room(self) -> memoryview:
        """Return where the next bytes go; never empty."""
        if self._large is None and self._sizes and self._sizes[len(self._parts)] > SMALL_BYTES:
            # A part that were there would be cut: the kernel writes the rest of this one where it stays.
            self._large, self._got = room(self._sizes[len(self._parts)]), self._end - self._begin
            self._large[: self._got] = self._view[self._begin : self._end]
            self._begin = self._end = 0
        if self._large is not None:
            return memoryview(self._large)[self._got :]
        if self._is_deaf:
            self._begin = self._end = 0
        elif self._begin:
            left = self._end - self._begin
            self._view[:left] = bytes(self._view[self._begin : self._end])
            self._begin, self._end = 0, left
        return self._view[self._end :]

    def filled(self, count: int) -> None:
        """Cut the complete parts now that `count` more bytes are there."""
        if self._large is None:
            self._end += count
        else:
            self._got += count
            if self._got < len(self._large):
                return
            self._parts.append(self._large)
            self._large = None
        while not self._is_deaf:
            begin = self._begin
            if self._sizes:
                stop = begin + self._sizes[len(self._parts)]
            else:
                stop = self._buffer.find(_END, begin, self._end) + len(_END)
                if stop < len(_END):
                    if self._end - begin == ROOM_BYTES:
                        self._refuse("a line that does not end")
                    break
            if stop > self._end:
                break
            part, self._begin = bytes(self._view[begin:stop]), stop
            if not self._sizes:
                self._line(part)
                continue
            self._parts.append(part)
            if len(self._parts) == len(self._sizes):
                self._message()

    def take(self) -> list[Frame]:
        """Return the complete frames, in order, and forget them."""
        frames, self.frames, self.waiting_bytes = self.frames, [], 0
        return frames

    def offer(self, taken: Callable[[Message], bool]) -> None:
        """Offer the messages at the front, in order, up to the first frame that is none or is not taken."""
        number = 0
        for frame in self.frames:
            if not isinstance(frame, Message) or not taken(frame):
                break
            number += 1
            self.waiting_bytes -= len(frame.header) + len(frame.payload)
        del self.frames[:number]

    def take_line(self) -> bytes | None:
        """Return the next frame, which must be a line, or None without one; raise `ProtocolError`."""
        if not self.frames:
            return None
        frame = self.frames.pop(0)
        if isinstance(frame, bytes):
            self.waiting_bytes -= len(frame)
            return frame
        raise frame if isinstance(frame, ProtocolError) else ProtocolError("nats: a message before the greeting")

    def _line(self, line: bytes) -> None:
        if not line.startswith((b"MSG ", b"HMSG ", b"MSG\t", b"HMSG\t")):
            self.frames.append(line)
            self.waiting_bytes += len(line)
            return
        verb, *words = line.split()
        numbers = 1 if verb == b"MSG" else 2
        head, sizes = words[:-numbers], words[-numbers:]
        if len(head) not in (2, 3) or not all(word.isdigit() for word in (head[1], *sizes)):
            self._refuse(f"{line[:80]!r}")
            return
        header, total = (0, int(sizes[0])) if numbers == 1 else (int(sizes[0]), int(sizes[1]))
        if header <= total <= FRAMED_BYTES_MAX:
            self._head, self._sizes = head, (header, total - header, len(_END))
        else:
            self._refuse(f"{line[:80]!r}")

    def _message(self) -> None:
        header, payload, end = self._parts
        subject, sid, *reply = self._head
        if end != _END:
            self._refuse("a message that does not end where it said")
            return
        self.frames.append(Message(int(sid), subject, reply[0] if reply else b"", bytes(header), payload))
        self.waiting_bytes += len(header) + len(payload)
        self._sizes, self._parts = (), []

    def _refuse(self, what: str) -> None:
        self.frames.append(ProtocolError(f"nats: {what}"))
        self._is_deaf, self._sizes, self._parts = True, (), []


STATUS: Final = "Status"
DESCRIPTION: Final = "Description"
STORED: Final = "Nats-Stream"
NOBODY: Final = "503"
"""With this status, and no body, the broker itself says on the answer's subject that nobody listens."""
_OF_THE_BROKER: Final = frozenset({STATUS.lower(), DESCRIPTION.lower()})
_STATUS_DIGITS: Final = 3


def read_headers(block: bytes) -> dict[str, str] | None:
    """Return the fields of a header block, with `STATUS` and `DESCRIPTION` where the broker speaks; None without a block.

    It raises nothing, whatever the bytes are.
    """
    if not block:
        return None
    first, *lines = block.split(b"\r\n")
    fields: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        key = text_of(name).strip()
        if colon and key and key.lower() not in _OF_THE_BROKER:
            fields[key] = text_of(value).strip()
    status, _, description = text_of(first.partition(b" ")[2]).strip().partition(" ")
    if len(status) == _STATUS_DIGITS and status.isascii() and status.isdigit() and STORED not in fields:
        fields |= {STATUS: status} | ({DESCRIPTION: description.strip()} if description else {})
    return fields


def text_of(data: bytes) -> str:
    """Return bytes as text; what is no text becomes a mark."""
    return data.decode("utf-8", "replace")
