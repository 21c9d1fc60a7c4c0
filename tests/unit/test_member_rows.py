"""The rows that a permitted learner sends are sent, each is read or refused in words, and harm to honest learners is seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from atoll.base.errors import PeerMisbehaved
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.membership import publish_origin
from atoll.protocol.data import DataLedger
from atoll.wire.limits import Info
from atoll.wire.messages import Contribution, Member, RunRecord, decode
from atoll_synchronizer.aggregator import check_manifest
from atoll_synchronizer.intake import read_beat
from support.door_attacks import INTRUDER
from support.founded_run import run_record
from support.honest_watch import RunLook, harm_in, stands_still
from support.member_attacks import EVENTS, FILLS, IDS_KEPT, LENGTHS, MEMBER_ATTACKS, REGIONS, Attacker, MemberAttack

ON_A_CONNECTION = {*EVENTS, *FILLS, *IDS_KEPT, *REGIONS}
"""Rows that need a broker: the test of a whole run plays them."""


class OverheardBus(MemoryBus):
    """A bus that keeps what is written through it."""

    def __init__(self, run: str) -> None:
        super().__init__(run, MemoryBroker())
        self.said: list[tuple[str, bytes]] = []

    async def publish(self, subject: str, data: bytes, *, msg_id: str, info: Info | None = None) -> None:  # noqa: ARG002
        self.said.append((subject, data))

    async def tell(self, subject: str, data: bytes) -> None:
        self.said.append((subject, data))

    async def put_record(self, subject: str, data: bytes, **how: Any) -> int:  # noqa: ANN401  (as the bus takes it)
        self.said.append((subject, data))
        return await super().put_record(subject, data, **how)


def reader_of(subject: str, run: RunRecord) -> Callable[[bytes], object]:
    levels = subject.removeprefix(f"{run.subjects.prefix}.")
    if levels.startswith("mb.learner."):
        return lambda data: decode(Member, data)
    if levels.startswith("mb.data"):
        return lambda data: decode(DataLedger, data).fault()
    if levels.startswith("hb.") or ".bye." in levels:
        return lambda data: read_beat(data, run)
    assert levels.startswith("up.m."), subject
    return lambda data: check_manifest(decode(Contribution, data), run)


async def sent_by(row: MemberAttack) -> tuple[RunRecord, list[tuple[str, bytes]]]:
    """Return what a row sends in a run that nobody serves, behind the beginning of its life."""
    run = run_record("demo")
    bus = OverheardBus(run.run)
    draw = np.random.default_rng(1)
    sizes = enumerate(run.layout.fragment_sizes())
    await publish_origin(bus, run, {p: draw.standard_normal(size, dtype=np.float32) for p, size in sizes})
    attacker = await Attacker.join(bus, run, INTRUDER)
    await attacker.begin_life()
    bus.said.clear()
    await row.send(attacker)
    return run, bus.said


@pytest.mark.parametrize("row", [row for row in MEMBER_ATTACKS if row not in ON_A_CONNECTION], ids=lambda row: row.name)
async def test_each_row_sends_what_is_read_or_refused(row: MemberAttack) -> None:
    """Whoever reads it refuses it as a peer's, in words; nothing else is raised."""
    run, said = await sent_by(row)

    assert said
    for subject, data in said:
        with contextlib.suppress(PeerMisbehaved):
            reader_of(subject, run)(data)


@pytest.mark.parametrize("row", LENGTHS, ids=lambda row: row.name)
async def test_but_for_its_lie_a_contribution_is_whole(row: MemberAttack) -> None:
    """Otherwise rows would be refused for a mistake in all of them, and show nothing."""
    run, said = await sent_by(row)

    manifests = [data for subject, data in said if ".up.m." in subject]
    assert len(manifests) % run.protocol.fragments == 0
    assert manifests
    for data in manifests:
        check_manifest(decode(Contribution, data), run)


@dataclass(frozen=True)
class Harm:
    """A later look at a run, and what it shows."""

    look: RunLook
    told: str


BEFORE = RunLook(0.0, {0: 4, 1: 4}, {"ada: outlier": 10}, {"ada": 100, "bob": 100}, 1000, 16.0)
AFTER = replace(BEFORE, at_s=1.0, versions={0: 5, 1: 5}, merged={"ada": 110, "bob": 110}, counted=1500)


@pytest.mark.parametrize(
    "harm",
    [
        Harm(AFTER, ""),
        Harm(replace(AFTER, refused={"ada: outlier": 12}), "refused of ada: outlier 2"),
        Harm(replace(AFTER, counted=1 << 47), "140,737,488,354,328 token-fragments counted in 2 commits"),
    ],
    ids=["none", "refused", "counted"],
)
def test_harm_to_honest_learners_is_told(harm: Harm) -> None:
    assert harm_in([BEFORE, harm.look], run_record("demo")) == harm.told


@pytest.mark.parametrize(
    "harm",
    [
        Harm(AFTER, ""),
        Harm(replace(AFTER, versions={0: 5, 1: 4}), "no version of fragments 1"),
        Harm(replace(AFTER, merged={"ada": 110, "bob": 100}), "nothing merged of bob"),
    ],
    ids=["none", "fragment", "learner"],
)
def test_what_does_not_go_on_is_told(harm: Harm) -> None:
    assert stands_still(BEFORE, harm.look) == harm.told
