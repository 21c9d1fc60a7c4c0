"""Alerts of a monitor: the rules of `infra/monitor/alerts.yml` as functions of its metrics, and the judge of them.

Prometheus wakes people by the same metrics. A page must not need one, so each rule is here a second time. A test plays the
cases of `alerts_test.yml` to both, and holds names, severities, waits and words against the file.

A rule is a function of a *reading*: all metrics at a moment. `AlertJudge.take` is given a reading now and then. A rule
*holds* once its condition has been so for `for_s` without a break; until then it is *pending*. Nothing here reads a clock.
Rules about the run itself hold only while the run goes on (`_going_on`); disks and certificates are of machines.
`AtollMonitorDown` is not here: a monitor that is down judges nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import Metric

from atoll.base.units import DAY_S
from atoll.report.page_data import HoldingAlert

Labels = Mapping[str, str]
Found = Iterator[tuple[Labels, float]]
RATE_S: Final = 600.0
RATED: Final = "atoll_junk_messages_total"
"""The counter of whose pace a rule speaks: only this one is kept, for `RATE_S`."""
READINGS_MAX: Final = 256
HOLDING_MAX: Final = 64
COMMITS_S: Final = 900.0
FULL: Final = 0.8
DISK_FREE: Final = 0.1
JUNK_PER_S: Final = 0.1
CERTIFICATE_S: Final = 14 * DAY_S
MINUTE_S: Final = 60.0


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
class AlertRule:
    """A rule: what it finds in a reading (labels and a value each), for how long that has to be so, and its words.

    `summary` may name labels and `{value}`, of which `show` makes a text. `tells_more` says where to look.
    """

    name: str
    severity: str
    finds: Callable[[MetricReading], Found]
    summary: str
    tells_more: str = ""
    for_s: float = 0.0
    show: Callable[[float], str] = str


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
            for labels, value in rule.finds(judged):
                key = rule.name, frozenset(labels.items())
                began_s = since_s[key] = self._since_s.get(key, reading.at_s)
                words = {"value": rule.show(value), **labels}
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


def _goes_on(reading: MetricReading) -> bool:
    return reading.value("atoll_run_over") == 0.0


def _is_watched(reading: MetricReading) -> bool:
    """Return whether the run goes on and its broker answers: what a silence of the broker entails is told once."""
    return _goes_on(reading) and reading.value("atoll_monitor_connected") == 1.0


def _going_on(finds: Callable[[MetricReading], Found]) -> Callable[[MetricReading], Found]:
    """Return a condition that no run fulfils which is over: its broker may be stopped, and nobody need get up for it."""
    return lambda reading: finds(reading) if _goes_on(reading) else iter(())


def _no_commits(reading: MetricReading) -> Found:
    committed = reading.all("atoll_last_commit_timestamp_seconds")
    for labels, at_s in committed or reading.all("atoll_run_founded_timestamp_seconds"):
        if reading.at_s - at_s > COMMITS_S and _is_watched(reading):
            yield labels, reading.at_s - at_s


def _is_zero(name: str) -> Callable[[MetricReading], Found]:
    return lambda reading: (
        (labels, value) for labels, value in reading.all(name) if not value and _is_watched(reading)
    )


def _equals(name: str, wanted: float) -> Callable[[MetricReading], Found]:
    return lambda reading: ((labels, value) for labels, value in reading.all(name) if value == wanted)


def _nearly_full(name: str, limit: str) -> Callable[[MetricReading], Found]:
    def finds(reading: MetricReading) -> Found:
        for labels, value in reading.all(name):
            bound = reading.beside(limit, labels)
            if bound and value / bound > FULL:
                yield labels, value / bound

    return finds


def _drops_messages(reading: MetricReading) -> Found:
    """Yield reasons for which messages were dropped faster than allowed, over the readings of the last ten minutes."""
    for labels, value in reading.all(RATED):
        known = [(each.at_s, count) for each in reading.former if (count := each.beside(RATED, labels)) is not None]
        if known and reading.at_s > known[0][0]:
            pace = max(0.0, value - known[0][1]) / RATE_S
            if pace > JUNK_PER_S:
                yield labels, pace


def _queue_deep(reading: MetricReading) -> Found:
    fragments = len(reading.all("atoll_fragment_commits_total"))
    bound = max(1.0, reading.value("atoll_learners_live") or 0.0) * fragments
    for labels, value in reading.all("atoll_queue_depth"):
        if fragments and value > bound:
            yield labels, value


def _copy_behind(reading: MetricReading) -> Found:
    for labels, value in reading.all("atoll_stream_copies_current"):
        wanted = reading.beside("atoll_stream_copies", labels)
        if wanted is not None and value < wanted:
            yield labels, value


def _disk_full(reading: MetricReading) -> Found:
    for labels, free in reading.all("atoll_disk_free_bytes"):
        size = reading.beside("atoll_disk_size_bytes", labels)
        if size and free / size < DISK_FREE:
            yield labels, free / size


def _certificate_ends(reading: MetricReading) -> Found:
    for labels, ends_s in reading.all("atoll_certificate_end_timestamp_seconds"):
        if ends_s - reading.at_s < CERTIFICATE_S:
            yield labels, ends_s - reading.at_s


def _number(value: float) -> str:
    return f"{value:.15g}"


def _percent(value: float) -> str:
    return f"{100.0 * value:.4g}%"


def _duration(seconds: float) -> str:
    """Return a time as Prometheus writes one: 16m 0s."""
    whole = int(abs(seconds))
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s")]
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return ("-" if seconds < 0 else "") + " ".join(f"{count}{unit}" for count, unit in parts[first:])


RULES: Final = (
    AlertRule(
        "AtollNoCommits",
        "critical",
        _no_commits,
        "Run {run} has committed nothing for {value}",
        "No shard has published a version. See who is live (`atoll top`) and why the round waits (`atoll why`).",
        show=_duration,
    ),
    AlertRule(
        "AtollNoSynchronizer",
        "critical",
        _is_zero("atoll_synchronizers_live"),
        "No synchronizer of run {run} is heard",
        "Contributions wait on the broker until one comes back; nothing is lost meanwhile.",
        MINUTE_S,
    ),
    AlertRule(
        "AtollNoLearners",
        "critical",
        _is_zero("atoll_learners_live"),
        "Run {run} has no learner that is heard",
        for_s=5 * MINUTE_S,
    ),
    AlertRule(
        "AtollLearnerLost",
        "warning",
        _is_zero("atoll_learner_up"),
        "Learner {learner} of run {run} fell silent",
        "It said no goodbye. The others train on; it continues when its process is started again.",
        MINUTE_S,
    ),
    AlertRule(
        "AtollLearnerQuarantined",
        "critical",
        _going_on(_equals("atoll_learner_quarantined", 1.0)),
        "Learner {learner} of run {run} is in quarantine",
        "Its contributions are refused until it is started again. See what the shard says of it (`atoll tap 'ev.>'`).",
    ),
    AlertRule(
        "AtollMessagesDropped",
        "warning",
        _going_on(_drops_messages),
        "Shards of run {run} drop messages: {reason}",
        "No correct peer sends these: a process of another version, or a stranger.",
        5 * MINUTE_S,
    ),
    AlertRule(
        "AtollQueueDeep",
        "warning",
        _going_on(_queue_deep),
        "{value} contributions of run {run} wait for shards",
        "Add a synchronizer, or find out what holds the shards up (`atoll why`).",
        5 * MINUTE_S,
        _number,
    ),
    AlertRule(
        "AtollStreamFull",
        "warning",
        _going_on(_nearly_full("atoll_stream_bytes", "atoll_stream_limit_bytes")),
        "Stream {stream} of run {run} is {value} full",
        for_s=5 * MINUTE_S,
        show=_percent,
    ),
    AlertRule(
        "AtollStreamCopyBehind",
        "warning",
        _going_on(_copy_behind),
        "Stream {stream} of run {run} has {value} copies that are whole",
        "Another node that is lost now may stop the run. See the nodes of the broker.",
        5 * MINUTE_S,
        _number,
    ),
    AlertRule(
        "AtollBrokerUnreachable",
        "critical",
        _going_on(_equals("atoll_monitor_connected", 0.0)),
        "The broker of run {run} does not answer the monitor",
        for_s=MINUTE_S,
    ),
    AlertRule(
        "AtollBrokerDown",
        "critical",
        _going_on(_equals("atoll_broker_up", 0.0)),
        "Node {broker} of the broker of run {run} is down",
        for_s=MINUTE_S,
    ),
    AlertRule(
        "AtollBrokerStoreFull",
        "critical",
        _going_on(_nearly_full("atoll_broker_store_bytes", "atoll_broker_store_limit_bytes")),
        "The streams of {broker} take {value} of what they may",
        for_s=5 * MINUTE_S,
        show=_percent,
    ),
    AlertRule(
        "AtollDiskFull",
        "critical",
        _disk_full,
        "{value} of the disk of {path} are free",
        for_s=5 * MINUTE_S,
        show=_percent,
    ),
    AlertRule(
        "AtollCertificateEnds",
        "warning",
        _certificate_ends,
        "The certificate of {address} ends in {value}",
        "Make another: `atoll keys certificate`. Who connects after its end is let in nowhere.",
        show=_duration,
    ),
)
