"""What every `Bus` must do, written once; `test_bus_memory` and `test_bus_jetstream` bind it.

A binding gives the fixture `make_bus`, which opens another bus of the same run and broker.
"""

from __future__ import annotations

import asyncio

import pytest

from atoll.base.errors import BrokerUnavailable, ProtocolMisuse
from atoll.bus.interface import Bus
from atoll.wire.limits import MESSAGE_BYTES_MAX
from atoll.wire.subjects import Subjects
from support.bus_contract_data import MIB, SOON_S, BlobContract, MakeBus, QueueContract, RecordContract, noise
from support.bus_contract_live import CoreMessageContract, EventLogContract


class BusContract(BlobContract, RecordContract, QueueContract, EventLogContract, CoreMessageContract):
    """All of it, and what concerns every call."""

    async def test_it_is_a_bus(self, make_bus: MakeBus) -> None:
        assert isinstance(await make_bus(), Bus)

    async def test_oversized_messages_are_refused_at_home(self, make_bus: MakeBus, run: str) -> None:
        """A message the broker would hang up on never leaves, and the bus goes on working."""
        bus, subjects, large = await make_bus(), Subjects(run), bytes(MESSAGE_BYTES_MAX + 1)

        with pytest.raises(ProtocolMisuse, match="too large"):
            await bus.put_record(subjects.head(0), large, expected=None)
        with pytest.raises(ProtocolMisuse, match="too large"):
            await bus.tell(subjects.call(0), large)
        with pytest.raises(ProtocolMisuse, match="info"):
            await bus.publish(subjects.event("a", "b"), b"", msg_id="m", info={"x": "y" * 5000})

        assert await bus.put_record(subjects.head(0), large[:-1], expected=0)

    async def test_a_subject_nobody_keeps_is_a_mistake(self, make_bus: MakeBus, run: str) -> None:
        """Durable calls on subjects without a stream are our own bug, told at once."""
        bus = await make_bus()

        with pytest.raises(ProtocolMisuse, match="no stream"):
            await bus.publish(Subjects(run).call(0), b"", msg_id="m")

    async def test_traffic_is_counted(self, make_bus: MakeBus, run: str) -> None:
        """Payload bytes of both directions are in the stats, and those of blobs among them."""
        bus = await make_bus()
        ref = await bus.put_blob(Subjects(run).global_stem(0, 1, "n"), noise(MIB + 5))
        await bus.get_blob(ref, 2 * MIB)
        assert (bus.stats.blob_bytes_up, bus.stats.blob_bytes_down) == (MIB + 5, MIB + 5)

        stats = bus.stats
        assert (stats.bytes_up, stats.bytes_down) == (MIB + 5, MIB + 5)
        await bus.put_record(Subjects(run).head(0), b"small", expected=None)
        assert (stats.bytes_up, stats.blob_bytes_up) == (MIB + 10, MIB + 5)

    async def test_a_closed_bus_refuses_and_ends_its_feeds(self, make_bus: MakeBus, run: str) -> None:
        """Closing twice is harmless; later calls say that the bus is closed."""
        bus, subjects = await make_bus(), Subjects(run)
        feed = await bus.listen(subjects.call("*"))
        waiting = asyncio.create_task(feed.next(SOON_S))

        await bus.close()
        await bus.close()

        assert await waiting is None
        with pytest.raises(BrokerUnavailable, match="closed"):
            await bus.get_record(subjects.head(0))
