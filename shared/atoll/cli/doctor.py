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
from typing import Annotated, Literal

import typer

from atoll.base.errors import AtollError, BrokerUnavailable, SettingsError, redact
from atoll.base.extras import install_command, is_installed
from atoll.base.logs import configure
from atoll.base.machine import processors
from atoll.base.wording import as_bytes
from atoll.bus.options import BusOptions
from atoll.bus.server import find_server
from atoll.cli.options import Assignments, Broker, Config
from atoll.cli.output import say
from atoll.deploy.checks import Finding, error_finding, seat_of_file, seat_of_service
from atoll.deploy.description import read_description
from atoll.deploy.examination import examine
from atoll.keys.identity import read_identity
from atoll.local.brokers import check_broker_at
from atoll.run.folder import FREE_MIN_BYTES
from atoll.settings import load

PYTHON_MIN = (3, 11)
BROKER_PATIENCE_S = 3.0


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
    if deployment is None:
        return asyncio.run(examine(seat_of_file(config, assignments)))
    return asyncio.run(examine(seat_of_service(read_description(deployment), out, service, assignments)))


def _check_machine() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    wanted = ".".join(map(str, PYTHON_MIN))
    yield Finding("ok" if sys.version_info >= PYTHON_MIN else "FAIL", "Python", f"{found} ({wanted} or later)")
    yield Finding("ok", "processors", processors())
    free = shutil.disk_usage(Path.cwd()).free
    grade: Literal["ok", "FAIL"] = "ok" if free >= FREE_MIN_BYTES else "FAIL"
    yield Finding(grade, "disk", f"{as_bytes(free)} free in {Path.cwd()} ({as_bytes(FREE_MIN_BYTES)} or more)")


def _check_server() -> Finding:

    try:
        return Finding("ok", "nats-server", f"at {find_server()}")
    except BrokerUnavailable as error:
        return error_finding("nats-server", error)


def _check_jax() -> Finding:
    """Return whether JAX is installed, without importing it: the import alone takes a second."""
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

    try:
        path = load().settings.broker.identity
        credentials = None if path is None else read_identity(path).credentials()
        asyncio.run(check_broker_at(url, BusOptions(patience_s=BROKER_PATIENCE_S, credentials=credentials)))
    except AtollError as error:
        return error_finding("broker", error)
    return Finding("ok", "broker", f"that at {redact(url)} answers, with JetStream")
