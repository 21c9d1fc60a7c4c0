"""Wrong inputs made of right ones, by their structure.

Bytes that are drawn at random are refused by the first check. So an honest input is taken apart, one or a few of its parts are
made absurd, and it is put together again: JSON by its values, a frame by its header, with its checksum repaired. A part of all
inputs is damaged byte by byte all the same.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import xxhash

from atoll.codec.frames import HEADER

DEPTHS = (3, 200, 1100, 20_000)
NUMBERS = (-1, 0, 1, 2, 255, 1 << 31, 1 << 32, 1 << 40, 1 << 48, 1 << 53, (1 << 53) + 1, 1 << 63, 1 << 64, 1 << 70)
FLOATS = (-1.0, 0.0, 1e-320, 0.5, 1e12, 1e308, -1e308)
TEXTS = (
    "",
    "*",
    ">",
    "a.b",
    "../../x",
    "\x1b[2J",
    "a\nb",
    "\x00",
    "é",
    "\ud800",
    "\u202e",
    "a" * 65,
    "a" * 5000,
    "a/1",
    "_INBOX.x",
)
RAW = (b"NaN", b"Infinity", b"-", b"1e999", b"{", b"[", b'"', b"null", b"tru", b"\xff\xfe", b"0" * 400, b"1" * 400)

Mutator = Callable[[bytes, random.Random], bytes]


def mutated_json(data: bytes, chance: random.Random) -> bytes:
    """Return JSON with some of its values changed, or damaged bytes."""
    if chance.random() < 0.2:
        return mutated_bytes(data, chance)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return mutated_bytes(data, chance)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        document = _changed(document, chance)
    text = json.dumps(document).encode("utf-8", "surrogatepass")
    if chance.random() < 0.05:
        at = chance.randrange(len(text) + 1)
        text = text[:at] + chance.choice(RAW) + text[at:]
    if chance.random() < 0.02:
        depth = chance.choice(DEPTHS)
        nested = b"[" * depth + b"]" * depth
        text = b'{"x":' + nested + b"," + text[1:] if text[:1] == b"{" else nested
    return text


def _changed(value: Any, chance: random.Random) -> Any:  # noqa: ANN401, PLR0911  (any JSON; a choice a line)
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(list(value))
        act = chance.random()
        if act < 0.08:
            return {key: inner for key, inner in value.items() if key != name}
        if act < 0.14:
            return value | {chance.choice(TEXTS): value[name]}
        return value | {name: _changed(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at, act = chance.randrange(len(value)), chance.random()
        if act < 0.1:
            return value[:at] + value[at + 1 :]
        if act < 0.15:
            return value * chance.choice((2, 3, 50))
        return [*value[:at], _changed(value[at], chance), *value[at + 1 :]]
    return _absurd(value, chance)


def _absurd(value: Any, chance: random.Random) -> Any:  # noqa: ANN401
    """Return something else in place of a value: mostly of its type, sometimes of another."""
    kind = chance.randrange(12)
    if isinstance(value, bool) or kind == 0:
        return chance.choice((True, False, None, [], {}, [[]], {"a": {}}))
    if isinstance(value, int) and kind < 10:
        return chance.choice((*NUMBERS, value + 1, value - 1, -value, value * 2))
    if isinstance(value, float) and kind < 10:
        return chance.choice((*FLOATS, value * 1e9, -value))
    if isinstance(value, str) and kind < 10:
        at = chance.randrange(len(value) + 1)
        return chance.choice((chance.choice(TEXTS), value[:at] + chance.choice(TEXTS) + value[at:], value[:at]))
    return chance.choice((chance.choice(NUMBERS), chance.choice(FLOATS), chance.choice(TEXTS)))


def mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        act, at = chance.randrange(5), chance.randrange(len(changed) + 1)
        if act == 0 and changed:
            changed[at % len(changed)] ^= 1 << chance.randrange(8)
        elif act == 1:
            del changed[at:]
        elif act == 2:
            changed[at:at] = chance.randbytes(chance.choice((1, 2, 8, 64)))
        elif act == 3:
            stop = min(len(changed), at + chance.choice((1, 4, 100)))
            changed[at:stop] = bytes(stop - at)
        else:
            changed += changed[: chance.choice((1, 40, 4000))]
    return bytes(changed)


def mutated_frame(data: bytes, chance: random.Random) -> bytes:
    """Return a segment of a frame with an absurd header or payload; its checksum is mostly right again."""
    if len(data) < HEADER.size or chance.random() < 0.3:
        return mutated_bytes(data, chance)
    fields = list(HEADER.unpack_from(data))
    payload = bytearray(data[HEADER.size :])
    if chance.random() < 0.6 and payload:
        for _ in range(chance.choice((1, 4, 64))):
            payload[chance.randrange(len(payload))] = chance.choice((0, 0x7F, 0x80, 0xFF, chance.randrange(256)))
    else:
        place = chance.randrange(1, len(fields))
        most = {"B": 8, "I": 32, "Q": 64}[HEADER.format.lstrip("<4s")[place - 1]]
        fields[place] = chance.choice((0, 1, fields[place] ^ 1, (1 << most) - 1)) & ((1 << most) - 1)
    if chance.random() < 0.9:
        fields[-1] = xxhash.xxh3_64_intdigest(payload)
        fields[-2] = len(payload) if chance.random() < 0.9 else fields[-2]
    return HEADER.pack(*fields) + bytes(payload)


def mutated_arrays(data: bytes, chance: random.Random) -> bytes:
    """Return packed arrays with another header, of the length that it says."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8 or chance.random() < 0.3:
        return mutated_bytes(data, chance)
    header = mutated_json(data[8 : 8 + length], chance)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]
