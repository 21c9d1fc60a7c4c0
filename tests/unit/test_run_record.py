"""What a process checks in the record of a run before it takes part."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from atoll.base.errors import SettingsError
from atoll.bus.memory.bus import MemoryBroker, MemoryBus
from atoll.client.founding import found_or_join, publish_origin
from atoll.model.layout import TensorSpec, plan_layout
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.messages import RunRecord
from atoll_synchronizer.process import wait_for_run


async def test_a_run_with_a_codec_of_another_version_is_refused_before_anything_is_owned(run: str) -> None:
    """A shard that cannot read the run's frames would take it from an owner that can; a learner would stay a ghost."""
    layout = plan_layout([TensorSpec("w", (8,), "float32")], 1)
    ours = RunRecord(
        run=run,
        founder="a",
        nonce="n",
        founded_at_s=0.0,
        layout=layout,
        protocol=ProtocolSettings(fragments=1, shards=1),
    )
    newer = msgspec.structs.replace(ours, protocol=msgspec.structs.replace(ours.protocol, codec_up="newer"))
    bus = MemoryBus(run, MemoryBroker())
    await found_or_join(bus, newer)
    await publish_origin(bus, newer, {0: np.zeros(8, np.float32)})

    with pytest.raises(SettingsError, match="does not know a codec") as refused:
        await wait_for_run(bus, run, asyncio.Event())
    with pytest.raises(SettingsError, match="does not know a codec"):
        await found_or_join(bus, ours)
    assert "newer" in str(refused.value)
    assert "the version of Atoll that the run was founded with" in str(refused.value)
