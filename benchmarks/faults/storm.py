"""Faults by a seeded Poisson process, and the hand that does them to real processes and undoes what does not undo itself.

A forecast knows roles, not processes: it says "a learner, the one at 0.7 of them", and who that is shows at the time. So one
forecast can be done to Atoll and to a baseline that has other processes. Faults that find nobody are not drawn again.

    kill        SIGKILL of an owner, a standby, a learner or the broker (which is up again after `over_s`)
    freeze      SIGSTOP of an owner, for longer than its lease
    cut         every connection of a process is closed, and refused for a while
    blackhole   what a process sends, hears, or both, is swallowed; connections stay open until they are cut to heal
    partition   a long cut of one learner; one per storm, at a fixed share of its length, not drawn

Spared are those in the middle of a fault, the partitioned learner for a while after it has healed, and after
`YOUNG_KILLS_MAX` early deaths a process that `atoll up` would give up. One thread does everything, because the fleet of
`atoll up` wants it so; relays run on a loop of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from types import TracebackType
from typing import Protocol, Self

import msgspec
import psutil

from atoll.base.background_tasks import LoopThread
from atoll.bus.server import EmbeddedBroker
from support.links import LinkProxy

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


POLL_S = 0.05
PEACE_AFTER_PARTITION_S = 30.0
AGAIN_S = 1.0
YOUNG_KILLS_MAX = 3
YOUNG_S = 20.0
CALL_S = 10.0


class Fault(msgspec.Struct):
    """A fault that was done, to whom, from when until when (seconds since the Unix epoch; 0: it ended by itself)."""

    at_s: float
    act: str
    role: str
    who: str
    shard: int = -1
    over_at_s: float = 0.0
    way: str = ""


@dataclass(frozen=True, slots=True)
class Victim:
    """A process, by name; `shard` for a shard's owner."""

    name: str
    pid: int = 0
    shard: int = -1


class Ground(Protocol):
    """The system that a storm disturbs."""

    @property
    def broker(self) -> EmbeddedBroker:
        """Return what may be killed and is started again."""

    @property
    def links(self) -> StormLinks:
        """Return the relays through which everybody reaches it."""

    def victim(self, planned: Planned) -> Victim | None:
        """Return who is meant, if there is anybody."""

    def tick(self) -> None:
        """See to processes that have ended."""


class StormLinks:
    """A relay to the broker for each of some processes; a context manager."""

    def __init__(self, names: Sequence[str], port: int) -> None:
        self._home = LoopThread("links")
        self._proxies = {name: LinkProxy(port) for name in names}

    @property
    def urls(self) -> dict[str, str]:
        return {name: proxy.url for name, proxy in self._proxies.items()}

    def cut(self, name: str) -> None:
        """Close every connection of a process and refuse new ones."""
        self._home.submit(self._proxies[name].cut()).result(CALL_S)

    def swallow(self, name: str, way: str) -> None:
        """Swallow what goes `up` to the broker, `down` from it, or `both`."""
        for direction in ("up", "down"):
            if way in (direction, "both"):
                self._proxies[name].blackhole("up" if direction == "up" else "down")

    def heal(self, name: str) -> None:
        """Relay again; connections that lost bytes are closed."""

        async def mend(proxy: LinkProxy) -> None:
            await proxy.cut()
            proxy.heal()

        self._home.submit(mend(self._proxies[name])).result(CALL_S)

    def __enter__(self) -> Self:
        for proxy in self._proxies.values():
            self._home.submit(proxy.__aenter__()).result(CALL_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for proxy in self._proxies.values():
            self._home.submit(proxy.__aexit__()).result(CALL_S)
        self._home.stop()


class Storm:
    """Carries one forecast out; `faults` is what was done."""

    def __init__(
        self,
        ground: Ground,
        planned: Sequence[Planned],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.faults: list[Fault] = []
        self.missed = 0
        self._ground = ground
        self._clock = clock
        self._pause = pause
        self._due = deque(planned)
        self._held: dict[str, tuple[float, Fault, Callable[[], None]]] = {}
        self._spared: dict[str, float] = {}
        self._kills: dict[str, list[float]] = {}

    def rage(self, seconds: float, kills: int = 0) -> None:
        """Return after `seconds`, or after so many kills, or a little later when something is still to be undone."""
        began_s = self._clock()
        while True:
            now_s = self._clock() - began_s
            self._undo(now_s)
            over = now_s >= seconds or (kills > 0 and sum(fault.act == "kill" for fault in self.faults) >= kills)
            if over and not self._held:
                return
            while not over and self._due and self._due[0].at_s <= now_s:
                self._do(self._due.popleft(), now_s)
            self._ground.tick()
            self._pause(POLL_S)

    def _do(self, planned: Planned, now_s: float) -> None:
        victim = self._ground.victim(planned)
        if victim is None and planned.act == "partition":
            self._due.appendleft(replace(planned, at_s=now_s + AGAIN_S))
            return
        if victim is None or not self._may(planned, victim, now_s):
            self.missed += 1
            return
        fault = Fault(time.time(), planned.act, planned.role, victim.name, victim.shard, way=planned.way)
        try:
            undo = self._start(planned, victim)
        except psutil.Error:
            self.missed += 1
            return
        self.faults.append(fault)
        if undo is not None:
            self._held[victim.name] = (now_s + planned.over_s, fault, undo)
        if planned.act == "partition":
            self._spared[victim.name] = now_s + planned.over_s + PEACE_AFTER_PARTITION_S
        print(f"  {now_s:6.1f} s: {planned.act} {planned.role} {victim.name} {planned.way}", flush=True)

    def _may(self, planned: Planned, victim: Victim, now_s: float) -> bool:
        """Return whether a victim is not in the middle of something, and not killed too often in its youth."""
        if victim.name in self._held or now_s < self._spared.get(victim.name, 0.0):
            return False
        if planned.act != "kill" or victim.name == "broker":
            return True
        kills = [*self._kills.get(victim.name, []), now_s][-YOUNG_KILLS_MAX - 1 :]
        if len(kills) > YOUNG_KILLS_MAX and all(b - a < YOUNG_S for a, b in itertools.pairwise(kills)):
            return False
        self._kills[victim.name] = kills
        return True

    def _start(self, planned: Planned, victim: Victim) -> Callable[[], None] | None:
        ground = self._ground
        if planned.act == "kill" and planned.role == "broker":
            ground.broker.kill()
            return lambda: _start_broker(ground.broker)
        if planned.act == "kill":
            psutil.Process(victim.pid).kill()
            return None
        if planned.act == "freeze":
            frozen = psutil.Process(victim.pid)
            frozen.suspend()
            return lambda: _wake(frozen)
        if planned.act == "blackhole":
            ground.links.swallow(victim.name, planned.way)
        else:
            ground.links.cut(victim.name)
        return lambda: ground.links.heal(victim.name)

    def _undo(self, now_s: float) -> None:
        for name, (until_s, fault, undo) in list(self._held.items()):
            if now_s >= until_s:
                del self._held[name]
                undo()
                fault.over_at_s = time.time()


def chosen(pick: float, names: Sequence[str]) -> str | None:
    return names[min(int(pick * len(names)), len(names) - 1)] if names else None


def _start_broker(broker: EmbeddedBroker) -> None:
    broker.start()


def _wake(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.resume()
