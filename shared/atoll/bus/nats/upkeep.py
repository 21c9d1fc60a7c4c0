"""Upkeep of a run at its broker, by every process that reads a queue: its live stream, and where its leaders are.

**The live stream** holds what was heard last of each process (`atoll.bus.streams.live_plan`). It is in memory, and a single
server forgets such a stream when it ends. So a shard looks for it when it comes and after every reconnect, and makes it anew,
with as many copies as the run's records. A run founded by a release before gets it from the first shard of this one. The run
does not need it. If the broker has no memory left for it, or a door made by a release before does not let us ask, the log says
so once, and watchers miss the last heartbeats until somebody changes that.

**The leaders.** Each stream, and each consumer of a queue, is led by one node of a cluster, and a new leader takes 4 to 9
seconds to be elected. A commit needs all of them: it writes chunks, outer state and a head, and reads a queue. Led by three
nodes, a run would pause with every node that dies, and for the slowest of several elections. Led by one, it does not notice the
death of either of the two others.

So a shard looks now and then where the leaders are. It asks those that are elsewhere to hand over to the first node by name, of
those that have caught up with everything. A handover takes a moment, not an election. It is always the same node, so that
leaders do not wander from one dying node to the next where nodes are restarted in turn. Clients try the addresses in their
order, so where the first address is that node, nobody is connected to another one without need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from atoll.base.errors import AtollError
from atoll.base.logs import get
from atoll.base.retry import Unanswered
from atoll.bus.nats.jetstream_api import NO_STREAM, STREAM_EXISTS, ApiRefusal, JetStream, read_field
from atoll.bus.nats.provision import stream_config
from atoll.bus.streams import live_plan
from atoll.wire.subjects import Subjects

LOOK_AT_LEADERS_S: Final = 2.0
LOOK_AT_CONNECTION_S: Final = 1.0
AGAIN_S: Final = 60.0
ANSWER_S: Final = 3.0

log = get(__name__)


async def keep_live_stream(jetstream: JetStream, run: str) -> None:
    """Make the stream of `run` whenever it may be missing, for ever."""
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
        await jetstream.once(
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
    """Return the configuration of a stream, None if there is none."""
    try:
        found = await jetstream.once(f"{jetstream.root}.STREAM.INFO.{stream}", b"", timeout_s=ANSWER_S)
    except ApiRefusal as reason:
        if reason.err_code == NO_STREAM:
            return None
        raise
    return read_field(found, dict[str, Any], "config")


async def keep_together(jetstream: JetStream, streams: Sequence[str], queue: str) -> None:
    """Look every few seconds, for ever, where `streams` and the consumers of `queue` are led."""
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
            await jetstream.once(f"{jetstream.root}.{call}", b'{"placement":{"preferred":"%s"}}' % home.encode())
        except (ApiRefusal, Unanswered) as reason:
            # Somebody was first, or there is an election: the others wait for nothing.
            log.debug("leader.stays", call=call, reason=str(reason))
        else:
            moved += 1
    return moved


def _nodes_ready(cluster: Mapping[str, Any]) -> set[str]:
    """Return the nodes that could lead one group at once: its leader, and those that have all that it has."""
    copies = cluster.get("replicas") or []
    caught_up = {str(copy.get("name")) for copy in copies if copy.get("current") and not copy.get("offline")}
    return caught_up | {str(cluster["leader"])} if cluster.get("leader") else set()
