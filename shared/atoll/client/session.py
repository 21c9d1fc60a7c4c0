"""One incarnation's stay in a run, from claim to goodbye, as coroutines of the island's loop.

    open ─ claim the id ─ found or join the run ─ read heads and frames ─► begin ─ steps, heartbeats ─► drain ─► shut

The order of leaving matters. First the last pushes become durable. Then the farewell goes to every shard through the
same queue *behind* them, so that no shard believes that a learner left while its contributions are still queued. Then
come the event log and the member record.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self

from atoll.base.clock import Clock, Identity, this_process
from atoll.base.errors import BrokerUnavailable, BusError, QueueFull, RunReplaced, StorageFull
from atoll.base.health import REACH_S, show_life
from atoll.base.logs import get
from atoll.bus.interface import Bus
from atoll.client.data_leases import DataLeases
from atoll.client.driver import IslandDriver
from atoll.client.membership import (
    Origin,
    await_founding,
    claim,
    found_or_join,
    publish_origin,
    release,
    warn_of_mixture,
)
from atoll.client.optimizer_state import StateLender, TrainingProgress
from atoll.client.options import DEFAULTS, SAMPLE_S_MIN, JoinOptions
from atoll.protocol.data import data_lease_s
from atoll.protocol.island import Island
from atoll.run.heads import GlobalFragment, fetch_frame, wait_for_heads
from atoll.run.record import check_run
from atoll.run.stream_room import provide
from atoll.wire.events import (
    SUPERSEDED_MAX,
    EventFields,
    JoinedEvent,
    LeftEvent,
    MovedEvent,
    event_info,
    log_entry,
    sample_of,
)
from atoll.wire.messages import Beat, Head, LearnerState, Member, RunRecord, encode
from atoll.wire.traffic import TOLD_EVERY_S, moved_by

log = get(__name__)

FETCHES_AT_ONCE = 4
LENDING_STEPS_MIN = 8
SAMPLES_PER_AGE: Final = 30.0
CALLS_DUE: Final = 2
"""After so many intervals of a fragment without a call nobody will call."""
ADOPTIONS_MIN: Final = 3
"""Of each fragment before a share is judged: what an adoption supersedes may have been trained long before."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A learner and what it brings: its id, the run as it would found it, its parameters, and its choices.

    One that does not `founds` waits until the run is there.
    """

    learner: str
    record: RunRecord
    origin: Origin
    options: JoinOptions = DEFAULTS
    founds: bool = True


class Session:
    """The asynchronous side of an island. Every coroutine belongs to the island's own loop."""

    def __init__(
        self,
        driver: IslandDriver,
        options: JoinOptions,
        clock: Clock,
        identity: Identity,
        *,
        founder: bool,
        began_s: float,
    ) -> None:
        self.bus: Bus = driver.bus
        self.run: RunRecord = driver.run
        self.member: Member = driver.member
        self.driver = driver
        self.lender = StateLender(self.bus, self.run, self.member, self._training_progress, identity)
        self.leases = DataLeases(
            self.bus,
            self.run.subjects,
            self.member,
            max(1, options.data_blocks),
            lease_s=data_lease_s(self.run.protocol.lease_s),
            clock=clock,
            recorded=self.run.data_blocks > 0,
        )
        self._options = options
        self._clock = clock
        self._founder = founder
        self._began_s = began_s
        self._state: LearnerState = "joining"
        self._superseded_log, self._uncalled_log = SupersededLog(), UncalledLog()

    @classmethod
    async def open(
        cls,
        bus: Bus,
        request: JoinRequest,
        clock: Clock,
        identity: Identity | None = None,
        *,
        began_s: float | None = None,
    ) -> Self:
        """Found or join the run, claim the id, read the run's frames, and return the session, which closes the bus at its end.

        Joining began at `began_s` of the clock, now if that is not given.
        """
        identity, options = identity or this_process(), request.options
        began_s = clock.monotonic() if began_s is None else began_s
        run, founder = await _enter(bus, request)
        # Only now: what is signed says of which founding it is, a member record too.
        member = await claim(bus, run.subjects, request.learner, clock, identity, options.region)
        heads = await _heads_of(bus, run, request.origin, clock, identity, founder=founder)
        gate = asyncio.Semaphore(FETCHES_AT_ONCE)

        async def fetch(p: int) -> GlobalFragment:
            async with gate:
                return await fetch_frame(bus, run, heads[p])

        frames = await asyncio.gather(*(fetch(p) for p in sorted(heads)))
        driver = IslandDriver(bus, run, member, {frame.fragment: frame for frame in frames}, clock, identity)
        driver.log_adoptions = options.log_adoptions
        await driver.prove()
        return cls(driver, options, clock, identity, founder=founder, began_s=began_s)

    async def begin(self, snapshot: Mapping[str, Any]) -> None:
        """Listen, send heartbeats and record that we joined; the first step may follow."""
        await self.driver.begin(snapshot, self._options.encode, donated=self._options.donated)
        await self.driver.start()
        self._state = "training"
        await self.lender.start()
        self.driver.background.spawn(
            self._beat_for_ever(), self._write_down_moved(), self._write_down_samples(), self.leases.renew_for_ever()
        )
        took_s = self._clock.monotonic() - self._began_s
        versions = max(interval.anchor for interval in self.driver.machine.intervals.values())
        await self.record(
            JoinedEvent(
                incarnation=self.member.incarnation,
                host=self.member.host,
                pid=self.member.pid,
                founder=self._founder,
                versions_max=versions,
                took_s=round(took_s, 3),
                start_s=round(self._options.start_s, 3),
            )
        )
        if await self.driver.prove():
            log.info("run.over", run=self.run.run, tokens_target=self.run.protocol.tokens_target)
        log.info("learner.joined", incarnation=self.member.incarnation, founder=self._founder, took_s=round(took_s, 3))

    async def record(self, fields: EventFields) -> None:
        """Append an event of this learner to the event log."""
        who = self.member.learner
        line = encode(log_entry(fields, who, self._clock.wall()))
        msg_id = f"{fields.kind}-{who}-{self.member.incarnation}-{self._clock.monotonic():.6f}"
        await self.bus.publish(self.run.subjects.event(fields.kind, who), line, msg_id=msg_id, info=event_info(fields))

    async def drain(self, within_s: float) -> None:
        """Make everything durable and say goodbye.

        Raises:
            TimeoutError: that takes longer than `within_s`.
            AtollError: the driver failed meanwhile; the last pushes may not be durable.
        """
        self._state = "draining"
        async with asyncio.timeout(within_s):
            if self.run.protocol.ending == "together":
                await self._say_draining()
            self.driver.order_drain()
            await self.driver.left.wait()
            if self.driver.failure is not None:
                raise self.driver.failure
            self._state = "left"
            machine = self.driver.machine
            subjects = self.run.subjects
            farewell = encode(await self._beat())
            for shard in range(self.run.protocol.shards):
                msg_id = f"bye-{self.member.nonce}-{shard}"
                subject = subjects.farewell(shard, self.member.learner)
                try:
                    await self.bus.publish(
                        subject, farewell, msg_id=msg_id, info={"incarnation": self.member.incarnation}
                    )
                except QueueFull as error:  # shards that are away have not read the last ones: our silence tells them
                    log.warning("farewell.not_stored", shard=shard, reason=str(error))
            await self.bus.tell(subjects.beat(self.member.learner), farewell)
            await self.record(sample_of(await self._beat()))  # where the curve ends
            await self._record_moved()
            await self.record(
                LeftEvent(incarnation=self.member.incarnation, tokens=machine.tokens, steps=machine.steps)
            )
            await release(self.bus, subjects, self.member)
        log.info("learner.left", incarnation=self.member.incarnation, **account(machine))

    async def _say_draining(self) -> None:
        """Tell the shards, before the last pushes arrive, that we are leaving: their rounds then wait for us."""
        try:
            await self.bus.tell(self.run.subjects.beat(self.member.learner), encode(await self._beat()))
        except (BusError, BrokerUnavailable) as error:
            log.warning("beat.failed", reason=str(error))

    async def shut(self) -> None:
        """Stop all work and close the bus."""
        await self.driver.stop()
        await self.lender.stop()
        await self.bus.close()

    async def _beat_for_ever(self) -> None:
        driver = self.driver
        while True:
            beat = await self._beat()
            driver.pace_changed.clear()
            pause_s = driver.heartbeats.pause_after(beat.step_s)
            try:
                await self.bus.tell(self.run.subjects.beat(self.member.learner), encode(beat))
                # What was told may lie in a buffer for minutes; an answer means that the broker has it.
                if self._options.health_file is not None and await self.bus.reach(REACH_S):
                    show_life(self._options.health_file)
            except (BusError, BrokerUnavailable) as error:
                log.warning("beat.failed", reason=str(error))
            # The shortest pause comes first, so that steps of changing length cannot cause a storm of heartbeats.
            await asyncio.sleep(driver.heartbeats.shortest_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s - driver.heartbeats.shortest_s):
                    await driver.pace_changed.wait()

    async def _write_down_moved(self) -> None:
        while True:
            await asyncio.sleep(TOLD_EVERY_S)
            try:
                await self._record_moved()
            except (BusError, BrokerUnavailable, StorageFull) as error:
                log.warning("moved.unrecorded", reason=str(error))

    async def _write_down_samples(self) -> None:
        began_s = self._clock.monotonic()
        while True:
            await asyncio.sleep(pause_of(self._clock.monotonic() - began_s, self._options.sample_s))
            try:
                await self.record(sample_of(await self._beat()))
            except (BusError, BrokerUnavailable, StorageFull) as error:
                log.warning("sample.unrecorded", reason=str(error))

    async def _record_moved(self) -> None:
        moved = moved_by(self.bus.stats)
        await self.record(MovedEvent(role="learner", incarnation=self.member.incarnation, moved=moved))
        step, adopted = self.driver.machine.steps, self.driver.adopted
        self.driver.adopted = 0
        self._superseded_log.look(self.driver.machine, adopted)
        self._uncalled_log.look(self.driver.machine, adopted, self.run.protocol.interval_steps)
        fast = self.driver.pusher.fragments_fast
        log.info("learner.moved", step=step, fragments_adopted=adopted, fragments_uncompressed=fast, **moved.counters)

    def _training_progress(self) -> TrainingProgress:
        machine, loss = self.driver.machine, self.driver.losses.known
        sound = loss is None or math.isfinite(loss)
        ready = self._state == "training" and machine.steps >= LENDING_STEPS_MIN
        return TrainingProgress(machine.steps, machine.tokens, self.driver.progress.tokens, healthy=ready and sound)

    async def _beat(self) -> Beat:
        loss = await self.driver.losses.read(self.driver.report.loss)
        machine, report, step_s = self.driver.machine, self.driver.report, self.driver.steps.mean_s
        return Beat(
            learner=self.member.learner,
            incarnation=self.member.incarnation,
            run_nonce=self.run.nonce,
            state=self._state,
            at_s=self._clock.wall(),
            step=machine.steps,
            step_s=step_s,
            tokens=machine.tokens,
            tokens_per_s=machine.tokens / machine.steps / step_s if machine.steps and step_s else 0.0,
            loss=loss,
            pushed=machine.pushed,
            superseded=machine.superseded,
            refused_local=machine.refused_local,
            overhead=report.overhead,
            lag_versions=machine.lag_versions,
            moved=moved_by(self.bus.stats),
            run_tokens=self.driver.progress.tokens,
        )


