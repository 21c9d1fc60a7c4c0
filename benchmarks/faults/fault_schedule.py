"""Which fault comes when: a seeded Poisson process, the same for whatever it is done to.

A forecast knows roles, not processes: it says "a learner, the one at 0.7 of them", and whoever carries it out finds out who
that is at the time. So one forecast can be done to Atoll and to a baseline that has other processes. Nothing here
looks at a clock.

    kill        SIGKILL of an owner, a standby, a learner or the broker (which is up again after `over_s`)
    freeze      SIGSTOP of an owner, for longer than its lease
    cut         every connection of a process is closed, and refused for a while
    blackhole   what a process sends, hears, or both, is swallowed; connections stay open until they are cut to heal
    partition   a long cut of one learner; one per storm, at a fixed share of its length, not drawn
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

WEIGHTS = {
    ("kill", "owner"): 30,
    ("kill", "standby"): 5,
    ("kill", "learner"): 30,
    ("kill", "broker"): 10,
    ("freeze", "owner"): 7,
    ("cut", "learner"): 5,
    ("cut", "owner"): 4,
    ("blackhole", "learner"): 5,
    ("blackhole", "owner"): 4,
}
OVER_S = {("kill", "broker"): 1.0, "freeze": 6.0, "cut": 5.0, "blackhole": 8.0}
WAYS = ("up", "down", "both")
PARTITION_AT = 0.3
KILLS_SPARE = 1.25


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault `at_s` after the storm began: to the process at share `pick` of those in `role`, lasting `over_s`."""

    at_s: float
    act: str
    role: str
    pick: float
    over_s: float = 0.0
    way: str = ""


def forecast(seed: int, per_minute: float) -> Iterator[Planned]:
    """Yield faults without end, in order of time; no fault at all at a rate of 0."""
    dice = random.Random(f"{seed}/{per_minute:g}")  # noqa: S311  (reproducible, not secret)
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    at_s = 0.0
    while per_minute > 0.0:
        at_s += dice.expovariate(per_minute / 60.0)
        act, role = dice.choices(kinds, weights)[0]
        pick, way = dice.random(), dice.choice(WAYS)
        over_s = OVER_S.get((act, role), OVER_S.get(act, 0.0))
        yield Planned(at_s, act, role, pick, over_s, way if act == "blackhole" else "")


def storm(seed: int, per_minute: float, seconds: float, partition_s: float) -> list[Planned]:
    """Return the faults of a storm of `seconds` with its one partition, in order of time."""
    drawn = list(takewhile(lambda fault: fault.at_s < seconds, forecast(seed, per_minute)))
    if per_minute > 0.0 and partition_s > 0.0:
        pick = random.Random(f"{seed}/partition").random()  # noqa: S311
        drawn.append(Planned(PARTITION_AT * seconds, "partition", "learner", pick, partition_s))
    return sorted(drawn, key=lambda fault: fault.at_s)


def seconds_for(seed: int, per_minute: float, kills: int) -> float:
    """Return how long a storm must be to kill so often, with some to spare: now and then there is nobody to kill."""
    wanted = round(KILLS_SPARE * kills)
    for fault in forecast(seed, per_minute):
        wanted -= fault.act == "kill"
        if wanted <= 0:
            return fault.at_s + 1.0
    raise ValueError("without faults nobody is killed")
