"""Keeps the records of a run while its monitor lives: events as they come, a sample of all metrics at a regular pace.

Nothing here ends the monitor once it serves: a sink that fails is told of once and left alone from then on, and a disk that is
full costs lines (`atoll_monitor_dropped_lines_total`). Files are written in one thread, in the order of what they hold.

A run that is founded anew under the same id is another run: the sinks of the former one end, and it has sinks of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from atoll.base.extras import require
from atoll.base.logs import get
from atoll.settings.sections import MonitorSettings
from atoll.wire.messages import Event, RunRecord
from atoll_monitor.metrics import families
from atoll_monitor.records.journal import RecordJournal
from atoll_monitor.records.sampling import named, tagged
from atoll_monitor.records.sinks import SINKS, MetricSink
from atoll_monitor.watched import Watched

if TYPE_CHECKING:
    from atoll_monitor.records.traces import RoundTracer

log = get(__name__)

FLUSH_S: Final = 1.0
FOLDER: Final = Path("runs/monitor")
NONCE_SHOWN: Final = 8


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

    def __init__(self, watched: Watched, settings: MonitorSettings) -> None:
        """Open the journal; sinks begin once the run is known. Raises as `RecordJournal`, and for a sink without extra."""
        for name in settings.sinks:
            require(name, name, f"the sink {name}")
        self._watched, self._settings = watched, settings
        self._folder = settings.folder or FOLDER
        self._journal = RecordJournal(self._folder, watched.run, settings.files)
        self._sinks: dict[str, MetricSink] = {}
        self._tracer = self._traced()
        self._nonce: str | None = None
        self._step = -1
        watched.dropped_lines = lambda: self._journal.dropped
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
                        sample = self._sampled()
                    await loop.run_in_executor(thread, self._write, self._journal.taken(), sample)
            finally:
                thread.submit(self._close)

    def _sampled(self) -> CurveSample | None:
        """Put a sample of all metrics into the journal, and return it for the sinks; None while no run is known.

        Called in the event loop: what the thread writes later must be of one founding, and the loop may forget it meanwhile.
        """
        watched = self._watched
        if watched.record is None:
            return None
        told = list(families(watched))
        self._journal.put("metrics", {"at_s": watched.clock.wall(), "values": named(told)})
        return CurveSample(watched.record, watched.view.run_tokens, tagged(told)) if self._settings.sinks else None

    def _write(self, lines: list[bytes], sample: CurveSample | None) -> None:
        self._journal.write(lines)
        if sample is None:
            return
        if self._nonce != sample.record.nonce:
            self._end_sinks()
            self._nonce, self._step, self._sinks = sample.record.nonce, -1, self._begun(sample.record)
        if sample.tokens < self._step:
            return  # a sink takes no step back, and a view that forgets the oldest lives of a learner knows fewer tokens
        self._step = sample.tokens
        for name, sink in list(self._sinks.items()):
            try:
                sink.log(sample.tokens, sample.values)
            except Exception as error:  # noqa: BLE001  (whatever a library raises)
                log.warning("sink.failed", sink=name, reason=str(error))
                del self._sinks[name]

    def _begun(self, record: RunRecord) -> dict[str, MetricSink]:
        """Begin every sink that was asked for; one that cannot is told of."""
        config: dict[str, Any] = msgspec.to_builtins(record.protocol)
        found: dict[str, MetricSink] = {}
        for name in self._settings.sinks:
            try:
                found[name] = SINKS[name](self._folder, sink_name(record), config)
            except Exception as error:  # noqa: BLE001  (whatever a library raises)
                log.warning("sink.failed", sink=name, reason=str(error))
        return found

    def _traced(self) -> RoundTracer | None:
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
