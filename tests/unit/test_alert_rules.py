"""The alerts of the page are those of Prometheus: its file is made of their rules, and the same ones hold in the same cases."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.report.page_data import HoldingAlert
from atoll_monitor.alerts import RULES, AlertJudge, Labels, MetricReading, prometheus_groups, reading_of
from atoll_monitor.metrics import families
from support.watched_runs import full, samples

FOLDER = Path(__file__).resolve().parents[2] / "infra" / "monitor"
NOT_OURS = {"AtollMonitorDown"}
"""A monitor that is down judges nothing."""
MINUTE_S = 60.0
Series = tuple[str, dict[str, str], list[float | None]]


def cases() -> list[dict[str, Any]]:
    """Return the cases that `promtool` plays."""
    told: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    return told


def series_of(told: dict[str, str]) -> Series:
    """Return a series of a case: its name, its labels, and a value each minute, None for none."""
    name, given = re.fullmatch(r"(\w+)\{(.*)\}", told["series"], re.DOTALL).groups()  # type: ignore[union-attr]
    values: list[float | None] = []
    for part in told["values"].split():
        gap = re.fullmatch(r"_(?:x(\d+))?", part)
        if gap is not None:
            values += [None] * int(gap[1] or 1)
            continue
        first, step, times = re.fullmatch(r"(-?[\d.]+)(?:([+-][\d.]+))?(?:x(\d+))?", part).groups()  # type: ignore[union-attr]
        values += [float(first) + float(step or 0) * number for number in range(int(times or 0) + 1)]
    return name, dict(re.findall(r'(\w+)="([^"]*)"', given)), values


def reading_at(series: list[Series], minute: int) -> MetricReading:
    samples: dict[str, list[tuple[Labels, float]]] = {}
    for name, labels, values in series:
        value = values[minute] if minute < len(values) else None
        if value is not None:
            samples.setdefault(name, []).append((labels, value))
    return MetricReading(MINUTE_S * minute, samples)


def of_run(series: list[Series], run: str) -> list[Series]:
    """Return the series of one run; a monitor knows no other."""
    return [each for each in series if each[1].get("run") == run]


def test_the_file_of_prometheus_is_made_of_the_rules() -> None:
    told = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))

    assert told == prometheus_groups(), "python infra/monitor/write_alerts.py"


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["name"])
def test_a_case_of_prometheus_ends_the_same_here(case: dict[str, Any]) -> None:
    """Minute by minute: at each time that the case asks about, the same alerts hold with the same words."""
    series = [series_of(each) for each in case["input_series"]]
    found: dict[tuple[str, int], list[HoldingAlert]] = {}
    for run in {labels["run"] for _, labels, _ in series if "run" in labels}:
        judge = AlertJudge(RULES)
        for minute in range(61):
            judge.take(reading_at(of_run(series, run), minute))
            for alert in judge.holding:
                if not alert.pending:
                    found.setdefault((alert.name, minute), []).append(alert)
    asked = [each for each in case["alert_rule_test"] if each["alertname"] not in NOT_OURS]

    assert asked
    for each in asked:
        holding = found.get((each["alertname"], int(each["eval_time"][:-1])), [])
        wanted = each.get("exp_alerts", [])
        assert [one.summary for one in holding] == [one["exp_annotations"]["summary"] for one in wanted], each
        assert [{**one.labels, "severity": one.severity} for one in holding] == [one["exp_labels"] for one in wanted]


def test_the_rules_read_the_metrics_that_the_monitor_makes() -> None:
    """A run in which a learner is in quarantine, a copy is missing and a broker is down: none of that waits for Prometheus."""
    judge = AlertJudge(RULES)
    judge.take(reading_of(families(full()), 2e9 - 60.0))
    names = {alert.name: alert for alert in judge.holding}

    assert {
        "AtollLearnerQuarantined",
        "AtollStreamCopyBehind",
        "AtollBrokerDown",
        "AtollCertificateEnds",
    } <= names.keys()
    assert not names["AtollLearnerQuarantined"].pending
    assert names["AtollBrokerDown"].pending
    assert names["AtollCertificateEnds"].summary == "The certificate of hub:4222 ends in 1m 0s"
    assert judge.holding[0].severity == "critical"


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (apt: prometheus)"
)


def rules() -> dict[str, dict[str, Any]]:
    told = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
    return {rule["alert"]: rule for group in told["groups"] for rule in group["rules"]}


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *words],  # noqa: S607  (the one on the path)
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=FOLDER,
    )


@needs_promtool
@pytest.mark.parametrize(
    "words",
    [
        ("check", "rules", "--lint-fatal", "alerts.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=" ".join,
)
def test_prometheus_takes_the_rules_and_their_tests_hold(words: tuple[str, ...]) -> None:
    done = promtool(*words)

    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_and_ends_in_a_test() -> None:
    told = yaml.safe_load((FOLDER / "alerts_test.yml").read_text(encoding="utf-8"))
    fires, quiet = set[str](), set[str]()
    for test in told["tests"]:
        for case in test["alert_rule_test"]:
            (fires if case.get("exp_alerts") else quiet).add(case["alertname"])

    assert fires == rules().keys()
    assert quiet == rules().keys()


def test_alerts_ask_for_metrics_that_the_monitor_has() -> None:
    """A rule on a metric that was renamed is silent for ever."""
    metric_names = {name for name, _ in samples(full())}
    asked = {name for rule in rules().values() for name in re.findall(r"\batoll_\w+", rule["expr"])}

    assert asked - metric_names == set()
