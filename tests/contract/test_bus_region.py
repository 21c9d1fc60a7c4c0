"""The contract of a bus, for a process whose broker is the leaf of a region."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from support.bus_contract import ROOM_BYTES, BusContract, MakeBus, buses
from support.regions import hub, region
from support.regions import leaf as leaf_at

pytestmark = pytest.mark.connected
OPTIONS = BusOptions(full_s=0.3, gone_s=0.2)


@pytest.fixture(scope="module")
def leaf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    broker, port = hub(tmp_path_factory.mktemp("hub"))
    with broker, region(leaf_at(tmp_path_factory.mktemp("eu"), f"nats://127.0.0.1:{port}")) as running:
        yield running


class TestRegionBus(BusContract):
    """The contract, with mirror and outbox."""

    @pytest.fixture
    async def make_bus(self, leaf: EmbeddedBroker, run: str) -> AsyncIterator[MakeBus]:
        async with buses(
            lambda number: open_bus(leaf.url, run, name=f"bus-{number}", options=OPTIONS), ROOM_BYTES
        ) as make:
            yield make
