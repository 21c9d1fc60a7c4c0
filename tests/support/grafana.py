"""The dashboards of the repository: their queries, as Grafana would ask them of a Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DASHBOARDS = Path(__file__).resolve().parents[2] / "infra" / "monitor" / "grafana"


def dashboards() -> dict[str, dict[str, Any]]:
    """Return each dashboard by the name of its file."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(DASHBOARDS.glob("*.json"))}


def queries(run: str, interval: str) -> Iterator[tuple[str, str]]:
    """Yield every query of every panel, with its title, for a run and an interval for rates."""
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", interval).replace("$run", run)
                yield f"{name}: {panel['title']} ({target['refId']})", query
