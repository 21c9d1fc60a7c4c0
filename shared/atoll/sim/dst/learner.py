"""One incarnation of a learner as the island's session and driver run it, around the production `Island`.

    claim the id - read heads and frames - step, adopt between steps, beat, answer calls - drain - farewells - leave

Training is virtual: a step takes `step_s` and yields tokens. Frames carry no numbers. The order of effects is that of
`atoll.client.session` and `atoll.client.driver`: chunks, then the manifest; every push durable, then the farewells
through the same queues, then the membership record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from atoll.protocol import invariants
from atoll.protocol.events import (
    Acknowledge,
    Action,
    Adopted,
    CallHeard,
    DrainOrdered,
    Event,
    FetchFailed,
    FetchFragment,
    FragmentFetched,
    HeadHeard,
    LearnerBeat,
    Leave,
    PublishCall,
    Push,
    PushKey,
    PushRefused,
    PushSettled,
    StepDone,
)
from atoll.protocol.island import Island
from atoll.sim.dst.broker import Full, Gone, Record
from atoll.sim.dst.line import RETRY_S, RETRY_S_MAX, Conflict, Line, Unavailable, patiently
from atoll.sim.dst.process import Mailbox, Process, Work
from atoll.sim.dst.reader import queue_name
from atoll.sim.dst.store import Head, head_name
from atoll.sim.dst.traffic import Contribution, Farewell

if TYPE_CHECKING:
    from atoll.sim.dst.world import World

TOKENS = 10
FLAWS = ("not_finite", "outlier", "foreign")
RESYNC_S = 4.0
PUSH_PATIENCE_S = 10.0
ENCODE_S = 0.01
TAKE_S = 0.001
BEATS_PER_SILENCE = 4.0
READ_ATTEMPTS = 8


class Member(NamedTuple):
    """The record of who answers to a learner id."""

    incarnation: int
    left: bool


def member_name(learner: str) -> str:
    """Return the name of a learner's membership record."""
    return f"member/{learner}"


