"""The protocol layer: production machines training on a fleet, for a window of steps; every token's fate at the end.

The chips (`chips`) report for each learner when it stops, when it goes on and with how many slices. The protocol reports
nothing back, so a table of goodput and a window of rounds are statements about one and the same fleet, with the same failures.

    window:  learners step, stall, answer calls, adopt            `steps` nominal steps long; figures are of this part
    drain:   all learners leave after their step or stall, shards finish, the ledgers are settled

`Hub` drives the shards and `FleetLearner` the islands, with sums in place of bytes, and both decide nothing. Waiting is
measured: the time a learner was there, less its stalls and the planned time of its steps.

**A link** is one direction of a learner's. A *core message* (a call, news of a head, a report) takes latency, or is lost for
good. A *small* message that is lost is sent again after a pause. A *large* one (a contribution, a frame) waits in line for the
bandwidth, and a lost one takes its time on the line again; small ones pass the line.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from atoll.base.errors import AtollError, ProtocolMisuse
from atoll.base.wording import check_within, counted
from atoll.protocol import invariants
from atoll.protocol.events import (
    Acknowledge,
    Adopt,
    Adopted,
    ArmTimer,
    CallHeard,
    Command,
    Commit,
    Committed,
    ContributionArrived,
    ContributionReady,
    Dismiss,
    DrainOrdered,
    Fact,
    Fetch,
    FetchFragment,
    Finish,
    Fold,
    FragmentFetched,
    HeadHeard,
    Isolate,
    Keep,
    Kept,
    LearnerBeat,
    LearnerLeft,
    Leave,
    NothingNewer,
    PublishCall,
    Push,
    PushKey,
    PushRefused,
    PushSettled,
    QueueDrained,
    Refuse,
    SnapshotKept,
    StepDone,
    TimerFired,
    Unfold,
)
from atoll.protocol.island import Island
from atoll.protocol.ledger import Ledger, Settlement, settle
from atoll.protocol.pacing import Heartbeats, StepTimes
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard
from atoll_simulator.fleet.cells import affordable
from atoll_simulator.fleet.chance import Engine, slowest, slowest_mean, speeds, stream
from atoll_simulator.fleet.chips import Chips, Lived
from atoll_simulator.fleet.parameters import Exchange, FleetParameters, split

BITS_PER_GBIT = 1e9


class FleetLink:
    """One direction between a learner and the hub."""

    def __init__(self, engine: Engine, exchange: Exchange, dice: random.Random) -> None:
        self._engine = engine
        self._dice = dice
        self._latency_s = exchange.latency_s
        self._loss = exchange.loss
        self._retry_s = exchange.retry_s
        self._bytes_s = exchange.gbit_s * BITS_PER_GBIT / 8.0
        self._free_s = 0.0
        self._line: deque[tuple[float, float]] = deque()
        self._busy_s = 0.0
        self.lost = 0

    def sent_bytes(self) -> float:
        """Return the bytes that have left by now, also in vain; messages still in line do not count."""
        now_s = self._engine.now_s
        while self._line and self._line[0][1] <= now_s:
            began_s, ended_s = self._line.popleft()
            self._busy_s += ended_s - began_s
        under_way_s = max(0.0, now_s - self._line[0][0]) if self._line else 0.0
        return (self._busy_s + under_way_s) * self._bytes_s

    def core_message(self, call: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401  (passed on)
        """Make `call(*arguments)` at the other end, or never."""
        if self._dice.random() < self._loss:
            self.lost += 1
            return
        self._engine.after(self._latency_s, call, *arguments)

    def ask(self, call: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401  (passed on)
        """Make `call(*arguments)` at the other end, a latency later and a pause more for each time it is lost."""
        wait_s = self._latency_s
        while self._dice.random() < self._loss:
            self.lost += 1
            wait_s += self._retry_s
        self._engine.after(wait_s, call, *arguments)

    def send(self, size_bytes: float, call: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401  (passed on)
        """Make `call(*arguments)` at the other end when `size_bytes` have arrived there."""
        now_s = self._engine.now_s
        on_line_s = size_bytes / self._bytes_s
        self.sent_bytes()  # forgets what has left, so that the line keeps only what waits
        done_s = max(now_s, self._free_s) + on_line_s
        self._line.append((done_s - on_line_s, done_s))
        while self._dice.random() < self._loss:
            self.lost += 1
            done_s += self._retry_s + on_line_s
            self._line.append((done_s - on_line_s, done_s))
        self._free_s = done_s
        self._engine.after(done_s - now_s + self._latency_s, call, *arguments)


REST_STEPS = 1000.0
STEPS_MAX = 1_000_000
TRAINERS_MAX = 256
FAILURES_MAX = 2_000_000
IDLE_S = 1.0
MOMENT_BYTES = 8.0


class NeverAtRest(AtollError):
    """All learners were asked to leave, and one never did: a bug."""


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The simulated part: `learners` learners on `chips` chips for `steps` nominal steps."""

    chips: int
    learners: int
    steps: int


