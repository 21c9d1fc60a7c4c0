"""Measures the merged model on held-out text while the run goes on, and writes it out at the end if it shall.

The evaluator is a reader: it takes the newest frame of every fragment, puts the parameters together and computes bits per
byte on the same held-out bytes each time. It holds no lease and answers no call, so no process waits for it
(`atoll.run.merged_model`). If the run keeps an average of its values, the evaluator measures that too.

An evaluator with a folder to export to does so when the run is over, which the shards' leases say, and when it is told to stop
if the run has gone on since. It has JAX and the compiled program already, and its last measurement is that of the model in the
files; values that it has measured it does not measure again (`measure_once`). Learners have left by then and cores are free, so
the sample of the model's text is drawn beside the measuring.

Beside learners, what an evaluator takes is time of theirs. Under `cores_max` it pauses longer after a measurement that took
long, so that in the mean it uses no more of a core than that, however large the model is.

How far the run is comes from the shards' leases, so the count goes on when the evaluator is started again. A model of
somebody's own loop is measured by a function of theirs (`own_evaluation`), as `evaluated` events.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from atoll.base.clock import SystemClock
from atoll.base.errors import AtollError, BrokerUnavailable, BusError, PeerMisbehaved
from atoll.base.extras import installed
from atoll.base.health import live
from atoll.base.logs import configure, get
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.run.folder import unusable
from atoll.run.heads import read_heads
from atoll.run.merged_model import MergedModel, read_merged
from atoll.run.record import RecordedProgress, founded_run, read_run, recorded_progress
from atoll.settings import Settings, bus_options
from atoll.wire.event_log import EVALUATOR
from atoll.wire.messages import Head, RunRecord, encode, event
from atoll.wire.subjects import Subjects
from atoll_learner.exporting import Measure, Measured, sampler_of, write_measured, write_model
from atoll_learner.measure_once import MeasureOnce
from atoll_learner.process import LearnerWork, limit_threads, prepare_work

if TYPE_CHECKING:
    from atoll_learner.sample import Sampler

log = get(__name__)

POLL_S = 0.5
UNREADABLE = (BusError, BrokerUnavailable, PeerMisbehaved)
"""What a later look may find mended."""
Heads = dict[int, Head]
"""The heads of a run's fragments, by fragment."""


class Evaluation(Protocol):
    """What is measured."""

    kind: str
    """That of its events."""

    def fields(self, run: RunRecord, merged: MergedModel, tokens: int) -> dict[str, Any]:
        """Return the fields of an event about a run's model after so many tokens."""

    def prepare(self) -> None:
        """Get ready for `write` after the first measurement, while nobody waits for it."""

    def write(self, run: RunRecord, merged: MergedModel) -> None:
        """Write a model out; it may be measured meanwhile."""

    def conclude(self, run: RunRecord, merged: MergedModel, began_s: float) -> None:
        """Write out how the model measured that was measured last; the export began at `began_s`, by the monotonic clock."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often to measure: with `every_s` seconds between two, and with at most `cores_max` of a core in the mean."""

    every_s: float
    cores_max: float = math.inf

    def pause_s(self, spent_s: float) -> float:
        """Return how long to pause after a measurement that took so much processor time."""
        return max(self.every_s, spent_s / self.cores_max)


def follow(settings: Settings, pace: Pace, own: str = "", like: str = "", out: Path | None = None) -> None:
    """Evaluate at that pace and append each result to the event log, until told to stop.

    `own` names a function (`module:function`) that measures in place of the reference model's bits per byte. With `out` the
    reference model is measured once more when the run is over or the evaluator is told to stop, and written to that folder.

    Raises:
        SettingsError: the settings, or what `own` and `like` name, are wrong.
        AtollError: the first evaluation by `own` failed. Later ones that fail are logged and passed over.
    """
    configure(settings.log.format, settings.log.level, role=EVALUATOR, run=settings.run)
    work = None if own else prepare_work(settings)
    limit_threads(settings.learner.threads or 1)

    if installed("jax"):  # a function of somebody's own may do without
        from atoll_learner.compiling import enable_compile_cache  # noqa: PLC0415  (only after the thread limits are set)

        enable_compile_cache(settings.learner.compile_cache)
    evaluation = _OfOwn(own, like) if work is None else _OfReference(settings, work, out)
    asyncio.run(_follow(settings, evaluation, pace, last=out is not None))


