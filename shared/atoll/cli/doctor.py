"""`atoll doctor`, `version` and `health`: what is installed here, whether a service lives, and whether a run can be joined.

Without options `doctor` looks at the machine alone. With `--broker` it asks whether a broker answers. With `--config` (the run
file of a service) or `--deployment` (a description, and the name of a service) it examines a seat (`atoll.deploy.examination`).
"""

from __future__ import annotations

import asyncio
import json as json_text
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from atoll.base.machine import processors
from atoll.cli.options import Assignments, Broker, Config, with_flags
from atoll.cli.output import say

if TYPE_CHECKING:
    from atoll.deploy.checks import Finding

PYTHON_MIN = (3, 11)
BROKER_PATIENCE_S = 3.0


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command(name="version", help="Print the version, and which wire versions it speaks.")(version_verb)
    app.command(name="health", help="Leave with 0 while a service's health file is fresh, else with 1.")(health_verb)
    app.command(name="doctor", help="Check what Atoll needs on this machine, and that a run can be joined from here.")(
        doctor
    )


def doctor(  # noqa: PLR0913  (one option each)
    *,
    broker: Broker = None,
    config: Config = None,
    deployment: Annotated[Path | None, typer.Option(help="A description, as `atoll deploy` has it.")] = None,
    service: Annotated[
        str | None, typer.Option(help="With --deployment: the service whose seat this is; without it the operator's.")
    ] = None,
    out: Annotated[Path, typer.Option(help="With --deployment: folder of the rendered files.")] = Path("deployment"),
    assignments: Assignments = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the findings; leave with 3 if something needed is missing."""
    from atoll.base.errors import SettingsError  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.base.logs import configure  # noqa: PLC0415

    configure(level="error")
    if service is not None and deployment is None:
        raise SettingsError("a service is one of a description", got=f"--service {service}", todo="give --deployment")
    if config is not None and deployment is not None:
        raise SettingsError(
            "two answers to what this seat is", got="--config beside --deployment", todo="give one of them"
        )
    findings = [*_check_machine(), _check_server(), _check_jax()]
    if broker is not None:
        findings.append(_check_broker(broker))
    if config is not None or deployment is not None:
        findings += _check_seat(config, deployment, service, out, list(assignments or ()))
    if json:
        sys.stdout.write(json_text.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    else:
        for finding in findings:
            say(finding.text())
    if any(finding.grade == "FAIL" for finding in findings):
        raise typer.Exit(3)


def _check_seat(
    config: Path | None, deployment: Path | None, service: str | None, out: Path, assignments: list[str]
) -> list[Finding]:
    """Return what was found at the seat of a run file, or of a service of a description."""
    from atoll.deploy.description import read_description  # noqa: PLC0415
    from atoll.deploy.examination import examine  # noqa: PLC0415
    from atoll.deploy.seat import seat_of_file, seat_of_service  # noqa: PLC0415

    if deployment is None:
        return asyncio.run(examine(seat_of_file(config, assignments)))
    return asyncio.run(examine(seat_of_service(read_description(deployment), out, service, assignments)))


def _check_machine() -> Iterator[Finding]:
    """Return what Python, processors and the disk are like."""
    from atoll.base.units import as_bytes  # noqa: PLC0415
    from atoll.deploy.checks import Finding  # noqa: PLC0415
    from atoll.run.folder import FREE_MIN_BYTES  # noqa: PLC0415

    found = ".".join(map(str, sys.version_info[:3]))
    wanted = ".".join(map(str, PYTHON_MIN))
    yield Finding("ok" if sys.version_info >= PYTHON_MIN else "FAIL", "Python", f"{found} ({wanted} or later)")
    yield Finding("ok", "processors", processors())
    free = shutil.disk_usage(Path.cwd()).free
    grade: Literal["ok", "FAIL"] = "ok" if free >= FREE_MIN_BYTES else "FAIL"
    yield Finding(grade, "disk", f"{as_bytes(free)} free in {Path.cwd()} ({as_bytes(FREE_MIN_BYTES)} or more)")


def _check_server() -> Finding:
    from atoll.base.errors import BrokerUnavailable  # noqa: PLC0415
    from atoll.bus.server import find_server  # noqa: PLC0415
    from atoll.deploy.checks import Finding, error_finding  # noqa: PLC0415

    try:
        return Finding("ok", "nats-server", f"at {find_server()}")
    except BrokerUnavailable as error:
        return error_finding("nats-server", error)


def _check_jax() -> Finding:
    """Return whether JAX is installed, without importing it: the import alone takes a second."""
    from atoll.base.extras import install_command, is_installed  # noqa: PLC0415
    from atoll.deploy.checks import Finding  # noqa: PLC0415

    if not is_installed("jax"):
        own, ours = install_command("island"), install_command("learner")
        return Finding(
            "note",
            "JAX",
            f"it is not installed; loops of NumPy arrays need none; a loop of JAX does: {own}; the reference learner: {ours}",
        )
    try:
        return Finding("ok", "JAX", version("jax"))
    except PackageNotFoundError:
        return Finding("note", "JAX", "it is importable, but its version is not known")


def _check_broker(url: str) -> Finding:
    from atoll.base.errors import AtollError  # noqa: PLC0415
    from atoll.base.wording import redact  # noqa: PLC0415
    from atoll.bus.options import BusOptions  # noqa: PLC0415
    from atoll.deploy.checks import Finding, error_finding  # noqa: PLC0415
    from atoll.keys.identity import read_identity  # noqa: PLC0415
    from atoll.local.brokers import check_broker_at  # noqa: PLC0415
    from atoll.settings import load  # noqa: PLC0415

    try:
        path = load().settings.broker.identity
        credentials = None if path is None else read_identity(path).credentials()
        asyncio.run(check_broker_at(url, BusOptions(patience_s=BROKER_PATIENCE_S, credentials=credentials)))
    except AtollError as error:
        return error_finding("broker", error)
    return Finding("ok", "broker", f"that at {redact(url)} answers, with JetStream")


def version_verb() -> None:
    """Print the version, and the wire versions of the runs that it can join."""
    from atoll import __version__  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.wire.version import spoken  # noqa: PLC0415

    say(f"atoll {__version__}, wire {spoken()}")


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
