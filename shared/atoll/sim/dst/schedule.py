"""One schedule from one seed: settings and faults are drawn, the run is founded, stormed upon, healed and drained."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import msgspec

from atoll.protocol.settings import ProtocolSettings
from atoll.sim.dst.faults import Faults, drawn
from atoll.sim.dst.world import NotLive, World, lines

STORMS_S = (10.0, 20.0, 40.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a schedule ended: `violation` is empty when every promise held, `kind` is "safety" or "liveness"."""

    seed: int
    violation: str
    kind: str
    tally: Counter[str]
    log: list[str]


def settings_of(dice: random.Random) -> ProtocolSettings:
    """Draw the agreement of a run: small, so that everything happens often."""
    chosen: dict[str, object] = {
        "shards": 2,
        "fragments": dice.choice((2, 2, 3)),
        "interval_steps": dice.choice((2, 4)),
        "quorum": dice.choice((1, 1, 2)),
        "adoption": dice.choice(("overwrite", "carry")),
        "age_max": dice.randint(0, 2),
        "grace_gamma": dice.choice((0.0, 0.8)),
        "lease_s": 4.0,
        "silence_s": 5.0,
    }
    return msgspec.convert(chosen, ProtocolSettings).check()


def world_of(
    seed: int, *, log: list[tuple[float, tuple[object, ...]]] | None = None, weather: Faults | None = None
) -> World:
    """Return the world of a seed, founded, with some learners in it; `weather` in place of faults that are drawn."""
    dice = random.Random(seed)  # noqa: S311  (chance is the point, secrecy is not)
    settings = settings_of(dice)
    faults = drawn(dice) if weather is None else weather
    world = World(settings, faults, dice, log=log)
    for name in world.names[: dice.randint(1, 3)]:
        world.start_learner(name)
    world.note("world", settings)
    world.note("world", faults)
    return world


def play(seed: int, *, log: bool = False, weather: Faults | None = None) -> Outcome:
    """Play the schedule of a seed to its end or to its first broken promise."""
    kept: list[tuple[float, tuple[object, ...]]] | None = [] if log else None
    world = world_of(seed, log=kept, weather=weather)
    violation = kind = ""
    try:
        world.rage(world.dice.choice(STORMS_S))
        kind = "liveness"
        world.heal()
        world.drain()
    except NotLive as error:
        violation, kind = error.explain(), "liveness"
    except Exception as error:  # noqa: BLE001  (whatever a machine or driver raises is a finding, with its seed)
        violation, kind = f"{type(error).__name__}: {error}", "safety"
    world.tally["events"] += world.engine.events
    world.tally["commits"] += sum(world.promises.durable.versions.values())
    return Outcome(seed, violation, kind if violation else "", world.tally, lines(kept or []))
