"""Verbs that look and change nothing: `version`, `doctor`, `health`."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import typer

from atoll.cli.options import Assignments, Broker, Config, with_flags

PYTHON_MIN = (3, 11)
DISK_FREE_MIN_BYTES = 200 << 20
BROKER_PATIENCE_S = 3.0


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command(name="version", help="Print the version.")(version_verb)
    app.command(name="doctor", help="Check what Atoll needs on this machine.")(doctor_verb)
    app.command(name="health", help="Leave with 0 while a service's health file is fresh, else with 1.")(health_verb)


def say(line: str) -> None:
    """Print a line of the answer, at once: whoever reads a pipe waits for it."""
    print(line, flush=True)  # noqa: T201  (this is the verb's output)


def version_verb() -> None:
    """Print the version."""
    from atoll import __version__  # noqa: PLC0415  (a verb loads what it needs when it runs)

    say(f"atoll {__version__}")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor: `grade` tells whether a run on this machine can do without it."""

    grade: Literal["ok", "note", "FAIL"]
    what: str


def doctor_verb(broker: Broker = None) -> None:
    """Print the findings; leave with 3 if something needed is missing."""
    findings = [*_machine(), _server(), _jax(), *([_broker(broker)] if broker is not None else [])]
    for finding in findings:
        say(f"{finding.grade:<5} {finding.what}")
    if any(finding.grade == "FAIL" for finding in findings):
        raise typer.Exit(3)


def _machine() -> Iterator[Finding]:
    """Return what Python, processors and the disk are like."""
    found = ".".join(map(str, sys.version_info[:3]))
    wanted = ".".join(map(str, PYTHON_MIN))
    yield Finding("ok" if sys.version_info >= PYTHON_MIN else "FAIL", f"Python {found} ({wanted} or later)")
    yield Finding("ok", f"{os.cpu_count() or 1} processor cores")
    free = shutil.disk_usage(Path.cwd()).free
    grade: Literal["ok", "FAIL"] = "ok" if free >= DISK_FREE_MIN_BYTES else "FAIL"
    yield Finding(grade, f"{free >> 20} MB free in {Path.cwd()} ({DISK_FREE_MIN_BYTES >> 20} MB or more)")


def _server() -> Finding:
    from atoll.base.errors import BrokerUnavailable  # noqa: PLC0415
    from atoll.bus.server import find_server  # noqa: PLC0415

    try:
        return Finding("ok", f"nats-server at {find_server()}")
    except BrokerUnavailable as error:
        return Finding("FAIL", str(error))


def _jax() -> Finding:
    """Return whether JAX is installed, without importing it: the import alone takes a second."""
    from atoll.base.extras import install, installed  # noqa: PLC0415

    if not installed("jax"):
        own, ours = install("island"), install("learner")
        return Finding(
            "note", f"JAX is not installed; a loop of your own needs it: {own}; the reference learner: {ours}"
        )
    try:
        return Finding("ok", f"JAX {version('jax')}")
    except PackageNotFoundError:
        return Finding("note", "JAX is importable, but its version is not known")


def _broker(url: str) -> Finding:
    from atoll.base.errors import AtollError  # noqa: PLC0415
    from atoll.base.logs import configure  # noqa: PLC0415
    from atoll.bus.options import BusOptions  # noqa: PLC0415
    from atoll.keys.identity import read_identity  # noqa: PLC0415
    from atoll.local.brokers import check_broker_at  # noqa: PLC0415
    from atoll.settings import load  # noqa: PLC0415

    configure(level="error")
    try:
        path = load().settings.broker.identity
        credentials = None if path is None else read_identity(path).credentials()
        asyncio.run(check_broker_at(url, BusOptions(patience_s=BROKER_PATIENCE_S, credentials=credentials)))
    except AtollError as error:
        return Finding("FAIL", str(error))
    from atoll.local.environment import redacted  # noqa: PLC0415

    return Finding("ok", f"the broker at {redacted(url)} answers, with JetStream")


def health_verb(
    file: Annotated[Path | None, typer.Option(help="The health file; default: health_file.")] = None,
    age_s: Annotated[float, typer.Option("--age", min=0.0, help="Seconds after which it is stale.")] = 15.0,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Leave with 0 if the file was touched within `--age` seconds, else with 1."""
    from atoll.base.clock import SystemClock  # noqa: PLC0415
    from atoll.base.errors import SettingsError  # noqa: PLC0415
    from atoll.base.health import silent_s  # noqa: PLC0415
    from atoll.settings import load  # noqa: PLC0415

    path = file if file is not None else load(config, with_flags(assignments)).settings.health_file
    if path is None:
        raise SettingsError(
            "no health file is configured", todo="set health_file for the service and here, or give --file"
        )
    try:
        since_s = silent_s(path, SystemClock())
    except OSError as error:
        say(f"unhealthy: {path}: {error.strerror}")
        raise typer.Exit(1) from None
    if since_s > age_s:
        say(f"unhealthy: last sign of life {since_s:.1f} s ago, allowed {age_s:g} s")
        raise typer.Exit(1)
    say(f"healthy: last sign of life {since_s:.1f} s ago")
