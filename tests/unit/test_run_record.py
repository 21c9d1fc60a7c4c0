"""What a process checks in the record of a run before it takes part."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from atoll.base.errors import LayoutMismatch, SettingsError
from atoll.bus.interface import Record
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.membership import found_or_join, publish_origin, warn_of_mixture
from atoll.client.parameters import frozen_leaves, rules_of
from atoll.model.layout import TensorSpec, plan_layout
from atoll.protocol.settings import ProtocolSettings
from atoll.run import heads
from atoll.wire.messages import RunRecord
from atoll_synchronizer.process import wait_for_run
from support.clocks import HandClock
from support.founded_run import run_record

MODEL = (
    TensorSpec("base/w", (8,), "float32"),
    TensorSpec("lora/a", (4,), "float32"),
    TensorSpec("lora/b", (4,), "float32"),
    TensorSpec("stats", (2,), "float32"),
)


def offered(run: str, merge: dict[str, str], tensors: tuple[TensorSpec, ...] = MODEL) -> RunRecord:
    """Return the record that a loop with these rules would found a run with."""
    rules = rules_of(tensors, merge)
    values = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in tensors}
    layout = rules.layout(tensors, 2)
    protocol = ProtocolSettings(fragments=2, shards=1, value_fragments=layout.value_fragments)
    frozen = frozen_leaves(values, rules)
    return RunRecord(run=run, founder="a", nonce="n", founded_at_s=0.0, layout=layout, protocol=protocol, frozen=frozen)


@pytest.mark.parametrize(
    ("founder", "ours", "told"),
    [
        ({"base/*": "frozen"}, {}, "'base/w' is merged here, and frozen in the run"),
        ({"base/*": "local"}, {}, "'base/w' is merged here, and local or missing in the run"),
        ({}, {"base/*": "frozen"}, "'base/w' is frozen here, and merged in the run"),
        ({"base/*": "local"}, {"lora/a": "local"}, "'lora/a' is local or missing here, and merged in the run"),
    ],
)
async def test_an_island_with_other_rules_than_the_founder_is_told_of_its_rules(
    run: str, founder: dict[str, str], ours: dict[str, str], told: str
) -> None:
    """Without `merge` it was told of tensors that have changed places."""
    bus = MemoryBus(run, MemoryBroker())
    await found_or_join(bus, offered(run, founder))

    with pytest.raises(LayoutMismatch, match="merges other leaves") as refused:
        await found_or_join(bus, offered(run, ours))

    assert told in str(refused.value)
    assert "the same JoinOptions.merge as the founder" in str(refused.value.todo)


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


Values = dict[int, np.ndarray[Any, np.dtype[np.float32]]]


async def begun(run: str) -> tuple[MemoryBus, RunRecord, Values, Values]:
    """Return the bus of a run that is founded and has no values yet, its record, and the values of two learners."""
    record, bus = run_record(run), MemoryBus(run, MemoryBroker())
    await found_or_join(bus, record)
    sizes = record.layout.fragment_sizes()
    theirs, ours = ({p: np.full(size, value, np.float32) for p, size in enumerate(sizes)} for value in (1.0, 2.0))
    return bus, record, theirs, ours


async def test_a_founder_that_was_taken_for_gone_learns_whose_values_are_in_its_place(run: str) -> None:
    """Where another learner has completed the heads with other values the model is mixed; with the same it is not."""
    bus, record, theirs, ours = await begun(run)

    assert await publish_origin(bus, record, {0: ours[0]}) == []
    assert await publish_origin(bus, record, theirs) == [0], "its own are there elsewhere"
    assert await publish_origin(bus, record, theirs) == [0]
    assert await publish_origin(bus, record, ours) == list(range(1, len(ours)))


class HeadByHead(MemoryBus):
    """A bus that shows one head more with every reading, up to `most`, while each takes `takes_s` of a clock."""

    def __init__(self, run: str, broker: MemoryBroker, clock: HandClock, takes_s: float) -> None:
        super().__init__(run, broker)
        self.clock, self.takes_s, self.most, self.readings = clock, takes_s, 1 << 30, 0

    async def get_records(self, subject_filter: str) -> list[Record]:
        self.readings += 1
        self.clock.now_s += self.takes_s
        return (await super().get_records(subject_filter))[: min(self.readings, self.most)]


async def test_a_founder_is_waited_for_as_long_as_heads_appear(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who completes a run whose founder is only slow mixes two models; one that has stopped is not waited for."""
    monkeypatch.setattr(heads, "POLL_S", 0.0)
    record, clock, broker = run_record(run), HandClock(), MemoryBroker()
    bus = HeadByHead(run, broker, clock, 0.9 * heads.founder_patience_s(record))
    await found_or_join(bus, record)
    sizes = record.layout.fragment_sizes()
    await publish_origin(bus, record, {p: np.zeros(size, np.float32) for p, size in enumerate(sizes)})

    found = await heads.wait_for_heads(bus, record, clock)
    assert found is not None
    assert (len(found), bus.readings) == (len(sizes), len(sizes))
    bus.readings, bus.most = 0, len(sizes) - 1
    assert await heads.wait_for_heads(bus, record, clock) is None
    assert bus.readings == bus.most + 2


async def test_who_completes_a_run_with_other_values_than_its_founder_says_so(run: str) -> None:
    """The run must begin though its founder is gone; that its model is mixed from two must not go unsaid."""
    bus, record, theirs, ours = await begun(run)
    await publish_origin(bus, record, {0: theirs[0]})
    same, others = [await publish_origin(bus, record, {0: values[0]}) for values in (theirs, ours)]
    with capture_logs() as lines:
        for mixed in (same, others):
            warn_of_mixture(record, mixed)

    assert (same, others) == ([], [0])
    assert [(line["event"], line["fragments"]) for line in lines] == [("run.mixed", f"1 of {len(ours)}")]