class Learner:
    """One process that wants to be the learner `name`."""

    def __init__(self, world: World, process: Process, name: str, line: Line) -> None:
        """Prepare; `live` does the work."""
        self.world = world
        self.process = process
        self.name = name
        self.line = line
        self.step_s = world.step_s_of(name)
        self.incarnation = 0
        self.machine: Island | None = None
        self.drain_wanted = False
        self.run_tokens = 0
        self.left = False
        self.state = "joining"
        self._ready: dict[int, int] = {}
        self._adopting: set[int] = set()
        self._encoding: set[int] = set()
        self._gone = Mailbox(process)

    def live(self) -> Work:
        """Join, train until told to leave, leave."""
        yield from patiently(self._claim)
        names = tuple(head_name(p) for p in range(self.world.settings.fragments))
        versions: dict[int, int] = {}
        heads: list[Record] = yield from patiently(self.line.ask, self.line.broker.get_all, names)
        for record in heads:
            head: Head = record.value
            versions[head.fragment] = yield from patiently(self._frame, head)
        self.machine = Island(self.world.settings, versions)
        self.world.joined(self)
        broker = self.line.broker
        broker.listen("call", self.process, self._on_call)
        broker.listen("head", self.process, self._on_head)
        broker.listen(f"verdict/{self.name}", self.process, self._on_verdict)
        self.state = "training"
        self.process.spawn(self._beat_for_ever())
        self.process.spawn(self._resync())
        while not self.drain_wanted:
            yield self.step_s * self.process.clock.rate
            ready = [p for p in self._ready if p not in self._encoding]
            if ready:
                self._adopting.update(ready)
                adopted = {p: self._ready.pop(p) for p in ready}
                yield TAKE_S
                self._on_step(adopted)
            else:
                self._on_step({})
        yield from self._drain()

    def _claim(self) -> Work:
        """Take the next incarnation of our id."""
        name = member_name(self.name)
        while True:
            record: Record = yield from self.line.ask(self.line.broker.get, name)
            self.incarnation = 1 if record.value is None else record.value.incarnation + 1
            try:
                yield from self.line.put_record(name, Member(self.incarnation, left=False), record.revision)
            except Conflict:
                continue
            return

    def _frame(self, head: Head) -> Work:
        """Return the version of the newest frame that could be read."""
        broker = self.line.broker
        for _ in range(READ_ATTEMPTS):
            try:
                yield from self.line.ask(broker.get_blob, head.frame)
            except Gone:
                record: Record = yield from self.line.ask(broker.get, head_name(head.fragment))
                head = record.value
                continue
            return head.version
        raise Unavailable

    # --- the training thread ------------------------------------------------------------------------------------------

    def _on_step(self, adopted: dict[int, int]) -> None:
        now_s = self.process.clock.now_s
        self._on_fact(StepDone(at_s=now_s, tokens=TOKENS))
        for fragment, version in adopted.items():
            self._on_fact(Adopted(at_s=now_s, fragment=fragment, version=version))
            self._adopting.discard(fragment)

    def _drain(self) -> Work:
        """Make everything durable and say goodbye."""
        self.state = "draining"
        self._on_fact(DrainOrdered(at_s=self.process.clock.now_s, cause_id="drain"))
        yield from self._gone.get()
        self.state = "left"
        farewell = Farewell(learner=self.name, incarnation=self.incarnation, beat=self._beat())
        for shard in range(self.world.settings.shards):
            message_id = f"bye-{self.name}-{self.incarnation}-{shard}"
            message = (queue_name(shard), f"bye/{self.name}", farewell, message_id)
            yield from patiently(self.line.ask, self.line.broker.publish, *message)
        self.left = True
        self.world.left(self)
        record: Record = yield from patiently(self.line.ask, self.line.broker.get, member_name(self.name))
        if record.value.incarnation == self.incarnation:
            gone = Member(self.incarnation, left=True)
            try:
                yield from patiently(self.line.put_record, member_name(self.name), gone, record.revision)
            except Conflict:
                self.world.tally["ids taken over"] += 1
        self.process.crash()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _beat_for_ever(self) -> Work:
        while True:
            self.line.tell("beat", (self._beat(), self.state))
            yield self.world.settings.silence_s / BEATS_PER_SILENCE

    def _beat(self) -> LearnerBeat:
        machine = self.machine
        if machine is None:
            raise RuntimeError("a learner beats after it has joined")
        return LearnerBeat(
            at_s=0.0,
            learner=self.name,
            incarnation=self.incarnation,
            training=self.state == "training",
            step_s=self.step_s if machine.steps else 0.0,
            tokens=machine.tokens,
            pushed=machine.pushed,
            superseded=machine.superseded,
            refused_local=machine.refused_local,
            run_tokens=max(self.run_tokens, machine.tokens),
        )

    def _resync(self) -> Work:
        """Re-read our membership and the heads now and then: at-most-once messages may be lost, records are not."""
        names = tuple(head_name(p) for p in range(self.world.settings.fragments))
        while True:
            yield RESYNC_S
            try:
                member: Record = yield from self.line.ask(self.line.broker.get, member_name(self.name))
                if member.value.incarnation != self.incarnation:
                    self.world.tally["ids taken over"] += 1
                    self.process.crash()
                    return
                heads: list[Record] = yield from self.line.ask(self.line.broker.get_all, names)
            except Unavailable:
                continue
            for record in heads:
                self._on_head(record.value)

    def _on_call(self, call: PublishCall) -> None:
        self.run_tokens = max(self.run_tokens, call.run_tokens)
        if call.fragment not in self._adopting:
            now_s = self.process.clock.now_s
            self._on_fact(CallHeard(at_s=now_s, fragment=call.fragment, version=call.version, attempt=call.attempt))

    def _on_head(self, head: Head) -> None:
        self._on_fact(HeadHeard(at_s=self.process.clock.now_s, fragment=head.fragment, version=head.version))

    def _on_verdict(self, verdict: Acknowledge) -> None:
        if verdict.key.incarnation == self.incarnation and self.machine is not None and not self.machine.left:
            if verdict.reason == "quarantined":
                self.world.tally["learners quarantined"] += 1
                self.world.note(self.process.name, "is in quarantine and leaves with an error")
                self.process.crash()
                return
            now_s, key = self.process.clock.now_s, verdict.key
            self._on_fact(PushRefused(at_s=now_s, fragment=key.fragment, push=key.push, reason=verdict.reason))

    def _on_fact(self, fact: Event) -> None:
        machine = self.machine
        if machine is None or not self.process.alive:
            return
        actions = machine.handle(fact)
        self.world.note(self.process.name, fact, actions)
        invariants.check_island(machine)
        for action in actions:
            self._do(action)

    # --- commands -----------------------------------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        if isinstance(action, Push):
            self._encoding.add(action.fragment)
            self.process.spawn(self._push(action))
        elif isinstance(action, FetchFragment):
            self.process.spawn(self._fetch(action))
        elif isinstance(action, Leave):
            self._gone.put(action)

    def _push(self, action: Push) -> Work:
        yield ENCODE_S
        self._encoding.discard(action.fragment)
        reason = ""
        if self.world.happens(self.world.faults.not_finite):
            reason = "not_finite"
            self.world.tally["pushes not finite"] += 1
        else:
            try:
                yield from self._send(action)
            except (Unavailable, Full):
                reason = "gave_up"
                self.world.tally["pushes given up"] += 1
        now_s = self.process.clock.now_s
        self._on_fact(PushSettled(at_s=now_s, fragment=action.fragment, push=action.push, reason=reason))

    def _send(self, action: Push) -> Work:
        """Store the chunks (bounded patience), then queue the manifest (until it is durable)."""
        key = PushKey(self.name, self.incarnation, action.fragment, action.push)
        stem = f"up/{self.name}/{action.fragment}/{self.incarnation}/{action.push}"
        broker = self.line.broker
        deadline_s = self.process.clock.now_s + PUSH_PATIENCE_S
        yield from self._patiently_until(deadline_s, stem)
        body = Contribution(
            key=key,
            base_version=action.base_version,
            tokens=action.tokens,
            steps=action.steps,
            trained_tokens=action.trained_tokens,
            final=action.final,
            stem=stem,
            flaw=self.world.dice.choice(FLAWS) if self.world.happens(self.world.faults.spoiled) else "",
        )
        queue = queue_name(self.world.settings.shard_of(action.fragment))
        subject = f"{self.name}/{action.fragment}"
        yield from patiently(self.line.ask, broker.publish, queue, subject, body, stem)

    def _patiently_until(self, deadline_s: float, stem: str) -> Work:
        pause_s = RETRY_S
        while True:
            try:
                yield from self.line.ask(self.line.broker.put_blob, stem, stem)
            except (Unavailable, Full):
                if self.process.clock.now_s > deadline_s:
                    raise
                yield pause_s
                pause_s = min(2.0 * pause_s, RETRY_S_MAX)
                continue
            return

    def _fetch(self, action: FetchFragment) -> Work:
        p = action.fragment
        try:
            record: Record = yield from self.line.ask(self.line.broker.get, head_name(p))
            version: int = yield from self._frame(record.value)
        except Unavailable:
            now_s = self.process.clock.now_s
            self._on_fact(FetchFailed(at_s=now_s, fragment=p, version=action.version, reason="away"))
            return
        self._ready[p] = version
        self._on_fact(FragmentFetched(at_s=self.process.clock.now_s, fragment=p, version=version))
