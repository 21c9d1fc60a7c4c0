"""Keeps the leaders of a run's streams on one node of a cluster.

Each stream, and each consumer of a queue, is led by one node, and a new leader takes 4 to 9 seconds to be elected. A commit
needs all of them: it writes chunks, outer state and a head, and reads a queue. Led by three nodes, a run would pause with every
node that dies, and for the slowest of several elections. Led by one, it does not notice the death of either of the two others.

So a process that reads a queue looks now and then where the leaders are. It asks those that are elsewhere to hand over to the
first node by name, of those that have caught up with everything. A handover takes a moment, not an election. It is always the
same node, so that leaders do not wander from one dying node to the next where nodes are restarted in turn. Clients try the
addresses in their order, so where the first address is that node, nobody is connected to another one without need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from atoll.base.errors import AtollError
from atoll.base.logs import get
from atoll.base.retry import Unanswered
from atoll.bus.nats.jetstream_api import ApiRefusal, JetStream

LOOK_EVERY_S: Final = 2.0

log = get(__name__)


async def keep_together(jetstream: JetStream, streams: Sequence[str], queue: str) -> None:
    """Look every few seconds, for ever, where `streams` and the consumers of `queue` are led."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            moved = await bring_together(jetstream, streams, queue)
        except (ApiRefusal, Unanswered, AtollError) as reason:
            log.debug("leaders.unknown", reason=str(reason))
        else:
            if moved:
                log.info("leaders.moved", groups=moved)


async def bring_together(jetstream: JetStream, streams: Sequence[str], queue: str) -> int:
    """Ask leaders that are elsewhere to hand over to the first node that has everything; return how many were asked."""
    told = [(f"STREAM.LEADER.STEPDOWN.{name}", await jetstream.api(f"STREAM.INFO.{name}")) for name in streams]
    readers = (await jetstream.api(f"CONSUMER.LIST.{queue}", {"offset": 0})).get("consumers") or []
    told += [(f"CONSUMER.LEADER.STEPDOWN.{queue}.{reader['name']}", reader) for reader in readers]
    groups = [(call, answer.get("cluster") or {}) for call, answer in told]
    ready = set.intersection(*(_ready(cluster) for _, cluster in groups))
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


def _ready(cluster: Mapping[str, Any]) -> set[str]:
    """Return the nodes that could lead one group at once: its leader, and those that have all that it has."""
    copies = cluster.get("replicas") or []
    caught_up = {str(copy.get("name")) for copy in copies if copy.get("current") and not copy.get("offline")}
    return caught_up | {str(cluster["leader"])} if cluster.get("leader") else set()
