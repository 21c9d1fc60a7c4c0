"""Who waits for a broker hears for how long, and why in vain."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from structlog.testing import capture_logs

from atoll.bus.nats import connection

NO_BROKER = "no broker answers there"


@pytest.mark.parametrize(
    ("answer", "why"),
    [(None, NO_BROKER), (socket.EAI_AGAIN, NO_BROKER), (socket.EAI_NONAME, "no name server knows hub.example")],
)
async def test_waiting_is_told_until_it_ends(answer: int | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the seconds that are left; a name server that is away says nothing about a host."""

    async def look_up(*_: Any) -> list[Any]:  # noqa: ANN401
        if answer is not None:
            raise socket.gaierror(answer, "as told")
        return []

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    monkeypatch.setattr(connection, "REPORT_EVERY_S", 0.01)
    with capture_logs() as lines, connection.report_waiting("nats://hub.example:4222", 0.02):
        async with asyncio.timeout(30.0):
            while len(lines) < 2:  # noqa: ASYNC110  (a line of the log sets no event)
                await asyncio.sleep(0)
    assert [(line["event"], line["why"], line["still_trying_for_s"]) for line in lines] == [
        ("bus.waiting", why, 0.01),
        ("bus.waiting", why, 0.0),
    ]