async def _enter(bus: Bus, request: JoinRequest) -> tuple[RunRecord, bool]:
    offer = request.record
    if not request.founds:
        await await_founding(bus, offer.subjects)
        return await check_run(bus, offer), False
    await provide(bus, offer, request.options.stream_bytes_max)
    return await found_or_join(bus, offer)


async def _heads_of(
    bus: Bus, run: RunRecord, origin: Origin, clock: Clock, identity: Identity, *, founder: bool
) -> dict[int, Head]:
    """Return the heads of all fragments; a founder publishes them first, and so does who finds that the founder is gone.

    Raises:
        RunReplaced: another learner has completed the run of this founder with other values.
        BrokerUnavailable: the heads do not become complete.
    """
    if founder and (mixed := await publish_origin(bus, run, origin, identity)):
        raise RunReplaced(
            "another learner took this founder for gone, and completed the run with values of its own",
            got=f"other values in {len(mixed)} of {len(run.layout.fragments)} fragments",
            todo=f"stop all learners, `atoll runs remove {run.run}`, and let one learner found it before others join",
        )
    heads = await wait_for_heads(bus, run, clock)
    if heads is None:
        log.warning("run.founder_lost", founder=run.founder)
        warn_of_mixture(run, await publish_origin(bus, run, origin.in_layout(run.layout), identity))
        heads = await wait_for_heads(bus, run, clock)
    if heads is None:
        raise BrokerUnavailable("the run has no complete parameters", todo="look at the broker's log and disk")
    return heads


