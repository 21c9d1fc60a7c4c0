"""What the nodes of a locked broker say of themselves to its operator: version, peers, and the tags that they wear.

A nats-server answers `$SYS.REQ.SERVER.PING.STATSZ` in its system account, each server for itself. A locked door lets the
account of the operator ask that, under the name `NODES` (`atoll.keys.doors`). So one question brings an answer of every node
that the asked one is connected to; a node that has lost the others is heard only where it is asked itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec

from atoll.base.parsing import parsed

NODES: Final = "atoll.nodes"
"""Where the operator asks; no run has it, whose subjects have a third part."""
PING: Final = "$SYS.REQ.SERVER.PING.STATSZ"
SYSTEM: Final = "$SYS"


@dataclass(frozen=True, slots=True)
class NodeTold:
    """One answer: the name and version of a nats-server, what its operator has it say, and which nodes it is connected to."""

    name: str
    version: str
    tags: tuple[str, ...]
    peers: tuple[str, ...]
    connections: int
    up_s: float


def told(data: bytes) -> NodeTold | None:
    """Return an answer; None for what is none."""
    try:
        answer = parsed(data, dict[str, Any])
    except msgspec.MsgspecError:
        return None
    server, state = _table(answer.get("server")), _table(answer.get("statsz"))
    name = server.get("name")
    if not isinstance(name, str):
        return None
    routes = state.get("routes")
    peers = {str(_table(one).get("name")) for one in (routes if isinstance(routes, list) else ())}
    tags, connections = server.get("tags"), state.get("connections")
    return NodeTold(
        name=name,
        version=str(server.get("ver", "")),
        tags=tuple(map(str, tags if isinstance(tags, list) else ())),
        peers=tuple(sorted(peers)),
        connections=connections if isinstance(connections, int) else 0,
        up_s=max(0.0, _time_s(server.get("time")) - _time_s(state.get("start"))),
    )


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _time_s(value: object) -> float:
    """Return a time that a server has written, to the microsecond; 0 for none."""
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return 0.0
