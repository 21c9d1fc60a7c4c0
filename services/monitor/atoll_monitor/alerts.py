"""Alerts of a monitor: each rule once, as a condition that is both a query of Prometheus and a function of the metrics.

Prometheus wakes people by the metrics of the monitor; a page must not need one, so the monitor judges the same rules by itself.
`infra/monitor/alerts.yml` is made of these rules, and a test plays the cases of `alerts_test.yml` to them, as `promtool` does.

A condition's function takes a *reading*: all metrics at a moment. A rule *holds* once its condition has been so for `for_s`
without a break; until then it is *pending*. Nothing here reads a clock. A silence of the run's broker alone is told
once, by `AtollBrokerUnreachable`: the others ask for a broker that answers (`_require_heard_run`). A run that is over wakes
nobody: rules of the run ask for one that goes on (`_require_run`), those of machines do not.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from prometheus_client.core import Metric

from atoll.base.wording import DAY_S
from atoll.report.page_data import HoldingAlert

Labels = Mapping[str, str]
Found = Iterator[tuple[Labels, float]]
RATE_S: Final = 600.0
RATED: Final = "atoll_junk_messages_total"
"""The counter of whose pace a rule speaks: only this one is kept, for `RATE_S`."""
READINGS_MAX: Final = 256
HOLDING_MAX: Final = 64
COMMITS_S: Final = 900
FULL: Final = 0.8
DISK_FREE: Final = 0.1
JUNK_PER_S: Final = 0.1
CERTIFICATE_S: Final = 14 * DAY_S
MINUTE_S: Final = 60.0
ON_RUN: Final = "on (run, instance, job)"


@dataclass(frozen=True, slots=True)
class MetricReading:
    """The metrics at a moment, seconds since the epoch; `former` are the readings before it, oldest first."""

    at_s: float
    samples: Mapping[str, list[tuple[Labels, float]]]
    former: tuple[MetricReading, ...] = ()

    def all(self, name: str) -> list[tuple[Labels, float]]:
        """Return the samples of a metric with their labels."""
        return self.samples.get(name, [])

    def value(self, name: str) -> float | None:
        """Return the first sample of a metric, None if it has none."""
        return next((value for _, value in self.all(name)), None)

    def beside(self, name: str, labels: Labels) -> float | None:
        """Return the sample of another metric that has the same labels."""
        return next((value for other, value in self.all(name) if other == labels), None)


def reading_of(families: Iterable[Metric], at_s: float) -> MetricReading:
    """Return a reading of metric families."""
    samples: dict[str, list[tuple[Labels, float]]] = {}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    return MetricReading(at_s, samples)


@dataclass(frozen=True, slots=True)
class AlertCondition:
    """The same condition twice: `query` of Prometheus, and `finds`, which yields labels and a value of each that is so."""

    query: str
    finds: Callable[[MetricReading], Found]


@dataclass(frozen=True, slots=True)
class ShownValue:
    """The form of a value in words: a function of Prometheus' templates, and the same here."""

    function: str
    text: Callable[[float], str]


def _duration(seconds: float) -> str:
    """Return a time as Prometheus writes one: 16m 0s."""
    whole = int(abs(seconds))
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s")]
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return ("-" if seconds < 0 else "") + " ".join(f"{count}{unit}" for count, unit in parts[first:])


NUMBER: Final = ShownValue("", lambda value: f"{value:.15g}")
PERCENTAGE: Final = ShownValue(" | humanizePercentage", lambda value: f"{100.0 * value:.4g}%")
DURATION: Final = ShownValue(" | humanizeDuration", _duration)


@dataclass(frozen=True, slots=True)
class AlertRule:
    """A rule of a group: its condition, for how long that has to be so, and its words.

    `summary` may name labels and `{value}`, in the form of `shown`. `tells_more` says where to look.
    """

    group: str
    name: str
    severity: str
    condition: AlertCondition
    summary: str
    tells_more: str = ""
    for_s: float = 0.0
    shown: ShownValue = NUMBER

    def for_prometheus(self) -> dict[str, Any]:
        """Return the rule as Prometheus reads it."""
        labels = re.sub(r"\{(?!value\})(\w+)\}", r"{{ $labels.\1 }}", self.summary)
        annotations = {"summary": labels.replace("{value}", f"{{{{ $value{self.shown.function} }}}}")}
        if self.tells_more:
            annotations["description"] = self.tells_more
        return {
            "alert": self.name,
            "expr": self.condition.query,
            **({"for": f"{self.for_s / MINUTE_S:.0f}m"} if self.for_s else {}),
            "labels": {"severity": self.severity},
            "annotations": annotations,
        }


def prometheus_groups() -> dict[str, Any]:
    """Return all rules as a file of Prometheus has them, in plain values."""
    groups = groupby(RULES, lambda rule: rule.group)
    return {"groups": [{"name": name, "rules": [rule.for_prometheus() for rule in rules]} for name, rules in groups]}


