"""Traces of rounds: what the event log says of a commit, as spans; told to a collector over HTTP as OpenTelemetry's own."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from atoll.run.history import History
from atoll.wire.messages import Event
from atoll_monitor.traces import RoundTracer, tracer_to
from support.collectors import collecting
from support.events import event


def commit(at_s: float = 1000.0, version: int = 7) -> Event:
    """Return a round of 3 s, which has two contributions: one with its shard's notes, one without."""
    noted = {"learner": "a", "incarnation": 2, "age": 0, "tokens": 50, "weight": 0.5, "cause_id": "c1"}
    noted |= {"arrived_s": 0.5, "read_s": 0.25, "upload_s": 2.0}
    plain = {"learner": "b", "incarnation": 1, "age": 1, "tokens": 50, "weight": 0.5}
    phases = {"quorum_wait_s": 0.5, "waited_s": 1.5, "queued_s": 0.25, "merge_s": 0.25, "commit_s": 1.0}
    told = {"fragment": 3, "version": version, "contributors": [noted, plain], "end": "grace over", "cause_id": "c9"}
    return event("round", "shard-0", at_s, **told, **phases)


def told(*events: Event, since_s: float = 0.0) -> tuple[ReadableSpan, ...]:
    exporter = InMemorySpanExporter()
    tracer = RoundTracer("r", since_s, SimpleSpanProcessor(exporter))
    for one in events:
        tracer.on_event(one, History().on_event(one))
    found = exporter.get_finished_spans()
    tracer.close()
    return found


def times(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def test_a_commit_is_one_trace_with_its_phases_and_contributions() -> None:
    """Phases follow each other up to the commit; a contribution is what its learner and its shard noted."""
    spans = {span.name: span for span in told(commit()) if span.name not in {"upload", "read"}}
    root = spans["round 3.7"]

    assert {name: times(span) for name, span in spans.items()} == {
        "round 3.7": (997.0, 1000.0),
        "quorum_wait": (997.0, 997.5),
        "grace": (997.5, 998.5),
        "queued": (998.5, 998.75),
        "merge": (998.75, 999.0),
        "commit": (999.0, 1000.0),
        "contribution of a/2": (995.5, 997.75),
        "contribution of b/1": (997.0, 997.0),
    }
    assert {span.context.trace_id for span in spans.values() if span.context} == {root.context.trace_id}
    assert {span.parent and span.parent.span_id for span in spans.values()} == {None, root.context.span_id}
    assert dict(root.attributes or {})["atoll.cause_id"] == "c9"
    assert dict(spans["contribution of a/2"].attributes or {})["atoll.learner"] == "a"
    assert dict(root.resource.attributes)["atoll.run"] == "r"


def test_a_round_that_is_told_again_is_the_same_and_another_one_is_not() -> None:
    """A monitor that is started anew reads the log once more; a collector keeps one span of an id."""
    first, again, later = told(commit()), told(commit()), told(commit(version=8))
    ids = [{(span.context.trace_id, span.context.span_id) for span in spans} for spans in (first, again, later)]

    assert ids[0] == ids[1]
    assert len(ids[0]) == len(first) == 12
    assert not ids[0] & ids[2]
    assert {trace for trace, _ in ids[0]} != {trace for trace, _ in ids[2]}


def test_what_was_before_is_not_told_and_what_is_malformed_says_nothing() -> None:
    """A monitor does not tell of a whole month when it is started; peers may write anything."""
    wrong = event("round", "shard-0", 1000.0, fragment="x")

    assert told(commit(at_s=10.0), event("joined", "a", 1000.0, incarnation=1), wrong, since_s=999.0) == ()


def test_a_collector_is_told_over_http() -> None:
    with collecting() as (url, found):
        tracer = tracer_to(url, "r", 0.0)
        tracer.on_event(commit(), History().on_event(commit()))
        tracer.close()

    assert len(found) == 12
    assert {span.name for span in found} >= {"round 3.7", "upload", "read"}
    assert len({span.trace_id for span in found}) == 1
