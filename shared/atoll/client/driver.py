"""The island's driver turns core messages, records and steps into facts, and commands into work. It decides nothing.

It runs on one event loop. The training thread meets it in three places only, none of which waits for the network: `end_step`
(a step ended, here is the snapshot; what is to be adopted?), `go_on` (that is adopted), and the flags.

    training thread ── end_step(snapshot) ── StepDone ─►  Island.handle ─► Push  ─► loop ─► worker thread: encode ─► bus
                    ◄─ frames to adopt ───── Adopt ◄────  Island.handle ◄─ FragmentFetched ◄─ loop ◄─ heads, calls
                    ── go_on(snapshot) ───── Adopted ──►  Island.handle

Both threads tell the machine facts, so a lock is held while it handles one and while the tensors change that it speaks of:
microseconds, and no decision is made beside it.

The snapshot maps tensor names to arrays of the last completed step: JAX arrays do not change, so a reference costs nothing.
Worker threads, or its device (`atoll.client.device_encoding`), compute pseudo-gradients of it: `anchor - theta` in float32.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, SupportsFloat

import msgspec
import numpy as np

from atoll.base import fact_dumps
from atoll.base.background_tasks import BackgroundTasks
from atoll.base.clock import Clock, Identity
from atoll.base.errors import (
    AtollError,
    BrokerUnavailable,
    BusError,
    FrameRejected,
    PeerMisbehaved,
    StorageFull,
    on_one_line,
)
from atoll.base.large_arrays import Vector
from atoll.base.logs import get, is_power_of_two
from atoll.base.parallel import off_loop
from atoll.base.parsing import parsed
from atoll.base.quantities import FIGURE_MAX
from atoll.base.retry import all_of
from atoll.bus.interface import Bus, CoreMessage
from atoll.client.device_encoding import Encoder, Placed, choose_encoder
from atoll.client.membership import dismissal, quarantine
from atoll.client.parameters import may_change
from atoll.client.pushing import Pusher
from atoll.codec import Read
from atoll.model.layout import Layout
from atoll.model.pytrees import gather, leaves_of, look
from atoll.protocol.claims import RunProgress
from atoll.protocol.events import (
    Adopt,
    Adopted,
    CallHeard,
    Command,
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
    SnapshotKept,
    StepDone,
    id_of,
)
from atoll.protocol.island import Island
from atoll.protocol.pacing import Heartbeats, StepTimes
from atoll.protocol.recorder import FactRecorder
from atoll.run.decisions import CLIP_CURE, ISOLATION_CURE, describe_clip, describe_outlier
from atoll.run.heads import GlobalFragment, fetch_newest, read_head, read_heads, went_back
from atoll.run.record import recorded_progress, the_run
from atoll.wire.messages import Call, Control, Head, Member, RunRecord, Verdict, decode, encode

log = get(__name__)

RESYNC_S = 5.0
RESYNC_S_MIN = 0.5
PUSHES_AT_ONCE = 4
PATIENCE_S: Final = 0.2
"""Longest wait of the loop for a loss."""
QUIET_S: Final = 60.0
"""Seconds between two warnings of refused or clipped pushes."""
NAMES_MAX: Final = 1024
"""Heads are all read together, each time, if they are so many with the contributors that they name: about 100 kB."""
IN_TURN: Final = 4


@dataclass(slots=True)
class StepReport:
    """The training thread's report of its newest step; `loss` may be a JAX scalar on its way (see `LossReader`)."""

    step_s: float = 0.0
    loss: SupportsFloat | None = None
    overhead: float = 0.0


@dataclass(frozen=True, slots=True)
class AdoptableFragment:
    """A global fragment to adopt, perhaps `placed` on its device; without `carry_from` it overwrites, whatever the rule is."""

    frame: GlobalFragment
    carry_from: Vector | None
    placed: Placed | None = None


