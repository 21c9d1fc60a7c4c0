"""Compiled programs outlast a run, in the user's own cache, and never grow without bound."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.local.program_cache import machine, program_cache, prune


def test_all_runs_of_a_user_share_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in the user's cache, and nobody else reads it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    one, other = program_cache(tmp_path / "one"), program_cache(tmp_path / "other")

    assert one == other
    assert one.is_relative_to(tmp_path / "cache" / "atoll")
    assert one.stat().st_mode & 0o077 == 0


def test_a_home_without_room_for_it_leaves_the_run_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "cache").write_text("taken", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    folder = program_cache(tmp_path / "run")

    assert folder == tmp_path / "run" / "cache" / "jax"
    assert folder.is_dir()


def test_unlike_processors_have_folders_of_their_own(tmp_path: Path) -> None:
    """How fast a core runs at the moment makes no difference, what it can do does."""
    said = ["processor : 0\nmodel name : A\ncpu MHz : 2000\nflags : avx\n\nprocessor : 1\n"]
    said += [said[0].replace("2000", "3000"), said[0].replace("avx", "avx avx512f")]
    for number, text in enumerate(said):
        (tmp_path / str(number)).write_text(text, encoding="utf-8")

    slow, quick, able = (machine(tmp_path / str(number)) for number in range(3))

    assert slow == quick
    assert slow != able
    assert machine(tmp_path / "none") != slow


def test_the_oldest_entries_go_first(tmp_path: Path) -> None:
    """Above the bound until half of it is left; below it nothing goes."""
    for age, name in enumerate("abcd"):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (age, age))

    prune(tmp_path, 400)
    before = sorted(path.name for path in tmp_path.iterdir())
    prune(tmp_path, 399)

    assert before == ["a", "b", "c", "d"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]
