"""JSON from outside becomes typed values, or one kind of error.

msgspec checks types and bounds. It raises errors of other kinds for bytes that are no text and for brackets that nest deeper
than the interpreter's stack; a reader that catches only msgspec's would end. So every reader of JSON that a peer, a disk or an
older process may have written parses it here.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def parsed(data: bytes | bytearray | memoryview | str, kind: type[T]) -> T:
    """Return JSON `data` as a `kind`; raise `msgspec.MsgspecError` for anything else."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