@dataclass(frozen=True, slots=True)
class HeldFragment:
    """A version of a fragment that is here: its frame, and its rows on their device if they are there, too."""

    frame: GlobalFragment
    placed: Placed | None = None


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
        self._asking_why = False
        self._heads = HeadReading(bus, run)
        self.losses = LossReader()
        self.progress = RunProgress(run.protocol.tokens_target)
        self.failure: AtollError | None = None
        self.failure_told = False  # the loop knows: a step has raised it
        self.drain_wanted = False
        self.left = asyncio.Event()
        self._anchors = {p: HeldFragment(frame) for p, frame in anchors.items()}
        self._fetched: dict[int, HeldFragment] = {}
        self._kept: dict[int, Vector] = {}  # snapshots of pushes, from which the machine goes on
        self._snapshot: Mapping[str, Any] = {}
        self._lock = threading.RLock()
        self._loop = asyncio.get_running_loop()
        self.background = BackgroundTasks(self._fail)
        self._strange = itertools.count(1)
        self._pushing = [asyncio.Semaphore(PUSHES_AT_ONCE) for _ in range(1 + len(run.bulk))]  # a broker each
        self.pusher = Pusher(bus, run, member, clock, self.steps, identity)
        self._refused_here = QuietCounter(clock)
        self._clipped = QuietCounter(clock)
        self._encoder: Encoder | None = None
        self.log_adoptions = False  # each at info: for a learner whose log is a file of its own
        self.adopted = 0

    async def begin(self, snapshot: Mapping[str, Any], encode: str = "auto", *, donated: bool = False) -> None:
        """Set the snapshot before the first step, and choose where pseudo-gradients are made of such snapshots."""
        self._snapshot = snapshot
        self._encoder, why = choose_encoder(encode, self.run.layout, self.run.protocol, snapshot, donated=donated)
        tell = log.warning if encode == "device" and self._encoder is None else log.info
        tell("pseudo_gradients.encoded", where="host" if self._encoder is None else "device", why=why)
        for p, held in self._anchors.items():
            self._anchors[p] = await self._hold(held.frame)

    def first_frames(self) -> list[AdoptableFragment]:
        """Return the frames that this driver began with; a learner that has trained nothing yet overwrites by them."""
        return [AdoptableFragment(held.frame, None) for held in self._anchors.values()]

    @property
    def done(self) -> bool:
        """Return whether the loop should end: the token target is reached or a drain was requested."""
        return self.drain_wanted or self.progress.is_over

    # --- called by the training thread ------------------------------------------------------------------------------

    def end_step(self, tokens: int, snapshot: Mapping[str, Any]) -> list[AdoptableFragment]:
        """Take a completed step, its arrays by name, and return what to adopt now; `go_on` must follow."""
        with self._lock:
            self._snapshot = snapshot
            commands = self._handle(StepDone(at_s=self.clock.monotonic(), tokens=tokens))
            return [self._adoptable(command) for command in commands if isinstance(command, Adopt)]

    def go_on(self, snapshot: Mapping[str, Any], adopted: list[AdoptableFragment], report: StepReport) -> None:
        """Note that training goes on from these arrays, in which the fragments that `end_step` returned are adopted."""
        with self._lock:
            for item in adopted:
                self._on_adopted(item)
            self._snapshot = snapshot
        self._loop.call_soon_threadsafe(self._on_report, report)

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
                if is_power_of_two(count := next(self._strange)):
                    log.warning("core_message.refused", subject=core_message.subject, reason=str(error), messages=count)

    async def _resync(self) -> None:
        """Read heads, membership and the end of the run at intervals, sooner after a claim that only a record can prove."""
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
                had = {p: held.frame.version for p, held in self._anchors.items()}
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
        self.left.set()  # nothing more becomes durable
        self.failure = error if isinstance(error, AtollError) else AtollError(f"the driver failed: {error!r}")
        log.error("driver.failed", reason=repr(error))
        fact_dumps.dump_if_our_bug(error, self.recorder)

    # --- facts --------------------------------------------------------------------------------------------------------

    def _adoptable(self, action: Adopt) -> AdoptableFragment:
        p, held = action.fragment, self._fetched.pop(action.fragment)
        since = self._kept[p] if action.since else self._anchors[p].frame.values
        return AdoptableFragment(held.frame, None if action.overwrite else since, held.placed)

    def _on_adopted(self, item: AdoptableFragment) -> None:
        p, version, overwritten = item.frame.fragment, item.frame.version, item.carry_from is None
        cause, now_s = id_of("head", p, version), self.clock.monotonic()
        # What this commands to push is a difference from the old anchor.
        self._on_fact(Adopted(at_s=now_s, fragment=p, version=version, overwritten=overwritten, cause_id=cause))
        self._anchors[p] = HeldFragment(item.frame, item.placed)
        self._kept.pop(p, None)
        self.pusher.note_adoption(p, version)
        self.adopted += 1
        log_adoption(p, version, self.machine.steps, cause, each=self.log_adoptions, overwritten=overwritten)

    def _on_report(self, report: StepReport) -> None:
        self.report = report
        if self.heartbeats.is_news(self.steps.add(report.step_s)):
            self.pace_changed.set()

    def _on_call(self, core_message: CoreMessage) -> None:
        call = decode(Call, core_message.data)
        if self.progress.hear(call.run_tokens, self.machine.tokens):
            self._proof_wanted.set()
        if call.fragment in self.machine.intervals:
            p, version, attempt = call.fragment, call.version, call.attempt
            now_s, cause = self.clock.monotonic(), id_of("call", p, version, attempt)
            self._on_fact(CallHeard(at_s=now_s, fragment=p, version=version, attempt=attempt, cause_id=cause))

    def _on_head(self, core_message: CoreMessage) -> None:
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
            if pushes := self._clipped.count():
                why = describe_clip(verdict.norm, verdict.norm_max)
                log.warning(
                    "push.clipped", fragment=verdict.fragment, push=verdict.push, pushes=pushes, why=why, todo=CLIP_CURE
                )
            return
        tell_refusal(verdict)
        if verdict.reason == "quarantined" and not self._asking_why:
            self._asking_why = True
            self.background.spawn(self._ask_why(verdict.fragment))
        now_s = self.clock.monotonic()
        self._on_fact(PushRefused(at_s=now_s, fragment=verdict.fragment, push=verdict.push, reason=verdict.reason))

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

    def _handle(self, fact: Fact) -> list[Command]:
        if self.recorder.broke:
            return []
        try:
            return self.recorder.handle(fact)
        except Exception as error:  # noqa: BLE001  (a callback of the loop: no caller would see it)
            self._loop.call_soon_threadsafe(self._fail, error)
            return []

    def _on_fact(self, fact: Fact) -> None:
        """Let the machine handle a fact, and have the loop start what it commands, with the tensors of this moment."""
        with self._lock:
            for action in self._handle(fact):
                if isinstance(action, Push):
                    # The whole snapshot would stay in memory for as long as this push waits.
                    leaves = leaves_of(self.run.layout, self._snapshot, action.fragment)
                    self._loop.call_soon_threadsafe(self._spawn, self._push, action, leaves, *self._origin(action))
                elif isinstance(action, FetchFragment):
                    self._loop.call_soon_threadsafe(self._spawn, self._fetch, action)
                elif isinstance(action, Leave):
                    self._loop.call_soon_threadsafe(self.left.set)

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: object) -> None:
        self.background.spawn(work(*arguments))

    def _origin(self, action: Push) -> tuple[Vector, Placed | None]:
        if self.run.protocol.by_value(p := action.fragment):
            return np.zeros(self.run.layout.fragment_sizes()[p], np.float32), None
        anchor = self._anchors[p]
        return self._kept[p] if action.onward else anchor.frame.values, anchor.placed

    # --- commands -----------------------------------------------------------------------------------------------------

    async def _push(self, action: Push, snapshot: Mapping[str, Any], origin: Vector, anchor: Placed | None) -> None:
        reason, p = "", action.fragment
        async with self._pushing[p % len(self._pushing)]:
            try:
                if self._encoder and anchor is not None and self._encoder.reads(p, snapshot):
                    make = partial(self._encoder.encode, p, anchor, snapshot)
                    await self.pusher.push_made(action, make, lambda: self.losses.read(self.report.loss))
                else:
                    theta = await self._read(action, snapshot, origin.size)
                    await self.pusher.push(action, origin, theta, lambda: self.losses.read(self.report.loss))
            except FrameRejected as error:
                reason = error.reason
                if pushes := self._refused_here.count():
                    await self._warn_of_refusal(action, snapshot, error, pushes)
            except (BusError, BrokerUnavailable, StorageFull, RuntimeError) as error:
                reason = "gave_up"
                log.warning("push.gave_up", fragment=p, push=action.push, reason=str(error))
        now_s, cause = self.clock.monotonic(), action.cause_id
        self._on_fact(PushSettled(at_s=now_s, fragment=p, push=action.push, reason=reason, cause_id=cause))

    async def _warn_of_refusal(
        self, action: Push, snapshot: Mapping[str, Any], error: FrameRejected, pushes: int
    ) -> None:
        """Warn that pushes are not sent because they are not finite, by the name of a leaf: a NaN does not heal."""
        leaf = await asyncio.to_thread(_infinite_leaf, self.run.layout, action.fragment, snapshot)
        log.warning(
            "push.refused_local",
            fragment=action.fragment,
            push=action.push,
            pushes=pushes,
            leaf=leaf or "none",
            reason="NaN or an infinity in it" if leaf else on_one_line(str(error)),
            todo="lower the learning rate, or look at loss and data; then begin again from finite values",
        )

    async def _read(self, action: Push, snapshot: Mapping[str, Any], size: int) -> Read:
        """Return how a fragment of the snapshot is read: where it is, or a copy that is kept or that nobody may write to."""
        p, layout = action.fragment, self.run.layout
        if not action.keep and not any(may_change(leaf) for leaf in snapshot.values()):
            return partial(look, layout, snapshot, p)
        theta = await off_loop(size, gather, layout, snapshot, p)
        if action.keep:
            with self._lock:
                self._kept[p] = theta
                self._on_fact(SnapshotKept(at_s=self.clock.monotonic(), fragment=p, push=action.push))
        return lambda start, stop: theta[start:stop]

    async def _hold(self, frame: GlobalFragment) -> HeldFragment:
        encoder, p = self._encoder, frame.fragment
        placed = None if encoder is None else await encoder.placed(p, frame.version, frame.values)
        return HeldFragment(frame, placed)

    async def _fetch(self, action: FetchFragment) -> None:
        p = action.fragment
        try:
            held = self._fetched.get(p, self._anchors[p]).frame
            frame = await fetch_newest(self.bus, self.run, held, again=action.again)
            if frame is None:
                self._on_fact(NothingNewer(at_s=self.clock.monotonic(), fragment=p, cause_id=action.cause_id))
                return
            fetched = await self._hold(frame)
        except (BusError, BrokerUnavailable, PeerMisbehaved, StorageFull) as error:
            log.warning("fetch.failed", fragment=p, version=action.version, reason=str(error))
            now_s, version, cause = self.clock.monotonic(), action.version, action.cause_id
            self._on_fact(FetchFailed(at_s=now_s, fragment=p, version=version, reason=str(error), cause_id=cause))
            return
        self.progress.record(frame.tokens)
        now_s, cause = self.clock.monotonic(), id_of("head", p, frame.version)
        with self._lock:
            self._fetched[p] = fetched
            self._on_fact(FragmentFetched(at_s=now_s, fragment=p, version=frame.version, cause_id=cause))


