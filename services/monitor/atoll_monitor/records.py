"""Records of a run while its monitor lives: a journal of events and metrics, and sinks that draw curves.

The journal has every entry of the event log and a sample of every metric, as lines of JSON, in a folder that stays bounded:

    FOLDER/RUN.jsonl                    what is being written
    FOLDER/RUN.000001.jsonl.zst         what was written before, compressed; the oldest are removed

An event has its number in the event log. A journal that goes on after its monitor was killed skips what it has, though a
monitor reads the log from its beginning. A run founded anew numbers from 1 again, at later times, so both are compared.

Nothing here ends the monitor once it serves: a sink that fails is logged once and left alone from then on, and a disk that is
full costs lines (`atoll_monitor_dropped_lines_total`). Files are written in one thread, in the order of what they hold.

A sink gets curves: W&B (offline), TensorBoard, trackio; each is an extra, loaded when a setting names it. All write files on
this machine and speak to nobody. Their step is the number of tokens that the run has trained. A sink has one curve a tag,
`learner_loss/a` or `round_phase_seconds_sum/merge`: the values of the labels without their names and without the run. It holds
one founding of a run, under a name of its own (`RUN-1a2b3c4d`), and goes on under it when the monitor begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import zstandard
from prometheus_client.core import Metric

from atoll.base.errors import InUse, SettingsError
from atoll.base.extras import require
from atoll.base.files import hold
from atoll.base.logs import get
from atoll.settings.sections import MonitorSettings
from atoll.wire.events import EventFields
from atoll.wire.messages import Event, RunRecord
from atoll_monitor.metrics import families
from atoll_monitor.monitored_run import MonitoredRun

if TYPE_CHECKING:
    from atoll_monitor.traces import RoundTracer

log = get(__name__)

FLUSH_S: Final = 1.0
FOLDER: Final = Path("runs/monitor")
NONCE_SHOWN: Final = 8
PREFIX = "atoll_"
FILE_BYTES_MAX: Final = 32 << 20
WAITING_BYTES_MAX: Final = 64 << 20
_ENCODER: Final = msgspec.json.Encoder()


class _Place(msgspec.Struct):
    sequence: int
    newest_s: float


class RecordJournal:
    """The files of one run's journal; only `write` and `close` touch them, and may run in a thread of their own."""

    def __init__(self, folder: Path, run: str, files_max: int, file_bytes_max: int = FILE_BYTES_MAX) -> None:
        """Open it, and find what it holds; `files_max` compressed files are kept, of files of `file_bytes_max`.

        Raises:
            SettingsError: the folder, made if need be, cannot be written.
            InUse: another monitor writes this journal.
        """
        self._folder, self._run = folder, run
        self._files_max, self._file_bytes_max = files_max, file_bytes_max
        self._path = folder / f"{run}.jsonl"
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._too_many = self._unwritten = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = hold(folder / f".{run}.lock")
            if self._lock is None:
                raise InUse("another monitor writes this journal", got=self._path, todo="set monitor.folder")
            self._file = self._open()
        except OSError as error:
            raise SettingsError(
                "the monitor cannot write its journal",
                got=f"{error.filename or folder}: {error.strerror}",
                todo="set monitor.folder to a folder that it may write",
            ) from error
        self._sequence, self._newest_s = self._last_place()

    def put_event(self, event: Event, sequence: int) -> None:
        """Write down an entry of the event log, unless it is here already."""
        if sequence <= self._sequence and event.at_s <= self._newest_s:
            return
        self._sequence, self._newest_s = sequence, max(event.at_s, self._newest_s)
        entry = {"event": event.kind, "who": event.who, "at_s": event.at_s, "fields": event.fields}
        self.put("event", {**entry, "sequence": sequence, "newest_s": self._newest_s})

    def put(self, kind: str, fields: dict[str, Any]) -> None:
        """Write down a line."""
        line = _ENCODER.encode({"kind": kind, "run": self._run, **fields}) + b"\n"
        if self._waiting_bytes + len(line) > WAITING_BYTES_MAX:
            self._too_many += 1
            return
        self._waiting.append(line)
        self._waiting_bytes += len(line)

    @property
    def dropped_lines(self) -> int:
        """Return how many lines are missing."""
        return self._too_many + self._unwritten

    def take_lines(self) -> list[bytes]:
        """Return the lines that wait, which then wait no more."""
        lines, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return lines

    def write(self, lines: list[bytes]) -> None:
        """Write lines. A disk that refuses them costs these and nothing else."""
        whole_bytes = self._file.seek(0, 2)
        try:
            left = memoryview(b"".join(lines))
            while left:
                left = left[self._file.write(left) :]
            if self._file.tell() >= self._file_bytes_max:
                self._rotate()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(whole_bytes)
            self._unwritten += len(lines)
            log.warning("journal.unwritten", lines=len(lines), reason=str(error))

    def close(self) -> None:
        """Write what waits, and let another monitor have it."""
        self.write(self.take_lines())
        self._file.close()
        if self._lock is not None:
            self._lock.close()

    def compressed_files(self) -> list[Path]:
        """Return the compressed files, the oldest first."""
        name = re.compile(rf"{re.escape(self._run)}\.\d{{6}}\.jsonl\.zst")
        return sorted(path for path in self._folder.iterdir() if name.fullmatch(path.name))

    def _open(self) -> FileIO:
        """Return the file, at its end, without what a killed monitor left: half a line, or what it has just compressed."""
        file = FileIO(self._path, "a+")
        size = file.seek(0, 2)
        if size >= self._file_bytes_max and self._is_compressed(file):
            size = 0
        while size:
            step = min(size, 1 << 16)
            file.seek(size - step)
            if (end := file.read(step).rfind(b"\n")) >= 0:
                size += end + 1 - step
                break
            size -= step
        file.truncate(size)
        return file

    def _is_compressed(self, file: FileIO) -> bool:
        """Return whether the newest compressed file holds all of this one: its monitor died before it emptied the file."""
        file.seek(0)
        for path in self.compressed_files()[-1:]:
            try:
                with path.open("rb") as former, zstandard.ZstdDecompressor().stream_reader(former) as reader:
                    while chunk := reader.read(1 << 20):
                        if file.read(len(chunk)) != chunk:
                            return False
                    return not file.read(1)
            except (OSError, zstandard.ZstdError):
                return False
        return False

    def _rotate(self) -> None:
        numbers = [int(path.name.split(".")[-3]) for path in self.compressed_files()]
        into = self._folder / f"{self._run}.{max(numbers, default=0) + 1:06}.jsonl.zst"
        draft = into.with_suffix(".new")
        with draft.open("wb") as compressed:
            self._file.seek(0)
            zstandard.ZstdCompressor(level=3).copy_stream(self._file, compressed)
        draft.replace(into)
        self._file.truncate(0)
        for path in self.compressed_files()[: -self._files_max]:
            path.unlink(missing_ok=True)
        log.info("journal.rotated", file=into.name, size_bytes=into.stat().st_size)

    def _last_place(self) -> tuple[int, float]:
        """Return the number of the newest event that is here, and the latest time of any."""
        found = (0, 0.0)
        with self._path.open(encoding="utf-8", errors="replace") as present:
            for line in chain(self._lines_of_former(), present):
                if line.startswith('{"kind":"event"'):
                    with contextlib.suppress(msgspec.MsgspecError):  # a line that somebody has edited
                        place = msgspec.json.decode(line, type=_Place)
                        found = place.sequence, place.newest_s
        return found

    def _lines_of_former(self) -> Iterator[str]:
        for path in self.compressed_files()[-1:]:
            try:
                with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
                    yield from TextIOWrapper(reader, encoding="utf-8", errors="replace")
            except (OSError, zstandard.ZstdError) as error:
                log.warning("journal.damaged", file=path.name, reason=str(error))


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

    def on_event(self, event: Event, fields: EventFields | None) -> None:
        """Take an entry of the event log."""
        self._journal.put_event(event, self._watched.read_up_to())
        if self._tracer is not None:
            self._tracer.on_event(event, fields)

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
            self._nonce, self._step = sample.record.nonce, -1
            self._begin_sinks(sample.record)
        if sample.tokens < self._step:
            return  # a sink takes no step back, and a view that forgets the oldest lives of a learner knows fewer tokens
        self._step = sample.tokens
        for name, sink in list(self._sinks.items()):
            with self._leave_alone_if_failed(name):
                sink.log(sample.tokens, sample.values)

    def _begin_sinks(self, record: RunRecord) -> None:
        config: dict[str, Any] = msgspec.to_builtins(record.protocol)
        for name in self._settings.sinks:
            with self._leave_alone_if_failed(name):
                self._sinks[name] = SINKS[name](self._folder, sink_name(record), config)

    @contextlib.contextmanager
    def _leave_alone_if_failed(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  (whatever a library raises)
            log.warning("sink.failed", sink=name, reason=str(error))
            self._sinks.pop(name, None)

    def _make_tracer(self) -> RoundTracer | None:
        if not self._settings.traces:
            return None
        from atoll_monitor.traces import tracer_to  # noqa: PLC0415  (an extra)

        return tracer_to(self._settings.traces, self._watched.run, self._watched.clock.wall())

    def _close(self) -> None:
        self._journal.close()
        if self._tracer is not None:
            self._tracer.close()
        self._end_sinks()

    def _end_sinks(self) -> None:
        for name, sink in list(self._sinks.items()):
            with self._leave_alone_if_failed(name):
                sink.close()
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
