"""The links of a run as a page shows them: the byte ledger of the report, and the pace of links whose process is heard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.run.links import name_of
from atoll.run.view import RunView
from atoll_monitor.dashboard.page_facts import PageFacts, shown_learners


def links_of(view: RunView, told: Mapping[str, Any], facts: PageFacts) -> list[dict[str, Any]]:
    """Return the traffic of each link in the ledger `told`, with its pace in bytes/s where its process is heard."""
    learners = {one.learner for one in shown_learners(view)}
    paces: dict[str, tuple[float, float]] = {}
    for name, one in view.learners.items():
        if one.latest is not None and facts.hearing.state(one) in ("joining", "training", "draining"):
            paces[name] = one.latest.meter.pace()
    for host in view.hosts.values():
        if facts.hearing.hears_host(host):
            former, pace = paces.get(name_of(host), (0.0, 0.0)), host.meter.pace()
            paces[name_of(host)] = former[0] + pace[0], former[1] + pace[1]
    rows = []
    for link in told["links"]:
        if link["role"] == "learner" and link["link"] not in learners:
            continue
        up, down = paces.get(link["link"], (None, None))
        rows.append(
            {
                **link,
                "up_per_s": None if up is None else round(up),
                "down_per_s": None if down is None else round(down),
            }
        )
    return rows
