"""What every monitor answers: `/metrics` for Prometheus, `/healthz` for whoever starts and stops it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from atoll_monitor.metrics import families
from atoll_monitor.watched import Watched

VERSION: Final = re.compile(r";\s*version=")
NUMBERED: Final = re.compile(r";\s*version=\d{1,4}(\.\d{1,4}){0,3}\s*(;|$)")


class RunCollector(Collector):
    """Makes the metrics of a run when they are asked for."""

    def __init__(self, watched: Watched) -> None:
        """Make none yet."""
        self._watched = watched

    def collect(self) -> Iterable[Metric]:
        """Return the metrics as they are now."""
        return families(self._watched)


def understood(accept: str) -> str:
    """Return an `Accept` without the formats whose version is no number: prometheus_client compares versions unseen."""
    return ",".join(each for each in accept.split(",") if not VERSION.search(each) or NUMBERED.search(each))


def plain_routes(watched: Watched) -> list[BaseRoute]:
    """Return the routes that need no page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(watched))

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(understood(request.headers.get("accept", "")))
        return Response(encode(registry), headers={"Content-Type": content_type})

    async def healthz(_: Request) -> Response:
        """Answer 200 while the broker answers the monitor, else 503: metrics are then as old as the outage."""
        told = {"run": watched.run, "broker": watched.connected, "founded": watched.record is not None}
        return JSONResponse(told, status_code=200 if watched.connected else 503)

    return [Route("/metrics", metrics), Route("/healthz", healthz)]