@dataclass(frozen=True, slots=True)
class RoundsReport:
    """The results of a window; times in seconds, tokens of the whole run (window and drain), shares of 1."""

    steps: int
    used_chips: int
    chips: Lived
    window_s: float
    participation: float
    stepped: float
    waited_s: float
    commits: int
    rounds: int
    called_again: int
    contributors: dict[int, int]
    fates: dict[str, int]
    trained: int
    exact: bool
    up_gbit_s: float
    events: int

    @property
    def contributors_mean(self) -> float:
        """Return the mean number of learners in a commit."""
        return sum(n * count for n, count in self.contributors.items()) / max(1, sum(self.contributors.values()))

    def share(self, *fates: str) -> float:
        """Return the share of all token-fragments that met one of `fates`; a fate ending in ':' stands for all its reasons."""
        found = sum(
            count
            for fate, count in self.fates.items()
            if any(fate == each or (each.endswith(":") and fate.startswith(each)) for each in fates)
        )
        return found / max(1, self.trained)


def window_table(told: RoundsReport) -> str:
    """Return the results of a window of rounds."""
    spread = ", ".join(f"{count} of {n}" for n, count in sorted(told.contributors.items(), reverse=True))
    failures, again = counted(told.chips.failures, "failure"), f"called again {counted(told.called_again, 'time')}"
    rows = [
        ("window", f"{told.window_s:.0f} s, {told.steps:,} steps of all learners, {failures}"),
        ("chips", f"{told.used_chips} in whole slices"),
        ("goodput of the chips", f"{100 * told.chips.goodput:.2f} %"),
        ("capacity trained on", f"{100 * told.stepped:.2f} %"),
        ("participation", f"{100 * told.participation:.2f} % of the learners' time is in finished steps"),
        ("waited", f"{abs(told.waited_s):.3g} s of all learners together"),
        ("commits", f"{told.commits:,} in {counted(told.rounds, 'round')}, {again}"),
        ("contributors", f"{told.contributors_mean:.2f} per commit ({spread})"),
        ("merged", f"{100 * told.share('merged'):.2f} %"),
        ("merged late", f"{100 * told.share('merged_late'):.2f} %"),
        ("superseded", f"{100 * told.share('superseded'):.2f} %"),
        ("refused", f"{100 * told.share('refused:'):.2f} %"),
        ("lost", f"{100 * told.share('lost'):.2f} %"),
        ("ledger", "exact" if told.exact else "DO NOT ADD UP"),
        ("sent", f"{told.up_gbit_s:.2f} Gbit/s per learner, on average"),
    ]
    return "\n".join(f"{name:<22}{text}" for name, text in rows)


