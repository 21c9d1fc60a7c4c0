"""What makes a schedule: happenings at random times, each at the rate that the schedule's `Faults` give it.

Crashes and freezes between two acts of a process are armed here and strike in `Process.boundary`. Nothing outlasts the
storm but its consequences: `heal` ends every fault and starts what is dead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atoll.sim.dst.faults import CALM
from atoll.sim.dst.process import NEVER, Process

if TYPE_CHECKING:
    from atoll.sim.dst.world import World

RESTART_S = 2.0
OUTAGE_S = 2.5
JUMP_S = 20.0
GRACE_S = 5.0


class Storm:
    """The faults of one world, from `begin` to `heal`."""

    def __init__(self, world: World) -> None:
        """Plan nothing yet."""
        self.world = world
        self._raging = False

    def begin(self) -> None:
        """Let every kind of happening that has a rate happen for the first time."""
        self._raging = True
        faults = self.world.faults
        kinds: list[tuple[float, Callable[[], None]]] = [
            (faults.kills_per_min, self._kill),
            (faults.partitions_per_min, self._cut),
            (faults.broker_crashes_per_min, self._crash_broker),
            (faults.full_disks_per_min, self._fill_disk),
            (faults.clock_jumps_per_min, self._jump),
            (faults.joins_per_min, self._join),
            (faults.drains_per_min, self._drain),
            (faults.replacements_per_min, self._replace),
            (faults.retirements_per_min, self._retire),
            (faults.handovers_per_min, self._hand_over),
        ]
        for per_min, happening in kinds:
            if per_min:
                self._plan(per_min, happening)
        for process in self.world.processes:
            self.arm(process)

    def arm(self, process: Process) -> None:
        """Choose after how many actions the storm waits for this process."""
        faults = self.world.faults
        process.on_doom = self._strike
        mean = min(acts for acts in (faults.acts_to_crash or NEVER, faults.acts_to_freeze or NEVER))
        process.actions_left = NEVER if mean == NEVER else 1 + int(self.world.dice.expovariate(1.0 / mean))

    def heal(self) -> None:
        """End every fault; what is dead is started, what is frozen thaws."""
        self._raging = False
        world = self.world
        world.faults = CALM
        world.network.heal(CALM)
        world.broker.full = False
        world.broker.restart()
        for process in world.processes:
            process.actions_left = NEVER
            process.thaw(world.dice)

    def _plan(self, per_min: float, happening: Callable[[], None]) -> None:
        self.world.engine.after(self.world.dice.expovariate(per_min / 60.0), self._happen, per_min, happening)

    def _happen(self, per_min: float, happening: Callable[[], None]) -> None:
        if self._raging:
            happening()
            self._plan(per_min, happening)

    def _strike(self, process: Process) -> None:
        """Kill or freeze a process between two of its actions."""
        faults, dice = self.world.faults, self.world.dice
        both = bool(faults.acts_to_crash and faults.acts_to_freeze)
        crash = dice.random() < 0.5 if both else bool(faults.acts_to_crash)
        if crash:
            self.world.kill(process, "between two acts")
        else:
            self._freeze(process)
            self.arm(process)

    def _freeze(self, process: Process) -> None:
        world = self.world
        for_s = world.dice.expovariate(1.0 / world.faults.freeze_s)
        world.tally["freezes"] += 1
        world.note("storm", "freezes", process.name, f"for {for_s:.2f} s")
        process.freeze()
        world.engine.after(for_s, self._thaw, process)

    def _thaw(self, process: Process) -> None:
        if process.alive and process.frozen:
            self.world.note("storm", "thaws", process.name)
            process.thaw(self.world.dice)

    def _someone(self) -> Process | None:
        alive = [process for process in self.world.processes if process.alive]
        return self.world.dice.choice(alive) if alive else None

    def _kill(self) -> None:
        process = self._someone()
        if process is not None:
            self.world.kill(process, "at any time")

    def _cut(self) -> None:
        process, world = self._someone(), self.world
        if process is None:
            return
        way = world.dice.choice(("both", "up", "down"))
        for_s = world.dice.expovariate(1.0 / (2.0 * OUTAGE_S))
        world.tally[f"partitions {way}"] += 1
        world.note("storm", "cuts", process.name, way, f"for {for_s:.2f} s")
        if way != "down":
            world.network.cut_up.add(process)
        if way != "up":
            world.network.cut_down.add(process)
        world.engine.after(for_s, self._mend, process)

    def _mend(self, process: Process) -> None:
        self.world.network.cut_up.discard(process)
        self.world.network.cut_down.discard(process)

    def _crash_broker(self) -> None:
        world = self.world
        if world.network.broker_up:
            for_s = world.dice.expovariate(1.0 / OUTAGE_S)
            world.tally["broker crashes"] += 1
            world.note("storm", "kills the broker", f"for {for_s:.2f} s")
            world.broker.crash()
            world.engine.after(for_s, world.broker.restart)

    def _fill_disk(self) -> None:
        world = self.world
        for_s = world.dice.expovariate(1.0 / OUTAGE_S)
        world.note("storm", "fills the disk", f"for {for_s:.2f} s")
        world.broker.full = True
        world.engine.after(for_s, self._empty_disk)

    def _empty_disk(self) -> None:
        self.world.broker.full = False

    def _jump(self) -> None:
        process, world = self._someone(), self.world
        if process is not None:
            by_s = world.dice.random() * JUMP_S
            world.tally["clock jumps"] += 1
            world.note("storm", "moves the clock of", process.name, f"by {by_s:.2f} s")
            process.clock.jump(by_s)

    def _join(self) -> None:
        names = [name for name in self.world.names if not self.world.is_there(name)]
        if names:
            self.world.start_learner(self.world.dice.choice(names))

    def _drain(self) -> None:
        names = [name for name in self.world.names if self.world.is_there(name)]
        if names:
            self.world.drain_learner(self.world.dice.choice(names))

    def _replace(self) -> None:
        """A learner freezes, and its id is claimed anew while it is away."""
        names = [name for name in self.world.names if self.world.is_there(name)]
        if names:
            name = self.world.dice.choice(names)
            self._freeze(self.world.learners[name].process)
            self.world.tally["ids claimed anew"] += 1
            self.world.start_learner(name)

    def _retire(self) -> None:
        """A candidate is told to leave, and does so a little later, whatever it is doing."""
        candidates = [candidate for candidate in self.world.candidates if candidate.process.alive]
        if candidates:
            candidate = self.world.dice.choice(candidates)
            self.world.tally["retirements"] += 1
            self.world.note("storm", "retires", candidate.process.name)
            candidate.process.tell(candidate.retire, GRACE_S)

    def _hand_over(self) -> None:
        """An owner gives its shard to another candidate, which may be dead by the time that it is free."""
        world = self.world
        pairs = [(one, other) for one in world.candidates for other in world.candidates if one.shard == other.shard]
        pairs = [(one, other) for one, other in pairs if one is not other and one.owner.reader is not None]
        if pairs:
            one, other = world.dice.choice(pairs)
            world.tally["handovers"] += 1
            world.note("storm", "lets", one.process.name, "hand over to", other.process.name)
            one.process.tell(one.give, other.process.name)
