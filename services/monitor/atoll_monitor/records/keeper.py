"""Keeper of a run's records while its monitor lives: events as they come, a sample of all metrics at a regular pace, and sinks.

Nothing here ends the monitor once it serves: a sink that fails is logged once and left alone from then on, and a disk that is
full costs lines (`atoll_monitor_dropped_lines_total`). Files are written in one thread, in the order of what they hold.

A sink gets curves: W&B (offline), TensorBoard, trackio; each is an extra, loaded when a setting names it. All write files on
this machine and speak to nobody (`wandb sync` sends W&B's afterwards). Their step is the number of tokens that the run has
trained, so that curves of runs lie over each other. A sink has one curve a tag, `learner_loss/a` or
`round_phase_seconds_sum/merge`: the values of the labels without their names and without the run. Buckets of histograms are
no curves. It holds one founding of a run, under a name of its own (`RUN-1a2b3c4d`), and goes on under it when the monitor
begins anew. A run that is founded anew under the same id is another run: the sinks of the former one end, and it has sinks of
its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from prometheus_client.core import Metric

from atoll.base.extras import require
from atoll.base.logs import get
from atoll.settings.sections import MonitorSettings
from atoll.wire.messages import Event, RunRecord
from atoll_monitor.metrics import families
from atoll_monitor.monitored_run import MonitoredRun
from atoll_monitor.records.journal import RecordJournal

if TYPE_CHECKING:
    from atoll_monitor.records.traces import RoundTracer

log = get(__name__)

FLUSH_S: Final = 1.0
FOLDER: Final = Path("runs/monitor")
NONCE_SHOWN: Final = 8
PREFIX = "atoll_"


@dataclass(frozen=True, slots=True)
class CurveSample:
    """A sample for sinks: of which founding, at how many tokens of the run, and a number for each tag."""

    record: RunRecord
    tokens: int
    values: Mapping[str, float]


def sink_name(record: RunRecord) -> str:
    """Return the name of a founding's curves: two foundings of one run id would else lie in one curve, one over the other."""
    return f"{record.run}-{record.nonce[:NONCE_SHOWN]}"


class RecordKeeper:
    """The journal of a run, and its sinks."""

    def __init__(self, watched: MonitoredRun, settings: MonitorSettings) -> None:
        """Open the journal; sinks begin once the run is known. Raises as `RecordJournal`, and for a sink without extra."""
        for name in settings.sinks:
            require(name, name, f"the sink {name}")
        self._watched, self._settings = watched, settings
        self._folder = settings.folder or FOLDER
        self._journal = RecordJournal(self._folder, watched.run, settings.files)
        self._sinks: dict[str, MetricSink] = {}
        self._tracer = self._make_tracer()
        self._nonce: str | None = None
        self._step = -1
        watched.dropped_lines = lambda: self._journal.dropped_lines
        watched.view.observers.append(self.on_event)

    def on_event(self, event: Event) -> None:
        """Take an entry of the event log."""
        self._journal.put_event(event, self._watched.read_up_to())
        if self._tracer is not None:
            self._tracer.on_event(event)

    async def keep(self) -> None:
        """Write until cancelled, and then what is left."""
        loop, clock = asyncio.get_running_loop(), self._watched.clock
        next_s = clock.monotonic() + self._settings.sample_s
        with ThreadPoolExecutor(1, "records") as thread:
            try:
                while True:
                    await asyncio.sleep(FLUSH_S)
                    sample = None
                    if clock.monotonic() >= next_s:
                        next_s = clock.monotonic() + self._settings.sample_s
                        sample = self._take_sample()
                    await loop.run_in_executor(thread, self._write, self._journal.take_lines(), sample)
            finally:
                thread.submit(self._close)

    def _take_sample(self) -> CurveSample | None:
        """Put a sample of all metrics into the journal, and return it for the sinks; None while no run is known.

        Called in the event loop: what the thread writes later must be of one founding, and the loop may forget it meanwhile.
        """
        watched = self._watched
        if watched.record is None:
            return None
        metrics = list(families(watched))
        self._journal.put("metrics", {"at_s": watched.clock.wall(), "values": samples_by_name(metrics)})
        return (
            CurveSample(watched.record, watched.view.run_tokens, samples_by_tag(metrics))
            if self._settings.sinks
            else None
        )

    def _write(self, lines: list[bytes], sample: CurveSample | None) -> None:
        self._journal.write(lines)
        if sample is None:
            return
        if self._nonce != sample.record.nonce:
            self._end_sinks()
            self._nonce, self._step, self._sinks = sample.record.nonce, -1, self._begin_sinks(sample.record)
        if sample.tokens < self._step:
            return  # a sink takes no step back, and a view that forgets the oldest lives of a learner knows fewer tokens
        self._step = sample.tokens
        for name, sink in list(self._sinks.items()):
            try:
                sink.log(sample.tokens, sample.values)
            except Exception as error:  # noqa: BLE001  (whatever a library raises)
                log.warning("sink.failed", sink=name, reason=str(error))
                del self._sinks[name]

    def _begin_sinks(self, record: RunRecord) -> dict[str, MetricSink]:
        """Begin every sink that was asked for; one that cannot is told of."""
        config: dict[str, Any] = msgspec.to_builtins(record.protocol)
        found: dict[str, MetricSink] = {}
        for name in self._settings.sinks:
            try:
                found[name] = SINKS[name](self._folder, sink_name(record), config)
            except Exception as error:  # noqa: BLE001  (whatever a library raises)
                log.warning("sink.failed", sink=name, reason=str(error))
        return found

    def _make_tracer(self) -> RoundTracer | None:
        """Return what tells a collector of rounds, if there is one to tell."""
        if not self._settings.traces:
            return None
        from atoll_monitor.records.traces import tracer_to  # noqa: PLC0415  (an extra)

        return tracer_to(self._settings.traces, self._watched.run, self._watched.clock.wall())

    def _close(self) -> None:
        self._journal.close()
        if self._tracer is not None:
            self._tracer.close()
        self._end_sinks()

    def _end_sinks(self) -> None:
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001  (whatever a library raises)
                log.warning("sink.failed", sink=name, reason=str(error))
        self._sinks = {}


