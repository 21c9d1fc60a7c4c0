"""One schedule from one seed: settings and faults are drawn, the run is founded, stormed upon, healed and drained."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import numpy as np
import structlog

from atoll.base.errors import AtollError
from atoll.client.pushing import Pusher
from atoll.protocol.claims import ClaimJudge, StepAllowance
from atoll.protocol.events import Fact, Push, PushKey
from atoll.protocol.invariants import ShardWatch, check_island, check_shard
from atoll.protocol.island import Island
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard
from atoll_simulator.loop import _group
from schedules.beliefs import Beliefs
from schedules.drawing import Plan, plan_of, settings_of
from schedules.faults import Beside, Happening, drawn
from schedules.processes import ProcessLoop
from schedules.tuning import tuned
from schedules.world import NAMES, NotLive, World

REGIONAL = 0.3
"""The share of schedules with a region."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a schedule ended: `violation` is empty when all held, `kind` is "safety" or "liveness"."""

    seed: int
    violation: str
    kind: str
    tally: Counter[str]
    log: list[str]
    happenings: list[Happening] = field(default_factory=list)

    @property
    def what(self) -> str:
        """Return the first line of the violation: what was broken, without the circumstances."""
        return self.violation.partition("\n")[0]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a seed draws."""

    settings: ProtocolSettings
    plan: Plan
    happenings: list[Happening]


def draw(seed: int, rates: Mapping[str, float] | None = None, *, beside: Beside = "", **fixed: Any) -> Drawn:  # noqa: ANN401
    """Return what a seed draws; `rates` and `fixed` settings in place of what would be drawn; `beside`: see `drawn`."""
    dice = random.Random(seed)
    settings, plan = settings_of(dice, hostile=beside == "hostile"), plan_of(dice)
    if not beside and random.Random(f"{seed}/region").random() < REGIONAL:
        fixed = {"regional": True} | fixed
    if fixed.get(
        "regional"
    ):  # sums in bfloat16, or of late contributions that are bent, are not those of `schedules.values`
        fixed = {"codec_up": "f32", "correction": "none"} | fixed
    for name, value in fixed.items():
        holder = settings if hasattr(settings, name) else plan
        if holder is settings:
            settings = msgspec.structs.replace(settings, **{name: value}).check()
        else:
            plan = replace(plan, **{name: value})
    return Drawn(settings, plan, drawn(dice, plan.storm_s, rates, beside=beside))


def play(
    seed: int,
    *,
    only: frozenset[int] | None = None,
    log: bool = False,
    beside: Beside = "",
    rates: Mapping[str, float] | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> Outcome:
    """Play the schedule of a seed, with all its happenings or `only` some, to its end or to what must not be."""
    what = draw(seed, rates, beside=beside, **(fixed or {}))
    happenings = [each for each in what.happenings if only is None or each.number in only]
    kept: list[str] | None = [] if log else None
    made: Any = ProcessLoop  # asyncio's class has methods that nothing here asks for
    loop: ProcessLoop = made(random.Random(f"{seed}/threads"))
    worlds: list[World] = []

    async def main() -> None:
        world = World(seed, what.settings, what.plan, happenings, kept)
        worlds.append(world)
        loop.set_exception_handler(lambda _, context: on_unheard(world, context))
        world.note("world", what.settings)
        world.note("world", what.plan)
        nonces = random.Random(f"{seed}/nonce")
        with (
            tuned(what.plan.chunk_bytes, lambda size: nonces.randbytes(size).hex(), world.object_store),
            watched(world),
        ):
            await world.play()

    violation = kind = ""
    with telling(kept, worlds), tidied(worlds):
        try:
            loop.run_until_complete(main())
        except NotLive as error:
            violation, kind = error.explain(), "liveness"
        except Exception as error:  # noqa: BLE001  (whatever a driver raises is a finding, with its seed)
            violation, kind = f"{type(error).__name__}: {error}", "safety"
        tally = worlds[0].tally if worlds else Counter[str]()
        tally["callbacks"] += loop.callbacks
        tally["virtual ms"] += int(1e3 * loop.now_s)
        loop.close()
    return Outcome(seed, violation, kind, tally, kept or [], happenings)


@contextlib.contextmanager
def tidied(worlds: list[World]) -> Iterator[None]:
    """Collect garbage after a schedule and never in it: a dead coroutine that is collected runs its `finally`."""
    hook, enabled = sys.unraisablehook, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        sys.unraisablehook = lambda _: None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for world in worlds:
                world.bury()
            worlds.clear()
            gc.collect()
        sys.unraisablehook = hook
        if enabled:
            gc.enable()


def on_unheard(world: World, context: dict[str, Any]) -> None:
    """An exception that nobody awaits is a finding unless it is one of ours that says that the broker is away."""
    error = context.get("exception")
    world.note("loop", context.get("message"), repr(error))
    if error is not None and not isinstance(error, AtollError):
        world.fail(error)


@contextlib.contextmanager
def watched(world: World) -> Iterator[None]:
    """Check every machine after every fact, and write down what it made of it."""
    shard_handle, island_handle, beliefs = Shard.handle, Island.handle, Beliefs(world)

    def name() -> str:
        process = _group.get()
        return getattr(process, "name", "nobody")

    def on_shard(self: Shard, event: Fact) -> list[Any]:
        try:
            actions = shard_handle(self, event)
            watch = self.__dict__.setdefault("watch", ShardWatch())
            world.note(name(), event, "->", actions)
            watch.see(actions)
            check_shard(self)
            if _group.get() is not None:  # a machine that replays its facts, later, is of no process: it has no time
                beliefs.see(self, event, actions)
        except Exception as error:
            world.fail(error)
            raise
        return actions

    def on_island(self: Island, event: Fact) -> list[Any]:
        try:
            actions = island_handle(self, event)
            world.note(name(), event, "->", actions)
            check_island(self)
        except Exception as error:
            world.fail(error)
            raise
        return actions

    Shard.handle, Island.handle = on_shard, on_island  # type: ignore[method-assign]
    try:
        with residuals_watched(world), claims_watched(world), beliefs.sampled():
            yield
    finally:
        Shard.handle, Island.handle = shard_handle, island_handle  # type: ignore[method-assign]


@contextlib.contextmanager
def claims_watched(world: World) -> Iterator[None]:
    """Check that whatever an honest learner says of itself is believed, by whichever owner hears it, and whenever."""
    fault, push_fault, wait_s = ClaimJudge.fault, ClaimJudge.push_fault, StepAllowance.wait_s

    def believed(learner: str, said: str) -> str:
        if learner in NAMES:
            world.check(not said, "what an honest learner says of itself is believed", (learner, said))
        return said

    def counted(self: StepAllowance, at_s: float) -> float:
        held_s = wait_s(self, at_s)
        world.tally["steps held"] += held_s > 0.0
        return held_s

    def of_beat(self: ClaimJudge, learner: str, *claim: Any) -> str:  # noqa: ANN401  (as `fault`)
        return believed(learner, fault(self, learner, *claim))

    def of_push(self: ClaimJudge, learner: str, *claim: Any) -> str:  # noqa: ANN401  (as `push_fault`)
        return believed(learner, push_fault(self, learner, *claim))

    judge, allowance = cast("Any", ClaimJudge), cast("Any", StepAllowance)
    judge.fault, judge.push_fault, allowance.wait_s = of_beat, of_push, counted
    try:
        yield
    finally:
        judge.fault, judge.push_fault, allowance.wait_s = fault, push_fault, wait_s


@contextlib.contextmanager
def residuals_watched(world: World) -> Iterator[None]:
    """Check that nothing is lost to rounding: what a push sends and what is kept for the next make what it was to send."""
    push, busy, begun = Pusher.push, Counter[tuple[int, int]](), Counter[tuple[int, int]]()

    async def watched_push(self: Pusher, action: Push, origin: Any, theta: Any, loss: Any) -> None:  # noqa: ANN401
        place = (id(self), action.fragment)
        alone = not busy[place]
        busy[place] += 1
        begun[place] += 1
        turn = begun[place]
        before, truth = self._residues.get(action.fragment), origin - theta(0, origin.size)
        try:
            await push(self, action, origin, theta, loss)
        finally:
            busy[place] -= 1
        member = self._member
        key = PushKey(member.learner, member.incarnation, action.fragment, action.push)
        sent = world.safety.contributions.get(key, (None, None))[1]
        if not alone or turn != begun[place] or sent is None or not world.settings.error_feedback:
            return
        kept = self._residues.get(action.fragment)
        wanted = truth if before is None else truth + before
        missed = np.abs(sent + (0.0 if kept is None else kept) - wanted).max()
        world.tally["residuals checked"] += 1
        world.check(bool(missed <= 1e-3), "what rounding takes is sent with the next push", (key, float(missed)))

    Pusher.push = watched_push  # type: ignore[method-assign]
    try:
        yield
    finally:
        Pusher.push = push  # type: ignore[method-assign]


@contextlib.contextmanager
def telling(kept: list[str] | None, worlds: list[World]) -> Iterator[None]:
    """Send production's log lines into the log of the schedule, or nowhere: they would cost more than the schedule."""
    before = structlog.get_config()

    def keep(_logger: object, method: str, event: Any) -> str:  # noqa: ANN401
        if worlds:
            process = _group.get()
            said = " ".join(f"{key}={value}" for key, value in event.items() if key != "event")
            worlds[0].note(getattr(process, "name", "nobody"), f"[{method}] {event['event']}", said)
        raise structlog.DropEvent

    level = logging.DEBUG if kept is not None else logging.CRITICAL
    structlog.configure(
        processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(level), cache_logger_on_first_use=False
    )
    try:
        yield
    finally:
        structlog.configure(**before)
