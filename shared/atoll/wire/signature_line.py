"""The line behind a message: who reads without keys takes it off, and who has keys checks it (`atoll.keys.signatures`).

A message is JSON in one line, so a line break tells where it ends. A bus replaces a message that it does not believe by the
reason why.
"""

from __future__ import annotations

from typing import Final

from atoll.base.errors import PeerMisbehaved

SIGNATURE: Final = b"\nsigned:"
"""Separates a message from its signature."""
_UNPROVEN: Final = b"unproven:"


def unproven(why: str) -> bytes:
    """Return what stands in place of a message that is not believed."""
    return _UNPROVEN + why.encode()


def is_unproven(data: bytes) -> bool:
    """Return whether this stands in place of a message that is not believed: nobody is known to have sent that."""
    return data.startswith(_UNPROVEN)


def without_signature(kind: str, data: bytes) -> bytes:
    """Return a message without its signature; raise `PeerMisbehaved` with the reason why it is not believed."""
    if is_unproven(data):
        why = data.removeprefix(_UNPROVEN).decode(errors="replace")
        raise PeerMisbehaved(f"a {kind} that is not believed", got=why)
    return data.rpartition(SIGNATURE)[0] if SIGNATURE in data else data