class _OfReference:
    """Bits per byte of the reference model. Its program is compiled when there is something to measure."""

    kind = "validation"

    def __init__(self, settings: Settings, work: LearnerWork, out: Path | None) -> None:
        self._settings = settings
        self._work = work
        self._out = out
        self._measure: Measure | None = None
        self._initial: float | None = None
        self._last: dict[str, Any] = {}
        self._shapes: dict[str, Any] = {}
        self._sampler: Sampler | None = None

    def fields(self, run: RunRecord, merged: MergedModel, tokens: int) -> dict[str, Any]:
        del run
        self._last = measured(merged, self._measured, tokens)
        if merged.versions_max == 0:
            self._initial = self._last["bits_per_byte"]
        self._shapes = {name: (leaf.shape, leaf.dtype) for name, leaf in merged.params.items()}
        return self._last

    def prepare(self) -> None:
        if self._out is not None and self._sampler is None:
            self._sampler = sampler_of(self._work)
            self._sampler.compile(self._shapes)

    def write(self, run: RunRecord, merged: MergedModel) -> None:
        if self._out is None:
            return
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            write_model(self._work, self._out, run, merged, self._sampler or sampler_of(self._work))
        except OSError as error:
            raise unusable(self._out, error) from error

    def conclude(self, run: RunRecord, merged: MergedModel, began_s: float) -> None:
        if self._out is None:
            return
        found = Measured(self._first(run), self._last["bits_per_byte"], self._last.get("average"))
        try:
            write_measured(self._work, self._out, merged, found, began_s)
        except OSError as error:
            raise unusable(self._out, error) from error

    def _measured(self, params: dict[str, Any]) -> float:
        from atoll_learner.train import make_evaluator  # noqa: PLC0415  (loads JAX)

        if self._measure is None:
            work = self._work
            self._measure = MeasureOnce(make_evaluator(work.model, work.train, work.shards, work.held_out_tokens))
        return self._measure(params)

    def _first(self, run: RunRecord) -> float:
        """Return the measure of the values that the run began with; an evaluator that came late has not seen them."""
        from atoll_learner.beginning import first_values  # noqa: PLC0415  (loads JAX)

        if self._initial is None:
            first = first_values(self._work.model, run.seed, self._settings.learner.initial_model)
            self._initial = round(self._measured(first), 5)
        return self._initial


class _OfOwn:
    """What a function of somebody's own says of the model of their loop."""

    kind = "evaluated"

    def __init__(self, own: str, like: str) -> None:
        from atoll_learner.own_evaluation import OwnEvaluation  # noqa: PLC0415

        self._evaluation = OwnEvaluation(own, like)

    def fields(self, run: RunRecord, merged: MergedModel, tokens: int) -> dict[str, Any]:
        return {
            "run_tokens": tokens,
            **self._evaluation.values(run, merged),
            "versions_min": merged.versions_min,
            "versions_max": merged.versions_max,
        }

    def prepare(self) -> None:
        """Nothing is exported."""

    def write(self, run: RunRecord, merged: MergedModel) -> None:
        """Write nothing: `atoll export` writes the model of any loop."""

    def conclude(self, run: RunRecord, merged: MergedModel, began_s: float) -> None:
        """Nothing was written."""


