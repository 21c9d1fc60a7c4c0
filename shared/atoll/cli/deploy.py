"""`atoll deploy`: one description of a run's hub and regions, as files for each place, and compared with what runs.

`render` writes configurations, keys, compose files, kustomizations, units and tasks (`atoll.deploy.rendering`). `check` asks
the broker which of the services of the description are there, and how they differ from it. `atoll doctor --deployment` looks at
one seat: the machine and the identity where it is run.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from atoll.base.wording import counted
from atoll.cli.output import say

if TYPE_CHECKING:
    from atoll.deploy.description import DeploymentDescription

SHOWN: Final = 12
Description = Annotated[Path, typer.Argument(help="The description: a TOML file.")]
Folder = Annotated[Path, typer.Option("--out", help="Folder of the rendered files.")]
DEFAULT_OUT: Final = Path("deployment")


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    deploy = typer.Typer(
        help="Render one description for every place of a run, and compare it with what runs.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    deploy.command(name="render", help="Write configurations, keys and files for each target; again, if you like.")(
        render
    )
    deploy.command(name="check", help="Say how what runs differs from the description; leave with 1 if it does.")(check)
    app.add_typer(deploy, name="deploy")


def render(description: Description, out: Folder = DEFAULT_OUT) -> None:
    """Write the files."""
    from atoll.deploy.description import read_description  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.deploy.rendering import render as write  # noqa: PLC0415

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


def check(
    description: Description,
    out: Folder = DEFAULT_OUT,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to listen for services.", min=1.0, max=600.0)] = 15.0,
) -> None:
    """Compare, and leave with 1 if anything differs."""
    from atoll.base.logs import configure  # noqa: PLC0415
    from atoll.deploy.description import read_description  # noqa: PLC0415
    from atoll.deploy.examination import compare_deployment  # noqa: PLC0415

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
    """Say for each place what starts it."""
    from atoll.deploy.services import places  # noqa: PLC0415
    from atoll.deploy.systemd import config_folder  # noqa: PLC0415

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
