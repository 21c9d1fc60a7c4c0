"""Events of the event log with any fields, right or wrong, as a test wants them."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from atoll.wire.events import EventPart
from atoll.wire.messages import Event

F = TypeVar("F", bound=EventPart)


def event(kind: str, who: str, at_s: float, **fields: object) -> Event:
    """Return an event with the given fields, encoded."""
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    return Event(kind=kind, who=who, at_s=at_s, fields=raw)


def fields(kind: type[F], **values: object) -> F:
    """Return the fields of an event, or a part of them, of which only some are of interest."""
    return msgspec.convert(values, kind)