class Rounds:
    """Trainers and shards on one engine."""

    def __init__(
        self,
        fleet: FleetParameters,
        exchange: Exchange,
        seed: int,
        *,
        settings: ProtocolSettings | None = None,
        watched: bool = False,
    ) -> None:
        """Found a run without learners, with the agreement of `exchange` or, where given, with `settings`.

        `watched` checks every invariant after every fact, at three times the cost.
        """
        self.fleet = fleet.check()
        self.exchange = exchange.check()
        self.seed = seed
        self.watched = watched
        self.engine = Engine()
        self.settings = (
            settings
            or ProtocolSettings(
                fragments=exchange.fragments,
                interval_steps=exchange.interval_steps,
                overlap_steps=exchange.overlap_steps,
                quorum=exchange.quorum,
                shards=min(exchange.shards, exchange.fragments),
            ).check()
        )
        self.hubs = [Hub(self, shard, watched=watched) for shard in range(self.settings.shards)]
        self.trainers: list[FleetLearner] = []
        self.on_tokens: Callable[[int], None] | None = None
        self.on_commit: Callable[[Commit], None] | None = None
        self.tokens = 0
        self._lent = 0

    # --- who is there -----------------------------------------------------------------------------------------------------

    def add(self, name: str, speed: float, slices: int) -> FleetLearner:
        """Return a new learner; it does nothing until it is begun."""
        trainer = FleetLearner(self, name, speed, slices, watched=self.watched)
        self.trainers.append(trainer)
        return trainer

    def versions(self) -> dict[int, int]:
        """Return the visible version of every fragment."""
        return {p: v for hub in self.hubs for p, v in hub.versions.items()}

    def hub_of(self, fragment: int) -> Hub:
        """Return the hub that owns a fragment."""
        return self.hubs[self.settings.shard_of(fragment)]

    def lender(self) -> FleetLearner | None:
        """Return the learner that lends its state to the next newcomer, in turns; None if none trains."""
        able = [trainer for trainer in self.trainers if trainer.trains and not trainer.leave_wanted]
        self._lent += 1
        return able[self._lent % len(able)] if able else None

    # --- what things take -------------------------------------------------------------------------------------------------

    def up_bytes(self, fragment: int) -> float:  # noqa: ARG002  (all fragments are equal here)
        """Return the size of a contribution to a fragment."""
        return self.exchange.fragment_bytes

    def down_bytes(self, fragment: int) -> float:  # noqa: ARG002
        """Return the size of a version of a fragment."""
        return self.exchange.fragment_bytes

    def fetch_s(self) -> float:
        """Return how long a shard takes to read a contribution."""
        return 8.0 * self.exchange.fragment_bytes / (self.exchange.hub_gbit_s * BITS_PER_GBIT)

    def commit_s(self) -> float:
        """Return how long it takes from the decision to commit until the version is visible."""
        return self.fetch_s()

    # --- what is said -----------------------------------------------------------------------------------------------------

    def announce_call(self, call: PublishCall) -> None:
        """Send a call to every learner, as core messages."""
        for trainer in self.trainers:
            if trainer.trains:
                trainer.down.core_message(trainer.hear_call, call)

    def announce_head(self, fragment: int, version: int) -> None:
        """Tell every learner, by core message, that a version is visible."""
        for trainer in self.trainers:
            if trainer.trains:
                trainer.down.core_message(trainer.hear_head, fragment, version)

    def tell_refused(self, refusal: Refuse) -> None:
        """Send a refusal to its learner, as a core message."""
        for trainer in self.trainers:
            if trainer.name == refusal.key.learner:
                trainer.down.core_message(trainer.hear_refused, refusal.key, refusal.reason)

    def trained(self, tokens: int) -> None:
        """Count the tokens of a step, and call the registered observer."""
        self.tokens += tokens
        if self.on_tokens is not None:
            self.on_tokens(self.tokens)

    # --- the end ------------------------------------------------------------------------------------------------------------

    def settle(self) -> Settlement:
        """Ask all learners to leave, wait until all is at rest, and return the fates; raise `NeverAtRest`."""
        for trainer in self.trainers:
            trainer.leave()
        until_s = self.engine.now_s + self._rest_s()
        if not self.engine.run(until_s, lambda: all(trainer.state == "left" for trainer in self.trainers)):
            raise NeverAtRest("a learner that is told to leave leaves", got=[(t.name, t.state) for t in self.trainers])
        for hub in self.hubs:
            hub.drain()
        if not self.engine.run(until_s + REST_STEPS, lambda: all(hub.finished for hub in self.hubs)):
            raise NeverAtRest("a shard without learners finishes", got=[hub.machine.shard for hub in self.hubs])
        ledger = Ledger()
        for hub in self.hubs:
            ledger.absorb(hub.machine.ledger)
        return settle(ledger, self.settings.fragments)

    def _rest_s(self) -> float:
        fleet, exchange = self.fleet, self.exchange
        line_s = 8.0 * exchange.fragment_bytes / (exchange.gbit_s * BITS_PER_GBIT)
        sent_s = (line_s + exchange.latency_s + exchange.retry_s) / (1.0 - exchange.loss)
        stalled_s = fleet.downscale_s + fleet.upscale_s + fleet.admission_s + fleet.return_s
        return REST_STEPS * fleet.step_s + 10.0 * (stalled_s + exchange.fragments * sent_s)


