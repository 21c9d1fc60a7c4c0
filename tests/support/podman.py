"""A container engine of our own: podman with its images, networks and volumes in one folder, and nothing else of the machine's.

Registries are not needed. The base image of the Dockerfile is made here by `debootstrap` under its real name, with what its
publisher leaves out (documentation, translations, package lists) left out, too. So Dockerfile and compose file run unchanged.

What differs from docker, and is not tested by this: the base's Python is Debian's; `depends_on` has no conditions in
podman-compose, so services start at once and wait for each other; health checks have no timer, so `health` runs them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

NEEDED: Final = ("podman", "buildah", "runc", "debootstrap", "iptables")
NETWORKERS: Final = (Path("/usr/lib/podman/netavark"), Path("/usr/lib/podman/aardvark-dns"))
BASE: Final = "docker.io/library/python:3.12-slim-bookworm"
PACKAGES: Final = "python3,python3-venv,python3-pip,ca-certificates"
LEFT_OUT: Final = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/lib/apt/lists",
    "var/cache/apt",
)
CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
SEES: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PIP_CERT": str(CERTIFICATES),
    "SSL_CERT_FILE": str(CERTIFICATES),
    "UV_SYSTEM_CERTS": "true",
}
"""What the base image tells pip and uv: to trust whom this machine trusts."""
NOISE: Final = ("systemd", "syslog", "WARNING:podman_compose")
ENGINE: Final = """[containers]
default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""
STORAGE: Final = """[storage]
driver = "overlay"
graphroot = "{folder}/storage"
runroot = "/run/atoll-{digest}"
"""
"""An engine writes down what it has mounted in its runroot: two checkouts that share one forget each other's mounts."""


def unfit() -> str:
    """Return why this machine cannot run containers, "" if it can."""
    if os.geteuid() != 0:
        return "containers need root here"
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)}"
    if missing := [path.name for path in NETWORKERS if not path.exists()]:
        return f"not installed: {', '.join(missing)}"
    return ""


class Podman:
    """The engine in a folder. It keeps images between runs; `clear` takes containers, networks and volumes away."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        (self.folder / "networks").mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(bytes(self.folder)).hexdigest()[:8]
        settings = {"CONTAINERS_CONF": ENGINE, "CONTAINERS_STORAGE_CONF": STORAGE}
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
        for variable, text in settings.items():
            path = self.folder / f"{variable.lower()}.toml"
            path.write_text(text.format(folder=self.folder, digest=digest), encoding="utf-8")
            self.environment[variable] = str(path)

    def run(self, *words: str | Path, check: bool = True, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Run a command with this engine's settings; raise `SystemExit` with what it said if it must not fail and does."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check and done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if not any(noise in line for noise in NOISE)]
            raise SystemExit(f"{' '.join(map(str, words))} left with {done.returncode}:\n" + "\n".join(said[-40:]))
        return done

    def ask(self, *words: str | Path, check: bool = True) -> str:
        """Run `podman` and return what it printed."""
        return self.run("podman", *words, check=check).stdout.strip()

    def make_base(self) -> None:
        """Make the stand-in for the base image, if there is none."""
        if self.run("podman", "image", "exists", BASE, check=False).returncode == 0:
            return
        root, archive = self.folder / "base", self.folder / "base.tar"
        shutil.rmtree(root, ignore_errors=True)
        self.run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", root)
        for path in LEFT_OUT:
            shutil.rmtree(root / path, ignore_errors=True)
        shutil.copyfile(CERTIFICATES, root / str(CERTIFICATES).lstrip("/"))
        for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()
        (root / "usr/bin/python").unlink(missing_ok=True)
        (root / "usr/bin/python").symlink_to("python3")
        self.run("tar", "--directory", root, "--create", "--file", archive, ".")
        changes = [word for name, value in SEES.items() for word in ("--change", f"ENV {name}={value}")]
        self.ask("import", *changes, archive, BASE)
        shutil.rmtree(root)
        archive.unlink()

    def build(self, repository: Path, image: str, target: str) -> None:
        file = repository / "infra/docker/Dockerfile"
        words = ("build", "--network", "host", "--target", target, "-t", image, "-f", file, repository)
        self.run("podman", *words, timeout_s=1800.0)

    def size(self, image: str) -> float:
        """Return the megabytes of an image with all its layers."""
        return int(self.ask("image", "inspect", "--format", "{{.Size}}", image)) / 1e6

    def in_image(self, image: str, code: str, mounts: Sequence[str] = ()) -> str:
        """Return what a Python program prints in a container of an image, without a network."""
        volumes = [word for mount in mounts for word in ("--volume", mount)]
        words = (
            "run",
            "--rm",
            "--network",
            "none",
            "--read-only",
            *volumes,
            "--entrypoint",
            "python",
            image,
            "-c",
            code,
        )
        return self.ask(*words)

    def clear(self) -> None:
        """Remove every container, volume and network of this engine, but no image."""
        self.ask("rm", "--all", "--force", "--time", "0", check=False)
        self.ask("volume", "rm", "--all", "--force", check=False)
        self.ask("network", "prune", "--force", check=False)
