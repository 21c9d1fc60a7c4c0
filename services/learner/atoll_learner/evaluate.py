"""Measures the merged model on held-out text while the run goes on, and writes it out at the end if it shall.

The evaluator is a reader: it takes the newest frame of every fragment, puts the parameters together and computes bits per byte
on the same held-out bytes each time, of the run's average, too, if it keeps one. It holds no lease and answers no call, so no
process waits for it (`atoll.run.merged_model`). A model of somebody's own loop is measured by a function of theirs
(`OwnEvaluation`), as `evaluated` events. How far the run is comes from the shards' leases, also after a restart.

With a folder to export to, it does so when the run is over, and when it is told to stop if the run has gone on since. It has
the compiled program already, values that it has measured it does not measure again (`MeasureOnce`), and the sample of the
model's text is drawn beside the measuring. Beside learners, what an evaluator takes is time of theirs: a pace bounds how much
of a core it uses (`MeasuringPace`), and it does not measure where the end of the run would overtake it.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from atoll.base.clock import SystemClock
from atoll.base.errors import AtollError, BrokerUnavailable, BusError, PeerMisbehaved
from atoll.base.extras import is_installed
from atoll.base.health import live
from atoll.base.logs import configure, get
from atoll.base.retry import cancel_all
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.run.heads import read_heads
from atoll.run.merged_model import MergedModel, read_merged
from atoll.run.record import RecordedProgress, founded_run, read_run, recorded_progress
from atoll.settings import Settings, bus_options
from atoll.wire.events import EVALUATOR, ValidationEvent, log_entry
from atoll.wire.messages import Head, RunRecord, encode
from atoll.wire.subjects import Subjects
from atoll_learner.evaluations import Evaluation, OwnEvaluation, ReferenceEvaluation
from atoll_learner.process import enable_compile_cache, limit_threads, prepare_work

log = get(__name__)

POLL_S = 0.5
LOOK_AGAIN_S = 5.0
"""After a look at a run that could not be read, or has not changed."""
STOP_PATIENCE_S = 15.0
EXPORT_LATER = "run `atoll export` when the broker is there again"
UNREADABLE = (BusError, BrokerUnavailable, PeerMisbehaved)
"""Errors that a later look may find mended."""
Heads = dict[int, Head]
"""The heads of a run's fragments, by fragment."""


@dataclass(frozen=True, slots=True)
class MeasuringPace:
    """Frequency of measurements: with `every_s` seconds between two, and with at most `cores_max` of a core in the mean."""

    every_s: float
    cores_max: float = math.inf

    def pause_s(self, spent_s: float) -> float:
        """Return how long to pause after a measurement that took so much processor time."""
        return max(self.every_s, spent_s / self.cores_max)


@dataclass(frozen=True, slots=True)
class Moment:
    """The run's tokens when a measurement began, when that was, and how long it took, in seconds."""

    tokens: int = 0
    at_s: float = 0.0
    took_s: float = 0.0


def ends_before(target: int, former: Moment, now: Moment) -> bool:
    """Return whether the run, at its pace since `former`, reaches its target before another measurement would be done.

    Then only the last one is of use, and it would have to wait for this one: a second or two in which all are done but us.
    """
    trained = now.tokens - former.tokens
    if target <= 0 or trained <= 0 or former.took_s <= 0.0:
        return False
    return (target - now.tokens) * (now.at_s - former.at_s) / trained < former.took_s


@dataclass(slots=True)
class Measurements:
    """Whether one has succeeded yet, and the heads and the moment of the newest that did."""

    sound: bool = False
    heads: Heads | None = None
    newest: Moment = field(default_factory=Moment)


def follow(
    settings: Settings,
    pace: MeasuringPace,
    own: str = "",
    like: str = "",
    out: Path | None = None,
    *,
    is_told: Callable[[], bool] = lambda: False,
) -> None:
    """Evaluate at that pace and append each result to the event log, until told to stop.

    `own` names a function (`module:function`) that measures in place of the reference model's bits per byte. With `out` the
    reference model is measured once more when the run is over or the evaluator is told to stop, and written to that folder.
    `is_told` says whether it was told to stop before it could listen.

    Raises:
        SettingsError: the settings, or what `own` and `like` name, are wrong.
        AtollError: the first evaluation by `own` failed. Later ones that fail are logged and passed over.
    """
    configure(settings.log.format, settings.log.level, role=EVALUATOR, run=settings.run)
    work = None if own else prepare_work(settings)
    limit_threads(settings.learner.threads or 1)

    if is_installed("jax"):  # a function of somebody's own may do without
        enable_compile_cache(settings.learner.compile_cache)
    evaluation = OwnEvaluation(own, like) if work is None else ReferenceEvaluation(settings, work, out)
    asyncio.run(_follow(settings, evaluation, pace, is_told, last=out is not None))