class LossReader:
    """Reads the losses of one learner. Belongs to the island's loop.

    A loss may be a JAX scalar that is still being computed. Turning it into a number waits for the device: a moment, seconds
    behind a long queue of steps, or for ever when the device hangs. So a worker thread reads it, one reading at a time, and the
    caller waits at most `PATIENCE_S`; after that it gets the last known loss. (In virtual time a worker thread does its work at
    once.) A loss that cannot be read, because the device was lost or it is no scalar, is NaN, and the reader warns once.
    """

    def __init__(self) -> None:
        self.known: float | None = None
        self._reading: asyncio.Future[float] | None = None
        self._failed = ""

    async def read(self, loss: SupportsFloat | None) -> float | None:
        """Return the newest `loss` as a number, or the last known one if this takes too long; never raises.

        NaN stands for a loss that cannot be read, None for a loop that reports none. One beyond `FIGURE_MAX`, for which
        messages have no room, has diverged: it is infinite.
        """
        if loss is None or isinstance(loss, float | int):
            self.known = None if loss is None else _figure_of(loss)
            return self.known
        if self._reading is not None and self._reading.done():
            self._take(self._reading)
        if self._reading is None:
            self._reading = asyncio.get_running_loop().run_in_executor(None, self._number, loss)
        reading = self._reading
        await asyncio.wait({reading}, timeout=PATIENCE_S)
        if reading.done():
            self._take(reading)
        return self.known

    def _take(self, reading: asyncio.Future[float]) -> None:
        if reading is self._reading:  # no concurrent caller has taken it
            self.known, self._reading = reading.result(), None

    def _number(self, loss: SupportsFloat) -> float:
        try:
            return _figure_of(loss)
        except Exception as error:  # noqa: BLE001  (the caller's object: a lost device raises any error)
            if repr(error) != self._failed:
                self._failed = repr(error)
                log.warning("loss.unreadable", reason=self._failed)
            return math.nan


