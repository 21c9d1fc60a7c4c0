"""What may go wrong in a schedule, as numbers: one frozen record, drawn anew for every schedule (swarm testing).

Most of the rates of a schedule are zero. A world in which everything goes wrong at once hides bugs: nothing gets far
enough to break. With many faults switched off, the remaining ones happen in runs that otherwise go well.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The rates of one schedule. Shares are of messages, `_per_min` are expected happenings per virtual minute.

    Attributes:
        delay_s: mean one-way delay between a process and the broker, exponentially distributed.
        slow: share of messages that take up to `SLOW_S` instead.
        lost_whispers: share of calls, heartbeats, head taps and verdicts that vanish.
        lost_requests: share of requests that never reach the broker.
        lost_answers: share of requests that take effect and whose answer vanishes.
        duplicates: share of messages that arrive twice.
        acts_to_crash: mean number of actions after which a process dies between two of them; 0: never.
        acts_to_freeze: the same for freezing (and thawing again, with stale state).
        freeze_s: mean length of a freeze.
        kills_per_min: processes killed at any time.
        partitions_per_min: links between a process and the broker that are cut, both ways or one.
        broker_crashes_per_min: the broker dies and returns; what it acknowledged is there again.
        full_disks_per_min: intervals in which the broker refuses whatever it would have to store.
        clock_jumps_per_min: a process finds its clock further on.
        drift: how much faster or slower than the true time clocks run, at most.
        joins_per_min: learners that arrive, or return after a death.
        drains_per_min: learners that are asked to leave.
        replacements_per_min: learners whose id is claimed by a new process while the old one is frozen.
        retirements_per_min: candidates that are told to leave and give their shard back.
        handovers_per_min: owners that give their shard to another candidate.
        spoiled: share of contributions that the shard finds unusable.
        not_finite: share of pushes that their learner refuses itself.
    """

    delay_s: float = 0.005
    slow: float = 0.0
    lost_whispers: float = 0.0
    lost_requests: float = 0.0
    lost_answers: float = 0.0
    duplicates: float = 0.0
    acts_to_crash: int = 0
    acts_to_freeze: int = 0
    freeze_s: float = 4.0
    kills_per_min: float = 0.0
    partitions_per_min: float = 0.0
    broker_crashes_per_min: float = 0.0
    full_disks_per_min: float = 0.0
    clock_jumps_per_min: float = 0.0
    drift: float = 0.0
    joins_per_min: float = 6.0
    drains_per_min: float = 0.0
    replacements_per_min: float = 0.0
    retirements_per_min: float = 0.0
    handovers_per_min: float = 0.0
    spoiled: float = 0.0
    not_finite: float = 0.0


CHOICES: dict[str, tuple[float, ...]] = {
    "delay_s": (0.002, 0.005, 0.02, 0.1),
    "slow": (0.02, 0.1),
    "lost_whispers": (0.05, 0.3),
    "lost_requests": (0.02, 0.1),
    "lost_answers": (0.02, 0.1, 0.3),
    "duplicates": (0.02, 0.2),
    "acts_to_crash": (30, 100, 300),
    "acts_to_freeze": (30, 100, 300),
    "freeze_s": (1.0, 4.0, 12.0),
    "kills_per_min": (2.0, 8.0),
    "partitions_per_min": (2.0, 8.0),
    "broker_crashes_per_min": (2.0, 6.0),
    "full_disks_per_min": (2.0, 6.0),
    "clock_jumps_per_min": (2.0, 8.0),
    "drift": (0.05, 0.2),
    "joins_per_min": (4.0, 12.0),
    "drains_per_min": (2.0, 6.0),
    "replacements_per_min": (3.0, 8.0),
    "retirements_per_min": (2.0, 6.0),
    "handovers_per_min": (3.0, 10.0),
    "spoiled": (0.05, 0.3),
    "not_finite": (0.05, 0.2),
}
ALWAYS = ("delay_s", "freeze_s", "joins_per_min")
SLOW_S = 3.0
CALM = Faults()


def drawn(dice: random.Random) -> Faults:
    """Return the faults of one schedule: how many kinds there are is drawn first, then which, then how often."""
    share = dice.choice((0.15, 0.3, 0.5))
    chosen: dict[str, float] = {}
    for field in fields(Faults):
        if field.name in ALWAYS or dice.random() < share:
            chosen[field.name] = dice.choice(CHOICES[field.name])
    return Faults(**chosen)  # type: ignore[arg-type]  # the whole numbers among the choices are whole
