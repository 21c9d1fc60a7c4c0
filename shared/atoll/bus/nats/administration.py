"""Questions of an operator or a monitor to a broker: the runs that it keeps, how full a run's streams are, how its nodes do.

A run is what its streams are named after (`atoll.bus.streams`). One that lacks some of its streams is a run, too: a founder
that died in between left it, and it can be removed like any other. But for `remove_run` nothing is changed here. A stream that
the broker does not have, or of which we may not ask, is left out. Everything runs in the connection's loop.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg

from atoll.base.errors import AccessDenied, PeerMisbehaved, SettingsError
from atoll.base.retry import bounded
from atoll.bus.interface import StoredCounts
from atoll.bus.nats.connection import Connection
from atoll.bus.nats.headers import NOBODY, STATUS
from atoll.bus.nats.jetstream_api import NO_STREAM, ApiRefusal, JetStream
from atoll.bus.server_info import NODES, NodeStatus, parse_node_status
from atoll.bus.streams import StreamPlan, live_plan, stream_plan

QUIET_S: Final = 0.3
"""When every node that another one names has answered, and nobody new for so long, there is nobody else."""
NODES_MAX: Final = 64
_NAME: Final = re.compile(r"atoll_([A-Za-z0-9_-]{1,64})_([A-Z]{2,3})")
_KINDS: Final = frozenset(plan.name.rpartition("_")[2] for plan in (*stream_plan("r"), live_plan("r")))


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run as a broker keeps it: streams, messages, bytes on disk, the sum of the bounds.

    `written_s` is when the newest message was stored, in seconds since the epoch, None if there is none.
    """

    run: str
    streams: int
    messages: int
    size_bytes: int
    bounds_bytes: int
    written_s: float | None

    def beside(self, other: StoredRun) -> StoredRun:
        """Return this run with what another broker keeps of it."""
        written = [at_s for at_s in (self.written_s, other.written_s) if at_s is not None]
        return replace(
            self,
            streams=self.streams + other.streams,
            messages=self.messages + other.messages,
            size_bytes=self.size_bytes + other.size_bytes,
            bounds_bytes=self.bounds_bytes + other.bounds_bytes,
            written_s=max(written, default=None),
        )


async def stored_runs(jetstream: JetStream) -> list[StoredRun]:
    """Return the runs of a broker by name."""
    streams: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    offset, total = 0, 1
    while offset < total:
        page = await jetstream.api("STREAM.LIST", {"offset": offset, "subject": "atoll.>"})
        found = page.get("streams") or []
        for stream in found:
            named = _NAME.fullmatch(str(stream.get("config", {}).get("name", "")))
            if named is not None and named[2] in _KINDS:
                streams[named[1]].append(stream)
        offset, total = offset + len(found), int(page.get("total", 0)) if found else 0
    return [_run(name, streams[name]) for name in sorted(streams)]


async def remove_run(jetstream: JetStream, run: str) -> int:
    """Delete all streams of a run and return how many there were.

    The stream of records goes first: from then on nobody takes the rest for a run.
    """
    removed = 0
    for plan in sorted((*stream_plan(run), live_plan(run)), key=lambda plan: not plan.name.endswith("_GL")):
        try:
            await jetstream.api(f"STREAM.DELETE.{plan.name}")
        except ApiRefusal as reason:
            if reason.err_code != NO_STREAM:
                raise reason.public(plan.name) from reason
        else:
            removed += 1
    return removed


def _run(name: str, streams: list[Mapping[str, Any]]) -> StoredRun:
    states = [stream.get("state", {}) for stream in streams]
    written = [_written_s(state["last_ts"]) for state in states if state.get("messages") and "last_ts" in state]
    return StoredRun(
        run=name,
        streams=len(streams),
        messages=sum(int(state.get("messages", 0)) for state in states),
        size_bytes=sum(int(state.get("bytes", 0)) for state in states),
        bounds_bytes=sum(max(0, int(stream["config"].get("max_bytes", 0))) for stream in streams),
        written_s=max(written, default=None),
    )


def _written_s(text: str) -> float:
    """Return a broker's time of day."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise PeerMisbehaved("the broker gave no time", got=text) from error


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
    """Return the states of these streams. Raises `Unanswered` if the broker is silent."""
    found = []
    for plan in plans:
        try:
            answer = await jetstream.once(f"{jetstream.root}.STREAM.INFO.{plan.name}", b"")
        except (ApiRefusal, AccessDenied):
            continue
        found.append(_stream_state(plan.name.rpartition("_")[2], answer))
    return found


async def count_by_subject(jetstream: JetStream, stream: str, subject_filter: str, more_than: int) -> StoredCounts:
    """Return how many messages a stream keeps of each subject; of none, if it keeps no more than `more_than` in all.

    A broker names 100,000 subjects at once, and the first so many will do: each that has stored more is among them.

    Raises:
        Unanswered: the broker is silent.
        ApiRefusal, AccessDenied: it has no such stream, or we may not ask.
    """
    where = f"{jetstream.root}.STREAM.INFO.{stream}"
    answer = await jetstream.once(where, b"")
    found = _stream_state("", answer)
    if found.messages <= more_than:
        return StoredCounts({}, found.size_bytes, found.bytes_max)
    answer = await jetstream.once(where, msgspec.json.encode({"subjects_filter": subject_filter}))
    subjects = _table(_table(answer.get("state")).get("subjects"))
    return StoredCounts(
        {subject: _count(messages) for subject, messages in subjects.items()}, found.size_bytes, found.bytes_max
    )


def _stream_state(kind: str, answer: Mapping[str, Any]) -> StreamState:
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


async def node_statuses(connection: Connection, wait_s: float) -> list[NodeStatus]:
    """Return what the nodes of a locked broker say of themselves, by name; wait for more of them for `wait_s` at most.

    Raises:
        SettingsError: the broker knows no such question.
    """
    answers: asyncio.Queue[Msg] = asyncio.Queue(NODES_MAX)
    inbox = connection.admission.inbox()

    def on_message(message: Msg) -> None:
        if not answers.full():
            answers.put_nowait(message)

    key = await connection.subscribe(inbox, on_message)
    found: dict[str, NodeStatus] = {}
    deadline_s = connection.loop.time() + wait_s
    try:
        await connection.send(NODES, b"", inbox)
        while (left_s := deadline_s - connection.loop.time()) > 0.0:
            named = {peer for node in found.values() for peer in node.peers}
            try:
                message = await bounded(answers.get(), min(left_s, QUIET_S))
            except TimeoutError:
                if found and named <= found.keys():
                    break
                continue
            if (message.headers or {}).get(STATUS) == NOBODY:
                raise SettingsError(
                    "this broker does not say what its nodes are",
                    got="nobody who answers",
                    allowed="a broker of `atoll broker --keys`, of this version or later",
                    todo="lock it (`atoll keys new`), or upgrade it; an open broker has no roll",
                )
            node = parse_node_status(message.data)
            if node is not None:
                found[node.name] = node
    finally:
        await connection.unsubscribe(key)
    return [found[name] for name in sorted(found)]
