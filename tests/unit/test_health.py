"""Health by a file: what is alive keeps it fresh, `atoll health` reads its age."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.base.clock import SystemClock
from atoll.base.health import live, show_life, silent_s
from atoll.cli.main import build


@pytest.fixture(autouse=True)
def _wall_jumps() -> None:
    """A file's age is told by the machine's time of day."""


def test_a_touched_file_is_fresh_and_an_old_one_is_not(tmp_path: Path) -> None:
    """The age is that of the last touch."""
    file = tmp_path / "health"
    show_life(file)
    assert silent_s(file, SystemClock()) < 60.0
    os.utime(file, (1.0, 1.0))
    assert silent_s(file, SystemClock()) > 1e6


def test_the_file_says_which_process_lives(tmp_path: Path) -> None:
    """It holds the id of the process that touched it last, so that a person can signal that one."""
    file = tmp_path / "health"
    file.write_text("1")
    show_life(file)

    assert file.read_text() == str(os.getpid())


def test_no_file_and_a_file_that_cannot_be_written_end_nothing(tmp_path: Path) -> None:
    """What is alive stays alive without a place to show it."""
    show_life(None)
    show_life(tmp_path / "no" / "such" / "folder")

    assert not list(tmp_path.iterdir())


async def test_a_living_loop_touches_at_once(tmp_path: Path) -> None:
    """The file is there after the first turn of the loop."""
    life = asyncio.create_task(live(tmp_path / "health"))
    await asyncio.sleep(0)
    assert (tmp_path / "health").exists()
    life.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await life
    assert life.cancelled()


@pytest.mark.parametrize(("age", "code"), [(0.0, 0), (100.0, 1)])
def test_the_verb_leaves_with_the_answer(tmp_path: Path, age: float, code: int) -> None:
    """0 when fresh, 1 when stale."""
    file = tmp_path / "health"
    file.touch()
    then_s = SystemClock().wall() - age
    os.utime(file, (then_s, then_s))

    assert CliRunner().invoke(build(), ["health", "--file", str(file)]).exit_code == code
