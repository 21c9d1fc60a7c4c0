"""Regions in network namespaces, with real packets on links of a rate, a delay and losses: what crosses a network, and a cut.

A hub has the broker and the synchronizer; each region has one learner and its own wire. Needs root on Linux (`support.wan`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.bus.server import EmbeddedBroker
from atoll.wire.messages import Event
from support.islands import DEADLINE_S, IslandProcess, end, unforked
from support.wan import Wan, Wire, inside, unfit, wan

pytestmark = [pytest.mark.wan, pytest.mark.second_tier]
HUB, REGIONS = "hub", ("a", "b", "c")
PORT = 4222
WIRE = Wire(bits_s=20e6, delay_s=0.02, loss=0.005, queue_s=0.1)


@pytest.fixture
def there() -> Iterator[Wan]:
    if reason := unfit():
        pytest.skip(reason)
    with wan({HUB: None, **dict.fromkeys(REGIONS, WIRE)}, 0) as hosts:
        yield hosts


@pytest.fixture
def island(there: Wan, tmp_path: Path, data: Path) -> Iterator[IslandProcess]:
    """A run at a broker in the hub; the synchronizer runs, and a learner in each region."""
    with inside(there.namespaces[HUB]):
        broker = EmbeddedBroker(tmp_path / "nats", PORT, host=there.addresses[HUB]).start()
    island = IslandProcess(tmp_path, broker.url, data)
    try:
        with inside(there.namespaces[HUB]):
            island.start("shard", "synchronizer")
        for name in REGIONS:
            with inside(there.namespaces[name]):
                island.start(name, "learner", "--id", name, ATOLL_LEARNER__THROTTLE="20")
        for name in REGIONS:
            island.wait_for(name, "fragment.adopted", 4)
        yield island
    finally:
        island.stop()
        broker.stop()


def rounds(island: IslandProcess, there: Wan) -> list[Event]:
    with inside(there.namespaces[HUB]):
        return asyncio.run(island.events("round"))


def ended(island: IslandProcess, there: Wan) -> None:
    """End the run, and check that every token of every learner has one fate and no version was made twice."""
    asyncio.run(end(island, list(REGIONS)))
    assert island.process("shard").wait(DEADLINE_S) == 0
    with inside(there.namespaces[HUB]):
        settled = asyncio.run(island.settlement())
    assert settled.exact, settled.errors
    assert unforked(rounds(island, there))


def test_three_regions_train_over_lossy_links(island: IslandProcess, there: Wan) -> None:
    for name in REGIONS:
        island.wait_for(name, "fragment.adopted", 40)
        up, down = there.carried(name)
        assert up.lost
        assert down.lost
    island.process("shard").terminate()
    ended(island, there)


def test_a_region_that_is_cut_trains_on_and_is_current_soon_after(island: IslandProcess, there: Wan) -> None:
    there.cut("b")
    island.wait_for("b", "bus.disconnected")  # by the watchdog, or by the system where something waits to be sent
    steps = len(island.lines("b", "learner.progress"))
    others = len(island.lines("shard", "round.committed"))
    island.wait_for("shard", "round.committed", others + 16)
    island.wait_for("b", "learner.progress", steps + 1)
    adopted = len(island.lines("b", "fragment.adopted"))
    there.heal("b")
    island.wait_for("b", "fragment.adopted", adopted + 8)
    assert island.process("b").poll() is None
    island.process("shard").terminate()
    ended(island, there)
