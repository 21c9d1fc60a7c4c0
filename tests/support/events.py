"""Events of the event log with any fields, right or wrong, and heartbeats, as a test wants them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from atoll.protocol.events import EventPart
from atoll.protocol.ledger import Ledger
from atoll.run.history import History
from atoll.wire.messages import Beat, Event

F = TypeVar("F", bound=EventPart)


def event(kind: str, who: str, at_s: float, **fields: object) -> Event:
    """Return an event with the given fields, encoded."""
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    return Event(kind=kind, who=who, at_s=at_s, fields=raw)


def fields(kind: type[F], **values: object) -> F:
    """Return the fields of an event, or a part of them, of which only some are of interest."""
    return msgspec.convert(values, kind)


def heartbeat(learner: str, **changes: Any) -> Beat:  # noqa: ANN401  (fields of a heartbeat)
    """Return the heartbeat of a learner that trains, ten steps of a hundred tokens on, with some fields changed."""
    plain = Beat(
        learner=learner,
        incarnation=1,
        run_nonce="n",
        state="training",
        at_s=0.0,
        step=10,
        step_s=0.5,
        tokens=1000,
        tokens_per_s=200.0,
        loss=2.5,
        pushed=0,
        superseded=0,
    )
    return msgspec.structs.replace(plain, **changes)


def closing_ledger(events: Iterable[Event]) -> Ledger:
    """Return the ledger of a run that is over, from the `ledger` events of its event log in their order."""
    history = History()
    for each in events:
        history.on_event(each)
    assert not history.unreadable
    return history.closed_ledger()
