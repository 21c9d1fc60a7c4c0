"""Keeps the records of a run while its monitor lives: events as they come, a sample of all metrics at a regular pace.

Nothing here ends the monitor once it serves: a sink that fails is told of once and left alone from then on, and a disk that is
full costs lines (`atoll_monitor_dropped_lines_total`). Files are written in one thread, in the order of what they hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from atoll.base.extras import require
from atoll.base.logs import get
from atoll.settings.sections import MonitorSettings
from atoll.wire.messages import Event
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


class RecordKeeper:
    """The journal of a run, and its sinks."""

    def __init__(self, watched: Watched, settings: MonitorSettings) -> None:
        """Open the journal; sinks begin once the run is known. Raises as `RecordJournal`, and for a sink without extra."""
        for name in settings.sinks:
            require(name, name, f"the sink {name}")
        self._watched, self._settings = watched, settings
        self._folder = settings.folder or FOLDER
        self._journal = RecordJournal(self._folder, watched.run, settings.files)
        self._sinks: dict[str, MetricSink] | None = None
        self._tracer = self._traced()
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
                    curves = None
                    if clock.monotonic() >= next_s:
                        next_s = clock.monotonic() + self._settings.sample_s
                        curves = self._sampled()
                    await loop.run_in_executor(thread, self._write, self._journal.taken(), curves)
            finally:
                thread.submit(self._close)

    def _sampled(self) -> dict[str, float] | None:
        """Put a sample of all metrics into the journal, and return it for the sinks; None while no run is known."""
        watched = self._watched
        if watched.record is None:
            return None
        told = list(families(watched))
        self._journal.put("metrics", {"at_s": watched.clock.wall(), "values": named(told)})
        return tagged(told) if self._settings.sinks else None

    def _write(self, lines: list[bytes], curves: Mapping[str, float] | None) -> None:
        self._journal.write(lines)
        if curves is None:
            return
        if self._sinks is None:
            self._sinks = self._begun()
        step = self._watched.view.run_tokens
        if step < self._step:
            return  # the event log is being read again from its beginning
        self._step = step
        for name, sink in list(self._sinks.items()):
            try:
                sink.log(step, curves)
            except Exception as error:  # noqa: BLE001  (whatever a library raises)
                log.warning("sink.failed", sink=name, reason=str(error))
                del self._sinks[name]

    def _begun(self) -> dict[str, MetricSink]:
        """Begin every sink that was asked for; one that cannot is told of."""
        record = self._watched.record
        config: dict[str, Any] = {} if record is None else msgspec.to_builtins(record.protocol)
        found: dict[str, MetricSink] = {}
        for name in self._settings.sinks:
            try:
                found[name] = SINKS[name](self._folder, self._watched.run, config)
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
        for name, sink in (self._sinks or {}).items():
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001  (whatever a library raises)
                log.warning("sink.failed", sink=name, reason=str(error))
