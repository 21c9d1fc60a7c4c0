"""Questions of an operator, a monitor or a doctor to a broker: runs, streams, nodes, and what we may do there.

A run is what its streams are named after (`atoll.bus.streams`), also one that lacks some of them: a founder that died in
between left it, and it can be removed like any other. A stream that the broker does not have, or of which we may not ask, is
left out. Everything runs in the connection's loop.

Nothing that a doctor asks (`BrokerProbe`) leaves a trace. A publication carries the name of a stream that does not exist as the
one it expects: the broker first looks whether we may publish there, then the stream refuses to store it. Bytes that measure the
link go from one connection of ours to another, on a subject that nobody else may hear. Those of a region turn back at its leaf,
so the link to the hub is measured by the body of a question that needs none.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg

from atoll.base.clock import unix_s
from atoll.base.errors import AccessDenied, BusError, EnvironmentFault, SettingsError
from atoll.base.parsing import parsed
from atoll.base.retry import Unanswered, wait_at_most
from atoll.bus.interface import NODES, NodeStatus, StoredCounts, StoredRun, StreamState
from atoll.bus.nats.connection import Connection
from atoll.bus.nats.framing import NOBODY, STATUS
from atoll.bus.nats.jetstream_api import NO_STREAM, ApiRefusal, JetStream
from atoll.bus.regions import is_region
from atoll.bus.streams import StreamPlan, live_plan, stream_plan

QUIET_S: Final = 0.3
"""When every node that another one names has answered, and nobody new for so long, there is nobody else."""
NODES_MAX: Final = 64
_NAME: Final = re.compile(r"atoll_([A-Za-z0-9_-]{1,64})_([A-Z]{2,3})")
_KINDS: Final = frozenset(plan.name.rpartition("_")[2] for plan in (*stream_plan("r"), live_plan("r")))


async def stored_runs(jetstream: JetStream) -> list[StoredRun]:
    """Return the runs of a broker by name."""
    streams: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for stream in await jetstream.list_streams("LIST", subject="atoll.>"):
        named = _NAME.fullmatch(str(stream.get("config", {}).get("name", "")))
        if named is not None and named[2] in _KINDS:
            streams[named[1]].append(stream)
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
    written = [unix_s(str(state.get("last_ts"))) for state in states if state.get("messages")]
    return StoredRun(
        run=name,
        streams=len(streams),
        messages=sum(int(state.get("messages", 0)) for state in states),
        size_bytes=sum(int(state.get("bytes", 0)) for state in states),
        bounds_bytes=sum(max(0, int(stream["config"].get("max_bytes", 0))) for stream in streams),
        written_s=max((at_s for at_s in written if at_s is not None), default=None),
    )


async def stream_states(jetstream: JetStream, plans: Sequence[StreamPlan]) -> list[StreamState]:
    """Return the states of these streams. Raises `Unanswered` if the broker is silent."""
    found = []
    for plan in plans:
        try:
            answer = await jetstream.request(f"{jetstream.root}.STREAM.INFO.{plan.name}", b"")
        except (ApiRefusal, AccessDenied):
            continue
        found.append(_stream_state(plan.name.rpartition("_")[2], answer))
    return found


async def count_by_subject(jetstream: JetStream, stream: str, subject_filter: str, more_than: int) -> StoredCounts:
    """Return how many messages a stream keeps of each subject; of none, if it keeps no more than `more_than` in all.

    A broker names 100,000 subjects at once, and the first so many will do: each that has stored more is among them.
    """
    where = f"{jetstream.root}.STREAM.INFO.{stream}"
    answer = await jetstream.request(where, b"")
    found = _stream_state("", answer)
    if found.messages <= more_than:
        return StoredCounts({}, found.size_bytes, found.bytes_max)
    answer = await jetstream.request(where, msgspec.json.encode({"subjects_filter": subject_filter}))
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
    """Return what the nodes of a locked broker say of themselves, by name, as `ManagingBus.nodes`."""
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
                message = await wait_at_most(answers.get(), min(left_s, QUIET_S))
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


def parse_node_status(data: bytes) -> NodeStatus | None:
    """Return a server's answer to `NODES`; None for what is none."""
    try:
        answer = parsed(data, dict[str, Any])
    except msgspec.MsgspecError:
        return None
    server, state = _table(answer.get("server")), _table(answer.get("statsz"))
    name = server.get("name")
    if not isinstance(name, str):
        return None
    routes = state.get("routes")
    peers = {str(_table(route).get("name")) for route in (routes if isinstance(routes, list) else ())}
    tags, connections = server.get("tags"), state.get("connections")
    return NodeStatus(
        name=name,
        version=str(server.get("ver", "")),
        tags=tuple(map(str, tags if isinstance(tags, list) else ())),
        peers=tuple(sorted(peers)),
        connections=connections if isinstance(connections, int) else 0,
        up_s=max(0.0, (unix_s(str(server.get("time"))) or 0.0) - (unix_s(str(state.get("start"))) or 0.0)),
    )


NO_SUCH_STREAM: Final = "none-of-this-name"
PIECE_BYTES: Final = 128 << 10
PIECES_MAX: Final = 32
SENDING_S: Final = 4.0
DRAINING_S: Final = 12.0
COPIES: Final = 2
"""Each piece comes back so often: so the way back can be seen to be faster than the way there."""
ECHOES: Final = 5
HUB_PIECE_BYTES: Final = 32 << 10
HUB_PIECES_MAX: Final = 128


@dataclass(frozen=True, slots=True)
class HubLinkMeasured:
    """One look at the link of a region: the shortest echo of the hub in seconds, and bits per second to it."""

    echo_s: float
    up_bits_per_s: float
    bytes_moved: int


