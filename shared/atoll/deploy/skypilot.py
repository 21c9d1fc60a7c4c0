"""A region as tasks of SkyPilot: one for each learner, on machines that may be taken back.

The identity is a *secret* of the task: the file names it and does not hold it, and `sky` asks for it at launch. The run file
holds no secret and travels in the task's own text. A managed job (`sky jobs launch`) that loses its machine begins anew on
another one: the learner takes the run's values, and goes on with fresh moments of its inner optimizer. One that has finished
leaves with 0 and stays finished.
"""

from __future__ import annotations

import shlex
from typing import Any, Final

from atoll.base.huge_pages import huge_pages
from atoll.deploy.description import DeploymentDescription
from atoll.deploy.services import IDENTITY_FILE, RUN_FILE, PlannedService, services, unit
from atoll.deploy.texts import toml, yaml

SECRET: Final = "ATOLL_IDENTITY_BASE64"  # noqa: S105  (a name)
_HEAD: Final = """{name}: written by `atoll deploy render`; change the description and render again.

  sky jobs launch {file} --secret {secret}="$(base64 -w0 services/{service}/identity.toml)" """


def skypilot_files(described: DeploymentDescription, place: str) -> dict[str, str]:
    """Return the files of a region by their names."""
    found = {}
    for service in services(described, place):
        file = f"{service.name}.sky.yaml"
        head = _HEAD.format(name=unit(described, service.name), file=file, secret=SECRET, service=service.name)
        found[file] = yaml(_task(described, place, service), head=head.rstrip())
    return found


def _task(described: DeploymentDescription, place: str, service: PlannedService) -> dict[str, Any]:
    region = described.regions[place]
    resources: dict[str, Any] = {"accelerators": region.accelerators} if region.accelerators else {}
    resources |= {"use_spot": region.spot, "disk_size": 256}
    run = (
        "umask 077\nmkdir -p ~/atoll && cd ~/atoll\n"
        f'printf %s "${SECRET}" | base64 -d > {IDENTITY_FILE}\n'
        f"cat > {RUN_FILE} <<'END_OF_RUN_FILE'\n{toml(service.settings)}END_OF_RUN_FILE\n"
        f"exec atoll learner --config {RUN_FILE}\n"
    )
    mounted = {"file_mounts": {"/data": region.data}} if "://" in region.data else {}
    return {
        "name": unit(described, service.name).lower(),
        "resources": resources,
        "num_nodes": 1,
        **mounted,
        "envs": huge_pages({}),
        "secrets": {SECRET: None},
        "setup": f"python3 -m pip install --upgrade {shlex.quote(described.software.package)}\n",
        "run": run,
    }