def samples_by_name(families: Iterable[Metric]) -> dict[str, float]:
    """Return every sample by its name and labels, as in `atoll_learner_loss{learner="a"}`, without the run."""
    found = {}
    for family in families:
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items() if key != "run" and value)
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = float(sample.value)
    return found


def samples_by_tag(families: Iterable[Metric]) -> dict[str, float]:
    """Return every sample that is a curve, by its tag; what is no finite number is left out."""
    found = {}
    for family in families:
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_info")) and math.isfinite(sample.value):
                found[_tag(sample.name, sample.labels)] = float(sample.value)
    return found


def _tag(name: str, labels: Mapping[str, str]) -> str:
    rest = [value.replace("/", "_") for key, value in labels.items() if key != "run" and value]
    return "/".join((name.removeprefix(PREFIX), *rest))


class MetricSink(Protocol):
    """Takes samples of all curves, in the order of their steps; may block and may raise anything."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take a sample: a number for each tag."""

    def close(self) -> None:
        """Write what is not written yet."""


class WandbSink:
    """A run of W&B below `folder/wandb`, offline; `config` is what it shows as the run's settings."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        """Begin it."""
        import wandb  # noqa: PLC0415  (an extra)

        # Without its own view of this process: console and system are the monitor's, which nobody asked for.
        settings = wandb.Settings(console="off", x_disable_stats=True, silent=True)
        self._run = wandb.init(
            project="atoll", name=name, dir=str(folder), config=dict(config), mode="offline", settings=settings
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take a sample."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is not written yet."""
        self._run.finish()


class TensorBoardSink:
    """Event files for TensorBoard in `folder/tensorboard/NAME`."""

    def __init__(self, folder: Path, name: str, _config: Mapping[str, Any]) -> None:
        """Begin a file."""
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415  (an extra)
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder / "tensorboard" / name))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take a sample."""
        points = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=points)))

    def close(self) -> None:
        """Write what is not written yet."""
        self._writer.close()


class TrackioSink:
    """A run of trackio, where trackio keeps its own: `TRACKIO_DIR`, or the cache of Hugging Face."""

    def __init__(self, _folder: Path, name: str, config: Mapping[str, Any]) -> None:
        """Begin it."""
        import trackio  # noqa: PLC0415  (an extra)

        # Curves of the run, and none of this machine.
        self._run = trackio.init(
            project="atoll",
            name=name,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take a sample."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is not written yet."""
        self._run.finish()  # type: ignore[no-untyped-call]


SINKS: Final[Mapping[str, Callable[[Path, str, Mapping[str, Any]], MetricSink]]] = {
    "wandb": WandbSink,
    "tensorboard": TensorBoardSink,
    "trackio": TrackioSink,
}