def rounds(
    fleet: FleetParameters, exchange: Exchange, window: StepWindow, seed: int, *, watched: bool = False
) -> RoundsReport:
    """Train on a fleet for a window, and return what happened."""
    chips, learners, steps = window.chips, window.learners, window.steps
    check_within("--learners", learners, 1, TRAINERS_MAX)
    check_within("--steps", steps, 1, STEPS_MAX)
    whole = split(chips, learners, fleet.check().slice_chips)
    affordable(
        chips, steps * fleet.step_s, fleet, FAILURES_MAX, "take fewer --steps or --chips, or a longer --mtbi-days"
    )
    world = Rounds(fleet, exchange, seed, watched=watched)
    world.settings.check(learners)
    for number, speed in enumerate(speeds(learners, fleet.learner_cv, stream(seed, "speeds"))):
        world.add(f"learner-{number}", speed, whole).begin()

    def hear(number: int) -> None:
        one = chips_layer.learners[number]
        if one.stepping:
            world.trainers[number].go_on(one.active)
        else:
            world.trainers[number].stall()

    chips_layer = Chips(world.engine, fleet, chips, learners, seed, hear)
    window_s = steps * fleet.step_s
    world.engine.run(window_s)
    lived = chips_layer.lived()
    tally: Counter[str] = Counter()
    contributors: Counter[int] = Counter()
    for hub in world.hubs:
        tally.update(hub.tally)
        contributors.update(hub.contributors)
    stepped_s, waited_s, capacity = _times(world, window_s)
    bits = 8.0 * sum(trainer.up.sent_bytes() for trainer in world.trainers)
    taken = sum(trainer.island.steps for trainer in world.trainers)
    settlement = world.settle()
    return RoundsReport(
        steps=taken,
        used_chips=learners * whole * fleet.slice_chips,
        chips=lived,
        window_s=window_s,
        participation=stepped_s / (learners * window_s),
        stepped=capacity,
        waited_s=waited_s,
        commits=tally["commits"],
        rounds=tally["rounds"],
        called_again=tally["calls again"],
        contributors=dict(sorted(contributors.items())),
        fates=settlement.fates,
        trained=settlement.trained,
        exact=settlement.exact,
        up_gbit_s=bits / learners / window_s / 1e9,
        events=world.engine.events,
    )


def _times(world: Rounds, window_s: float) -> tuple[float, float, float]:
    """Return learner-seconds of finished steps, learner-seconds of waiting, and the trained share of the capacity.

    Capacity is what every learner would have trained at its own mean speed with all its slices. A step under way when
    the window ends is neither a finished step nor waiting.
    """
    stepped_s = waited_s = capacity = 0.0
    for trainer in world.trainers:
        known_s = trainer.stepped_s + trainer.cut_s + trainer.stalled_s + trainer.under_way_s()
        waited_s += window_s - trainer.joined_s - known_s
        stepped_s += trainer.stepped_s
        mean_s = trainer.step_s * (1.0 + world.fleet.slice_cv * slowest_mean(trainer.slices))
        whole = trainer.slices * world.fleet.slice_chips
        capacity += trainer.island.tokens * mean_s / (whole * window_s)
    return stepped_s, waited_s, capacity / len(world.trainers)


