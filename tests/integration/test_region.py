"""Learners behind the broker of a region train with a synchronizer at the hub, through a cut of their link: real processes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.keys.rights import Kind, premerger_of
from support.islands import DEADLINE_S, IslandProcess, end, unforked
from support.links import unique_run
from support.locked_regions import LockedRelayed
from support.regions import RelayedRegion

pytestmark = [pytest.mark.connected, pytest.mark.second_tier]
ROUNDS = 4
EU = premerger_of("eu")
KINDS: dict[str, Kind] = {"shard": "synchronizer", "a": "learner", "b": "learner", EU: "premerger"}


@dataclass(frozen=True, slots=True)
class AddingRegion:
    """A hub, a region, and a run to be; `identities` by name, as environment."""

    there: RelayedRegion
    island: IslandProcess
    identities: dict[str, dict[str, str]]

    def start(self, name: str, who: str, *words: str, at: EmbeddedBroker) -> subprocess.Popen[bytes]:
        """Start a service of the run as `who`, at a broker."""
        return self.island.start(name, *words, ATOLL_BROKER__URL=at.url, **self.identities.get(who, {}))


@pytest.fixture
def there(tmp_path: Path) -> Iterator[RelayedRegion]:
    with RelayedRegion(tmp_path / "brokers") as running:
        yield running


async def test_a_region_trains_through_a_cut(there: RelayedRegion, tmp_path: Path, data: Path) -> None:
    """Its founder is in the region, too; every token has one fate, and no version is made twice."""
    island = IslandProcess(tmp_path, there.hub.url, data)
    try:
        island.start("shard", "synchronizer", "--shard", "0")
        for name in ("a", "b"):
            island.start(name, "learner", "--id", name, ATOLL_BROKER__URL=there.leaf.url)
        island.wait_for("shard", "round.committed", ROUNDS)
        for name in ("a", "b"):  # one that is still compiling as the link is cut has no text to train on
            island.wait_for(name, "fragment.adopted", ROUNDS)
        there.cut()
        steps = len(island.lines("a", "learner.progress"))
        island.wait_for("a", "learner.progress", steps + 2)
        there.heal()
        made, adopted = len(island.lines("shard", "round.committed")), len(island.lines("a", "fragment.adopted"))
        island.wait_for("shard", "round.committed", made + ROUNDS)
        island.wait_for("a", "fragment.adopted", adopted + ROUNDS)
        await end(island, ["a", "b"])
        island.process("shard").terminate()
        assert island.process("shard").wait(DEADLINE_S) == 0, island.log("shard").read_text(encoding="utf-8")[-2000:]
        settled = await island.settlement()
        assert settled.exact, settled.errors
        assert settled.fates["merged"] > 0
        assert unforked(await island.events("round"))
    finally:
        island.stop()


@pytest.fixture(params=["open", "locked"])
def adding(request: pytest.FixtureRequest, tmp_path: Path, data: Path) -> Iterator[AddingRegion]:
    """A hub and a region without a run; behind a locked door everybody has an identity of their own."""
    if request.param == "open":
        with RelayedRegion(tmp_path / "brokers") as running:
            yield AddingRegion(running, IslandProcess(tmp_path, running.hub.url, data), {})
        return
    run = unique_run()
    with LockedRelayed(tmp_path / "brokers", run, KINDS, ("a", "b", "eu")) as locked:
        island = IslandProcess(tmp_path, locked.hub.url, data, run)
        island.options = BusOptions(credentials=locked.identity("shard").credentials())
        identities = {name: {"ATOLL_BROKER__IDENTITY": str(locked.identity_path(name))} for name in KINDS}
        yield AddingRegion(locked, island, identities)


async def test_a_region_that_adds_up_keeps_chunks_and_gives_them_back(adding: AddingRegion) -> None:
    """Only sums are stored at the hub. With the region's synchronizer dead, a shard has the chunks sent, and all goes on."""
    island = adding.island
    try:
        adding.start("shard", "shard", "synchronizer", "--shard", "0", at=adding.there.hub)
        adds_up = adding.start("eu", EU, "synchronizer", "--region", "eu", at=adding.there.leaf)
        for name in ("a", "b"):
            adding.start(name, name, "learner", "--id", name, "--set", "learner.region=eu", at=adding.there.leaf)
        island.wait_for("shard", "region.sum_read", 3 * ROUNDS)
        bus = await open_bus(island.url, island.run, name="reader", options=island.options)
        stored = await bus.purge(f"atoll.{island.run}.up.c.a.>") + await bus.purge(f"atoll.{island.run}.up.c.b.>")
        assert stored == 0, "chunks of contributions have crossed the link"
        await bus.close()
        adds_up.kill()
        island.wait_for("shard", "region.away")
        made = len(island.lines("shard", "round.committed"))
        island.wait_for("shard", "round.committed", made + 2 * ROUNDS)
        adding.start("eu-again", EU, "synchronizer", "--region", "eu", at=adding.there.leaf)
        island.wait_for("shard", "region.sum_read", len(island.lines("shard", "region.sum_read")) + ROUNDS)
        await end(island, ["a", "b"])
        island.process("shard").terminate()
        assert island.process("shard").wait(DEADLINE_S) == 0, island.log("shard").read_text(encoding="utf-8")[-2000:]
        settled = await island.settlement()
        assert settled.exact, settled.errors
        wasted = {fate for fate, count in settled.fates.items() if count and fate.startswith("refused")}
        assert wasted <= {"refused:stale"}
        assert settled.fates["lost"] == 0
        assert unforked(await island.events("round"))
    finally:
        island.stop()
