"""What a broker sends is cut into the same frames however the network has cut it."""

from __future__ import annotations

import pytest
from nats.errors import ProtocolError

from atoll.bus.nats.framing import FRAMED_BYTES_MAX, ROOM_BYTES, SMALL_BYTES, Frame, Framer, Message

STATUS = b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\n\r\n"
HEADER = b"NATS/1.0\r\nNats-Sequence: 7\r\n\r\n"
CONVERSATION = b"".join(
    [
        b'INFO {"server_id":"X"}\r\n',
        b"PING\r\n",
        b"MSG a.b 1 5\r\nhello\r\n",
        b"MSG a.b 12 reply.to 2\r\n\r\n\r\n",
        b"HMSG in 3 %d %d\r\n%sxyz\r\n" % (len(HEADER), len(HEADER) + 3, HEADER),
        b"HMSG in 3 re %d %d\r\n%s\r\n" % (len(STATUS), len(STATUS), STATUS),
        b"MSG a 4 0\r\n\r\n",
        b"-ERR 'Unknown Protocol Operation'\r\n",
        b"+OK\r\n",
        b"PONG\r\n",
    ]
)
FRAMES: list[Frame] = [
    b'INFO {"server_id":"X"}\r\n',
    b"PING\r\n",
    Message(1, b"a.b", b"", b"", b"hello"),
    Message(12, b"a.b", b"reply.to", b"", b"\r\n"),
    Message(3, b"in", b"", HEADER, b"xyz"),
    Message(3, b"in", b"re", STATUS, b""),
    Message(4, b"a", b"", b"", b""),
    b"-ERR 'Unknown Protocol Operation'\r\n",
    b"+OK\r\n",
    b"PONG\r\n",
]


def feed(framer: Framer, data: bytes) -> int:
    """Fill `framer` with one packet and return how many bytes went straight into a payload of its own."""
    view, straight = memoryview(data), 0
    while view:
        room = framer.room()
        count = min(len(room), len(view))
        room[:count] = view[:count]
        straight += count if len(room) > ROOM_BYTES else 0
        framer.filled(count)
        view = view[count:]
    return straight


def test_packets_may_end_anywhere() -> None:
    for cut in range(len(CONVERSATION) + 1):
        framer = Framer()
        feed(framer, CONVERSATION[:cut])
        feed(framer, CONVERSATION[cut:])

        assert framer.take() == FRAMES, cut
        assert not framer.frames
        assert framer.waiting_bytes == 0


def test_a_packet_may_hold_one_byte() -> None:
    framer = Framer()
    for place in range(3 * len(CONVERSATION)):
        feed(framer, CONVERSATION[place % len(CONVERSATION)].to_bytes())

    assert framer.take() == 3 * FRAMES


@pytest.mark.parametrize("size", [SMALL_BYTES, SMALL_BYTES + 1, ROOM_BYTES - 1, ROOM_BYTES, 3 * ROOM_BYTES + 1])
@pytest.mark.parametrize("step", [1009, ROOM_BYTES - 1, 1 << 20])
def test_large_payloads_and_headers_arrive_whole(size: int, step: int) -> None:
    """On both sides of every size that changes how a part is kept, in packets of several sizes."""
    payload = bytes(range(256)) * (size // 256 + 1)
    header = b"NATS/1.0\r\nLong: " + payload[:size].hex().encode() + b"\r\n\r\n"
    line = b"HMSG in 3 %d %d\r\n" % (len(header), len(header) + size)
    told = (line + header + payload[:size] + b"\r\n" + b"MSG b 1 %d\r\n" % size + payload[:size] + b"\r\n") * 2
    framer = Framer()

    for begin in range(0, len(told), step):
        feed(framer, told[begin : begin + step])

    expected = [Message(3, b"in", b"", header, payload[:size]), Message(1, b"b", b"", b"", payload[:size])]
    assert framer.take() == 2 * expected


def test_a_large_payload_is_received_where_it_stays() -> None:
    size = 1 << 20
    framer = Framer()
    feed(framer, b"MSG a 1 %d\r\n" % size + bytes(100))

    straight = feed(framer, bytes(size - 100) + b"\r\n")

    message = framer.take()[0]
    assert isinstance(message, Message)
    assert isinstance(message.payload, memoryview)
    assert straight == pytest.approx(size - 100, abs=ROOM_BYTES)


@pytest.mark.parametrize(
    "wrong",
    [
        b"MSG a 1\r\n",
        b"MSG a x 1\r\n",
        b"MSG a 1 -1\r\n",
        b"MSG a 1 r too 1\r\n",
        b"HMSG a 1 3 2\r\n",
        b"MSG a 1 %d\r\n" % (FRAMED_BYTES_MAX + 1),
        b"MSG a 1 2\r\nlonger\r\n",
        bytes(ROOM_BYTES),
    ],
)
def test_what_breaks_the_grammar_is_the_last_that_is_believed(wrong: bytes) -> None:
    framer = Framer()
    feed(framer, b"PING\r\n" + wrong + b"PONG\r\n" + bytes(2 * ROOM_BYTES))

    first, error = framer.take()
    assert first == b"PING\r\n"
    assert isinstance(error, ProtocolError)
    feed(framer, b"PONG\r\n")
    assert framer.take() == []


def test_lines_are_taken_one_by_one_before_messages_come() -> None:
    framer = Framer()
    feed(framer, b"INFO {}\r\nPONG\r\nMSG a 1 0\r\n\r\n")

    assert [framer.take_line(), framer.take_line()] == [b"INFO {}\r\n", b"PONG\r\n"]
    with pytest.raises(ProtocolError):
        framer.take_line()
    assert framer.take_line() is None


def test_messages_at_the_front_may_be_taken_and_nothing_is_overtaken() -> None:
    """The first frame that is none, or that nobody takes, keeps all behind it; their bytes count as waiting."""
    framer, offered = Framer(), list[int]()

    def taken(message: Message) -> bool:
        offered.append(message.sid)
        return message.sid == 1

    feed(framer, b"MSG a 1 3\r\none\r\n" * 2 + b"MSG b 2 3\r\ntwo\r\n" + b"MSG a 1 3\r\none\r\n")
    framer.offer(taken)

    assert offered == [1, 1, 2]
    assert framer.waiting_bytes == 6
    assert [frame.sid for frame in framer.take() if isinstance(frame, Message)] == [2, 1]
    feed(framer, b"PING\r\nMSG a 1 3\r\none\r\n")
    framer.offer(taken)
    assert len(framer.take()) == 2
