"""The island's driver turns core messages, records and steps into facts, and commands into work. It decides nothing.

It runs on one event loop in a thread of its own. The training thread meets it in three places only, all non-blocking:
`post_step` (a step ended, here is the snapshot), `take_ready` (frames to adopt at this boundary) and the flags.

    training thread ── post_step(snapshot, adopted) ─►  loop: Island.handle ─► Push  ─► worker thread: encode ─► bus
                    ◄─ take_ready() ── ready frames ◄── loop: FetchFragment ◄─ heads (taps, calls, anti-entropy)

The snapshot maps tensor names to arrays of the last completed step: JAX arrays do not change, so a reference costs nothing.
Worker threads, or its device (`atoll.client.device_encoding`), compute pseudo-gradients of it: `anchor - theta` in float32.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from atoll.base import fact_dumps
from atoll.base.background_tasks import BackgroundTasks
from atoll.base.buffer_pool import Vector
from atoll.base.clock import Clock
from atoll.base.errors import (
    AtollError,
    BrokerUnavailable,
    BusError,
    FrameRejected,
    PeerMisbehaved,
    StorageFull,
)
from atoll.base.identity import Identity
from atoll.base.logs import get
from atoll.base.parallel import off_loop
from atoll.base.parsing import parsed
from atoll.bus.interface import Bus, CoreMessage
from atoll.client.adoption import AdoptableFragment
from atoll.client.device_encoding import Encoder, Placed, chosen
from atoll.client.head_reading import HeadReading, HeadTap
from atoll.client.local_refusals import ClippedPushes, LocalRefusals, tell_refusal
from atoll.client.log_lines import AdoptionLog
from atoll.client.membership import dismissal, quarantine
from atoll.client.pushing import Pusher
from atoll.client.run_progress import RunProgress
from atoll.client.step_boundary import LossReader, StepBoundary, StepReport
from atoll.codec import Read
from atoll.model.pytrees import gather, leaves_of, look
from atoll.protocol.events import (
    Adopted,
    CallHeard,
    DrainOrdered,
    Fact,
    FetchFailed,
    FetchFragment,
    FragmentFetched,
    HeadHeard,
    Leave,
    NothingNewer,
    Push,
    PushRefused,
    PushSettled,
    StepDone,
)
from atoll.protocol.island import Island
from atoll.protocol.pacing import Heartbeats, StepTimes
from atoll.protocol.reasons import id_of
from atoll.protocol.recorder import FactRecorder
from atoll.run.heads import GlobalFragment, fetch_newest, read_head, went_back
from atoll.run.record import recorded_progress, the_run
from atoll.wire.messages import Call, Control, Member, RunRecord, Verdict, decode, encode

log = get(__name__)

RESYNC_S = 5.0
RESYNC_S_MIN = 0.5
PUSHES_AT_ONCE = 4


class IslandDriver:
    """Drives one incarnation's `Island` on the running loop. Create it on that loop."""

    def __init__(
        self,
        bus: Bus,
        run: RunRecord,
        member: Member,
        anchors: Mapping[int, GlobalFragment],
        clock: Clock,
        identity: Identity | None = None,
    ) -> None:
        """Start from the adopted frames."""
        self.bus = bus
        self.run = run
        self.member = member
        self.clock = clock
        self.subjects = run.subjects
        self.machine = Island(run.protocol, {p: frame.version for p, frame in anchors.items()})
        self.recorder = FactRecorder(f"island-{member.learner}-{member.incarnation}", self.machine)
        fact_dumps.keep(self.recorder)
        self.report = StepReport()
        self.steps = StepTimes()
        self.heartbeats = Heartbeats(run.protocol.silence_s)
        self.pace_changed = asyncio.Event()
        self._proof_wanted = asyncio.Event()
        self._asking_why, self._heads = False, HeadReading(bus, run)
        self.losses = LossReader()
        self.progress = RunProgress(run.protocol.tokens_target)
        self.failure: AtollError | None = None
        self.failure_told = False  # the loop knows: a step has raised it
        self.drain_wanted = False
        self.left = asyncio.Event()
        self._anchors: dict[int, GlobalFragment] = dict(anchors)
        self._sent: dict[int, Vector] = {}
        self._snapshot: Mapping[str, Any] = {}
        self._at_home: dict[int, Placed] = {}  # anchors that are on their device too
        self._ready: dict[int, tuple[GlobalFragment, Placed | None]] = {}
        self._adopting: set[int] = set()
        self._encoding: set[int] = set()
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self.background, self._strange = BackgroundTasks(self._fail), itertools.count(1)
        self._pushing = [asyncio.Semaphore(PUSHES_AT_ONCE) for _ in range(1 + len(run.bulk))]  # a broker each
        self.pusher = Pusher(bus, run, member, clock, self.steps, identity)
        self._refusals = LocalRefusals(run.layout, clock)
        self._clipped = ClippedPushes(clock)
        self._encoder: Encoder | None = None
        self.adoption_log = AdoptionLog()

    async def begin(self, snapshot: Mapping[str, Any], encode: str = "auto", *, donated: bool = False) -> None:
        """Set the snapshot before the first step, and choose where pseudo-gradients are made of such snapshots."""
        self._snapshot = snapshot
        self._encoder, why = chosen(encode, self.run.layout, self.run.protocol, snapshot, donated=donated)
        tell = log.warning if encode == "device" and self._encoder is None else log.info
        tell("pseudo_gradients.encoded", where="host" if self._encoder is None else "device", why=why)
        for p, frame in self._anchors.items():
            placed = await self._encoder.placed(p, frame.version, frame.values) if self._encoder else None
            if placed is not None:
                self._at_home[p] = placed

    # --- called by the training thread ------------------------------------------------------------------------------

    def take_ready(self) -> list[AdoptableFragment]:
        """Return the frames to adopt at this step boundary and forget them.

        Until the adoption is posted, the learner does not answer calls for these fragments: a push in between would count steps
        that the adoption is about to carry or overwrite. A fragment being encoded waits: we must know what was pushed.
        """
        with self._lock:
            now = [p for p in self._ready if p not in self._encoding]
            self._adopting.update(now)
            ready = []
            for p in now:
                frame, placed = self._ready.pop(p)
                since = self._sent.get(p, self._anchors[p].values) if self.machine.keeps(p, frame.version) else None
                ready.append(AdoptableFragment(frame, since, placed))
            return ready

    def post_step(self, step: StepBoundary) -> None:
        """Hand over a completed step and the adoptions that followed it; returns at once."""
        self._loop.call_soon_threadsafe(self._on_step, step)

    def order_drain(self) -> None:
        """Begin to leave: push the rest; `left` is set when everything is durable."""
        self._loop.call_soon_threadsafe(self._on_fact, DrainOrdered(at_s=self.clock.monotonic(), cause_id="drain"))

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, and return when every subscription stands, so that no later call is missed."""
        learner = self.member.learner
        feeds: list[tuple[str, Callable[[CoreMessage], None]]] = [
            (self.subjects.call("*"), self._on_call),
            (self.subjects.tap("gl.head.*"), self._on_head),
            (self.subjects.verdict(learner), self._on_verdict),
            (self.subjects.control("all"), self._on_control),
            (self.subjects.control(learner), self._on_control),
        ]
        for subject, handler in feeds:
            subscription = await self.bus.listen(subject)
            self.background.spawn(self._hear(subscription, handler))
        self.background.spawn(self._resync())

    async def stop(self) -> None:
        """End all background work."""
        await self.background.stop()

    async def _hear(self, subscription: Any, handler: Callable[[CoreMessage], None]) -> None:  # noqa: ANN401  (Subscription)
        async for core_message in subscription:
            try:
                handler(core_message)
            except PeerMisbehaved as error:
                if (count := next(self._strange)) & (count - 1) == 0:  # a flood of them fills no log
                    log.warning("core_message.refused", subject=core_message.subject, reason=str(error), messages=count)

    async def _resync(self) -> None:
        """Read heads, membership and the end of the run at intervals: core messages may be lost or wrong, records are not.

        A message that claims what only a record can prove brings the next reading forward.
        """
        pause_s = RESYNC_S_MIN
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESYNC_S):
                    await self._proof_wanted.wait()
            # A claim that is repeated for ever makes us look no more often than we do anyway.
            pause_s = min(2.0 * pause_s, RESYNC_S) if self._proof_wanted.is_set() else min(RESYNC_S_MIN, RESYNC_S)
            try:
                dismissed = await dismissal(self.bus, self.subjects, self.run, self.member)
                if dismissed is not None:
                    self._fail(dismissed)
                    return
                await self.prove()
                had = {p: frame.version for p, frame in self._anchors.items()}
                heads = await self._heads.read()
                for head in heads:
                    if head.version < had[head.fragment] and (back := await self._went_back(head.fragment, had)):
                        self._fail(back)
                        return
                for head in heads:
                    self.progress.record(head.tokens_counted)
                    p, version, now_s = head.fragment, head.version, self.clock.monotonic()
                    cause = id_of("head", p, version)
                    self._on_fact(HeadHeard(at_s=now_s, fragment=p, version=version, proven=True, cause_id=cause))
            except (BusError, BrokerUnavailable, StorageFull, PeerMisbehaved) as error:
                log.warning("resync.failed", reason=str(error))
            await asyncio.sleep(pause_s)
            self._proof_wanted.clear()

    async def _went_back(self, fragment: int, had: Mapping[int, int]) -> AtollError | None:
        """Return why a head is older than the version that we had before it was read; None if its newest reading is not."""
        head = await read_head(self.bus, self.run, fragment)
        if head is not None and head.version >= had[fragment]:
            return None
        rebuilt = await dismissal(self.bus, self.subjects, self.run, self.member)
        return rebuilt or went_back(self.run, fragment, None if head is None else head.version, had[fragment])

    async def prove(self) -> bool:
        """Read how far the run is; return whether all shards have closed their ledgers, so that none hears us any more."""
        own = self.machine.tokens
        recorded = await recorded_progress(self.bus, self.run)
        self.progress.prove(recorded.tokens, own)
        self.drain_wanted = self.drain_wanted or recorded.over or (await the_run(self.bus, self.subjects)).closing
        return recorded.over

    def _fail(self, error: BaseException) -> None:
        """Have the next step, or the drain, raise `error`; if the cause is our own bug, keep the last facts of the machine."""
        self.left.set()  # nothing more becomes durable
        self.failure = error if isinstance(error, AtollError) else AtollError(f"the driver failed: {error!r}")
        log.error("driver.failed", reason=repr(error))
        fact_dumps.dump_if_our_bug(error, self.recorder)

    # --- facts --------------------------------------------------------------------------------------------------------

    def _on_step(self, step: StepBoundary) -> None:
        self._snapshot, self.report = step.completed, step.report
        if self.heartbeats.is_news(self.steps.add(step.report.step_s)):
            self.pace_changed.set()
        now_s = self.clock.monotonic()
        self._on_fact(StepDone(at_s=now_s, tokens=step.tokens))
        for item in step.adopted:
            p, version = item.frame.fragment, item.frame.version
            cause = id_of("head", p, version)
            gone = item.carry_from is None
            self._on_fact(Adopted(at_s=now_s, fragment=p, version=version, overwritten=gone, cause_id=cause))
            self.pusher.adopted(p, version)
            self.adoption_log.adopted(p, version, self.machine.steps, cause, overwritten=gone)
            with self._lock:
                self._anchors[p] = item.frame
                self._at_home.pop(p, None)
                if item.placed is not None:
                    self._at_home[p] = item.placed
                self._sent.pop(p, None)
                self._adopting.discard(p)
        self._snapshot = step.continued

    def _on_call(self, core_message: CoreMessage) -> None:
        call = decode(Call, core_message.data)
        if self.progress.hear(call.run_tokens, self.machine.tokens):
            self._proof_wanted.set()
        if call.fragment in self.machine.intervals and call.fragment not in self._adopting:
            p, version, attempt = call.fragment, call.version, call.attempt
            now_s, cause = self.clock.monotonic(), id_of("call", p, version, attempt)
            self._on_fact(CallHeard(at_s=now_s, fragment=p, version=version, attempt=attempt, cause_id=cause))

    def _on_head(self, core_message: CoreMessage) -> None:
        """Note that a head moved, as its tap says; the fetch reads the record itself."""
        try:
            said = parsed(core_message.headers.get("Atoll-Info", ""), HeadTap)
        except msgspec.MsgspecError as error:
            raise PeerMisbehaved("a head tap without its info", got=str(error)) from error
        if said.fragment in self.machine.intervals:
            p, version, now_s = said.fragment, said.version, self.clock.monotonic()
            self._on_fact(HeadHeard(at_s=now_s, fragment=p, version=version, cause_id=id_of("head", p, version)))

    def _on_verdict(self, core_message: CoreMessage) -> None:
        verdict = decode(Verdict, core_message.data)
        if verdict.incarnation != self.member.incarnation or verdict.fragment not in self.machine.intervals:
            return
        if verdict.fate == "clipped":
            self._clipped.tell(verdict)
            return
        tell_refusal(verdict)
        if verdict.reason == "quarantined" and not self._asking_why:
            self._asking_why = True
            self.background.spawn(self._ask_why(verdict.fragment))
        self._on_fact(
            PushRefused(
                at_s=self.clock.monotonic(), fragment=verdict.fragment, push=verdict.push, reason=verdict.reason
            )
        )

    async def _ask_why(self, fragment: int) -> None:
        """Fail if the ledgers of the shard that owns `fragment` say that we are in quarantine; a verdict may be wrong."""
        try:
            if (reason := await quarantine(self.bus, self.run, fragment, self.member)) is not None:
                self._fail(reason)
        except (BusError, BrokerUnavailable, PeerMisbehaved) as error:
            log.warning("quarantine.unproven", fragment=fragment, reason=str(error))
        self._asking_why = False

    def _on_control(self, core_message: CoreMessage) -> None:
        control = decode(Control, core_message.data)
        if control.verb == "identify" and core_message.reply:
            self.background.spawn(self.bus.tell(core_message.reply, encode(self.member)))
        elif control.verb == "drain":
            self._proof_wanted.set()

    def _on_fact(self, fact: Fact) -> None:
        """Let the machine handle a fact and start what it commands."""
        if self.recorder.broke:
            return
        try:
            actions = self.recorder.handle(fact)
        except Exception as error:  # noqa: BLE001  (a callback of the loop: no caller would see it)
            self._fail(error)
            return
        for action in actions:
            if isinstance(action, Push):
                p = action.fragment
                with self._lock:
                    self._encoding.add(p)
                # The whole snapshot would stay in memory for as long as this push waits.
                leaves = leaves_of(self.run.layout, self._snapshot, p)
                self.background.spawn(self._push(action, leaves, *self._origin(action)))
            elif isinstance(action, FetchFragment):
                self.background.spawn(self._fetch(action))
            elif isinstance(action, Leave):
                self.left.set()

    def _origin(self, action: Push) -> tuple[Vector, Placed | None]:
        """Return what a push is a difference from, and the same on its device if it is there."""
        if self.run.protocol.by_value(p := action.fragment):
            return np.zeros(self.run.layout.fragment_sizes()[p], np.float32), None
        return self._sent[p] if action.onward else self._anchors[p].values, self._at_home.get(p)

    # --- commands -----------------------------------------------------------------------------------------------------

    async def _push(self, action: Push, snapshot: Mapping[str, Any], origin: Vector, anchor: Placed | None) -> None:
        reason, p = "", action.fragment
        async with self._pushing[p % len(self._pushing)]:
            try:
                if self._encoder and anchor is not None and self._encoder.reads(p, snapshot):
                    with self._lock:
                        self._encoding.discard(p)
                    make = partial(self._encoder.encode, p, anchor, snapshot)
                    await self.pusher.push_made(action, make, lambda: self.losses.read(self.report.loss))
                else:
                    theta = await off_loop(origin.size, self._reader, p, snapshot, origin)
                    await self.pusher.push(action, origin, theta, lambda: self.losses.read(self.report.loss))
            except FrameRejected as error:
                reason = error.reason
                await self._refusals.tell(action, snapshot, error)
            except (BusError, BrokerUnavailable, StorageFull, RuntimeError) as error:
                reason = "gave_up"
                log.warning("push.gave_up", fragment=p, push=action.push, reason=str(error))
        now_s = self.clock.monotonic()
        settled = PushSettled(at_s=now_s, fragment=p, push=action.push, reason=reason, cause_id=action.cause_id)
        self._on_fact(settled)

    def _reader(self, fragment: int, snapshot: Mapping[str, Any], origin: Vector) -> Read:
        """Return how a fragment of the snapshot is read, and note what is sent if the run needs it later.

        It copies (in a worker thread, if that is much) in runs that carry over or push onward, and what its owner may write to.
        """
        layout, protocol = self.run.layout, self.run.protocol.of(fragment)
        try:
            changing = any(isinstance(leaf, np.ndarray) and leaf.flags.writeable for leaf in snapshot.values())
            if protocol.adoption != "carry" and protocol.ending != "together" and not changing:
                return partial(look, layout, snapshot, fragment)
            theta = gather(layout, snapshot, fragment)
            with self._lock:
                if self._anchors[fragment].values is origin:
                    self._sent[fragment] = theta
        finally:
            with self._lock:
                self._encoding.discard(fragment)  # the pseudo-gradient that is being sent cannot change now
        return lambda start, stop: theta[start:stop]

    async def _fetch(self, action: FetchFragment) -> None:
        p = action.fragment
        try:
            with self._lock:
                held = self._ready[p][0] if p in self._ready else self._anchors[p]
            frame = await fetch_newest(self.bus, self.run, held, again=action.again)
            if frame is None:
                self._on_fact(NothingNewer(at_s=self.clock.monotonic(), fragment=p, cause_id=action.cause_id))
                return
            placed = await self._encoder.placed(p, frame.version, frame.values) if self._encoder else None
        except (BusError, BrokerUnavailable, PeerMisbehaved, StorageFull) as error:
            log.warning("fetch.failed", fragment=p, version=action.version, reason=str(error))
            now_s = self.clock.monotonic()
            failed = FetchFailed(
                at_s=now_s, fragment=p, version=action.version, reason=str(error), cause_id=action.cause_id
            )
            self._on_fact(failed)
            return
        self.progress.record(frame.tokens)
        with self._lock:
            self._ready[p] = frame, placed
        now_s, cause = self.clock.monotonic(), id_of("head", p, frame.version)
        self._on_fact(FragmentFetched(at_s=now_s, fragment=p, version=frame.version, cause_id=cause))