@dataclass(slots=True)
class AlertJudge:
    """Judge of what holds, from one reading to the next."""

    rules: Sequence[AlertRule]
    holding: tuple[HoldingAlert, ...] = ()
    _since_s: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)
    _former: deque[MetricReading] = field(default_factory=lambda: deque(maxlen=READINGS_MAX))

    def take(self, reading: MetricReading) -> None:
        """Judge a reading."""
        while self._former and self._former[0].at_s < reading.at_s - RATE_S:
            self._former.popleft()
        judged = MetricReading(reading.at_s, reading.samples, tuple(self._former))
        self._former.append(MetricReading(reading.at_s, {RATED: reading.all(RATED)}))
        since_s: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        found = []
        for rule in self.rules:
            for labels, value in rule.condition.finds(judged):
                key = rule.name, frozenset(labels.items())
                began_s = since_s[key] = self._since_s.get(key, reading.at_s)
                words = {"value": rule.shown.text(value), **labels}
                found.append(
                    HoldingAlert(
                        rule.name,
                        rule.severity,
                        labels,
                        rule.summary.format_map(words),
                        rule.tells_more,
                        began_s,
                        pending=reading.at_s - began_s < rule.for_s,
                    )
                )
        self._since_s = since_s
        order = sorted(found, key=lambda alert: (alert.pending, alert.severity != "critical", alert.since_s))
        self.holding = tuple(order[:HOLDING_MAX])


def _equals(name: str, wanted: int) -> AlertCondition:
    return AlertCondition(
        f"{name} == {wanted}",
        lambda reading: ((labels, value) for labels, value in reading.all(name) if value == wanted),
    )


def _share(name: str, of: str, relation: str, bound: float) -> AlertCondition:
    """Return that a metric is above or below a share of another one of the same labels, which may be 0: no bound."""

    def finds(reading: MetricReading) -> Found:
        for labels, value in reading.all(name):
            whole = reading.beside(of, labels)
            if whole and (value / whole > bound if relation == ">" else value / whole < bound):
                yield labels, value / whole

    return AlertCondition(f"{name} / ({of} > 0) {relation} {bound:g}", finds)


def _paces(reading: MetricReading) -> Found:
    for labels, value in reading.all(RATED):
        known = [(each.at_s, count) for each in reading.former if (count := each.beside(RATED, labels)) is not None]
        if known and reading.at_s > known[0][0]:
            yield labels, max(0.0, value - known[0][1]) / RATE_S


def _deep_queues(reading: MetricReading) -> Found:
    fragments = len(reading.all("atoll_fragment_commits_total"))
    bound = max(1.0, reading.value("atoll_learners_live") or 0.0) * fragments
    return ((labels, value) for labels, value in reading.all("atoll_queue_depth") if fragments and value > bound)


NO_COMMITS: Final = AlertCondition(
    f"time() - (atoll_last_commit_timestamp_seconds or atoll_run_founded_timestamp_seconds) > {COMMITS_S}",
    lambda reading: (
        (labels, reading.at_s - at_s)
        for labels, at_s in reading.all("atoll_last_commit_timestamp_seconds")
        or reading.all("atoll_run_founded_timestamp_seconds")
        if reading.at_s - at_s > COMMITS_S
    ),
)
DROPS_MESSAGES: Final = AlertCondition(
    f"rate({RATED}[{RATE_S / MINUTE_S:.0f}m]) > {JUNK_PER_S:g}",
    lambda reading: ((labels, pace) for labels, pace in _paces(reading) if pace > JUNK_PER_S),
)
QUEUE_DEEP: Final = AlertCondition(
    "atoll_queue_depth > clamp_min(atoll_learners_live, 1) * count by (run, instance, job) (atoll_fragment_commits_total)",
    _deep_queues,
)
"""More contributions wait than each learner has one of for each fragment: shards cannot follow."""
COPY_BEHIND: Final = AlertCondition(
    "atoll_stream_copies_current < atoll_stream_copies",
    lambda reading: (
        (labels, value)
        for labels, value in reading.all("atoll_stream_copies_current")
        if (copies := reading.beside("atoll_stream_copies", labels)) is not None and value < copies
    ),
)
CERTIFICATE_ENDS: Final = AlertCondition(
    f"atoll_certificate_end_timestamp_seconds - time() < {CERTIFICATE_S:.0f}",
    lambda reading: (
        (labels, ends_s - reading.at_s)
        for labels, ends_s in reading.all("atoll_certificate_end_timestamp_seconds")
        if ends_s - reading.at_s < CERTIFICATE_S
    ),
)
MONITOR_DOWN: Final = AlertCondition('up{job="atoll"} == 0', lambda _: iter(()))
"""Prometheus alone can know this: a monitor that is down judges nothing."""


def _and(condition: AlertCondition, metrics: Mapping[str, int]) -> AlertCondition:
    """Return a condition that also wants some metrics of the run at these values."""
    wanted = " and ".join(f"{name} == {value}" for name, value in metrics.items())

    def finds(reading: MetricReading) -> Found:
        so = all(reading.value(name) == value for name, value in metrics.items())
        return condition.finds(reading) if so else iter(())

    return AlertCondition(f"({condition.query}) and {ON_RUN} ({wanted})", finds)


