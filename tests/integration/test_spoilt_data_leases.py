"""A permitted learner writes what it likes into the record of data leases: others go on, and newcomers come in."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

import atoll
from atoll.base.background_tasks import LoopThread
from atoll.base.quantities import COUNT_MAX
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.client.join import IslandHandle
from atoll.protocol.data import DataGrant, DataLedger
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.messages import decode, encode
from atoll.wire.subjects import Subjects
from atoll_synchronizer.process import serve_run
from support.links import unique_run
from support.locked_brokers import LockedBroker

pytestmark = pytest.mark.connected

BLOCKS = 400
DEADLINE_S = 120.0
SPOILT = {
    "no ledger": b"{}",
    "no text": b"\xff" * 64,
    "an epoch without a successor": msgspec.json.encode(
        DataLedger(blocks=BLOCKS, epoch=COUNT_MAX, next_position=BLOCKS)
    ),
    "an epoch above its writes": encode(DataLedger(blocks=BLOCKS, epoch=COUNT_MAX // 4, next_position=BLOCKS)),
    "renewals above its writes": encode(
        DataLedger(blocks=BLOCKS, next_position=4, grants=(DataGrant(0, 0, 4, "ada", 1, renewals=COUNT_MAX // 4),))
    ),
    "grants of 13,000 holders that are nowhere": b'{"blocks":%d,"next_position":200,"grants":[%s]}'
    % (
        BLOCKS,
        b",".join(
            b'{"epoch":0,"start":0,"stop":1,"learner":"m","incarnation":%d}' % incarnation
            for incarnation in range(13_000)
        ),
    ),
    "other blocks": encode(DataLedger(blocks=7)),
}
"""Records that stopped every lease of a run, for ever."""


class LeasingIsland:
    """An island that leases its data and reads it at once."""

    def __init__(self, broker: LockedBroker, run: str, name: str) -> None:
        self.params = {"w": np.zeros((8, 4), np.float32)}
        protocol = ProtocolSettings(fragments=1, shards=1, interval_steps=4)
        identity = broker.keys.path / "identities" / run / f"{name}.toml"
        options = atoll.JoinOptions(identity=identity, data_blocks=BLOCKS)
        self.island: IslandHandle = atoll.join(
            broker.url, run=run, learner=name, params=self.params, protocol=protocol, options=options
        )

    def lease(self) -> int:
        leases = self.island.session.leases
        grant = self.island.call(leases.take(4)).result(DEADLINE_S)
        leases.progress = {**leases.progress, grant.key: (1, 1)}
        return grant.blocks

    def train_to(self, versions: int) -> None:
        interval, deadline_s = self.island.session.driver.machine.intervals[0], time.monotonic() + DEADLINE_S
        enough = interval.anchor + versions
        while interval.anchor < enough:
            assert time.monotonic() < deadline_s
            self.params = self.island.step({"w": np.asarray(self.params["w"]) + np.float32(0.01)}, tokens=4)
            time.sleep(0.005)


def test_a_spoilt_record_of_data_leases_is_replaced_and_newcomers_come_in(home: LoopThread, tmp_path: Path) -> None:
    """Behind a locked door, by a key that may write it: the run leases, trains and grows after each of them."""
    run = unique_run()
    subjects = Subjects(run)
    with LockedBroker(tmp_path) as broker:
        broker.add(run, "ada", founds=True)
        for name in ("bob", "mallory"):
            broker.add(run, name)
        broker.add(run, "shard", "synchronizer")

        async def opened(name: str = "shard") -> Bus:
            options = BusOptions(credentials=broker.identity(run, name).credentials())
            return await open_bus(broker.url, run, name=name, options=options)

        async def spoil(record: bytes) -> None:
            bus = await opened("mallory")
            await bus.put_record(subjects.data, record, expected=None)
            await bus.close()

        async def ledger() -> DataLedger:
            bus = await opened("mallory")
            record = await bus.get_record(subjects.data)
            await bus.close()
            assert record is not None
            return decode(DataLedger, record.data)

        serving = home.submit(serve_run(opened, run, shard=0))
        try:
            ada = LeasingIsland(broker, run, "ada")
            with ada.island:
                assert ada.lease() == 4
                for what, record in SPOILT.items():
                    home.submit(spoil(record)).result(DEADLINE_S)
                    assert ada.lease() == 4, what
                    there = home.submit(ledger()).result(DEADLINE_S)
                    assert (there.blocks, there.epoch) == (BLOCKS, 0), what
                for what, record in SPOILT.items():
                    home.submit(spoil(record)).result(DEADLINE_S)
                    bob = LeasingIsland(broker, run, "bob")
                    with bob.island:
                        assert bob.lease() == 4, what
                ada.train_to(3)
                assert ada.lease() == 4
        finally:
            serving.cancel()
            home.stop()
