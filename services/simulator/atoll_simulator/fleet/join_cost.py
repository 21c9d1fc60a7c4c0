"""The cost of a joining learner, by the time that the copy of its state takes (arXiv 2604.21428, Fig. 12).

The paper's elastic data-parallel job stalls for the whole copy. Its Decoupled DiLoCo does not stall up to a copy of six
steps (at H = 24), then longer and longer, and from H steps on no less than the elastic job. Here the production
machines answer: M learners train, one more joins, and the same run without it is the reference. The others lose the
difference of their stepping time; the newcomer loses its own time until it steps, and until a commit has its
contribution.

In Atoll a peer lends the copy through the broker and steps on. A newcomer needs no agreement: it adopts the visible
versions when its copy is there. So the others lose no step however long the copy takes: by construction no step here
depends on a link. The load on the lender's link is not counted, since a copy here has a length and no bytes (in
`scavenging` it is). A long copy costs the newcomer's own time, and its moments are as old as the copy is long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.base.errors import SettingsError
from atoll.base.units import within
from atoll_simulator.fleet.parameters import Exchange, FleetParameters
from atoll_simulator.fleet.rounds import TRAINERS_MAX, Rounds

SLICES = 4
COPY_STEPS_MAX = 100_000.0
NEWCOMER = "newcomer"


@dataclass(frozen=True, slots=True)
class JoinCost:
    """One copy time, all in nominal steps: the others' total loss, and when the newcomer stepped and was merged.

    `merged_steps` is None if no commit had it before the end of the window.
    """

    copy_steps: float
    others_lost_steps: float
    stepping_steps: float
    merged_steps: float | None
    exact: bool


def join(
    fleet: FleetParameters, exchange: Exchange, learners: int, copies: Sequence[float], seed: int
) -> list[JoinCost]:
    """Let a learner join `learners` others, with a copy that takes so many steps, once for each of `copies`."""
    within("--learners", learners, 1, TRAINERS_MAX)
    rows = []
    for copy in copies:
        within("--copy-steps", copy, 0.0, COPY_STEPS_MAX)
        come_s = 2.0 * exchange.interval_steps * fleet.step_s
        until_s = come_s + (copy + 3.0 * exchange.interval_steps) * fleet.step_s
        alone = _begin_run(fleet, exchange, learners, seed)
        alone.engine.run(until_s)
        world = _begin_run(fleet, exchange, learners, seed)
        world.engine.run(come_s)
        newcomer = world.add(NEWCOMER, 1.0, SLICES)
        newcomer.join(copy * fleet.step_s)
        world.engine.run(until_s)
        lost_s = math.fsum(
            one.stepped_s - other.stepped_s for one, other in zip(alone.trainers, world.trainers, strict=False)
        )
        merged_s = min((hub.merged_s[NEWCOMER] for hub in world.hubs if NEWCOMER in hub.merged_s), default=None)
        rows.append(
            JoinCost(
                copy_steps=copy,
                others_lost_steps=lost_s / fleet.step_s,
                stepping_steps=(newcomer.joined_s - come_s) / fleet.step_s,
                merged_steps=None if merged_s is None else (merged_s - come_s) / fleet.step_s,
                exact=world.settle().exact,
            )
        )
    return rows


def copies_in(text: str) -> tuple[float, ...]:
    """Return copy times in steps from '1,6,24'."""
    try:
        found = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        found = ()
    if not found:
        raise SettingsError("--copy-steps is no list of numbers", got=text, allowed="for instance 1,6,24,96")
    return found


def _begin_run(fleet: FleetParameters, exchange: Exchange, learners: int, seed: int) -> Rounds:
    """Return a newly begun run of equal learners."""
    world = Rounds(fleet, exchange, seed)
    world.settings.check(learners)
    for number in range(learners):
        world.add(f"learner-{number}", 1.0, SLICES).begin()
    return world
