"""Grafana's dashboards as files: what can be known without a Grafana. Their queries are asked in test_prometheus.py."""

from __future__ import annotations

import re

import pytest

from support.grafana import dashboards, queries
from support.watched_runs import full, samples

NAMES = sorted(dashboards())


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_can_be_imported_beside_others(name: str) -> None:
    """Panels have numbers, titles and queries of their own and do not overlap; the source of data is chosen by who looks."""
    dashboard = dashboards()[name]
    panels = dashboard["panels"]
    cells = [
        (x, y)
        for each in (panel["gridPos"] for panel in panels)
        for x in range(each["x"], each["x"] + each["w"])
        for y in range(each["y"], each["y"] + each["h"])
    ]

    assert dashboard["uid"] == f"atoll-{name}"
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24  # the width of Grafana's grid
    assert {target["datasource"]["uid"] for panel in panels for target in panel["targets"]} == {"${source}"}
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["source", "run"]


def test_queries_ask_for_metrics_that_the_monitor_has_of_the_chosen_run() -> None:
    """Every metric in a query exists, and has the run's label, so that two runs are never added up."""
    known = {name for name, _ in samples(full())}
    asked = [(title, name, rest) for title, query in queries("r", "1m") for name, rest in metrics_of(query)]

    assert asked
    assert [(title, name) for title, name, _ in asked if name not in known] == []
    assert [(title, name) for title, name, rest in asked if not rest.startswith('{run="r"}')] == []


def metrics_of(query: str) -> list[tuple[str, str]]:
    """Return the metrics in a query, each with what follows it."""
    return [(found[0], query[found.end() :]) for found in re.finditer(r"\batoll_\w+", query)]