@dataclass(frozen=True, slots=True)
class LinkMeasured(HubLinkMeasured):
    """One look at a link, both ways; the bits per second down are what we saw at least."""

    down_bits_per_s: float


@dataclass(frozen=True, slots=True)
class BrokerTime:
    """The broker's clock less ours, in seconds, and by how much that may be wrong."""

    ahead_s: float
    within_s: float


class BrokerProbe:
    """Questions of a doctor through an open connection, which stays open."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._jetstream = JetStream(self._connection)

    @property
    def in_region(self) -> bool:
        """Return whether the broker is the leaf of a region; then JetStream's answers are the hub's."""
        return is_region(self._connection.domain)

    async def may_store(self, subject: str) -> bool | None:
        """Return whether the broker takes a message on `subject` from us; None if nobody stores such messages (yet)."""
        try:
            await self._connection.call(
                self._jetstream.request(subject, b"", {"Nats-Expected-Stream": NO_SUCH_STREAM}, attempts=0)
            )
        except AccessDenied:
            return False
        except ApiRefusal:
            return True
        except Unanswered:
            return None
        return True

    async def may_hear(self, subject: str) -> bool:
        """Return whether the broker lets us subscribe to `subject`."""

        def drop(_message: Msg) -> None:
            """Nothing is wanted."""

        try:
            key = await self._connection.call(self._connection.subscribe(subject, drop))
        except AccessDenied:
            return False
        await self._connection.call(self._connection.unsubscribe(key))
        return True

    async def stream(self, name: str) -> dict[str, Any] | None:
        """Return what the broker says of a stream; None if there is none, or we may not ask."""
        try:
            return await self._connection.call(
                self._jetstream.request(f"{self._jetstream.root}.STREAM.INFO.{name}", b"")
            )
        except (AccessDenied, ApiRefusal, Unanswered):
            return None

    async def time(self, name: str, wall: Callable[[], float]) -> BrokerTime | None:
        """Return how the broker's clock differs from `wall`, from what it says of a stream; None if it says nothing."""
        before_s = wall()
        said = await self.stream(name)
        after_s = wall()
        there_s = unix_s(str((said or {}).get("ts")))
        return None if there_s is None else BrokerTime(there_s - (before_s + after_s) / 2, (after_s - before_s) / 2)

    async def link(self) -> LinkMeasured | None:
        """Move a few megabytes there and back, for some seconds at most; None if the broker does not answer meanwhile."""
        try:
            return await self._connection.call(self._measure_link())
        except (Unanswered, BusError, EnvironmentFault):
            return None

    async def hub_link(self) -> HubLinkMeasured | None:
        """Move a few megabytes to the hub of our region, for some seconds at most; None if it does not answer meanwhile."""
        try:
            return await self._connection.call(self._measure_hub_link())
        except (Unanswered, BusError, EnvironmentFault):
            return None

    async def _measure_hub_link(self) -> HubLinkMeasured:
        """Ask the more questions at once the more were answered: a slow link must not be full of ours for long."""
        loop, asking = self._connection.loop, set[asyncio.Task[float]]()
        echo_s = min([await self._answer_time_s(b"") for _ in range(ECHOES)])
        began_s, sent, answered = loop.time(), 0, 0
        try:
            while asking or not sent:
                while sent < HUB_PIECES_MAX and len(asking) <= answered and loop.time() - began_s < SENDING_S:
                    asking.add(asyncio.create_task(self._answer_time_s(bytes(HUB_PIECE_BYTES))))
                    sent += 1
                done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                answered += len([task.result() for task in done])
        finally:
            for task in asking:
                task.cancel()
        bytes_moved = HUB_PIECE_BYTES * answered
        return HubLinkMeasured(echo_s, 8 * bytes_moved / max(1e-6, loop.time() - began_s - echo_s), bytes_moved)

    async def _answer_time_s(self, body: bytes) -> float:
        began_s = self._connection.loop.time()
        with contextlib.suppress(ApiRefusal):
            await self._jetstream.request(f"{self._jetstream.root}.INFO", body, timeout_s=DRAINING_S)
        return self._connection.loop.time() - began_s

    async def _measure_link(self) -> LinkMeasured:
        loop, main = self._connection.loop, self._connection
        echo_s = min([await self._echo_s() for _ in range(ECHOES)])
        subject, arrived = main.admission.inbox(), list[float]()
        wanted = asyncio.Event()
        expected = PIECES_MAX * COPIES

        def on_message(_message: Msg) -> None:
            arrived.append(loop.time())
            if len(arrived) >= expected:
                wanted.set()

        keys = [await main.subscribe(subject, on_message) for _ in range(COPIES)]
        sender = main.branch()
        try:
            await sender.ready(main.options.try_s)
            await sender.echo(main.options.try_s)
            began_s, sent = loop.time(), 0
            while sent < PIECES_MAX and loop.time() - began_s < SENDING_S:
                await sender.send(subject, bytes(PIECE_BYTES))
                sent += 1
            await sender.echo(DRAINING_S)
            up_s = max(1e-6, loop.time() - began_s - echo_s)
            expected = sent * COPIES
            if len(arrived) < expected:
                with contextlib.suppress(TimeoutError):
                    await wait_at_most(wanted.wait(), DRAINING_S)
        finally:
            for key in keys:
                await main.unsubscribe(key)
        down_s = max(1e-6, arrived[-1] - arrived[0]) if len(arrived) > 1 else float("inf")
        bits = 8 * PIECE_BYTES
        return LinkMeasured(
            echo_s, bits * sent / up_s, PIECE_BYTES * (sent + len(arrived)), bits * (len(arrived) - 1) / down_s
        )

    async def _echo_s(self) -> float:
        began_s = self._connection.loop.time()
        await self._connection.echo(self._connection.options.try_s)
        return self._connection.loop.time() - began_s