def _figure_of(loss: SupportsFloat) -> float:
    number = float(loss)
    return math.inf if abs(number) > FIGURE_MAX else number


class HeadTap(msgspec.Struct, frozen=True):
    """The part of a head's tap that a learner needs."""

    fragment: int
    version: int


class HeadReading:
    """Reads the heads of a run at intervals, as records: their taps may be lost or wrong, records are not.

    A head names its contributors. If each reading took all heads, M learners and P fragments would move M * M * P names every
    few seconds (128 learners, 96 fragments: 30 MB/s at the broker). So a reading takes all heads if they name few, at the
    beginning, and after a lost connection or a dropped core message. Otherwise it takes the next `IN_TURN` fragments. A tap
    that the broker lost without a sign is found some readings later, or by the next call of its fragment.
    """

    def __init__(self, bus: Bus, run: RunRecord) -> None:
        self._bus = bus
        self._run = run
        self._turns = itertools.cycle(range(len(run.layout.fragments)))
        self._missed: tuple[int, int] | None = None
        self._names = 0
        """Number of heads when all were read, and of contributors in them."""

    async def read(self) -> list[Head]:
        """Return the heads of this reading, without those that do not fit the run; raises what the bus raises."""
        missed = self._bus.stats.reconnects, self._bus.stats.core_messages_dropped
        if self._names <= NAMES_MAX or missed != self._missed:
            heads = list((await read_heads(self._bus, self._run)).values())
            self._names = sum(1 + len(head.included) for head in heads)
            self._missed = missed
            return heads
        turn = list(itertools.islice(self._turns, IN_TURN))
        found = await all_of(self._fitting(fragment) for fragment in turn)
        return [head for head in found if head is not None]

    async def _fitting(self, fragment: int) -> Head | None:
        try:
            return await read_head(self._bus, self._run, fragment)
        except PeerMisbehaved as error:
            log.warning("head.refused", fragment=fragment, reason=str(error))
            return None


