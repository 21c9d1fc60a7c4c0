"""Polling of all that does not come by itself: streams, brokers' endpoints, nodes, disks, certificates; each at its own pace.

A failure is a figure that is missing or a broker that is down, and never an end of the monitor. A nats-server with a
monitoring port answers `/varz` (the process) and `/jsz` (JetStream); a figure that its answer lacks is left out, and never an
error. Blocking work (HTTP, TLS, the file system) is done in threads, with bounds on time and size.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import shutil
import socket
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from atoll.base.errors import AtollError
from atoll.base.logs import get
from atoll.bus.open import open_managing_bus
from atoll.bus.options import PORT, addresses
from atoll.bus.server import LINE_BYTES_MAX, greeting, unchecked_tls
from atoll.keys.certificates import ends_at_s
from atoll.report.page_data import NodeSeen
from atoll.settings import Settings, bus_options
from atoll_monitor.monitored_run import BrokerFigures, DiskFigures, MonitoredRun

log = get(__name__)

POLL_S: Final = 5.0
NODES_S: Final = 2.0
CERTIFICATE_S: Final = 600.0
WAIT_S: Final = 3.0
ANSWER_BYTES_MAX: Final = 1 << 20


async def poll_streams(watched: MonitoredRun, settings: Settings) -> None:
    """Keep `watched.streams` current, over a connection of its own; while nobody answers there are none."""
    while True:
        try:
            bus = await open_managing_bus(
                settings.broker.url, settings.run, name="monitor-streams", options=bus_options(settings)
            )
            try:
                while True:
                    watched.streams = tuple(await bus.stream_states())
                    await asyncio.sleep(POLL_S)
            finally:
                await bus.close()
        except AtollError as error:
            watched.streams = ()
            log.info("streams.unknown", reason=str(error))
            await asyncio.sleep(POLL_S)


async def poll_brokers(watched: MonitoredRun, urls: tuple[str, ...]) -> None:
    """Keep `watched.brokers` current from the brokers' own endpoints."""
    while urls:
        found = await asyncio.gather(*(asyncio.to_thread(read_endpoint, url) for url in urls))
        watched.brokers = {urlsplit(url).netloc: figures for url, figures in zip(urls, found, strict=True)}
        await asyncio.sleep(POLL_S)


async def poll_disks(watched: MonitoredRun, paths: tuple[Path, ...]) -> None:
    """Keep `watched.disks` current."""
    while paths:
        found = await asyncio.to_thread(lambda: {str(path): disk_of(path) for path in paths})
        watched.disks = {path: disk for path, disk in found.items() if disk is not None}
        await asyncio.sleep(POLL_S)


async def poll_nodes(watched: MonitoredRun, urls: Sequence[str]) -> None:
    """Keep `watched.nodes` current: who answers at each address, if there are several; a node that is frozen says nothing."""
    every = list(dict.fromkeys(address for url in urls for address in addresses(url)))
    while len(every) > 1:
        # Each is asked on its own: what one address keeps waiting is not told late of the others.
        await asyncio.gather(*(_look_at(watched, address) for address in every))
        await asyncio.sleep(NODES_S)


async def _look_at(watched: MonitoredRun, url: str) -> None:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or PORT
    said = await asyncio.to_thread(greeting, host, port)
    address = f"{host}:{port}"
    former = watched.nodes.get(address, NodeSeen("", answers=False))
    name = former.name if said is None else str(said.get("server_name", ""))
    watched.nodes[address] = NodeSeen(name, answers=said is not None)


async def poll_certificates(watched: MonitoredRun, url: str) -> None:
    """Keep `watched.certificates` current: those that its addresses show; one that cannot be asked keeps its last."""
    while True:
        for address in addresses(url):
            parts = urlsplit(address)
            host, port = parts.hostname or "", parts.port or PORT
            ends_s = await asyncio.to_thread(certificate_ends_s, host, port)
            if ends_s is not None:
                watched.certificates[f"{host}:{port}"] = ends_s
        await asyncio.sleep(CERTIFICATE_S if watched.certificates else POLL_S)


def read_endpoint(url: str) -> BrokerFigures | None:
    """Return what the endpoint of a nats-server says, None if it does not answer as one."""
    try:
        return figures_of(_document(url, "/varz"), _document(url, "/jsz"))
    except (OSError, ValueError, http.client.HTTPException) as error:
        log.info("broker.silent", url=url, reason=str(error))
        return None


def _document(url: str, path: str) -> dict[str, Any]:
    """Return a JSON object over HTTP; raise `OSError`, `ValueError` or `HTTPException`. It follows no redirection."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    with contextlib.closing(kind(parts.hostname or "", parts.port, timeout=WAIT_S)) as connection:
        connection.request("GET", f"{parts.path.rstrip('/')}{path}")
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise ValueError(f"{path} answers {response.status}")
        try:
            answer = json.loads(response.read(ANSWER_BYTES_MAX))
        except RecursionError as error:
            raise ValueError(f"{path} answers lists in lists, deeper than Python reads") from error
    if not isinstance(answer, dict):
        raise ValueError(f"{path} answers no object")  # noqa: TRY004  (as above)
    return answer


def figures_of(varz: Mapping[str, Any], jsz: Mapping[str, Any]) -> BrokerFigures:
    """Return the figures in the answers of one server."""
    config = jsz.get("config")
    return BrokerFigures(
        memory_bytes=_figure(varz, "mem"),
        cpu_ratio=_figure(varz, "cpu") / 100.0,
        connections=int(_figure(varz, "connections")),
        slow_consumers=int(_figure(varz, "slow_consumers")),
        bytes_in=int(_figure(varz, "in_bytes")),
        bytes_out=int(_figure(varz, "out_bytes")),
        store_bytes=int(_figure(jsz, "storage")),
        store_bytes_max=int(_figure(config if isinstance(config, dict) else {}, "max_storage")),
    )


def _figure(table: Mapping[str, Any], name: str) -> float:
    """Return a figure; 0 where there is none, and for "no bound" (-1)."""
    value = table.get(name)
    return max(0.0, float(value)) if isinstance(value, int | float) else 0.0


def disk_of(path: Path) -> DiskFigures | None:
    """Return the size of the file system of `path`, None if there is none."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        log.info("disk.unknown", path=str(path), reason=str(error))
        return None
    return DiskFigures(usage.total, usage.free)


def certificate_ends_s(host: str, port: int) -> float | None:
    """Return when the certificate ends that a broker shows, in seconds since the epoch; None if it shows none.

    Nothing is believed here, so the certificate is not checked: one that has ended is to be told of, too.
    """
    try:
        with socket.create_connection((host, port), timeout=WAIT_S) as connection:
            # Unbuffered: what follows the greeting is TLS's.
            line = connection.makefile("rb", buffering=0).readline(LINE_BYTES_MAX)
            if not json.loads(line.removeprefix(b"INFO ")).get("tls_required"):
                return None
            with unchecked_tls().wrap_socket(connection, server_hostname=host) as encrypted:
                return ends_at_s(ssl.DER_cert_to_PEM_cert(encrypted.getpeercert(binary_form=True) or b""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
