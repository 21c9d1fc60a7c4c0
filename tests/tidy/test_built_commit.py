"""A wheel knows the commit it was built from, and says so where it does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from atoll.base.machine import EDITED, UNKNOWN, commit

ROOT = Path(__file__).resolve().parents[2]
ASK = "from atoll.base import machine; print(machine.__file__); print(machine.commit())"


def installed_commit(root: Path, folder: Path, version: str = "standard") -> str:
    """Build a wheel of the tree `root`, unpack it in `folder` and return the commit that the package there tells."""
    (path,) = WheelBuilder(str(root)).build(directory=str(folder / "dist"), versions=[version])
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "site")
    environment = {**os.environ, "PYTHONPATH": str(folder / "site")}
    asked = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, timeout=60, check=True, cwd=folder, env=environment
    )
    where, told = asked.stdout.splitlines()
    assert Path(where).is_relative_to(folder), "another package answered"
    return told


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    for name in ("shared", "services", "infra"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def git(folder: Path, *words: str) -> str:
    """Run git in `folder`, with an identity of its own."""
    told = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", folder, *told, *words], capture_output=True, text=True, timeout=60, check=True)  # noqa: S607
    return done.stdout.strip()


def test_a_wheel_of_a_checkout_tells_its_commit(sources: Path, tmp_path: Path) -> None:
    git(sources, "init", "-q")
    git(sources, "add", ".")
    git(sources, "commit", "-q", "-m", "all")
    head = git(sources, "rev-parse", "HEAD")
    assert installed_commit(sources, tmp_path / "clean") == head

    (sources / "README.md").write_text("edited", encoding="utf-8")
    assert installed_commit(sources, tmp_path / "edited") == head + EDITED


def test_a_wheel_without_git_tells_what_its_builder_named_or_that_it_does_not_know(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image is built without git, from a variable; sources inside somebody else's repository have not its commit."""
    monkeypatch.delenv("SOURCE_COMMIT", raising=False)
    assert installed_commit(sources, tmp_path / "none") == UNKNOWN

    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "theirs")
    assert installed_commit(sources, tmp_path / "theirs") == UNKNOWN

    monkeypatch.setenv("SOURCE_COMMIT", "c" * 40)
    assert installed_commit(sources, tmp_path / "named") == "c" * 40


def test_a_checkout_is_asked_itself() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("these sources are no checkout")
    assert commit().removesuffix(EDITED) == git(ROOT, "rev-parse", "HEAD")
