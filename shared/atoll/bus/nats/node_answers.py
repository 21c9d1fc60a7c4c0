"""One question to all nodes of a locked broker, and their answers (`atoll.bus.nodes`)."""

from __future__ import annotations

import asyncio
from typing import Final

from nats.aio.msg import Msg

from atoll.base.errors import SettingsError
from atoll.base.retry import bounded
from atoll.bus.nats.connection import Connection
from atoll.bus.nodes import NODES, NodeTold, told

QUIET_S: Final = 0.3
"""When every node that another one names has answered, and nobody new for so long, there is nobody else."""
NODES_MAX: Final = 64


async def node_answers(connection: Connection, wait_s: float) -> list[NodeTold]:
    """Return what the nodes say, by name; wait for more of them for `wait_s` at most. In the connection's loop.

    Raises:
        SettingsError: the broker knows no such question.
    """
    answers: asyncio.Queue[Msg] = asyncio.Queue(NODES_MAX)
    inbox = connection.admission.inbox()

    def on_message(message: Msg) -> None:
        if not answers.full():
            answers.put_nowait(message)

    key = await connection.subscribe(inbox, on_message)
    found: dict[str, NodeTold] = {}
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
            if (message.headers or {}).get("Status") == "503":
                raise SettingsError(
                    "this broker does not say what its nodes are",
                    got="nobody who answers",
                    allowed="a broker of `atoll broker --keys`, of this version or later",
                    todo="lock it (`atoll keys new`), or upgrade it; an open broker has no roll",
                )
            node = told(message.data)
            if node is not None:
                found[node.name] = node
    finally:
        await connection.unsubscribe(key)
    return [found[name] for name in sorted(found)]