class Hub:
    """One shard with its queue; `versions` are visible, `merged_s` says when a commit first had each learner."""

    def __init__(self, world: Rounds, shard: int, *, watched: bool) -> None:
        """Found the fragments at version 0; `watched` checks every invariant after every fact."""
        self.world = world
        self.versions = dict.fromkeys(world.settings.fragments_of(shard), 0)
        self.machine = Shard(world.settings, shard, dict(self.versions))
        self.tally: Counter[str] = Counter()
        self.contributors: Counter[int] = Counter()
        self.merged_s: dict[str, float] = {}
        self.finished = False
        self._unsettled: set[PushKey | tuple[str, int]] = set()
        self._timers: Counter[str] = Counter()
        self._lanes: dict[int, deque[Command]] = {fragment: deque() for fragment in self.versions}
        self._committing: set[int] = set()
        self._watch = invariants.ShardWatch() if watched else None
        self._durable = invariants.Durable(self.versions) if watched else None

    # --- facts ----------------------------------------------------------------------------------------------------------

    def hear_beat(self, beat: LearnerBeat) -> None:
        """Hear a report."""
        self._on_fact(msgspec.structs.replace(beat, at_s=self.world.engine.now_s))

    def receive(self, arrived: ContributionArrived) -> None:
        """Find a contribution in the queue."""
        self._unsettled.add(arrived.key)
        self._on_fact(msgspec.structs.replace(arrived, at_s=self.world.engine.now_s))

    def receive_farewell(self, beat: LearnerBeat) -> None:
        """Find a farewell in the queue: a last report, then the goodbye."""
        self._unsettled.add((beat.learner, beat.incarnation))
        self.hear_beat(beat)
        now_s = self.world.engine.now_s
        self._on_fact(LearnerLeft(at_s=now_s, learner=beat.learner, incarnation=beat.incarnation))

    def drain(self) -> None:
        """Finish when all learners have left and nothing is queued."""
        self._on_fact(DrainOrdered(at_s=self.world.engine.now_s, cause_id="drain"))
        self._look_at_queue()

    def _look_at_queue(self) -> None:
        if not self.finished:
            self._on_fact(QueueDrained(at_s=self.world.engine.now_s, proven=not self._unsettled))
            self.world.engine.after(IDLE_S, self._look_at_queue)

    def _on_fact(self, fact: Fact) -> None:
        actions = self.machine.handle(fact)
        if self._watch is not None:
            self._watch.see(actions)
            invariants.check_shard(self.machine)
        for action in actions:
            self._do(action)

    # --- commands -------------------------------------------------------------------------------------------------------

    def _do(self, action: Command) -> None:
        engine = self.world.engine
        if isinstance(action, ArmTimer):
            self._timers[action.name] += 1
            engine.after(action.due_s - engine.now_s, self._on_timer, action, self._timers[action.name])
        elif isinstance(action, PublishCall):
            self.tally["calls again" if action.attempt > 1 else "rounds"] += 1
            self.world.announce_call(action)
        elif isinstance(action, Fetch):
            engine.after(self.world.fetch_s(), self._on_fetched, action.key)
        elif isinstance(action, Fold | Acknowledge):
            self._in_lane(action.key.fragment, action)
        elif isinstance(action, Commit | Keep | Dismiss | Unfold):
            if isinstance(action, Commit) and self.world.on_commit is not None:
                self.world.on_commit(action)
            self._in_lane(action.fragment, action)
        elif isinstance(action, Refuse):
            self.world.tell_refused(action)
        elif isinstance(action, Finish):
            self.finished = True
        elif not isinstance(action, Isolate):
            raise ProtocolMisuse("a shard that nothing happens to has no reason for this", got=action)

    def _on_timer(self, armed: ArmTimer, number: int) -> None:
        if self._timers[armed.name] == number:
            # Adding a wait to the time of day may round to just before the intended moment.
            self._on_fact(TimerFired(at_s=max(armed.due_s, self.world.engine.now_s), name=armed.name))

    def _on_fetched(self, key: PushKey) -> None:
        self._on_fact(ContributionReady(at_s=self.world.engine.now_s, key=key))

    def _in_lane(self, fragment: int, action: Command) -> None:
        if fragment in self._committing:
            self._lanes[fragment].append(action)
        else:
            self._execute(fragment, action)

    def _execute(self, fragment: int, action: Command) -> None:
        if isinstance(action, Commit):
            self._committing.add(fragment)
            self.world.engine.after(self.world.commit_s(), self._commit, action)
        elif isinstance(action, Acknowledge):
            self._unsettled.discard(action.key)
            self.tally[action.reason or action.fate] += 1
            if self._durable is not None:
                self._durable.see_acknowledged(action)
        elif isinstance(action, Dismiss):
            self._unsettled.discard((action.learner, action.incarnation))
            if self._durable is not None:
                self._durable.see_dismissed(action)
        elif isinstance(action, Keep):
            if self._durable is not None:
                self._durable.see_ledger(fragment, action.fragment_ledger)
            self._on_fact(Kept(at_s=self.world.engine.now_s, fragment=fragment))

    def _commit(self, commit: Commit) -> None:
        fragment = commit.fragment
        if self._durable is not None:
            self._durable.see_commit(commit)
        version = self.versions[fragment] = commit.base_version + 1
        self.tally["commits"] += 1
        names = {share.key.learner for share in commit.shares}
        self.contributors[len(names)] += 1
        for name in sorted(names - self.merged_s.keys()):
            self.merged_s[name] = self.world.engine.now_s
        self.world.announce_head(fragment, version)
        self._committing.discard(fragment)
        lane = self._lanes[fragment]
        waiting, self._lanes[fragment] = lane, deque()
        for action in waiting:
            self._in_lane(fragment, action)
        self._on_fact(
            Committed(at_s=self.world.engine.now_s, fragment=fragment, version=version, cause_id=commit.cause_id)
        )


