"""The contract of a bus, over a real nats-server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from support.bus_contract import BusContract
from support.bus_contract_data import MakeBus

pytestmark = pytest.mark.connected
ROOM_BYTES = 16 << 20
OPTIONS = BusOptions(full_s=0.3, gone_s=0.2)


@pytest.fixture
def full_at_bytes() -> int:
    """More than the room of a tensor stream."""
    return ROOM_BYTES


@pytest.fixture
async def make_bus(broker: EmbeddedBroker, run: str) -> AsyncIterator[MakeBus]:
    """Open buses of one run on the session's broker."""
    opened: list[JetStreamBus] = []

    async def make() -> Any:  # noqa: ANN401  # mypy checks the protocol at the contract's own type
        opened.append(await JetStreamBus.open(broker.url, run, name=f"bus-{len(opened)}", options=OPTIONS))
        await opened[-1].provision(ROOM_BYTES)
        return opened[-1]

    yield make
    for bus in opened:
        await bus.close()


class TestJetStreamBus(BusContract):
    """The contract."""
