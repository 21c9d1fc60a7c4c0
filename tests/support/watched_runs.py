"""Runs as a monitor would know them, built without a broker: for tests of metrics, rules, dashboards and sinks."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from atoll.bus.interface import StreamState
from atoll.protocol.events import PushKey
from atoll.wire.messages import Beat, LearnerState
from atoll.wire.traffic import LinkTraffic
from atoll_monitor.http_server import RunCollector
from atoll_monitor.monitored_run import BrokerFigures, DiskFigures, MonitoredRun
from support.clocks import SetClock
from support.events import event, heartbeat
from support.founded_run import run_record

Sample = tuple[str, frozenset[tuple[str, str]]]


def watched_run() -> tuple[MonitoredRun, SetClock]:
    """Return a run of which nothing is known, and the clock of its times."""
    clock = SetClock()
    return MonitoredRun("r", clock), clock


def beat(learner: str, incarnation: int = 1, *, state: LearnerState = "training", step: int = 10) -> Beat:
    moved = LinkTraffic(payload_up=10, payload_down=20, wire_up=15, wire_down=30)
    known = {"incarnation": incarnation, "state": state, "step": step, "tokens": step * 100}
    return heartbeat(learner, **known, lag_versions=3, moved=moved)


def take_round(watched: MonitoredRun, fragment: int, version: int, at_s: float, **more: object) -> None:
    contributors = [{"learner": "a", "incarnation": 1, "age": age, "tokens": 50, "weight": 0.5} for age in (0, 2)]
    fields: dict[str, object] = {
        "fragment": fragment,
        "version": version,
        "contributors": contributors,
        "tokens": 100,
        "bytes_up": 1000,
        "bytes_down": 400,
        "quorum_wait_s": 0.2,
        "waited_s": 0.7,
        "merge_s": 0.03,
        "commit_s": 2.0,
        "end": "grace over",
    }
    watched.view.on_event(event("round", "shard-0", at_s, **(fields | more)))


def samples(watched: MonitoredRun) -> Mapping[Sample, float]:
    """Return every sample by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text_of_metrics(watched))
        for sample in family.samples
    }


def text_of_metrics(watched: MonitoredRun) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(watched))
    return generate_latest(registry).decode()


def full() -> MonitoredRun:
    """A run of which everything is known."""
    watched, clock = watched_run()
    watched.record, watched.answered_s = run_record("r"), clock.now_s
    watched.view.on_beat(beat("a"), clock.now_s)
    take_round(watched, 0, 1, 50.0)
    watched.view.on_event(
        event("refused", "shard-0", 1.0, refusals=[{**PushKey("a", 1, 0, 1)._asdict(), "reason": "stale"}])
    )
    watched.view.on_event(event("junk", "shard-0", 1.0, messages=2, reasons={"malformed": 2}))
    watched.view.on_event(event("validation", "evaluator", 1.0, run_tokens=100, bits_per_byte=3.5))
    watched.view.on_event(
        event("quarantined", "shard-0", 1.0, learner="a", incarnation=1, offences=3, reason="not_finite")
    )
    watched.streams = (StreamState("UPM", 12, 3400, 1 << 20, 3, 2),)
    watched.brokers = {"hub:8222": BrokerFigures(memory_bytes=1.0), "gone:8222": None}
    watched.disks = {"/data": DiskFigures(100, 10)}
    watched.certificates = {"hub:4222": 2e9}
    return watched
