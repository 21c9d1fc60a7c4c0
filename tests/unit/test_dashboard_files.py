"""Grafana's dashboards as files: what can be known without a Grafana. Their queries are asked in test_prometheus.py."""

from __future__ import annotations

import re

from support.grafana import queries
from support.watched_runs import full, samples


def test_queries_ask_for_metrics_that_the_monitor_has_of_the_chosen_run() -> None:
    """Every metric in a query exists, and has the run's label, so that two runs are never added up."""
    known = {name for name, _ in samples(full())}
    asked = [(title, name, rest) for title, query in queries("r", "1m") for name, rest in metrics_of(query)]

    assert asked
    assert [(title, name) for title, name, _ in asked if name not in known] == []
    assert [(title, name) for title, name, rest in asked if not rest.startswith('{run="r"}')] == []


def metrics_of(query: str) -> list[tuple[str, str]]:
    return [(found[0], query[found.end() :]) for found in re.finditer(r"\batoll_\w+", query)]
