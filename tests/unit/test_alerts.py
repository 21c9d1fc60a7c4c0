"""The alert rules: Prometheus takes them, each fires and ends in its own test, and asks for metrics that the monitor has."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.watched_runs import full, samples

FOLDER = Path(__file__).resolve().parents[2] / "infra" / "monitor"
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
    """A rule that nobody has seen fire, or end, may do neither."""
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
