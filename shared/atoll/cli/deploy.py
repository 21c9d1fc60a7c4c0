"""`atoll deploy`: one description of a run, as files for each place, and compared with what runs; and `atoll doctor`.

`render` writes configurations, keys, compose files, kustomizations, units and tasks (`atoll.deploy.rendering`). `check` asks
the broker which of the services of the description are there, and how they differ from it.

Without options `doctor` looks at the machine alone. With `--broker` it asks whether a broker answers. With `--config` (the run
file of a service) or `--deployment` (a description, and the name of a service) it examines a seat (`atoll.deploy.examination`).
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Final

import typer

from atoll.base.errors import AtollError, BrokerUnavailable, SettingsError, redact
from atoll.base.extras import install_command, is_installed
from atoll.base.logs import configure
from atoll.base.machine import processors
from atoll.base.wording import as_bytes, counted
from atoll.bus.options import BusOptions
from atoll.bus.server import find_server
from atoll.cli.options import Assignments, Broker, Config, Json
from atoll.cli.output import say, say_json
from atoll.deploy.checks import Finding, error_finding, graded, seat_of_file, seat_of_service
from atoll.deploy.description import DeploymentDescription, read_description
from atoll.deploy.examination import compare_deployment, examine
from atoll.deploy.rendering import render as write
from atoll.deploy.services import places
from atoll.deploy.targets import config_folder
from atoll.keys.identity import read_identity
from atoll.local.brokers import check_broker_at
from atoll.run.folder import FREE_MIN_BYTES
from atoll.settings import load

SHOWN: Final = 12
Description = Annotated[Path, typer.Argument(help="The description: a TOML file.")]
Folder = Annotated[Path, typer.Option("--out", help="Folder of the rendered files.")]
DEFAULT_OUT: Final = Path("deployment")
PYTHON_MIN: Final = (3, 11)
BROKER_PATIENCE_S: Final = 3.0

verbs = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@verbs.command(name="render")
def render(description: Description, out: Folder = DEFAULT_OUT) -> None:
    """Write configurations, keys and files for each target; again, if you like."""
    described = read_description(description)
    done = write(described, out)
    for verb, names in (("wrote", done.written), ("removed", done.removed)):
        for name in names[:SHOWN]:
            say(f"{verb} {out / name}")
        if len(names) > SHOWN:
            say(f"{verb} {counted(len(names) - SHOWN, 'more file')}")
    for note in done.notes:
        say(f"note: {note}")
    say(f"{counted(len(done.written), 'file')} written, {len(done.removed)} removed, {done.kept} as they were")
    _say_next(described, out)


@verbs.command(name="check")
def check(
    description: Description,
    out: Folder = DEFAULT_OUT,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to listen for services.", min=1.0, max=600.0)] = 15.0,
) -> None:
    """Say how what runs differs from the description; leave with 1 if it does."""
    configure(level="error")
    described = read_description(description)
    findings = asyncio.run(compare_deployment(described, out, wait_s))
    _say_findings(findings)
    if differing := sum(finding.grade == "FAIL" for finding in findings):
        say(f"{differing} of {len(findings)} differ")
        raise typer.Exit(1)
    say(f"what runs is as {description} says")


def _say_next(described: DeploymentDescription, out: Path) -> None:
    starts = {
        "compose": "copy {folder} there, give its `services` to user 10001, then: docker compose up -d",
        "kubernetes": "kubectl apply -k {folder}/services && kubectl apply -k {folder}",
        "skypilot": "cd {folder}; each file says its command: sky jobs launch …",
        "systemd": f"copy {{folder}} there; its `services` to {config_folder(described)}, its units to /etc/systemd/system",
    }
    for place, target in places(described).items():
        say(f"{place} ({target}): {starts[target].format(folder=out / place)}")


def doctor(  # noqa: PLR0913  (one option each)
    *,
    broker: Broker = None,
    config: Config = None,
    deployment: Annotated[Path | None, typer.Option(help="A description, as `atoll deploy` has it.")] = None,
    service: Annotated[
        str | None, typer.Option(help="With --deployment: the service whose seat this is; without it the operator's.")
    ] = None,
    out: Annotated[Path, typer.Option(help="With --deployment: folder of the rendered files.")] = DEFAULT_OUT,
    assignments: Assignments = None,
    json: Json = False,
) -> None:
    """Print the findings; leave with 3 if something needed is missing."""
    configure(level="error")
    if service is not None and deployment is None:
        raise SettingsError("a service is one of a description", got=f"--service {service}", todo="give --deployment")
    if config is not None and deployment is not None:
        raise SettingsError(
            "two answers to what this seat is", got="--config beside --deployment", todo="give one of them"
        )
    findings = list(_check_machine())
    if broker is not None:
        findings.append(_check_broker(broker))
    told = list(assignments or ())
    if deployment is not None:
        findings += asyncio.run(examine(seat_of_service(read_description(deployment), out, service, told)))
    elif config is not None:
        findings += asyncio.run(examine(seat_of_file(config, told)))
    if json:
        say_json(findings)
    else:
        _say_findings(findings)
    if any(finding.grade == "FAIL" for finding in findings):
        raise typer.Exit(3)


def _say_findings(findings: Iterable[Finding]) -> None:
    for finding in findings:
        say(finding.text())


def _check_machine() -> Iterator[Finding]:
    found, wanted = (".".join(map(str, numbers)) for numbers in (sys.version_info[:3], PYTHON_MIN))
    free = shutil.disk_usage(Path.cwd()).free
    room = f"{as_bytes(free)} free in {Path.cwd()} ({as_bytes(FREE_MIN_BYTES)} or more)"
    yield graded("Python", f"{found} ({wanted} or later)", well=sys.version_info >= PYTHON_MIN)
    yield Finding("ok", "processors", processors())
    yield graded("disk", room, well=free >= FREE_MIN_BYTES)
    try:
        yield Finding("ok", "nats-server", f"at {find_server()}")
    except BrokerUnavailable as error:
        yield error_finding("nats-server", error)
    yield _check_jax()


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