def tell_refusal(verdict: Verdict) -> None:
    """Log that a shard has refused a push; one that came too late is part of a normal run, at its beginning above all."""
    facts = {"fragment": verdict.fragment, "push": verdict.push, "reason": verdict.reason}
    if verdict.reason == "stale":
        log.info("push.refused", **facts, why="newer versions were there first; harmless unless it goes on")
    elif verdict.norm_max:
        log.warning("push.refused", **facts, why=describe_outlier(verdict.norm, verdict.norm_max), todo=ISOLATION_CURE)
    else:
        log.warning("push.refused", **facts)


def _infinite_leaf(layout: Layout, fragment: int, snapshot: Mapping[str, Any]) -> str:
    """Return the first leaf with rows in a fragment that is not finite; empty if all are. Runs in a worker thread."""
    for name in dict.fromkeys(part.tensor_name for part in layout.slices(fragment)):
        try:
            with np.errstate(over="ignore"):
                values = np.asarray(snapshot[name]).astype(np.float32)
        except RuntimeError:  # the loop has donated it meanwhile
            continue
        if not np.isfinite(values).all():
            return name
    return ""


class QuietCounter:
    """Counts what happens again and again, for a warning at most once in `QUIET_S` seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pushes = 0
        self._warned_s = -math.inf

    def count(self) -> int:
        """Count one more; return how many there were since the last warning if one is due, else 0."""
        self._pushes += 1
        now_s = self._clock.monotonic()
        if now_s - self._warned_s < QUIET_S:
            return 0
        pushes, self._pushes, self._warned_s = self._pushes, 0, now_s
        return pushes


def log_adoption(
    fragment: int, version: int, step: int, cause_id: str, *, each: bool = False, overwritten: bool = False
) -> None:
    """Log that the learner goes on from `version` of a fragment, after its step number `step`.

    A learner adopts every fragment again and again, so a line for each drowns what a person's own loop prints. Such a loop gets
    them at debug and their number at intervals (`learner.moved`); with `each` they are at info.
    """
    tell = log.info if each else log.debug
    if overwritten:
        log.info("fragment.overwritten", fragment=fragment, version=version, step=step, cause_id=cause_id)
    else:
        tell("fragment.adopted", fragment=fragment, version=version, step=step, cause_id=cause_id)
