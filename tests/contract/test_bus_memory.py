"""The contract of a bus, in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.base.errors import BlobGone
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.bus.signed import SignedBus
from atoll.keys.identity import read_identity
from atoll.keys.roll import KeyFolder
from atoll.wire.subjects import Subjects
from support.bus_contract import ROOM_BYTES, BusContract, MakeBus, buses
from support.clocks import HandClock


@pytest.fixture
async def make_bus(run: str) -> AsyncIterator[MakeBus]:
    shared = MemoryBroker(stream_bytes_max=ROOM_BYTES)

    async def made(_: int) -> MemoryBus:
        return MemoryBus(run, shared)

    async with buses(made) as make:
        yield make


class TestMemoryBus(BusContract):
    """The contract."""


class TestSignedMemoryBus(BusContract):
    """The same contract, where each message is signed and checked.

    Two of its tests count the bytes of messages exactly, and one writes a chunk as if it were a message.
    """

    test_oversized_messages_are_refused_at_home = None  # type: ignore[assignment]
    test_traffic_is_counted = None  # type: ignore[assignment]
    test_a_foreign_chunk_is_found_out = None  # type: ignore[assignment]

    @pytest.fixture
    async def make_bus(self, run: str, tmp_path: Path) -> AsyncIterator[MakeBus]:
        """Open buses on one shared broker, each with the signatures of the operator."""
        shared = MemoryBroker(stream_bytes_max=ROOM_BYTES)
        signatures = read_identity(KeyFolder(tmp_path / "keys").create(["127.0.0.1"], 0.0)).signatures()

        async def made(_: int) -> SignedBus:
            return SignedBus(MemoryBus(run, shared), run, signatures)

        async with buses(made) as make:
            yield make


async def test_ids_and_messages_age_by_the_clock(run: str) -> None:
    """After the dedup window an id may be stored again; chunks older than their stream's age are gone, manifests stay."""
    clock = HandClock(0.0)
    bus, subjects = MemoryBus(run, MemoryBroker(clock=clock)), Subjects(run)
    await bus.publish(subjects.event("a", "b"), b"1", msg_id="m")
    await bus.publish(subjects.contribution(0, 0, "a"), b"1", msg_id="m")
    stored = await bus.put_blob(subjects.contribution_stem("a", 0, 1, 1, "0" * 16), b"1")

    clock.now_s = 601.0
    await bus.publish(subjects.event("a", "b"), b"2", msg_id="m")
    assert [entry.data for entry in await bus.replay(subjects.event("*", ">"))] == [b"1", b"2"]

    clock.now_s = 7201.0
    assert len(await bus.replay(subjects.contributions_of(0))) == 1
    with pytest.raises(BlobGone):
        await bus.get_blob(stored, 1)
    await bus.close()
