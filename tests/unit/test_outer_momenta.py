"""A region has the momenta of the shards, whether they are stored with every version or derived from the values."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from atoll.archive.object_store import FolderArchive
from atoll.base.errors import BlobGone
from atoll.merge.outer import MOMENTUM, derivable
from atoll.protocol.settings import ProtocolSettings
from atoll_synchronizer import region_service
from atoll_synchronizer.region_service import MOMENTA_KEPT, OuterMomenta
from support.founded_run import FRAGMENTS, FoundedRun, TurnedClock, run_record

DELTAS = {"codec_down": "int4", "outer_momentum": 0.9, "keyframe_versions": 4}


@pytest.fixture(params=[{"average_versions": 4}, {}], ids=["stored", "derived"])
async def founded(request: pytest.FixtureRequest, run: str, tmp_path: Path) -> FoundedRun:
    record = run_record(run)
    asked = msgspec.structs.asdict(record.protocol) | DELTAS | request.param
    record = msgspec.structs.replace(record, protocol=msgspec.convert(asked, ProtocolSettings).check())
    found = FoundedRun(record, FolderArchive(tmp_path), TurnedClock())
    await found.found()
    return found


async def of_shard(founded: FoundedRun, momenta: OuterMomenta, fragment: int) -> bool:
    holding = founded.stores[founded.record.protocol.shard_of(fragment)].holdings[fragment]
    reference = await momenta.of(fragment, holding.head.version, holding.head.state)
    assert reference is not None
    return reference.momentum.tobytes() == holding.state[MOMENTUM].tobytes()


async def test_a_region_has_the_momentum_of_the_shard(founded: FoundedRun) -> None:
    """At every version, also after some that it was not asked for, and over a keyframe; of version 0 there is none."""
    momenta = OuterMomenta(founded.bus, founded.record)
    assert await momenta.of(0, 0, None) is None
    for rounds in (1, 1, 2, 1, 3):
        for _ in range(rounds):
            await founded.commit(0)
        assert await of_shard(founded, momenta, 0)
        assert await of_shard(founded, momenta, 0), "asked once more"


async def test_what_is_derived_is_read_once(founded: FoundedRun) -> None:
    bus = founded.bus
    momenta = OuterMomenta(bus, founded.record)
    await founded.commit(0)
    assert await of_shard(founded, momenta, 0)
    await founded.commit(0)
    before = bus.stats.frame_bytes_down
    assert await of_shard(founded, momenta, 0)
    newest = founded.stores[0].holdings[0].head.deltas[-1]
    assert bus.stats.frame_bytes_down - before == (newest.size_bytes if derivable(founded.record.protocol) else 0)


async def test_as_many_momenta_are_kept_as_there_is_room_for(founded: FoundedRun) -> None:
    assert FRAGMENTS >= MOMENTA_KEPT
    momenta = OuterMomenta(founded.bus, founded.record)
    await founded.round()
    for fragment in (*range(FRAGMENTS), 0):
        assert await of_shard(founded, momenta, fragment)


async def test_a_head_that_never_comes_is_said(founded: FoundedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that speaks of a version that is not there has a sum refused, and nothing waits for ever."""
    monkeypatch.setattr(region_service, "HEAD_LOOK_S", 0.001)
    await founded.commit(0)
    momenta = OuterMomenta(founded.bus, founded.record)
    if derivable(founded.record.protocol):
        with pytest.raises(BlobGone, match="not here"):
            await momenta.of(0, 5, None)
    else:
        assert await momenta.of(0, 5, None) is None


async def test_a_run_that_corrects_nothing_reads_nothing(founded: FoundedRun) -> None:
    """Then there is nothing to compare with, and the run's optimizer need not be installed where the region is."""
    agreed = msgspec.structs.replace(founded.record.protocol, correction="none", outer="not_installed_here:optimizer")
    plain = msgspec.structs.replace(founded.record, protocol=agreed)
    bus = founded.bus
    assert await OuterMomenta(bus, plain).of(0, 1, None) is None
    assert bus.stats.bytes_down == 0
