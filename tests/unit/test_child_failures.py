"""What `atoll up` says of a program of its own that ended by a fault: that program's own error, and where its log is."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from atoll.base.clock import SystemClock
from atoll.base.errors import AtollError, EnvironmentFault, UserError
from atoll.local.processes import ChildPlan, ProcessGroup

DEADLINE_S = 60.0


def failure_of(program: str, folder: Path, **more: str) -> AtollError:
    """Run a program as a child, and return what is said of its end."""
    group = ProcessGroup(folder, SystemClock())
    group.start(ChildPlan("child", (sys.executable, "-c", program), {**os.environ, **more}))
    deadline_s = time.monotonic() + DEADLINE_S
    while group.alive(["child"]):
        group.poll()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return group.failure("child", "work failed")


RAISES = "from atoll.base.exits import guarded\nfrom atoll.base.errors import SettingsError\ndef work():\n    raise "


@pytest.mark.parametrize("style", ["console", "json"])
@pytest.mark.parametrize("todo", ["", ", todo='mend it'"])
def test_an_error_of_ours_is_told_as_our_own(tmp_path: Path, style: str, todo: str) -> None:
    """Not as a text inside a text; one that does not say what to do, too."""
    program = f"{RAISES}SettingsError('wrong', got=1, allowed=2{todo})\nguarded(work)"
    error = failure_of(program, tmp_path, ATOLL_LOG__FORMAT=style)
    log = str(tmp_path / "child.jsonl")

    assert isinstance(error, UserError)
    assert (error.what, error.got, error.allowed) == ("work failed: wrong", "1", "2")
    assert error.todo == (f"mend it; its log is {log}" if todo else f"look at {log}")


def test_what_is_no_error_of_ours_is_shown_as_its_end(tmp_path: Path) -> None:
    """Further lines stand under the first."""
    error = failure_of("import sys; print('one\\ntwo'); sys.exit(3)", tmp_path)

    assert isinstance(error, EnvironmentFault)
    assert str(error).splitlines()[:3] == ["work failed", "  got:     one", "           two"]
