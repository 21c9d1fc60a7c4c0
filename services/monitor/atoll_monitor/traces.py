"""Traces of rounds for OpenTelemetry, made from the event log (ADR 51): one trace a commit.

    round 3.17 ─┬─ wait for the quorum ── grace ── queued ── merge ── commit
                └─ contribution of a:  upload ── read

A shard writes with each commit how long every phase took and when each contribution came, so messages carry nothing more. The
ids of a trace and of its spans follow from what they are of: a monitor that tells of a round once more tells the same again.
Times are by the clock of the shard that made the commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, set_span_in_context

from atoll.wire.events import Contributor, EventFields, RoundEvent
from atoll.wire.messages import Event
from atoll_monitor.monitored_run import PHASES

EXPORT_S: Final = 5
NS: Final = 1e9


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """A span before it is told, and those inside it. It has a name, begins and ends in seconds since the epoch.

    `place` tells it from others of its name in the same span; its id follows from it.
    """

    name: str
    begin_s: float
    end_s: float
    known: dict[str, str | int | float]
    inside: tuple[PlannedSpan, ...] = field(default=())
    place: str = ""


def plan_spans(event: Event, line: RoundEvent) -> PlannedSpan:
    """Return the spans of a commit."""
    phases = line.phases
    at_s = begin_s = event.at_s - sum(phases)
    inside = []
    for name, duration_s in zip(PHASES, phases, strict=True):
        inside.append(PlannedSpan(name, at_s, at_s + duration_s, {}))
        at_s += duration_s
    inside += [_contribution(one, begin_s) for one in line.contributors]
    known: dict[str, str | int | float] = {
        "atoll.fragment": line.fragment,
        "atoll.version": line.version,
        "atoll.shard": event.who,
        "atoll.end": line.end,
        "atoll.tokens": line.tokens,
        "atoll.cause_id": line.cause_id,
    }
    return PlannedSpan(f"round {line.fragment}.{line.version}", begin_s, event.at_s, known, tuple(inside))


def _contribution(one: Contributor, begin_s: float) -> PlannedSpan:
    """Return a contribution from its upload until it was read; without notes it is a moment at the round's beginning."""
    arrived_s = begin_s + (one.arrived_s or 0.0)
    read_s = arrived_s + max(0.0, one.read_s or 0.0)
    sent_s = arrived_s - max(0.0, one.upload_s)
    known: dict[str, str | int | float] = {
        "atoll.learner": one.learner,
        "atoll.incarnation": one.incarnation,
        "atoll.push": one.push,
        "atoll.age": one.age,
        "atoll.weight": one.weight,
        "atoll.cause_id": one.cause_id,
    }
    inside = (PlannedSpan("upload", sent_s, arrived_s, {}), PlannedSpan("read", arrived_s, read_s, {}))
    # A learner may have two contributions in one round: the push tells them apart.
    name, place = f"contribution of {one.learner}/{one.incarnation}", str(one.push)
    return PlannedSpan(name, sent_s, read_s, known, inside, place)


class DerivedIds(IdGenerator):
    """Ids that follow from what a span is of: `path` names the span that is begun next, from the trace down."""

    def __init__(self) -> None:
        self.path: tuple[str, ...] = ()

    def generate_trace_id(self) -> int:
        """Return the id of the trace, never 0."""
        return _hash_path(16, self.path[:1]) or 1

    def generate_span_id(self) -> int:
        """Return the id of the span, never 0."""
        return _hash_path(8, self.path) or 1


def _hash_path(size: int, path: tuple[str, ...]) -> int:
    return int.from_bytes(blake2b("\0".join(path).encode(), digest_size=size).digest(), "big")


class RoundTracer:
    """Tells of rounds to an OpenTelemetry collector; a collector that is away costs these traces and nothing else."""

    def __init__(self, run: str, since_s: float, processor: SpanProcessor) -> None:
        """Tell by `processor` of commits since a moment, in seconds since the epoch."""
        self._run, self._since_s, self._ids = run, since_s, DerivedIds()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "atoll", "atoll.run": run}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("atoll_monitor")

    def on_event(self, event: Event, fields: EventFields | None) -> None:
        """Take an entry of the event log; those before the tracer began were told by a former one, or by nobody."""
        if isinstance(fields, RoundEvent) and event.at_s >= self._since_s:
            path = (f"{self._run} {fields.fragment}.{fields.version} {event.at_s}",)
            self._tell(plan_spans(event, fields), path, None)

    def _tell(self, span: PlannedSpan, path: tuple[str, ...], parent: Span | None) -> None:
        self._ids.path = path
        context: Any = None if parent is None else set_span_in_context(parent)
        started = self._tracer.start_span(
            span.name, context, attributes=span.known, start_time=round(span.begin_s * NS)
        )
        for one in span.inside:
            self._tell(one, (*path, one.name, one.place), started)
        started.end(round(span.end_s * NS))

    def close(self) -> None:
        """Tell what is left."""
        self._provider.shutdown()


def tracer_to(url: str, run: str, since_s: float) -> RoundTracer:
    """Return what tells of rounds to the collector at `url`, by OTLP over HTTP, from a thread of its own."""
    return RoundTracer(run, since_s, BatchSpanProcessor(OTLPSpanExporter(url, timeout=EXPORT_S)))
