"""Several founders create a run's streams at once: the first does, and the others find them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.base.errors import AtollError
from atoll.bus.nats import provision as module
from atoll.bus.nats.jetstream_api import NO_STREAM, STREAM_EXISTS, ApiError, ApiRefusal, JetStream
from atoll.bus.nats.provision import provision, stream_config
from atoll.bus.options import BusOptions
from atoll.bus.streams import stream_plan

PLAN = stream_plan("demo")[0]


class CreatedElsewhere:
    """A cluster on which another founder creates a stream: it refuses the name, and has the stream `looks` looks later."""

    def __init__(self, looks: int) -> None:
        self.connection = SimpleNamespace(loop=asyncio.get_running_loop(), options=BusOptions(peers_s=0.2))
        self.looks = looks

    async def api(self, call: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if call.startswith("STREAM.CREATE"):
            assert body is not None
            raise ApiRefusal(ApiError(code=400, err_code=STREAM_EXISTS, description="stream name already in use"))
        self.looks -= 1
        if self.looks > 0:
            raise ApiRefusal(ApiError(code=404, err_code=NO_STREAM, description="stream not found"))
        return {"config": stream_config(PLAN, "atoll.demo")}


async def test_a_stream_that_another_founder_creates_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster refuses its name before it is there; so a learner once left that founded beside others."""
    monkeypatch.setattr(module, "_PEERS_PAUSE_S", 0.001)
    late = CreatedElsewhere(looks=5)
    await provision(cast("JetStream", late), (PLAN,), "atoll.demo")
    assert late.looks == 0

    never = CreatedElsewhere(looks=1_000_000)
    with pytest.raises(AtollError, match="already in use"):
        await provision(cast("JetStream", never), (PLAN,), "atoll.demo")
