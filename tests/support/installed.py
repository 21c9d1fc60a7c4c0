"""The wheel of this tree, and environments that hold nothing but what it asks for; a plugin with their fixtures.

An environment has the lock's versions, from the lock's own tool and cache, so a second one costs seconds. Where no package
index answers, or an interpreter is missing, tests skip and say so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600.0
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"


def plain_environment(**more: str) -> dict[str, str]:
    """Return the environment of a person who has just installed Atoll."""
    ours = ("ATOLL_", "PYTHON", "VIRTUAL_ENV", "UV_", "COV_", "JAX_", "NUMBA_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | more


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def atoll(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.folder / "bin" / "atoll"), *words, cwd=cwd)

    def program(self, text: str, *words: str) -> str:
        """Return what a program prints; it must end well."""
        done = self.run(self.python, "-c", text, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command away from the sources."""
        return subprocess.run(
            command,
            cwd=cwd or self.folder,
            env=plain_environment(),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )


@dataclass
class Installations:
    """Makes environments, one for each interpreter and extra, and keeps them for the session."""

    folder: Path
    wheel: Path
    uv: str
    constraints: Path
    made: dict[tuple[str, str], Installed] = field(default_factory=dict)

    def of(self, version: str = THIS, extra: str = "") -> Installed:
        """Return an environment of this Python, such as 3.12, with an extra or with none."""
        if (version, extra) not in self.made:
            python = sys.executable if version == THIS else interpreter(version)
            made = Installed(self.folder / f"{version}-{extra or 'base'}")
            asked = f"atoll[{extra}] @ {self.wheel.as_uri()}" if extra else str(self.wheel)
            self._uv("venv", "--no-config", "--python", python, str(made.folder))
            self._uv("pip", "install", "--python", made.python, "-c", str(self.constraints), asked)
            self.made[version, extra] = made
        return self.made[version, extra]

    def _uv(self, *words: str) -> None:
        done = subprocess.run(
            [self.uv, "--quiet", *words],
            env=plain_environment(UV_PYTHON_DOWNLOADS="never", UV_SYSTEM_CERTS="true"),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def interpreter(version: str) -> str:
    """Return the path of an interpreter that runs; skip the test where there is none."""
    places = [
        shutil.which(f"python{version}"),
        *map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))),
    ]
    for place in filter(None, places):
        done = subprocess.run([place, "-c", "import ssl, venv"], capture_output=True, check=False, timeout=DEADLINE_S)
        if done.returncode == 0:
            return place
    pytest.skip(f"there is no python{version} on this machine")


@pytest.fixture(scope="session")
def uv() -> str:
    """The tool of the lock, as the set-up left it."""
    found = os.environ.get("UV") or shutil.which("uv", path=f"{ROOT / 'build/bootstrap/bin'}:{os.environ['PATH']}")
    if not found:
        pytest.skip("uv is neither in build/bootstrap nor on the path: run make setup")
    return found


@pytest.fixture(scope="session")
def index(uv: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A package index that answers; it returns the tool that has asked it."""
    target = str(tmp_path_factory.mktemp("index"))
    asked = [
        uv,
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--refresh",
        "--target",
        target,
        "--python",
        sys.executable,
        "xxhash",
    ]
    done = subprocess.run(
        asked,
        env=plain_environment(UV_SYSTEM_CERTS="true"),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no package index answers: {done.stderr.strip()[-300:]}")
    return uv


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hatchling.builders.wheel import WheelBuilder  # noqa: PLC0415  (every test loads this plugin)

    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")), versions=["standard"])
    return Path(path)


@pytest.fixture(scope="session")
def installed(index: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Installed]:
    """A function of a Python version and an extra, which gives the environment with that."""
    folder = tmp_path_factory.mktemp("environments")
    constraints = folder / "constraints.txt"
    words = ["export", "--frozen", "--quiet", "--all-extras", "--no-emit-project", "--no-hashes", "--output-file"]
    subprocess.run([index, *words, str(constraints)], cwd=ROOT, check=True, capture_output=True, timeout=DEADLINE_S)
    return Installations(folder, wheel, index, constraints).of
