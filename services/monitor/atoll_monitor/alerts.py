"""Judges alert rules on the metrics of a monitor, so that its page tells which of them hold; the rules are in `alert_rules`.

A rule is a function of a *reading*: all metrics at a moment. `AlertJudge.take` is given a reading now and then. A rule *holds*
once its condition has been so for `for_s` without a break; until then it is *pending*. Nothing here reads a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client.core import Metric

Labels = Mapping[str, str]
Found = Iterator[tuple[Labels, float]]
RATE_S: Final = 600.0
RATED: Final = "atoll_junk_messages_total"
"""The counter of whose pace a rule speaks: only this one is kept, for `RATE_S`."""
READINGS_MAX: Final = 256
HOLDING_MAX: Final = 64


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


@dataclass(frozen=True, slots=True)
class HoldingAlert:
    """A rule whose condition is so, since `since_s`; it is `pending` until it has been so for as long as the rule waits."""

    name: str
    severity: str
    labels: Labels
    summary: str
    tells_more: str
    since_s: float
    pending: bool

    def as_json(self, began_s: float) -> dict[str, Any]:
        """Return it in plain JSON values, with its time in seconds since `began_s`."""
        return {
            "name": self.name,
            "severity": self.severity,
            "labels": dict(sorted(self.labels.items())),
            "summary": self.summary,
            "tells_more": self.tells_more,
            "since_s": round(self.since_s - began_s, 2),
            "pending": self.pending,
        }


@dataclass(slots=True)
class AlertJudge:
    """What holds, from one reading to the next."""

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
