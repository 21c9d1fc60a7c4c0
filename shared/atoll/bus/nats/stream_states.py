"""How full the streams of a run are, as the broker says: what a monitor shows as queue depth, disk and copies.

Only looking: the request (`STREAM.INFO`) changes nothing. A stream that the broker does not have, or of which we may not ask,
is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from atoll.base.errors import AccessDenied
from atoll.bus.interface import StoredCounts
from atoll.bus.nats.jetstream_api import ApiRefusal, JetStream
from atoll.bus.streams import StreamPlan


@dataclass(frozen=True, slots=True)
class StreamState:
    """One stream; `kind` is the end of its name (`UPM` is the queue of contributions).

    `size_bytes` and `bytes_max` are of one copy; `copies_current` are those that have everything, of `copies`.
    """

    kind: str
    messages: int
    size_bytes: int
    bytes_max: int
    copies: int
    copies_current: int


async def stream_states(jetstream: JetStream, plans: Sequence[StreamPlan]) -> list[StreamState]:
    """Return the states of these streams; in the connection's loop. Raises `Unanswered` if the broker is silent."""
    found = []
    for plan in plans:
        try:
            answer = await jetstream.once(f"{jetstream.root}.STREAM.INFO.{plan.name}", b"")
        except (ApiRefusal, AccessDenied):
            continue
        found.append(_state(plan.name.rpartition("_")[2], answer))
    return found


async def stored_by_subject(jetstream: JetStream, stream: str, subject_filter: str, more_than: int) -> StoredCounts:
    """Return how many messages a stream keeps of each subject; of none, if it keeps no more than `more_than` in all.

    A broker names 100,000 subjects at once, and the first so many will do: whoever has stored more is among them.

    Raises:
        Unanswered: the broker is silent.
        ApiRefusal, AccessDenied: it has no such stream, or we may not ask.
    """
    where = f"{jetstream.root}.STREAM.INFO.{stream}"
    answer = await jetstream.once(where, b"")
    found = _state("", answer)
    if found.messages <= more_than:
        return StoredCounts({}, found.size_bytes, found.bytes_max)
    answer = await jetstream.once(where, msgspec.json.encode({"subjects_filter": subject_filter}))
    subjects = _table(_table(answer.get("state")).get("subjects"))
    return StoredCounts(
        {subject: _count(messages) for subject, messages in subjects.items()}, found.size_bytes, found.bytes_max
    )


def _state(kind: str, answer: Mapping[str, Any]) -> StreamState:
    config, state, cluster = (_table(answer.get(name)) for name in ("config", "state", "cluster"))
    others = [_table(one) for one in cluster.get("replicas") or ()]
    # A single server names no leader, and a cluster without one answers nothing.
    return StreamState(
        kind=kind,
        messages=_count(state.get("messages")),
        size_bytes=_count(state.get("bytes")),
        bytes_max=_count(config.get("max_bytes")),
        copies=max(1, _count(config.get("num_replicas"))),
        copies_current=1 + sum(one.get("current") is True and not one.get("offline") for one in others),
    )


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int:
    """Return a number of the broker's; what is none, and "no bound" (-1), is 0."""
    return max(0, value) if isinstance(value, int) else 0