async def _follow(settings: Settings, evaluation: Evaluation, pace: Pace, *, last: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    bus = await open_bus(settings.broker.url, settings.run, name=EVALUATOR, options=bus_options(settings))
    try:
        life = asyncio.create_task(live(settings.health_file, bus.reach))
        exported = await evaluate_until(stop, bus, settings.run, evaluation, pace, last=last)
        if last:
            await export_at_stop(bus, settings.run, evaluation, exported)
        life.cancel()
    finally:
        await bus.close()


async def evaluate_until(
    stop: asyncio.Event, bus: Bus, name: str, evaluation: Evaluation, pace: Pace, *, last: bool
) -> Heads | None:
    """Measure the run of that name at that pace until `stop` is set.

    With `last`, a run that is over is exported at once, and again if it goes on and is over once more. An export that fails is
    tried again later. Return the heads of what was exported, None if nothing was.

    Raises:
        AtollError: the first measurement failed.
    """
    sound, former = False, Moment()
    exported: Heads | None = None
    while not stop.is_set():
        run = await read_run(bus, Subjects(name))
        if run is None or await _incomplete(bus, run):
            await _pause(stop, POLL_S)
            continue
        progress = await _progress(bus, run) or RecordedProgress(0, over=False)
        if last and progress.over:
            exported = await _try_export(bus, run, evaluation, exported)
            await _pause(stop, pace.every_s)
            continue
        now = Moment(progress.tokens, time.monotonic())
        if last and ends_before(run.protocol.tokens_target, former, now):
            await _pause(stop, POLL_S)
            continue
        began_s, compiled = time.process_time(), sound
        try:
            sound = await evaluate_once(bus, run, evaluation) or sound
            former = replace(now, took_s=time.monotonic() - now.at_s)
            if sound:
                await asyncio.to_thread(evaluation.prepare)
        except AtollError as error:
            if not sound:
                raise
            log.warning("evaluation.failed", reason=str(error))
        # The first measurement compiles, so its time says nothing about the next.
        pause_s = pace.pause_s(time.process_time() - began_s if compiled else 0.0)
        await (_pause_until_over(stop, bus, run, pause_s) if last else _pause(stop, pause_s))
    return exported


@dataclass(frozen=True, slots=True)
class Moment:
    """How many tokens the run had when a measurement began, when that was, and how long it took, in seconds."""

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


async def _incomplete(bus: Bus, run: RunRecord) -> bool:
    return len(await read_heads(bus, run)) < len(run.layout.fragments)


async def export_at_stop(bus: Bus, name: str, evaluation: Evaluation, exported: Heads | None) -> None:
    """Export the run of that name as `_export` does; one that was exported and cannot be read now has its export."""
    try:
        await _export(bus, await founded_run(bus, name), evaluation, exported)
    except UNREADABLE as error:
        if exported is None:
            raise
        log.warning("export.skipped", reason=str(error))


async def _try_export(bus: Bus, run: RunRecord, evaluation: Evaluation, exported: Heads | None) -> Heads | None:
    """Export as `_export` does; say so if that fails, and return what was exported before."""
    try:
        return await _export(bus, run, evaluation, exported)
    except AtollError as error:
        log.warning("export.failed", reason=str(error))
        return exported


async def _export(bus: Bus, run: RunRecord, evaluation: Evaluation, exported: Heads | None) -> Heads | None:
    """Measure the model and write that very one out, unless it is the one that was `exported`; return the heads of it.

    A measurement that the event log has not got leaves the export undone: the log's last one shall be of the model that was
    written.

    Raises:
        AtollError: the run cannot be read, or the folder not be written to. What was measured is in the event log even so.
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
    """Return how far the run is; None, and say so, if that cannot be read now."""
    try:
        return await recorded_progress(bus, run)
    except UNREADABLE as error:
        log.warning("evaluation.skipped", reason=str(error))
        return None


async def _tell(bus: Bus, run: RunRecord, evaluation: Evaluation, merged: MergedModel, tokens: int) -> bool:
    """Measure a model and write the result to the event log; return whether the log has it."""
    began_s = time.monotonic()
    fields = await asyncio.to_thread(evaluation.fields, run, merged, tokens)
    fields["took_s"] = round(time.monotonic() - began_s, 3)
    clock = SystemClock()
    line = encode(event(evaluation.kind, EVALUATOR, clock.wall(), **fields))
    msg_id = f"{evaluation.kind}-{os.getpid()}-{clock.monotonic():.6f}"
    shown = fields["values"] if "values" in fields else {"bpb": fields["bits_per_byte"]}
    try:
        await bus.publish(run.subjects.event(evaluation.kind, EVALUATOR), line, msg_id=msg_id, info=shown)
    except (BusError, BrokerUnavailable) as error:
        log.warning("evaluation.skipped", reason=str(error))
        return False
    log.info("model.evaluated", **fields)
    return True


def measured(
    merged: MergedModel, measure: Callable[[dict[str, Any]], float], run_tokens: int
) -> dict[str, int | float]:
    """Return the fields of a `validation` event."""
    average = {} if merged.average is None else {"average": round(measure(merged.average), 5)}
    return {
        "run_tokens": run_tokens,
        "bits_per_byte": round(measure(merged.params), 5),
        **average,
        "versions_min": merged.versions_min,
        "versions_max": merged.versions_max,
        "token_fragments_merged": merged.token_fragments,
    }


async def _pause_until_over(stop: asyncio.Event, bus: Bus, run: RunRecord, for_s: float) -> None:
    """Pause for so long, and no longer than until the run is over."""
    ends_s, over = time.monotonic() + for_s, False
    while not (stop.is_set() or over) and (left_s := ends_s - time.monotonic()) > 0.0:
        await _pause(stop, min(POLL_S, left_s))
        progress = await _progress(bus, run)
        over = progress is not None and progress.over


async def _pause(stop: asyncio.Event, for_s: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), for_s)
    except TimeoutError:
        return