def _require_run(condition: AlertCondition) -> AlertCondition:
    return _and(condition, {"atoll_run_over": 0})


def _require_heard_run(condition: AlertCondition) -> AlertCondition:
    return _and(condition, {"atoll_run_over": 0, "atoll_monitor_connected": 1})


RULES: Final = (
    AlertRule(
        "atoll-run",
        "AtollNoCommits",
        "critical",
        _require_heard_run(NO_COMMITS),
        "Run {run} has committed nothing for {value}",
        "No shard has published a version. See who is live (`atoll top`) and why the round waits (`atoll why`).",
        shown=DURATION,
    ),
    AlertRule(
        "atoll-run",
        "AtollNoSynchronizer",
        "critical",
        _require_heard_run(_equals("atoll_synchronizers_live", 0)),
        "No synchronizer of run {run} is heard",
        "Contributions wait on the broker until one comes back; nothing is lost meanwhile.",
        MINUTE_S,
    ),
    AlertRule(
        "atoll-run",
        "AtollNoLearners",
        "critical",
        _require_heard_run(_equals("atoll_learners_live", 0)),
        "Run {run} has no learner that is heard",
        for_s=5 * MINUTE_S,
    ),
    AlertRule(
        "atoll-run",
        "AtollLearnerLost",
        "warning",
        _require_heard_run(_equals("atoll_learner_up", 0)),
        "Learner {learner} of run {run} fell silent",
        "It said no goodbye. The others train on; it continues when its process is started again.",
        MINUTE_S,
    ),
    AlertRule(
        "atoll-run",
        "AtollLearnerQuarantined",
        "critical",
        _require_run(_equals("atoll_learner_quarantined", 1)),
        "Learner {learner} of run {run} is in quarantine",
        "Its contributions are refused until it is started again. See what the shard says of it (`atoll tap 'ev.>'`).",
    ),
    AlertRule(
        "atoll-run",
        "AtollMessagesDropped",
        "warning",
        _require_run(DROPS_MESSAGES),
        "Shards of run {run} drop messages: {reason}",
        "No correct peer sends these: a process of another version, or a stranger.",
        5 * MINUTE_S,
    ),
    AlertRule(
        "atoll-streams",
        "AtollQueueDeep",
        "warning",
        _require_run(QUEUE_DEEP),
        "{value} contributions of run {run} wait for shards",
        "Add a synchronizer, or find out what holds the shards up (`atoll why`).",
        5 * MINUTE_S,
    ),
    AlertRule(
        "atoll-streams",
        "AtollStreamFull",
        "warning",
        _require_run(_share("atoll_stream_bytes", "atoll_stream_limit_bytes", ">", FULL)),
        "Stream {stream} of run {run} is {value} full",
        for_s=5 * MINUTE_S,
        shown=PERCENTAGE,
    ),
    AlertRule(
        "atoll-streams",
        "AtollStreamCopyBehind",
        "warning",
        _require_run(COPY_BEHIND),
        "Stream {stream} of run {run} has {value} copies that are whole",
        "Another node that is lost now may stop the run. See the nodes of the broker.",
        5 * MINUTE_S,
    ),
    AlertRule(
        "atoll-brokers",
        "AtollBrokerUnreachable",
        "critical",
        _require_run(_equals("atoll_monitor_connected", 0)),
        "The broker of run {run} does not answer the monitor",
        for_s=MINUTE_S,
    ),
    AlertRule(
        "atoll-brokers",
        "AtollBrokerDown",
        "critical",
        _require_run(_equals("atoll_broker_up", 0)),
        "Node {broker} of the broker of run {run} is down",
        for_s=MINUTE_S,
    ),
    AlertRule(
        "atoll-brokers",
        "AtollBrokerStoreFull",
        "critical",
        _require_run(_share("atoll_broker_store_bytes", "atoll_broker_store_limit_bytes", ">", FULL)),
        "The streams of {broker} take {value} of what they may",
        for_s=5 * MINUTE_S,
        shown=PERCENTAGE,
    ),
    AlertRule(
        "atoll-brokers",
        "AtollDiskFull",
        "critical",
        _share("atoll_disk_free_bytes", "atoll_disk_size_bytes", "<", DISK_FREE),
        "{value} of the disk of {path} are free",
        for_s=5 * MINUTE_S,
        shown=PERCENTAGE,
    ),
    AlertRule(
        "atoll-brokers",
        "AtollCertificateEnds",
        "warning",
        CERTIFICATE_ENDS,
        "The certificate of {address} ends in {value}",
        "Make another: `atoll keys certificate`. Who connects after its end is let in nowhere.",
        shown=DURATION,
    ),
    AlertRule(
        "atoll-brokers",
        "AtollMonitorDown",
        "warning",
        MONITOR_DOWN,
        "The monitor at {instance} does not answer; the run goes on without it",
        for_s=2 * MINUTE_S,
    ),
)
