"""Compute scavenging: extra capacity for half of the work, by learners that come and go or by one elastic job.

M learners train a token budget; more of them, +25 ... +300 %, are there until half of it is done (or in several waves). If
coming and going cost nothing, it takes T(x) / T(0) = 0.5 + 0.5 / (1 + x).

**Learners that come and go** are simulated with the production machines. One that comes fetches parameters and a peer's moments
over the links of both before its first step; one that goes pushes what it has and says goodbye. All have the same speed.
**One elastic data-parallel job** of the same capacity stalls as a whole whenever its size changes. No single length of stall
gives the paper's column for it, so `stall_for` computes for each row the one that would; waves multiply the stalls and divide
it.

**Joining** costs by the time that the copy of the state takes (arXiv 2604.21428, Fig. 12: the elastic job stalls for the whole
copy, Decoupled DiLoCo longer and longer from six steps on). Here M learners train, one more joins, and the same run without it
is the reference. In Atoll a peer lends the copy through the broker and steps on, so by construction the others lose no step;
the lender's link is not counted. A long copy costs the newcomer's own time, and its moments are as old as the copy is long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from atoll.base.errors import SettingsError
from atoll.base.wording import check_within
from atoll_simulator.fleet.chance import Engine
from atoll_simulator.fleet.parameters import Exchange, FleetParameters
from atoll_simulator.fleet.rounds import STEPS_MAX, TRAINERS_MAX, Rounds

JOIN_SLICES = 4
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
    check_within("--learners", learners, 1, TRAINERS_MAX)
    rows = []
    for copy in copies:
        check_within("--copy-steps", copy, 0.0, COPY_STEPS_MAX)
        come_s = 2.0 * exchange.interval_steps * fleet.step_s
        until_s = come_s + (copy + 3.0 * exchange.interval_steps) * fleet.step_s
        alone = _begin_run(fleet, exchange, learners, seed)
        alone.engine.run(until_s)
        world = _begin_run(fleet, exchange, learners, seed)
        world.engine.run(come_s)
        newcomer = world.add(NEWCOMER, 1.0, JOIN_SLICES)
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
    world = Rounds(fleet, exchange, seed)
    world.settings.check(learners)
    for number in range(learners):
        world.add(f"learner-{number}", 1.0, JOIN_SLICES).begin()
    return world


EXTRAS: Final = (0.0, 0.25, 0.5, 1.0, 3.0)
SLICES: Final = 16
WAVES_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class Scavenged:
    """One row: `extra` capacity, times over those without it, and the fates of the tokens of the learners' run.

    `join_s` is the mean time that a helper waited for its copy, in seconds (0 if no helper joined).
    """

    extra: float
    ideal: float
    learners: float
    elastic: float
    merged: float
    exact: bool
    joins: int
    join_s: float


@dataclass(frozen=True, slots=True)
class Budget:
    """`steps` of `learners` learners without help; help comes in `waves`; `stall_s` is the elastic job's."""

    learners: int = 4
    steps: int = 4000
    waves: int = 1
    stall_s: float = 14.0

    def check(self, extras: Sequence[float]) -> Budget:
        """Return self, or raise `SettingsError`."""
        check_within("--learners", self.learners, 1, TRAINERS_MAX)
        check_within("--steps", self.steps, 10, STEPS_MAX)
        check_within("--waves", self.waves, 1, min(WAVES_MAX, self.steps // 2))
        check_within("--stall-s", self.stall_s, 0.0, 1e9)
        for extra in extras:
            helpers = extra * self.learners
            if not (0.0 <= helpers <= TRAINERS_MAX and math.isclose(helpers, round(helpers))):
                raise SettingsError(
                    "--extra is no whole number of learners",
                    got=f"{extra:g} of {self.learners} learners",
                    allowed=f"0 to {TRAINERS_MAX} more learners, as shares of --learners",
                    todo="choose --learners so that every share is whole: 4 or 8 for quarters",
                )
        return self

    def present(self, done: float) -> bool:
        """Return whether help is there when a share `done` of the budget is trained."""
        return int(2 * self.waves * done) % 2 == 0


def extras_in(text: str) -> tuple[float, ...]:
    """Return shares of 1 from per cents such as '0,25,300'."""
    try:
        found = tuple(float(word) / 100.0 for word in text.split(",") if word.strip())
    except ValueError:
        found = ()
    if not found:
        raise SettingsError("--extra is no list of per cents", got=text, allowed="for instance 0,25,50,100,300")
    return found


def ideal(extra: float) -> float:
    """Return the relative time if coming and going cost nothing."""
    return 0.5 + 0.5 / (1.0 + extra)


def scavenge(
    fleet: FleetParameters, exchange: Exchange, budget: Budget, extras: Sequence[float], seed: int
) -> list[Scavenged]:
    """Simulate every row and the one without extra capacity, to which all times relate."""
    budget.check(extras)
    alone = _by_learners(fleet, exchange, budget, 0.0, seed)
    rows = []
    for extra in extras:
        run = _by_learners(fleet, exchange, budget, extra, seed) if extra else alone
        elastic = by_elastic(budget, extra, fleet.step_s) / by_elastic(budget, 0.0, fleet.step_s)
        learners = run.took_s / alone.took_s
        rows.append(Scavenged(extra, ideal(extra), learners, elastic, run.merged, run.exact, run.joins, run.join_s))
    return rows


@dataclass(frozen=True, slots=True)
class _Run:
    took_s: float
    merged: float
    exact: bool
    joins: int
    join_s: float


def _by_learners(fleet: FleetParameters, exchange: Exchange, budget: Budget, extra: float, seed: int) -> _Run:
    world = Rounds(fleet, exchange, seed)
    for number in range(budget.learners):
        world.add(f"learner-{number}", 1.0, SLICES).begin()
    helpers = round(extra * budget.learners)
    tokens_wanted = budget.steps * budget.learners * SLICES * fleet.slice_chips
    there = False
    joins = 0

    def look(tokens: int) -> None:
        """Add or remove help as planned."""
        nonlocal there, joins
        wanted = tokens < tokens_wanted and budget.present(tokens / tokens_wanted)
        if wanted == there or not helpers:
            return
        there = wanted
        if wanted:
            joins += helpers
            for number in range(helpers):
                world.add(f"helper-{joins + number}", 1.0, SLICES).join()
        else:
            for trainer in world.trainers[budget.learners :]:
                trainer.leave()

    world.on_tokens = look
    look(0)
    world.engine.run(1e3 * budget.steps * fleet.step_s, lambda: world.tokens >= tokens_wanted)
    took_s = world.engine.now_s
    settlement = world.settle()
    kept = settlement.fates["merged"] + settlement.fates["merged_late"]
    copied_s = [one.joined_s - one.asked_s for one in world.trainers[budget.learners :] if one.machine is not None]
    mean_s = math.fsum(copied_s) / max(1, len(copied_s))
    return _Run(took_s, kept / settlement.trained, settlement.exact, joins, mean_s)


def by_elastic(budget: Budget, extra: float, step_s: float) -> float:
    """Return when one elastic job has trained the budget, in seconds: it stalls whenever its size changes."""
    engine = Engine()
    whole_s = budget.steps * step_s
    done = 0.0
    edges = [whole_s * (edge + 1) / (2 * budget.waves) for edge in range(2 * budget.waves)]

    def go_on(edge: int) -> None:
        """Train up to the next edge, then change size."""
        rate = 1.0 + (extra if edge % 2 == 0 else 0.0)
        engine.after((edges[edge] - done) / rate, reach, edge)

    def reach(edge: int) -> None:
        nonlocal done
        done = edges[edge]
        if edge + 1 < len(edges):
            engine.after(budget.stall_s if extra else 0.0, go_on, edge + 1)

    engine.after(budget.stall_s if extra else 0.0, go_on, 0)
    engine.run(math.inf, lambda: done >= whole_s)
    return engine.now_s


def stall_for(extra: float, time: float, budget: Budget) -> float:
    """Return the stall per change of size, as a share of the time without help, that makes an elastic job take `time`.

    Found by bisection on the simulation.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        stalled = Budget(budget.learners, budget.steps, budget.waves, middle * budget.steps)
        low, high = (middle, high) if by_elastic(stalled, extra, 1.0) / budget.steps < time else (low, middle)
    return 0.5 * (low + high)


def scavenging_table(rows: Sequence[Scavenged]) -> str:
    """Return the table of scavenging: times over those without help."""
    head = (
        f"{'extra':>7}{'0.5+0.5/(1+x)':>15}{'learners':>10}{'off by':>9}{'elastic DP':>12}{'joins':>7}{'copy':>9}"
        f"{'merged':>9}{'ledger':>8}"
    )
    lines = [
        f"{100 * row.extra:>+6.0f}%{row.ideal:>15.3f}{row.learners:>10.3f}{100 * (row.learners / row.ideal - 1):>+8.2f}%"
        f"{row.elastic:>12.3f}{row.joins:>7}{f'{row.join_s:.1f} s' if row.joins else '-':>9}"
        f"{100 * row.merged:>8.1f}%{'exact' if row.exact else 'WRONG':>8}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def join_table(rows: Sequence[JoinCost]) -> str:
    """Return the table of joins, in steps."""
    head = f"{'copy':>8}{'others lost':>14}{'steps after':>14}{'merged after':>14}{'ledger':>8}"
    lines = [
        f"{row.copy_steps:>8g}{row.others_lost_steps:>14.2f}{row.stepping_steps:>14.1f}"
        f"{'never' if row.merged_steps is None else format(row.merged_steps, '.1f'):>14}"
        f"{'exact' if row.exact else 'WRONG':>8}"
        for row in rows
    ]
    return "\n".join([head, *lines])