class FleetLearner:
    """One learner; `speed` is its step time over the nominal one, `slices` how many it has when whole."""

    def __init__(self, world: Rounds, name: str, speed: float, slices: int, *, watched: bool) -> None:
        self.world = world
        self.name = name
        self.slices = slices
        self.active = slices
        self.step_s = world.fleet.step_s * speed
        self.incarnation = 1
        self.machine: Island | None = None
        self.state = "joining"
        self.stepping = False
        self.stalled = False
        self.leave_wanted = False
        self.asked_s = self.joined_s = self.left_s = 0.0
        self.stepped_s = self.cut_s = self.stalled_s = 0.0
        self.up = FleetLink(world.engine, world.exchange, stream(world.seed, "up", name))
        self.down = FleetLink(world.engine, world.exchange, stream(world.seed, "down", name))
        self._dice = stream(world.seed, "steps", name)
        self._watched = watched
        self._epoch = 0
        self.since_s = 0.0
        self._last_s = 0.0
        self._steps = StepTimes()
        self._heartbeats = Heartbeats(world.settings.silence_s)
        self._beats = 0
        self._parts = 0
        self._farewells = 0

    @property
    def trains(self) -> bool:
        """Return whether it takes part: it has joined and was not asked to leave yet."""
        return self.state == "training"

    @property
    def island(self) -> Island:
        """Return the machine of a learner that has joined."""
        if self.machine is None:
            raise RuntimeError(f"{self.name} has not joined")
        return self.machine

    # --- there and away ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Train from the founding on."""
        self._take_over(self.world.versions())

    def join(self, copy_s: float | None = None) -> None:
        """Fetch parameters and a peer's two moments over the links of both, or in `copy_s` over no link, then train.

        The peer's moments wait in its line like its contributions. The broker forwards at once, so the copy is there
        when the slower of the two lines is done.
        """
        versions = self.world.versions()
        self.asked_s = self.world.engine.now_s
        if copy_s is not None:
            self.world.engine.after(copy_s, self._take_over, versions)
            return
        exchange = self.world.exchange
        moments_bytes = MOMENT_BYTES * exchange.parameters
        lender = self.world.lender()
        self._parts = 1 if lender is None else 2
        self.down.send(exchange.fragments * exchange.fragment_bytes + moments_bytes, self._part_is_here, versions)
        if lender is not None:
            lender.up.send(moments_bytes, self._part_is_here, versions)

    def leave(self) -> None:
        """Leave after the present step or stall."""
        self.leave_wanted = True

    def _part_is_here(self, versions: dict[int, int]) -> None:
        self._parts -= 1
        if not self._parts:
            self._take_over(versions)

    def _take_over(self, versions: dict[int, int]) -> None:
        self.machine = Island(self.world.settings, versions)
        self.state = "training"
        self.joined_s = self.since_s = self.world.engine.now_s
        self._beat_for_ever()
        self._resync()
        if self.stalled:
            return
        self._step()

    # --- steps and stalls ---------------------------------------------------------------------------------------------------

    def under_way_s(self) -> float:
        """Return the age of the present stall, or of the present step, at most the planned time of that step."""
        since_s = self.world.engine.now_s - self.since_s
        return since_s if self.stalled else min(since_s, self._last_s)

    def stall(self) -> None:
        """Stop: the step under way is lost."""
        self.stalled = True
        if self.state == "training":
            self.cut_s += self.under_way_s()
            self.since_s = self.world.engine.now_s
            self._epoch += 1

    def go_on(self, active: int) -> None:
        """Go on with `active` slices and adopt what was missed."""
        self.stalled = False
        self.active = active
        if self.state == "training":
            now_s = self.world.engine.now_s
            self.stalled_s += now_s - self.since_s
            self.since_s = now_s
            self._resync()
            self._step()

    def _step(self) -> None:
        if self.leave_wanted:
            self._drain()
            return
        self._last_s = self._next_step_s()
        self.world.engine.after(self._last_s, self._step_done, self._epoch)

    def _next_step_s(self) -> float:
        u = 1.0 - self._dice.random()
        slow = slowest(self.active, min(u, 1.0 - 1e-12))
        return self.step_s * max(0.1, 1.0 + self.world.fleet.slice_cv * slow)

    def _step_tokens(self) -> int:
        return self.active * self.world.fleet.slice_chips

    def _step_done(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        now_s = self.world.engine.now_s
        self.stepped_s += self._last_s
        self._steps.add(self._last_s)
        self.since_s = now_s
        tokens = self._step_tokens()
        self._on_fact(StepDone(at_s=now_s, tokens=tokens))
        self._epoch += 1
        self.world.trained(tokens)
        self._step()
        if self._heartbeats.is_news(self._steps.mean_s):
            self._beat_for_ever()

    def _drain(self) -> None:
        self.state = "draining"
        self.left_s = self.world.engine.now_s
        self._on_fact(DrainOrdered(at_s=self.left_s, cause_id="drain"))

    # --- news ---------------------------------------------------------------------------------------------------------------

    def hear_call(self, call: PublishCall) -> None:
        """Hear a call, unless the learner is deaf."""
        if self.trains and not self.stalled:
            now_s = self.world.engine.now_s
            self._on_fact(CallHeard(at_s=now_s, fragment=call.fragment, version=call.version, attempt=call.attempt))

    def hear_head(self, fragment: int, version: int, proven: bool = False) -> None:  # noqa: FBT001, FBT002  (called by timers)
        """Hear of a head, by message or by its record, unless the learner is deaf."""
        if self.trains and not self.stalled:
            now_s = self.world.engine.now_s
            self._on_fact(HeadHeard(at_s=now_s, fragment=fragment, version=version, proven=proven))

    def hear_refused(self, key: PushKey, reason: str) -> None:
        """Hear that a contribution was refused."""
        if self.trains and not self.stalled:
            now_s = self.world.engine.now_s
            self._on_fact(PushRefused(at_s=now_s, fragment=key.fragment, push=key.push, reason=reason))

    def _resync(self) -> None:
        self.up.ask(self._answer_heads)

    def _answer_heads(self) -> None:
        for fragment, version in self.world.versions().items():
            self.down.ask(self.hear_head, fragment, version, True)

    def _beat_for_ever(self) -> None:
        """Beat as production does: at once when the step time is news, and seldom when it is not."""
        if not self.trains:
            return
        if not self.stalled:
            for hub in self.world.hubs:
                self.up.core_message(hub.hear_beat, self.beat())
        self._beats += 1
        self.world.engine.after(self._heartbeats.pause_after(self._steps.mean_s), self._beat_again, self._beats)

    def _beat_again(self, number: int) -> None:
        if number == self._beats:
            self._beat_for_ever()

    def beat(self) -> LearnerBeat:
        """Return a report of this moment."""
        machine = self.island
        return LearnerBeat(
            at_s=self.world.engine.now_s,
            learner=self.name,
            incarnation=self.incarnation,
            training=self.trains,
            step_s=self._steps.mean_s,
            steps=machine.steps,
            tokens=machine.tokens,
            pushed=machine.pushed,
            superseded=machine.superseded,
            refused_local=machine.refused_local,
        )

    # --- facts and commands -------------------------------------------------------------------------------------------------

    def _on_fact(self, fact: Fact) -> None:
        actions = self.island.handle(fact)
        if self._watched:
            invariants.check_island(self.island)
        for action in actions:
            self._do(action)

    def _do(self, action: Command) -> None:
        if isinstance(action, Push):
            arrived = ContributionArrived(
                at_s=0.0,
                key=PushKey(self.name, self.incarnation, action.fragment, action.push),
                base_version=action.base_version,
                tokens=action.tokens,
                steps=action.steps,
                trained_tokens=action.trained_tokens,
                final=action.final,
            )
            self.up.send(self.world.up_bytes(action.fragment), self._is_durable, arrived)
            if action.keep:
                self._on_fact(SnapshotKept(at_s=self.world.engine.now_s, fragment=action.fragment, push=action.push))
        elif isinstance(action, Adopt):
            fragment, version, now_s = action.fragment, action.version, self.world.engine.now_s
            self._on_fact(Adopted(at_s=now_s, fragment=fragment, version=version, overwritten=action.overwrite))
        elif isinstance(action, FetchFragment):
            self.up.ask(self._answer_fetch, action)
        elif isinstance(action, Leave):
            for hub in self.world.hubs:
                self.up.ask(self._said_goodbye, hub)

    def _is_durable(self, arrived: ContributionArrived) -> None:
        """Find a contribution in the queue, and tell its learner a latency later."""
        self.down.ask(self._settled, arrived.key)
        self.world.hub_of(arrived.key.fragment).receive(arrived)

    def _settled(self, key: PushKey) -> None:
        self._on_fact(PushSettled(at_s=self.world.engine.now_s, fragment=key.fragment, push=key.push))

    def _answer_fetch(self, asked: FetchFragment) -> None:
        fragment = asked.fragment
        version = self.world.hub_of(fragment).versions[fragment]
        if version <= self.island.intervals[fragment].newest and not asked.again:
            self.down.ask(self._found_nothing, fragment)
        else:
            self.down.send(self.world.down_bytes(fragment), self._fetched, fragment, version)

    def _found_nothing(self, fragment: int) -> None:
        self._on_fact(NothingNewer(at_s=self.world.engine.now_s, fragment=fragment))

    def _fetched(self, fragment: int, version: int) -> None:
        self._on_fact(FragmentFetched(at_s=self.world.engine.now_s, fragment=fragment, version=version))

    def _said_goodbye(self, hub: Hub) -> None:
        hub.receive_farewell(self.beat())
        self._farewells += 1
        if self._farewells == len(self.world.hubs):
            self.state = "left"