def pause_of(age_s: float, sample_s: float) -> float:
    """Return how long the next sample of an incarnation of that age waits, seconds: pauses grow with age, up to `sample_s`.

    A sample is a heartbeat written down in the event log, so that a run that is over still has its curves. The event log is
    bounded, so samples must stay few beside its rounds, yet a run of a minute should have a curve as well. At the default
    of 30 s a day of one learner is about 2,970 samples or 2.4 MB.
    """
    return min(sample_s, max(SAMPLE_S_MIN, age_s / SAMPLES_PER_AGE))


class SupersededLog:
    """Warns, once in a life, that much of what a learner trains is superseded.

    A stretch is judged when each fragment has been adopted some times in it, and two in a row must be bad: a broker that
    was away for minutes is another matter.
    """

    def __init__(self) -> None:
        self._trained = self._superseded = self._adopted = 0
        self._was_bad = self._warned = False

    def look(self, machine: Island, adopted: int) -> None:
        """Go on by `adopted` fragments, and warn if more than `SUPERSEDED_MAX` of two stretches was superseded."""
        self._adopted += adopted
        trained = machine.tokens * len(machine.intervals)
        if self._adopted < ADOPTIONS_MIN * len(machine.intervals) or trained == self._trained:
            return
        share = min(1.0, (machine.superseded - self._superseded) / (trained - self._trained))
        self._trained, self._superseded, self._adopted = trained, machine.superseded, 0
        was_bad, self._was_bad = self._was_bad, share > SUPERSEDED_MAX
        if was_bad and self._was_bad and not self._warned:
            self._warned = True
            log.warning(
                "learner.superseded",
                share=round(share, 2),
                why="a round takes long beside an interval, and new values overwrite what was trained since the push",
                todo="protocol.adoption=carry, or a longer protocol.interval_steps; both belong to the founding of a run",
            )


