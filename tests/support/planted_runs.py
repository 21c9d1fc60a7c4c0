"""Simulated runs with one planted cause of trouble each, for tests that ask whether that cause is named."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from atoll.base.errors import StorageFull
from atoll.bus.memory import MemoryStream, StoredMessage
from support.simulated_runs import Simulate

TOKENS: Final = 25_000
FULL_S: Final = (3.0, 7.0)


@dataclass(frozen=True, slots=True)
class Plant:
    """A cause: the `kind` and the culprit that are to be named, and how a run is simulated that has it.

    `changes` are settings, `config` is a run file. With `full` the broker has no room for tensors during `FULL_S`.
    """

    kind: str
    who: str
    learners: int = 3
    standbys: int = 0
    config: str = ""
    changes: Mapping[str, object] = field(default_factory=dict)
    full: bool = False


WIDE: Final = {"protocol.codec_up": "bf16", "protocol.codec_down": "f32", "protocol.interval_steps": 16}
"""Settings under which a contribution is large enough for a thin line to be felt."""
PLANTS: Final = (
    Plant(
        "shard without owner",
        "shard-0",
        standbys=1,
        config='[sim]\nkills = [{ who = "shard-0", at_s = 3.0, return_s = -1.0 }]\n',
    ),
    Plant("slow learner", "learner-2", changes={"sim.speed.learner-2": 0.25}),
    Plant("disk was full", "broker", full=True),
    Plant("slow link", "learner-3", config="[sim.links.learner-3]\nlatency_s = 0.001\nup_mbit_s = 0.2\n", changes=WIDE),
    Plant(
        "quarantine",
        "learner-4",
        learners=4,
        changes={"sim.liars.learner-4": "scaling", "protocol.protect": "isolate", "protocol.tokens_target": 2 * TOKENS},
    ),
)
BY_KIND: Final = {plant.kind: plant for plant in PLANTS}


def planted(simulate: Simulate, plant: Plant) -> Path:
    """Simulate a run that has the cause; return its folder."""
    changes = {"protocol.tokens_target": TOKENS, **plant.changes}
    with pytest.MonkeyPatch.context() as patch:
        if plant.full:
            honest = MemoryStream._make_room

            def no_room(self: MemoryStream, kept: StoredMessage) -> None:
                if self.plan.discard == "new" and FULL_S[0] < asyncio.get_running_loop().time() < FULL_S[1]:
                    raise StorageFull("the stream has no room", got="planted")
                honest(self, kept)

            patch.setattr(MemoryStream, "_make_room", no_room)
        return simulate(learners=plant.learners, standbys=plant.standbys, config=plant.config, **changes).out
