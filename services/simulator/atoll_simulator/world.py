"""The processes of a simulated run: their lives, their links, and the effects of the scenario on them.

A process is a name with a series of lives. A life has a bus at the end of a link of its own, an identity drawn from the
seed, and a group of tasks. A kill ends the group and severs the link at one moment; the broker keeps its stored data,
as for a real process. A life that ends with an error of ours is started again after a pause, as `atoll up` does; any
other error is a bug and ends the simulation.

    start ─► live ─► ended well | failed ─► pause ─► start | killed ─► return_s ─► start
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from atoll.base.clock import Clock, Identity
from atoll.base.errors import AtollError, UserError
from atoll.base.logs import say_in_this_task
from atoll.bus.memory import MemoryBroker
from atoll.local.processes import RESTART_PAUSE_S
from atoll.local.services import RESTARTS_MAX
from atoll_simulator.links import LinkedBus, SimulatedLink
from atoll_simulator.loop import ProcessTasks
from atoll_simulator.scenario import BROKER, Kill, Partition, Scenario

HOST: Final = "simulated"


@dataclass(slots=True)
class ProcessLife:
    """One life of a process. `stop` asks it to leave in good order."""

    name: str
    number: int
    bus: LinkedBus
    identity: Identity
    stop: asyncio.Event
    group: ProcessTasks = field(default_factory=ProcessTasks)
    killed: bool = False
    ended: bool = False


@dataclass(slots=True)
class Actor:
    """A process of the run: the work of a life, the present life, and whether another is `due`.

    It was `dismissed` when it was asked to leave, and has `left` when its newest life ended well and by itself.
    """

    name: str
    serve: Callable[[ProcessLife], Coroutine[Any, Any, None]]
    lives: int = 0
    life: ProcessLife | None = None
    due: bool = False
    restarts: int = 0
    dismissed: bool = False
    left: bool = False

    @property
    def alive(self) -> bool:
        """Return whether it is alive at this moment."""
        return self.life is not None and not self.life.ended


class SimulatedWorld:
    """The processes of one run on one broker, from one seed, on the running loop."""

    def __init__(self, run: str, seed: int, scenario: Scenario, broker: MemoryBroker, clock: Clock) -> None:
        self._run = run
        self._seed = seed
        self._scenario = scenario
        self._broker = broker
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._actors: dict[str, Actor] = {}
        self._cuts: dict[str, dict[str, None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.journal: list[dict[str, object]] = []
        self.failure: BaseException | None = None

    def dice(self, *about: object) -> random.Random:
        """Return the random stream of one purpose: the same for one seed, whatever other streams draw."""
        return random.Random("/".join(str(part) for part in (self._seed, *about)))  # noqa: S311  (no secret)

    def note(self, what: str, who: str, **facts: object) -> None:
        """Record an event of the world."""
        self.journal.append({"at_s": round(self._clock.monotonic(), 6), "what": what, "who": who, **facts})

    # --- processes ----------------------------------------------------------------------------------------------------

    def add(self, name: str, serve: Callable[[ProcessLife], Coroutine[Any, Any, None]], *, at_s: float = 0.0) -> None:
        """Register a process, which starts at `at_s`."""
        actor = self._actors[name] = Actor(name, serve)
        self._start_later(actor, at_s)

    def begin(self) -> None:
        """Start the scenario."""
        scenario = self._scenario
        for number, kill in enumerate(scenario.kills):
            self._loop.call_at(kill.at_s, self._kill_as_told, kill, f"kill-{number}")
        for number, cut in enumerate(scenario.partitions):
            self._loop.call_at(cut.at_s, self._cut_as_told, cut, f"partition-{number}")
        for name, at_s in scenario.leaves.items():
            self._loop.call_at(at_s, self.dismiss, name)

    def fail_at_random(self, name: str) -> None:
        """Kill a learner at random times until the simulation ends, if the scenario says so."""
        if self._scenario.failures.mtbi_s > 0:
            self._tasks.append(self._loop.create_task(self._die_at_random(name)))

    def actor(self, name: str) -> Actor:
        """Return a process, to read from."""
        return self._actors[name]

    def dismiss(self, name: str) -> None:
        """Ask a process to leave in good order; it does not start again."""
        actor = self._actors[name]
        actor.dismissed, actor.due = True, False
        if actor.life is not None and actor.alive and not actor.life.stop.is_set():
            self.note("dismissed", name)
            actor.life.stop.set()

    def kill(self, name: str, return_s: float) -> None:
        """End a process at once; it starts again after `return_s`, unless that is negative or it was dismissed."""
        actor = self._actors[name]
        if actor.life is None or not actor.alive:
            return
        self.note("killed", name, life=actor.lives)
        self._end(actor.life, killed=True)
        if return_s >= 0 and not actor.dismissed:
            self._start_later(actor, return_s)

    def end(self) -> None:
        """End all living processes."""
        for task in self._tasks:
            task.cancel()
        for actor in self._actors.values():
            actor.due, actor.dismissed = False, True
            if actor.life is not None and actor.alive:
                self._end(actor.life, killed=True)

    def _start_later(self, actor: Actor, wait_s: float) -> None:
        actor.due = True
        self._loop.call_later(wait_s, self._start, actor)

    def _start(self, actor: Actor) -> None:
        if not actor.due or actor.alive:
            return
        actor.due = actor.left = False
        actor.lives += 1
        name, number = actor.name, actor.lives
        link = SimulatedLink(self._scenario.link_of(name), self.dice(name, number, "link"))
        for reason in (*self._cuts.get(BROKER, ()), *self._cuts.get(name, ())):
            link.cut(reason)
        nonces = self.dice(name, number, "nonce")
        # A name that begins with "shard-" is a shard's alone: nobody would believe what its process writes under it.
        identity = Identity(f"{HOST}-{name}-{number}", HOST, number, lambda size: nonces.randbytes(size).hex())
        life = ProcessLife(name, number, LinkedBus(self._run, self._broker, link), identity, asyncio.Event())
        actor.life = life
        self.note("started", name, life=number)
        task = life.group.spawn(self._live(actor, life))
        task.add_done_callback(lambda done: self._on_end(actor, life, done))

    async def _live(self, actor: Actor, life: ProcessLife) -> None:
        say_in_this_task(process=life.name, life=life.number)
        await asyncio.sleep(self._scenario.start_s)
        await actor.serve(life)

    def _end(self, life: ProcessLife, *, killed: bool) -> None:
        life.ended, life.killed = True, killed
        life.bus.sever()
        life.group.kill()

    def _on_end(self, actor: Actor, life: ProcessLife, done: asyncio.Task[None]) -> None:
        """Handle a life that ended by itself: well, with an error that leads to a restart, or with a bug."""
        if life.killed or done.cancelled():
            return
        self._end(life, killed=False)
        error = done.exception()
        if error is None:
            self.note("left", life.name, life=life.number)
            actor.left = not actor.dismissed
            return
        if not isinstance(error, AtollError):
            self.failure = error
            return
        self.note("failed", life.name, life=life.number, reason=str(error))
        if isinstance(error, UserError) or actor.restarts >= RESTARTS_MAX or actor.dismissed:
            return
        actor.restarts += 1
        self._start_later(actor, RESTART_PAUSE_S * actor.restarts)

    # --- misfortune ---------------------------------------------------------------------------------------------------

    def _kill_as_told(self, kill: Kill, reason: str) -> None:
        if kill.who != BROKER:
            self.kill(kill.who, kill.return_s)
            return
        self.note("killed", BROKER)
        self._cut(list(self._actors), BROKER, reason)
        if kill.return_s >= 0:
            self._loop.call_later(kill.return_s, self._heal, list(self._actors), BROKER, reason)

    def _cut_as_told(self, cut: Partition, reason: str) -> None:
        for name in cut.who:
            self.note("cut", name)
            self._cut([name], name, reason)
            self._loop.call_later(cut.for_s, self._heal, [name], name, reason)

    def _cut(self, names: list[str], where: str, reason: str) -> None:
        self._cuts.setdefault(where, {})[reason] = None
        for name in names:
            life = self._actors[name].life
            if life is not None:
                life.bus.link.cut(reason)

    def _heal(self, names: list[str], where: str, reason: str) -> None:
        self.note("healed", where)
        self._cuts[where].pop(reason, None)
        for name in names:
            life = self._actors[name].life
            if life is not None:
                life.bus.link.heal(reason)

    async def _die_at_random(self, name: str) -> None:
        failures, dice = self._scenario.failures, self.dice(name, "failures")
        while True:
            await asyncio.sleep(dice.expovariate(1.0 / failures.mtbi_s))
            if self._actors[name].alive:
                self.kill(name, failures.return_s)
                await asyncio.sleep(failures.return_s)
