"""The smallest run there is: one shard and one fragment of four numbers, founded on an in-memory broker."""

from __future__ import annotations

import msgspec
import numpy as np

from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.membership import found_or_join, publish_origin
from atoll.model.layout import TensorSpec, plan_layout
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.messages import RunRecord


async def founded(broker: MemoryBroker, run: str) -> RunRecord:
    bus = MemoryBus(run, broker)
    protocol = msgspec.convert({"fragments": 1, "shards": 1}, ProtocolSettings)
    layout = plan_layout([TensorSpec("w", (4,), "float32")], 1)
    offer = RunRecord(run=run, founder="a", nonce="n", founded_at_s=0.0, layout=layout, protocol=protocol)
    record, _ = await found_or_join(bus, offer)
    await publish_origin(bus, record, {0: np.zeros(4, dtype=np.float32)})
    return record
