"""`atoll deploy`: one description of a run's hub and regions, as files for each place, and compared with what runs.

`render` writes configurations, keys, compose files, kustomizations, units and tasks (`atoll.deploy.rendering`). `check` asks
the broker which of the services of the description are there, and how they differ from it. `atoll doctor --deployment` looks at
one seat: the machine and the identity where it is run.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Final

import typer

from atoll.base.logs import configure
from atoll.base.wording import counted
from atoll.cli.output import say
from atoll.deploy.description import DeploymentDescription, read_description
from atoll.deploy.examination import compare_deployment
from atoll.deploy.rendering import render as write
from atoll.deploy.services import places
from atoll.deploy.systemd import config_folder

SHOWN: Final = 12
Description = Annotated[Path, typer.Argument(help="The description: a TOML file.")]
Folder = Annotated[Path, typer.Option("--out", help="Folder of the rendered files.")]
DEFAULT_OUT: Final = Path("deployment")


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
    for finding in findings:
        say(finding.text())
    if differing := sum(finding.grade == "FAIL" for finding in findings):
        say(f"{differing} of {len(findings)} differ")
        raise typer.Exit(1)
    say(f"what runs is as {description} says")


def _say_next(described: DeploymentDescription, out: Path) -> None:
    starts = {
        "compose": "copy {folder} there, give its `services` to user 10001, then: docker compose up -d",
        "kubernetes": "kubectl apply -k {folder}/services && kubectl apply -k {folder}",
        "skypilot": "cd {folder}; each file says its command: sky jobs launch …",
        "systemd": "copy {folder} there; its `services` to "
        + config_folder(described)
        + ", its units to /etc/systemd/system",
    }
    for place, target in places(described).items():
        say(f"{place} ({target}): {starts[target].format(folder=out / place)}")
