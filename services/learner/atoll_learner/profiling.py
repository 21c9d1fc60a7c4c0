"""A profile of some steps: the device's and XLA's work, and beside it what the island did, in one file for Perfetto.

JAX's profiler knows nothing of an island, whose pushes and fetches are coroutines that overlap. Those are kept as spans
(`atoll.base.spans`) and added as asynchronous slices of the Chrome trace format; one mark is known on both clocks.

    <folder>/<learner>-<incarnation>.json.gz      open it in https://ui.perfetto.dev
    <folder>/<learner>-<incarnation>/             the same from JAX alone, as XProf and TensorBoard read it

Recording begins after `SETTLED_STEPS`, when everything is compiled. Rounds are marked where their result was adopted.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import jax

from atoll.base import spans
from atoll.base.errors import SettingsError, on_one_line
from atoll.base.files import write_whole
from atoll.base.logs import get

log = get(__name__)

SETTLED_STEPS: Final = 8
CLOCK: Final = "atoll.clock"
ISLAND_PID: Final = 1
"""The island's place in the trace. JAX's own processes have numbers from 701 on."""


class StepProfiler:
    """Records `steps` steps of a learner into a folder; with no folder it does nothing."""

    def __init__(self, folder: Path | None, steps: int, name: str) -> None:
        self._folder, self._last, self._name = folder, SETTLED_STEPS + steps, name
        self._mark_s: float | None = None
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SettingsError(
                    "no profile can be written there",
                    got=f"learner.profile = {folder}: {error.strerror}",
                    todo="name a folder",
                ) from error

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run step `number`, counted from 0, and record it if it is one of those that are wanted."""
        if self._folder is not None and number == SETTLED_STEPS:
            self._begin(self._folder)
        if self._mark_s is None:
            yield
            return
        with jax.profiler.StepTraceAnnotation("step", step_num=number), spans.span("step", number=number):
            yield
        if number + 1 == self._last:
            self.end()

    def _begin(self, folder: Path) -> None:
        options = jax.profiler.ProfileOptions()
        # A slice for every call of a Python function would bury the rest.
        options.python_tracer_level = 0
        jax.profiler.start_trace(folder / self._name, profiler_options=options)
        with jax.profiler.TraceAnnotation(CLOCK):
            self._mark_s = time.monotonic()
        spans.policy.log = deque(maxlen=spans.SPANS_MAX)

    def end(self) -> None:
        """Write what was recorded, if anything is being recorded. Where it cannot be written, training goes on without it."""
        kept, mark_s = spans.policy.log, self._mark_s
        if self._folder is None or kept is None or mark_s is None:
            return
        began_s = time.monotonic()
        spans.policy.log = self._mark_s = None
        try:
            path = self._written(self._folder, list(kept), mark_s)
        except Exception as error:  # noqa: BLE001  (a full disk is an error of JAX's own, or half a trace)
            log.warning(
                "profile.unwritten",
                folder=str(self._folder),
                reason=on_one_line(str(error)),
                todo="make room, or name another folder in learner.profile",
            )
            return
        log.info(
            "profile.written",
            file=str(path),
            bytes=path.stat().st_size,
            spans=len(kept),
            took_s=round(time.monotonic() - began_s, 3),
            todo="open it in https://ui.perfetto.dev",
        )

    def _written(self, folder: Path, kept: list[spans.Span], mark_s: float) -> Path:
        jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
        source = max((folder / self._name).glob("plugins/profile/*/*.trace.json.gz"))
        trace = json.loads(gzip.decompress(source.read_bytes()))
        trace["traceEvents"] += island_events(kept, mark_s, clock_us(trace), self._name)
        path = folder / f"{self._name}.json.gz"
        write_whole(path, gzip.compress(json.dumps(trace).encode()), path.with_suffix(".part"))
        return path


def clock_us(trace: dict[str, Any]) -> float:
    """Return when the mark was set on the trace's own clock, in microseconds."""
    return float(next(event["ts"] for event in trace["traceEvents"] if event.get("name") == CLOCK))


def island_events(kept: list[spans.Span], mark_s: float, mark_us: float, name: str) -> list[dict[str, Any]]:
    """Return spans as events of the Chrome trace format; `mark_s` and `mark_us` are one moment on both clocks."""
    made: list[dict[str, Any]] = [
        {"ph": "M", "pid": ISLAND_PID, "name": "process_name", "args": {"name": f"island {name}"}},
        {"ph": "M", "pid": ISLAND_PID, "name": "process_sort_index", "args": {"sort_index": -1}},
    ]
    for number, one in enumerate(kept):
        here = {"pid": ISLAND_PID, "tid": 0, "name": one.name, "cat": "island"}
        began_us, ended_us = (mark_us + 1e6 * (at_s - mark_s) for at_s in (one.began_s, one.ended_s))
        if one.began_s == one.ended_s:
            made.append({**here, "ph": "i", "s": "g", "ts": began_us, "args": one.facts})
        else:
            made.append({**here, "ph": "b", "id": number, "ts": began_us, "args": one.facts})
            made.append({**here, "ph": "e", "id": number, "ts": ended_us})
    return made
