"""A learner's side in a simulated fleet: the production `Island`, stepping in virtual time.

    joining --state over the link--> training <--> stalled --told to leave--> draining --farewells--> left

The next step begins when one ends, whatever the links and the shards do. A stall of the learner's chips cuts the
present step short (its tokens were never trained). It also makes the learner deaf: it misses calls and news of heads,
and sends no reports. Afterwards the learner asks for the heads, as the production island does at intervals, and adopts
what it missed. Transfers under way go on: the host does them, not the chips.

Tokens are counted as one per chip and step: a learner without some of its slices trains that much less per step, and
its contributions weigh accordingly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.protocol import invariants
from atoll.protocol.events import (
    Adopted,
    CallHeard,
    Command,
    ContributionArrived,
    DrainOrdered,
    Fact,
    FetchFragment,
    FragmentFetched,
    HeadHeard,
    LearnerBeat,
    Leave,
    NothingNewer,
    PublishCall,
    Push,
    PushKey,
    PushRefused,
    PushSettled,
    StepDone,
)
from atoll.protocol.island import Island
from atoll.protocol.pacing import Heartbeats, StepTimes
from atoll_simulator.fleet.chance import slowest, stream
from atoll_simulator.fleet.links import FleetLink

if TYPE_CHECKING:
    from atoll_simulator.fleet.hub import Hub
    from atoll_simulator.fleet.rounds import Rounds

MOMENT_BYTES = 8.0


class FleetLearner:
    """One learner; `speed` is its step time over the nominal one, `slices` how many it has when whole."""

    def __init__(self, world: Rounds, name: str, speed: float, slices: int, *, watched: bool) -> None:
        """Prepare; `begin` or `join` starts it."""
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
        self._ready: dict[int, int] = {}
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
        ready, self._ready = self._ready, {}
        for fragment, version in ready.items():
            gone = not self.island.keeps(fragment, version)
            self._on_fact(Adopted(at_s=now_s, fragment=fragment, version=version, overwritten=gone))
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
        """Ask which heads are visible; the answer is there a round trip later."""
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
        self.world.engine.after(self._heartbeats.told(self._steps.mean_s), self._beat_again, self._beats)

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
        held = max(self.island.intervals[fragment].anchor, self._ready.get(fragment, 0))
        if version <= held and not asked.again:
            self.down.ask(self._found_nothing, fragment)
        else:
            self.down.send(self.world.down_bytes(fragment), self._fetched, fragment, version)

    def _found_nothing(self, fragment: int) -> None:
        self._on_fact(NothingNewer(at_s=self.world.engine.now_s, fragment=fragment))

    def _fetched(self, fragment: int, version: int) -> None:
        self._ready[fragment] = version
        self._on_fact(FragmentFetched(at_s=self.world.engine.now_s, fragment=fragment, version=version))

    def _said_goodbye(self, hub: Hub) -> None:
        hub.receive_farewell(self.beat())
        self._farewells += 1
        if self._farewells == len(self.world.hubs):
            self.state = "left"
