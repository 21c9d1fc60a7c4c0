"""Compiled programs outlast a run, in the user's own cache, and never grow without bound."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from atoll.local.program_cache import LOOKED, program_cache, tidy


def test_all_runs_of_a_user_share_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in the user's cache, and nobody else reads it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    one, other = program_cache(tmp_path / "one"), program_cache(tmp_path / "other")

    assert one == other
    assert one.is_relative_to(tmp_path / "cache" / "atoll")
    assert one.stat().st_mode & 0o077 == 0


def test_a_home_without_room_for_it_leaves_the_run_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("taken", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    folder = program_cache(tmp_path / "run")

    assert folder == tmp_path / "run" / "cache" / "jax"
    assert folder.is_dir()


def test_the_oldest_entries_go_first(tmp_path: Path) -> None:
    for age, name in enumerate("abcd"):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (age, age))

    tidy(tmp_path, 400)
    before = sorted(path.name for path in tmp_path.iterdir() if path.name != LOOKED)
    tidy(tmp_path, 399)

    assert before == ["a", "b", "c", "d"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != LOOKED) == ["d"]


def spoilt_leaf(place: Path) -> None:
    place.chmod(0o777)


def spoilt_parent(place: Path) -> None:
    place.parent.chmod(0o775)


def led_elsewhere(place: Path) -> None:
    elsewhere = place.parents[3] / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere)


@pytest.mark.parametrize("spoil", [spoilt_leaf, spoilt_parent, led_elsewhere])
def test_programs_are_not_run_from_where_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a" / "cache"))
    spoil(program_cache(tmp_path / "before"))

    assert program_cache(tmp_path / "run") == tmp_path / "run" / "cache" / "jax"


@pytest.mark.parametrize("home", ["", "/"])
def test_who_has_no_home_has_no_cache_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)

    assert program_cache(tmp_path / "run") == tmp_path / "run" / "cache" / "jax"


def test_an_entry_that_is_cut_goes(tmp_path: Path) -> None:
    """JAX would find it, refuse it and keep it, in every run."""
    whole = zstandard.ZstdCompressor().compress(os.urandom(5000))
    kept = {"whole-cache": whole, "other": b"text"}
    gone = {"cut-cache": whole[:700], "empty-cache": b"", "foreign-cache": b"no program"}
    for name, data in (kept | gone).items():
        (tmp_path / name).write_bytes(data)

    tidy(tmp_path, 1 << 20)

    assert {path.name for path in tmp_path.iterdir()} == {*kept, LOOKED}
    (tmp_path / "old-cache").write_bytes(whole[:700])
    os.utime(tmp_path / "old-cache", (1.0, 1.0))
    tidy(tmp_path, 1 << 20)
    assert (tmp_path / "old-cache").exists(), "what was there at the last look is not read again"
