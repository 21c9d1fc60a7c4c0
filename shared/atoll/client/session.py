"""One incarnation's stay in a run, from claim to goodbye, as coroutines of the island's loop.

    open ─ claim the id ─ found or join the run ─ read heads and frames ─► begin ─ steps, heartbeats ─► drain ─► shut

The order of leaving matters. First the last pushes become durable. Then the farewell goes to every shard through the
same queue *behind* them, so that no shard believes that a learner left while its contributions are still queued. Then
come the event log and the member record.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from atoll.base.clock import Clock
from atoll.base.errors import BrokerUnavailable, BusError, QueueFull, RunReplaced, StorageFull
from atoll.base.health import REACH_S, show_life
from atoll.base.identity import Identity, this_process
from atoll.base.logs import get
from atoll.bus.interface import Bus
from atoll.client.adoption import AdoptableFragment
from atoll.client.arguments import checked_start
from atoll.client.data_leases import DataLeases
from atoll.client.device_encoding import checked
from atoll.client.driver import IslandDriver
from atoll.client.founding import Origin, await_founding, found_or_join, publish_origin, warn_of_mixture
from atoll.client.join_options import JoinOptions
from atoll.client.log_lines import AdoptionLog, SupersededLog, UncalledLog, account
from atoll.client.membership import claim, release
from atoll.client.peer_recovery import StateLender, TrainingStanding
from atoll.client.samples import SAMPLE_S, checked_pause, pause_of, sample_of
from atoll.protocol.data import data_lease_s
from atoll.run.heads import GlobalFragment, fetch_frame, wait_for_heads
from atoll.run.record import check_run
from atoll.run.stream_room import provide
from atoll.wire.event_log import event_info
from atoll.wire.messages import Beat, LearnerState, Member, RunRecord, encode, event
from atoll.wire.traffic import TOLD_EVERY_S, moved_by

log = get(__name__)

FETCHES_AT_ONCE = 4
LENDING_STEPS_MIN = 8


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """What a learner brings: its id, the run as it would found it, and its parameters, flat per fragment.

    `encode` is where pseudo-gradients are made, one of `device_encoding.CHOICES`; `donated` parameters are copied every
    step. `bytes_max` bounds each stream of tensors if this learner founds the run; None: the bound follows from the model.
    One that may not found waits until the run is there. `region` is where its contributions are folded, empty for nowhere.
    `sample_s` is the longest pause between two samples of it in the event log (`atoll.client.samples`); `start_s` says how
    long its program had been starting before. With `log_adoptions` each adopted fragment is a line of its log at info.
    """

    learner: str
    record: RunRecord
    origin: Origin
    data_blocks: int = 0
    health_file: Path | None = None
    encode: str = "auto"
    donated: bool = False
    bytes_max: int | None = None
    founds: bool = True
    region: str = ""
    sample_s: float = SAMPLE_S
    start_s: float = 0.0
    log_adoptions: bool = False

    @classmethod
    def of(cls, learner: str, record: RunRecord, origin: Origin, options: JoinOptions, *, founds: bool) -> Self:
        """Return the request of a learner that joins with these options; raise `SettingsError` for one that is out of range."""
        return cls(
            learner,
            record,
            origin,
            options.data_blocks,
            options.health_file,
            encode=checked(options.encode),
            donated=options.donated,
            bytes_max=options.stream_bytes_max,
            founds=founds,
            region=options.region,
            sample_s=checked_pause(options.sample_s),
            start_s=checked_start(options.start_s),
            log_adoptions=options.log_adoptions,
        )


class Session:
    """The asynchronous side of an island. Every coroutine belongs to the island's own loop."""

    run: RunRecord
    driver: IslandDriver
    bus: Bus
    member: Member
    leases: DataLeases
    lender: StateLender

    def __init__(
        self,
        request: JoinRequest,
        opener: Callable[[], Coroutine[Any, Any, Bus]],
        clock: Clock,
        identity: Identity | None = None,
    ) -> None:
        """Prepare; nothing is opened yet."""
        self.learner = request.learner
        self._request = request
        self.opener = opener
        self._clock = clock
        self._identity = identity or this_process()
        self._opened = False
        self._state: LearnerState = "joining"
        self._founder = False
        self._began_s = clock.monotonic()
        self._superseded_log, self._uncalled_log = SupersededLog(), UncalledLog()

    async def open(self) -> list[AdoptableFragment]:
        """Found or join the run, claim the id, and return the run's frames, ready to adopt."""
        self.bus = await self.opener()
        self._opened = True
        offer = self._request.record
        if self._request.founds:
            await provide(self.bus, offer, self._request.bytes_max)
            self.run, self._founder = await found_or_join(self.bus, offer)
        else:
            await await_founding(self.bus, offer.subjects)
            self.run = await check_run(self.bus, offer)
        # Only now: what is signed says of which founding it is, a member record too.
        who = self._request.learner
        self.member = await claim(self.bus, offer.subjects, who, self._clock, self._identity, self._request.region)
        if self._founder and (mixed := await publish_origin(self.bus, self.run, self._request.origin, self._identity)):
            raise RunReplaced(
                "another learner took this founder for gone, and completed the run with values of its own",
                got=f"other values in {len(mixed)} of {len(self.run.layout.fragments)} fragments",
                todo=f"stop all learners, `atoll runs remove {self.run.run}`, and let one learner found it before others join",
            )
        heads = await wait_for_heads(self.bus, self.run, self._clock)
        if heads is None:
            log.warning("run.founder_lost", founder=self.run.founder)
            origin = self._request.origin.on(self.run.layout)
            warn_of_mixture(self.run, await publish_origin(self.bus, self.run, origin, self._identity))
            heads = await wait_for_heads(self.bus, self.run, self._clock)
        if heads is None:
            raise BrokerUnavailable("the run has no complete parameters", todo="look at the broker's log and disk")
        self._request = replace(self._request, origin=Origin(self.run.layout, {}))  # its arrays may be freed
        gate = asyncio.Semaphore(FETCHES_AT_ONCE)

        async def fetch(p: int) -> GlobalFragment:
            async with gate:
                return await fetch_frame(self.bus, self.run, heads[p])

        frames = await asyncio.gather(*(fetch(p) for p in sorted(heads)))
        anchors = {frame.fragment: frame for frame in frames}
        self.driver = IslandDriver(self.bus, self.run, self.member, anchors, self._clock, self._identity)
        self.driver.adoption_log = AdoptionLog(each=self._request.log_adoptions)
        await self.driver.prove()
        self.leases = DataLeases(
            self.bus,
            self.run.subjects,
            self.member,
            max(1, self._request.data_blocks),
            lease_s=data_lease_s(self.run.protocol.lease_s),
            clock=self._clock,
            recorded=self.run.data_blocks > 0,
        )
        self.lender = StateLender(self.bus, self.run, self.member, self._standing, self._identity)
        return [AdoptableFragment(frame, frame.values) for frame in frames]

    async def begin(self, snapshot: Mapping[str, Any]) -> None:
        """Listen, send heartbeats and record that we joined; the first step may follow."""
        await self.driver.begin(snapshot, self._request.encode, donated=self._request.donated)
        await self.driver.start()
        self._state = "training"
        await self.lender.start()
        self.driver.background.spawn(
            self._beat_for_ever(), self._write_down_moved(), self._write_down_samples(), self.leases.renew_for_ever()
        )
        took_s = self._clock.monotonic() - self._began_s
        versions = max(interval.anchor for interval in self.driver.machine.intervals.values())
        await self.record(
            "joined",
            incarnation=self.member.incarnation,
            host=self.member.host,
            pid=self.member.pid,
            founder=self._founder,
            versions_max=versions,
            took_s=round(took_s, 3),
            start_s=round(self._request.start_s, 3),
        )
        if await self.driver.prove():
            log.info("run.over", run=self.run.run, tokens_target=self.run.protocol.tokens_target)
        log.info("learner.joined", incarnation=self.member.incarnation, founder=self._founder, took_s=round(took_s, 3))

    async def record(self, kind: str, **fields: object) -> None:
        """Append an event of this learner to the event log."""
        who = self.member.learner
        line = event(kind, who, self._clock.wall(), **fields)
        msg_id = f"{kind}-{who}-{self.member.incarnation}-{self._clock.monotonic():.6f}"
        await self.bus.publish(
            self.run.subjects.event(kind, who), encode(line), msg_id=msg_id, info=event_info(kind, fields)
        )

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
            await self.record("sample", **sample_of(await self._beat()))  # where the curve ends
            await self._record_moved()
            counts = {"tokens": machine.tokens, "steps": machine.steps}
            await self.record("left", incarnation=self.member.incarnation, **counts)
            await release(self.bus, subjects, self.member)
        log.info("learner.left", incarnation=self.member.incarnation, **account(machine))

    async def _say_draining(self) -> None:
        """Tell the shards, before the last pushes arrive, that we are leaving: their rounds then wait for us."""
        try:
            await self.bus.tell(self.run.subjects.beat(self.member.learner), encode(await self._beat()))
        except (BusError, BrokerUnavailable) as error:
            log.warning("beat.failed", reason=str(error))

    async def shut(self) -> None:
        """Stop all work and close the bus; safe in any state."""
        if hasattr(self, "driver"):
            await self.driver.stop()
        if hasattr(self, "lender"):
            await self.lender.stop()
        if self._opened:
            await self.bus.close()

    async def _beat_for_ever(self) -> None:
        driver = self.driver
        while True:
            beat = await self._beat()
            driver.pace_changed.clear()
            pause_s = driver.heartbeats.told(beat.step_s)
            try:
                await self.bus.tell(self.run.subjects.beat(self.member.learner), encode(beat))
                # What was told may lie in a buffer for minutes; an answer means that the broker has it.
                if self._request.health_file is not None and await self.bus.reach(REACH_S):
                    show_life(self._request.health_file)
            except (BusError, BrokerUnavailable) as error:
                log.warning("beat.failed", reason=str(error))
            # The shortest pause comes first, so that steps of changing length cannot cause a storm of heartbeats.
            await asyncio.sleep(driver.heartbeats.shortest_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s - driver.heartbeats.shortest_s):
                    await driver.pace_changed.wait()

    async def _write_down_moved(self) -> None:
        """Write our link's traffic to the event log and the log at intervals; a later entry covers one that fails."""
        while True:
            await asyncio.sleep(TOLD_EVERY_S)
            try:
                await self._record_moved()
            except (BusError, BrokerUnavailable, StorageFull) as error:
                log.warning("moved.unrecorded", reason=str(error))

    async def _write_down_samples(self) -> None:
        """Write samples of our heartbeats to the event log; one that fails is a gap in a curve."""
        began_s = self._clock.monotonic()
        while True:
            await asyncio.sleep(pause_of(self._clock.monotonic() - began_s, self._request.sample_s))
            try:
                await self.record("sample", **sample_of(await self._beat()))
            except (BusError, BrokerUnavailable, StorageFull) as error:
                log.warning("sample.unrecorded", reason=str(error))

    async def _record_moved(self) -> None:
        moved = moved_by(self.bus.stats)
        await self.record("moved", role="learner", incarnation=self.member.incarnation, moved=moved)
        step, adopted = self.driver.machine.steps, self.driver.adoption_log.taken()
        self._superseded_log.look(self.driver.machine, adopted)
        self._uncalled_log.look(self.driver.machine, adopted, self.run.protocol.interval_steps)
        fast = self.driver.pusher.fragments_fast
        log.info("learner.moved", step=step, fragments_adopted=adopted, fragments_uncompressed=fast, **moved.counters)

    def _standing(self) -> TrainingStanding:
        """Return our standing: sound after several steps of this incarnation, if the last known loss is finite."""
        machine, loss = self.driver.machine, self.driver.losses.known
        sound = loss is None or math.isfinite(loss)
        ready = self._state == "training" and machine.steps >= LENDING_STEPS_MIN
        return TrainingStanding(machine.steps, machine.tokens, self.driver.progress.tokens, healthy=ready and sound)

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
