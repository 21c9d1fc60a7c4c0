"""The synchronizer of a region: it reads the contributions of its learners where they are, and sends their sum.

It owns no shard and decides nothing. Shards say what to read and what to fold, with which weights (`atoll.wire.messages`); the
rules of a merge are the run's, and the arithmetic is that of a shard (`read_contribution`, `atoll.merge.partial`). So fates,
quorum and quarantine are a shard's, as without it. Everything here can be read again: a region's synchronizer that dies costs a
shard the time until it reads by itself.

Where the run corrects contributions by the outer momentum, a shard says which version they are merged into. If the run stores
its outer state with every version, the shard names it, and the region reads it. If the run derives it
(`atoll.run.delta_chain`), the region follows the fragment: after the first time it reads a delta per version, which learners
of the region read anyway.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from atoll.base.background_tasks import BackgroundTasks
from atoll.base.clock import Clock
from atoll.base.errors import AtollError, BlobGone, BrokerUnavailable, BusError, PeerMisbehaved, RunReplaced
from atoll.base.logs import get
from atoll.base.parallel import off_loop
from atoll.base.retry import cancel_all, patiently
from atoll.bus.interface import Bus, CoreMessage, Subscription
from atoll.merge.correction import MomentumReference, correction_of
from atoll.merge.fold import FragmentFold, PartialMerge
from atoll.merge.global_update import GlobalUpdate
from atoll.merge.outer import MOMENTUM, State, make_outer
from atoll.merge.partial import PartialShape, is_partial, partial_codec
from atoll.merge.round_merge import update_of
from atoll.protocol.events import PushKey
from atoll.run.delta_chain import StatedVersion, read_outer_state, read_version
from atoll.run.heads import read_head
from atoll.run.record import read_run, recorded_progress
from atoll.wire.blobs import BlobRef, Upload
from atoll.wire.messages import RegionAnswer, RegionAsk, RunRecord, decode, encode
from atoll.wire.subjects import matches
from atoll_synchronizer.aggregator import PendingContribution, check_manifest, corrections_of, read_contribution

log = get(__name__)

ANSWER_S: Final = 1.0
"""Work that takes longer is answered with "not done", and goes on."""
KEPT_S: Final = 120.0
"""So long a contribution that was read, and an answer, wait for the shard to ask."""
READS_AT_ONCE: Final = 8
LOOK_S: Final = 2.0
AT_WORK: Final = RegionAnswer(done=False)
MOMENTA_KEPT: Final = 4
"""Momenta that are kept, each as large as its fragment; derived ones have the values beside them."""
HEAD_LOOKS: Final = 20
HEAD_LOOK_S: Final = 0.1
"""A broker of the region may hear of a head later than the shard that wrote it."""


@dataclass(slots=True)
class Work:
    """Something that a shard asked for: its task, and when it was last asked for."""

    task: asyncio.Task[RegionAnswer]
    asked_s: float


class RegionService:
    """Folds the contributions of `region` for the shards of a founded run, on the running loop."""

    def __init__(self, bus: Bus, run: RunRecord, region: str, clock: Clock) -> None:
        self._bus = bus
        self._run = run
        self._region = region
        self._clock = clock
        self._held: dict[PushKey, tuple[PendingContribution, float]] = {}
        """Contributions that were read, and when."""
        self._being_read: dict[PushKey, asyncio.Future[None]] = {}
        self._works: dict[str, Work] = {}
        self._momenta = OuterMomenta(bus, run)
        self._reading = asyncio.Semaphore(READS_AT_ONCE)
        self._background = BackgroundTasks(self._on_failure)
        self.sums = 0
        """Number of sums sent."""
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def serve(self, stop: asyncio.Event) -> str:
        """Answer shards; return why that has ended: `stopped`, the run is `over`, or `replaced` by another founding of it."""
        self._background.spawn(self._until(stop))
        asks = self._run.subjects.premerge(self._region)
        listening = asyncio.ensure_future(patiently(lambda: self._bus.listen(asks), "what shards ask"))
        either: set[asyncio.Future[Any]] = {listening, self._ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._ended.done():
                feed = listening.result()
                log.info("region.serving", region=self._region)
                self._background.spawn(self._keep_forgetting(), self._hear(feed), self._watch_run())
            return await self._ended
        finally:
            await self._background.stop()
            await cancel_all([listening])
            if not listening.cancelled() and listening.exception() is None:
                await listening.result().close()
            for work in self._works.values():
                work.task.cancel()

    async def _until(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._end("stopped")

    async def _watch_run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                there = await read_run(self._bus, self._run.subjects)
                if there is not None and there.nonce != self._run.nonce:
                    self._end("replaced")
                elif (await recorded_progress(self._bus, self._run)).over:
                    self._end("over")
            except RunReplaced:
                self._end("replaced")
            except (BusError, BrokerUnavailable, PeerMisbehaved) as error:
                log.warning("run.unreadable", reason=str(error))

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    async def _hear(self, feed: Subscription) -> None:
        async for message in feed:
            self._background.spawn(self._answer(message))

    async def _answer(self, message: CoreMessage) -> None:
        try:
            asked = decode(RegionAsk, message.data)
        except PeerMisbehaved as error:
            log.debug("region.refused", reason=str(error))
            return
        if asked.run_nonce != self._run.nonce:
            return
        if asked.verb == "drop":
            self._drop(asked)
        # Who carries the question chooses where the answer goes. It is one of ours only where shards hear answers.
        if message.reply is None or not matches(self._run.subjects.premerge_answer(self._region, "*"), message.reply):
            return
        name = hashlib.blake2b(msgspec.json.encode(asked), digest_size=16).hexdigest()
        work = self._works.get(name)
        if work is None or (work.task.done() and self._is_spent(asked, work.task.result())):
            work = self._works[name] = Work(asyncio.create_task(self._work_on(asked, name)), 0.0)
        work.asked_s = self._clock.monotonic()
        await asyncio.wait({work.task}, timeout=ANSWER_S)
        answer = work.task.result() if work.task.done() else AT_WORK
        try:
            await self._bus.tell(message.reply, encode(answer))
        except (BusError, BrokerUnavailable) as error:
            log.warning("region.unanswered", reason=str(error))

    def _is_spent(self, asked: RegionAsk, answer: RegionAnswer) -> bool:
        """Return whether an answer no longer holds: what was read is in a sum since, or what was missing may be here.

        A sum whose contributions were read once more is that of a former owner, who may have removed it.
        """
        if asked.verb == "fold":
            again = bool(asked.pushes) and all(key in self._held for key in keys_of(asked))
            return again or bool(answer.missing or answer.reason)
        return not answer.reason and asked.manifest is not None and asked.manifest.key not in self._held

    def _drop(self, asked: RegionAsk) -> None:
        for key in keys_of(asked):
            self._held.pop(key, None)

    async def _work_on(self, asked: RegionAsk, name: str) -> RegionAnswer:
        """Do what is asked for; a question that nobody should have asked ends nothing but itself."""
        try:
            return await (self._read(asked) if asked.verb == "read" else self._fold(asked, name))
        except Exception as error:  # noqa: BLE001  (whatever a peer brings about; the shard reads by itself then)
            log.warning("region.failed", asked=asked.verb, fragment=asked.fragment, reason=repr(error))
            return RegionAnswer(done=True, reason="failed")

    async def _read(self, asked: RegionAsk) -> RegionAnswer:
        manifest = asked.manifest
        if manifest is None or manifest.fragment >= len(self._run.layout.fragments):
            return RegionAnswer(done=True, reason="malformed")
        try:
            check_manifest(manifest, self._run)
        except PeerMisbehaved:
            return RegionAnswer(done=True, reason="malformed")
        key = manifest.key
        done = self._being_read[key] = asyncio.get_running_loop().create_future()
        try:
            async with self._reading:
                read = await read_contribution(self._bus, self._run, manifest)
        finally:
            self._being_read.pop(key, None)
            done.set_result(None)
        if isinstance(read, str):
            return RegionAnswer(done=True, reason=read)
        self._held[key] = read, self._clock.monotonic()
        return RegionAnswer(done=True, norm=read.norm)

    async def _fold(self, asked: RegionAsk, name: str) -> RegionAnswer:
        began_s, p, run = self._clock.monotonic(), asked.fragment, self._run
        keys = keys_of(asked)
        # Where two processes of a region are alive, a shard goes on when the faster one has read.
        if reading := [self._being_read[key] for key in keys if key in self._being_read]:
            await asyncio.wait(reading)
        if missing := tuple(place for place, key in enumerate(keys) if key not in self._held):
            return RegionAnswer(done=True, missing=missing)
        if p >= len(run.layout.fragments) or not is_partial(run.protocol, p, run.layout.fragment_sizes()[p]):
            return RegionAnswer(done=True, reason="malformed")
        elements, settings = run.layout.fragment_sizes()[p], run.protocol.of(p)
        try:
            reference = await self._momenta.of(p, asked.version, asked.state)
            waiting = [self._held[key][0] for key in keys]
            partial = await off_loop(elements, self._summed, waiting, asked, reference)
            shape = PartialShape.of(run.layout.slices(p), elements, settings)
            frame = shape.encode(partial, partial_codec(settings))
            stem = run.subjects.partial_stem(self._region, p, asked.base_version, f"{name}-{self.sums}")
            upload = Upload(frame)
            blob = await patiently(lambda: self._bus.put_blob(stem, upload), "a region's sum")
        except AtollError as error:
            log.warning("region.sum_failed", fragment=p, pushes=len(keys), reason=str(error))
            return RegionAnswer(done=True, reason="failed")
        for key in keys:
            self._held.pop(key, None)
        took_s = round(self._clock.monotonic() - began_s, 4)
        self.sums += 1
        told = {"fragment": p, "base": asked.base_version, "pushes": len(keys), "bytes": blob.size_bytes}
        log.info("region.folded", **told, took_s=took_s)
        return RegionAnswer(
            done=True, blob=blob, lengths=tuple((one.unit, one.radial, one.heard) for one in partial.lengths)
        )

    def _summed(
        self, waiting: list[PendingContribution], asked: RegionAsk, reference: MomentumReference | None
    ) -> PartialMerge:
        fragment, run = asked.fragment, self._run
        fold = FragmentFold(run.layout.slices(fragment), run.protocol.of(fragment).merge)
        for one, push in zip(waiting, asked.pushes, strict=True):
            corrections = corrections_of(run, fragment, one, reference)
            fold.add(one.pseudo_gradient, one.norms, push.weight, corrections=corrections)
        return fold.partial()

    async def _keep_forgetting(self) -> None:
        while True:
            await asyncio.sleep(KEPT_S / 4)
            before_s = self._clock.monotonic() - KEPT_S
            for name in [name for name, work in self._works.items() if work.asked_s < before_s]:
                self._works.pop(name).task.cancel()
            for key in [key for key, (_, read_s) in self._held.items() if read_s < before_s]:
                self._held.pop(key)

    def _on_failure(self, error: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)


def keys_of(asked: RegionAsk) -> list[PushKey]:
    """Return the keys of the contributions that a question is about."""
    return [PushKey(push.learner, push.incarnation, asked.fragment, push.push) for push in asked.pushes]


@dataclass(frozen=True, slots=True)
class _Kept:
    name: int | str
    reference: MomentumReference
    held: StatedVersion | None = None


class OuterMomenta:
    """Reads the momenta of a run's fragments and keeps the newest of some."""

    def __init__(self, bus: Bus, run: RunRecord) -> None:
        self._bus, self._run = bus, run
        self._kept: dict[int, _Kept] = {}
        self._reading: dict[int, asyncio.Lock] = {}

    async def of(self, fragment: int, version: int, state: BlobRef | None) -> MomentumReference | None:
        """Return the momentum of a version, or of a newer one; None where the run corrects by none, or has none yet."""
        protocol = self._run.protocol
        if correction_of(protocol.of(fragment)) is None:
            return None
        # A run that corrects has our own optimizer; another one is neither installed nor named here.
        update = update_of(
            self._run.protocol, fragment, make_outer(protocol.outer, protocol.outer_lr, protocol.outer_momentum)
        )
        async with self._reading.setdefault(fragment, asyncio.Lock()):
            kept = self._kept.get(fragment)
            if update.derived:
                if version == 0:
                    return None
                if kept is None or kept.held is None or kept.held.version < version:
                    held = await self._follow(fragment, version, update, None if kept is None else kept.held)
                    kept = self._keep(fragment, held.version, held.state, held)
            elif state is None:
                return None
            elif kept is None or kept.name != state.stem:
                elements = self._run.layout.fragment_sizes()[fragment]
                kept = self._keep(fragment, state.stem, await read_outer_state(self._bus, state, elements))
            return kept.reference

    async def _follow(
        self, fragment: int, version: int, update: GlobalUpdate, held: StatedVersion | None
    ) -> StatedVersion:
        for _ in range(HEAD_LOOKS):
            head = await read_head(self._bus, self._run, fragment)
            if head is not None and head.version >= version:
                return await read_version(self._bus, self._run, head, update, held)
            await asyncio.sleep(HEAD_LOOK_S)
        raise BlobGone("the head that a shard speaks of is not here", got=f"fragment {fragment}, version {version}")

    def _keep(self, fragment: int, name: int | str, state: State, held: StatedVersion | None = None) -> _Kept:
        elements = self._run.layout.fragment_sizes()[fragment]
        momentum = state.get(MOMENTUM)
        if momentum is None or momentum.shape != (elements,) or momentum.dtype != np.float32:
            raise PeerMisbehaved("an outer state without the run's momentum", got=sorted(state), allowed=MOMENTUM)
        self._kept.pop(fragment, None)
        while len(self._kept) >= MOMENTA_KEPT:
            self._kept.pop(next(iter(self._kept)))
        reference = MomentumReference.of(momentum, self._run.layout.slices(fragment))
        self._kept[fragment] = _Kept(name, reference, held)
        return self._kept[fragment]