class UncalledLog:
    """Warns a learner that trains for nobody: its steps count no tokens, or no shard calls and none makes versions."""

    def __init__(self) -> None:
        self._steps = self._tokens = self._pushed = 0
        self._warned = False

    def look(self, machine: Island, adopted: int, interval_steps: int) -> None:
        """Go on by `adopted` fragments; warn, once until that ends, if nothing can come of the steps since the last look."""
        stepped, trained, pushed = (
            machine.steps - self._steps,
            machine.tokens - self._tokens,
            machine.pushed - self._pushed,
        )
        self._steps, self._tokens, self._pushed = machine.steps, machine.tokens, machine.pushed
        long = stepped > CALLS_DUE * interval_steps
        tokenless = long and not trained
        uncalled = long and not adopted and not pushed
        if tokenless and not self._warned:
            log.warning(
                "learner.tokenless",
                steps=stepped,
                why="your steps count 0 tokens: a contribution is weighed by its tokens, so nothing of yours can be merged",
                todo="say how many tokens (or samples) each step covers: island.step(params, tokens=...)",
            )
        elif uncalled and not self._warned:
            log.warning(
                "learner.uncalled",
                steps=stepped,
                why="no shard has called for a contribution, and no version was made",
                todo="is a synchronizer running? `atoll status` says what the run waits for",
            )
        self._warned = tokenless or uncalled


def account(machine: Island) -> dict[str, int]:
    """Return what became of a learner's tokens: steps, tokens, and token-fragments.

    A token counts once in each fragment of the model, because its fragments may meet different fates. So the trained
    token-fragments are the sum of the others, and tokens are to be compared with none of them.
    """
    return {
        "steps": machine.steps,
        "tokens": machine.tokens,
        "trained_token_fragments": machine.tokens * len(machine.intervals),
        "pushed_token_fragments": machine.pushed,
        "superseded_token_fragments": machine.superseded,
        "refused_local_token_fragments": machine.refused_local,
    }