async def _follow(
    settings: Settings, evaluation: Evaluation, pace: MeasuringPace, is_told: Callable[[], bool], *, last: bool
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if is_told():
        stop.set()
    bus = await _open_bus(stop, settings, last=last)
    if bus is None:
        return
    try:
        life = asyncio.create_task(live(settings.health_file, bus.reach))
        await measure_and_export(stop, bus, settings.run, evaluation, pace, last=last)
        life.cancel()
    finally:
        await bus.close()


async def _open_bus(stop: asyncio.Event, settings: Settings, *, last: bool) -> Bus | None:
    """Return the open bus; None if we are told to stop before, and have nothing to write."""
    url, options = settings.broker.url, bus_options(settings)
    opening = asyncio.create_task(open_bus(url, settings.run, name=EVALUATOR, options=options))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done() and last:
            await asyncio.wait({opening}, timeout=STOP_PATIENCE_S)
        if opening.done():
            return await opening
    finally:
        await cancel_all([stopping, opening])
    if last:
        raise BrokerUnavailable("no broker answered when we were told to stop", todo=EXPORT_LATER)
    return None


async def measure_and_export(
    stop: asyncio.Event, bus: Bus, name: str, evaluation: Evaluation, pace: MeasuringPace, *, last: bool
) -> None:
    """Measure as `evaluate_until` does, and with `last` export at the stop.

    Raises:
        BrokerUnavailable: no broker answered for `STOP_PATIENCE_S` at the stop, so nothing could be exported.
        AtollError: as `evaluate_until` and `export_at_stop` do, or what the broker said at the stop.
    """

    async def work() -> None:
        exported = await evaluate_until(stop, bus, name, evaluation, pace, last=last)
        if last:
            await export_at_stop(bus, name, evaluation, exported)

    working, unreachable = asyncio.create_task(work()), asyncio.create_task(_unreachable(stop, bus))
    await asyncio.wait({working, unreachable}, return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        unreachable.cancel()
        await asyncio.gather(unreachable, return_exceptions=True)  # so that asyncio does not report what it raised
        await working
        return
    working.cancel()
    await unreachable  # raises what the broker says, if it has not been silent
    if last:
        raise BrokerUnavailable("no broker answered when we were told to stop", todo=EXPORT_LATER)


async def _unreachable(stop: asyncio.Event, bus: Bus) -> None:
    """Return when we were told to stop and the broker has not answered for `STOP_PATIENCE_S`.

    An evaluator that has time waits a minute for a broker that is started again; one that was told to stop does not.
    """
    await stop.wait()
    while await bus.reach(STOP_PATIENCE_S):  # noqa: ASYNC110  (a broker says nothing when it goes)
        await asyncio.sleep(POLL_S)


async def evaluate_until(
    stop: asyncio.Event, bus: Bus, name: str, evaluation: Evaluation, pace: MeasuringPace, *, last: bool
) -> Heads | None:
    """Measure the run of that name at that pace until `stop` is set.

    A model that has not changed since is not measured again. With `last`, a run that is over is exported at once, and again if
    it goes on and is over once more. An export that fails is tried again later. Return the heads of what was exported, None if
    nothing was.

    Raises:
        AtollError: the first measurement failed, or the run cannot be read before it and never will be.
    """
    known, exported = Measurements(), None
    while not stop.is_set():
        try:
            found = await _whole_run(bus, name)
        except UNREADABLE as error:
            if not known.sound and isinstance(error, PeerMisbehaved):
                raise  # a run of another version stays one
            log.warning("evaluation.skipped", reason=str(error))
            await _pause(stop, min(LOOK_AGAIN_S, pace.every_s))
            continue
        if found is None:
            await _pause(stop, POLL_S)
            continue
        run, heads = found
        progress = await _progress(bus, run) or RecordedProgress(0, over=False)
        if last and progress.over:
            try:
                exported = await _export(bus, run, evaluation, exported)
            except AtollError as error:
                log.warning("export.failed", reason=str(error))
            await _pause(stop, pace.every_s)
            continue
        now = Moment(progress.tokens, time.monotonic())
        if heads == known.heads or (last and ends_before(run.protocol.tokens_target, known.newest, now)):
            await _pause(stop, POLL_S if last else min(LOOK_AGAIN_S, pace.every_s))
            continue
        pause_s = pace.pause_s(await _measure(bus, run, heads, evaluation, known, now))
        await (_pause_until_over(stop, bus, run, pause_s) if last else _pause(stop, pause_s))
    return exported


async def _measure(
    bus: Bus, run: RunRecord, heads: Heads, evaluation: Evaluation, known: Measurements, now: Moment
) -> float:
    """Measure a run at these heads, and note that in `known`; return the processor time that it took.

    The first measurement compiles, so its time says nothing about the next: it counts as none.
    """
    began_s, compiled = time.process_time(), known.sound
    try:
        if await evaluate_once(bus, run, evaluation):
            known.sound, known.heads = True, heads
        known.newest = replace(now, took_s=time.monotonic() - now.at_s)
        if known.sound:
            await asyncio.to_thread(evaluation.prepare)
    except AtollError as error:
        if not known.sound:
            raise
        log.warning("evaluation.failed", reason=str(error))
    return time.process_time() - began_s if compiled else 0.0


async def _whole_run(bus: Bus, name: str) -> tuple[RunRecord, Heads] | None:
    run = await read_run(bus, Subjects(name))
    heads = {} if run is None else await read_heads(bus, run)
    return None if run is None or len(heads) < len(run.layout.fragments) else (run, heads)


async def export_at_stop(bus: Bus, name: str, evaluation: Evaluation, exported: Heads | None) -> None:
    """Export the run of that name as `_export` does; one that was exported and cannot be read now has its export."""
    try:
        await _export(bus, await founded_run(bus, name), evaluation, exported)
    except UNREADABLE as error:
        if exported is None:
            raise
        log.warning("export.skipped", reason=str(error))


async def _export(bus: Bus, run: RunRecord, evaluation: Evaluation, exported: Heads | None) -> Heads | None:
    """Measure the model and write that very one out, unless it is the one that was `exported`; return the heads of it.

    A measurement that the event log has not got leaves the export undone: the log's last one shall be of the model that was
    written.
    """
    heads = await read_heads(bus, run)
    if heads == exported:
        return exported
    began_s = time.monotonic()
    merged, tokens = await read_merged(bus, run), (await recorded_progress(bus, run)).tokens
    written, told = await asyncio.gather(
        asyncio.to_thread(evaluation.write, run, merged),
        _tell(bus, run, evaluation, merged, tokens),
        return_exceptions=True,  # a thread cannot be stopped, so no other attempt may begin before both have ended
    )
    for failure in (written, told):
        if isinstance(failure, BaseException):
            raise failure
    await asyncio.to_thread(evaluation.conclude, run, merged, began_s)
    return heads if told else exported


async def evaluate_once(bus: Bus, run: RunRecord, evaluation: Evaluation) -> bool:
    """Measure the present model and write the result to the event log; return whether that could be done.

    Raises:
        AtollError: the evaluation itself failed.
    """
    progress = await _progress(bus, run)
    if progress is None:
        return False
    try:
        merged = await read_merged(bus, run)
    except UNREADABLE as error:
        log.warning("evaluation.skipped", reason=str(error))
        return False
    return await _tell(bus, run, evaluation, merged, progress.tokens)


async def _progress(bus: Bus, run: RunRecord) -> RecordedProgress | None:
    try:
        return await recorded_progress(bus, run)
    except UNREADABLE as error:
        log.warning("evaluation.skipped", reason=str(error))
        return None


async def _tell(bus: Bus, run: RunRecord, evaluation: Evaluation, merged: MergedModel, tokens: int) -> bool:
    fields = await asyncio.to_thread(evaluation.measure, run, merged, tokens)
    clock = SystemClock()
    line = encode(log_entry(fields, EVALUATOR, clock.wall()))
    msg_id = f"{fields.kind}-{os.getpid()}-{clock.monotonic():.6f}"
    shown = {"bpb": fields.bits_per_byte} if isinstance(fields, ValidationEvent) else fields.values
    try:
        await bus.publish(run.subjects.event(fields.kind, EVALUATOR), line, msg_id=msg_id, info=shown)
    except (BusError, BrokerUnavailable) as error:
        log.warning("evaluation.skipped", reason=str(error))
        return False
    log.info("model.evaluated", **msgspec.to_builtins(fields))
    return True


async def _pause_until_over(stop: asyncio.Event, bus: Bus, run: RunRecord, for_s: float) -> None:
    ends_s, over = time.monotonic() + for_s, False
    while not (stop.is_set() or over) and (left_s := ends_s - time.monotonic()) > 0.0:
        await _pause(stop, min(POLL_S, left_s))
        progress = await _progress(bus, run)
        over = progress is not None and progress.over


async def _pause(stop: asyncio.Event, for_s: float) -> None:
    try:
        async with asyncio.timeout(for_s):
            await stop.wait()
    except TimeoutError:
        return
