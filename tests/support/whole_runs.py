"""Whole runs of `atoll up` with a small model, started as a person starts them; a plugin for its fixtures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import atoll
from support import caches

SMALL = (
    *("model.layers=1", "model.width=32", "model.heads=2", "model.kv_heads=1", "model.ffn=64"),
    *("model.context=32", "train.batch=4", "train.sequence=32", "protocol.fragments=4"),
    *("protocol.interval_steps=8", "protocol.silence_s=2"),
)
UNHURRIED = ("--set", "learner.throttle=20")
"""For a run that trains until it is told to stop: its learners leave the processors to what the test starts meanwhile."""
DEADLINE_S = 480.0
SCHEMA = Path(atoll.__file__).parent / "report" / "report.schema.json"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of real text: some modules of the standard library."""
    folder = tmp_path_factory.mktemp("text")
    source = Path(os.__file__).parent
    for path in sorted(source.glob("*.py"))[:60]:
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run's folder; whatever happens, no process that mentions it is left."""
    out = tmp_path / "run"
    yield out
    left = processes_of(out)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == [], "processes were left behind"


def processes_of(out: Path) -> list[int]:
    """Return the processes whose environment or command line names the run's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            told = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(out).encode() in told:
            found.append(int(entry.name))
    return found


def command_of(out: Path, corpus: Path, *words: str) -> list[str]:
    """Return the command of `atoll up` with a small model, whose programs all runs of this module compile once."""
    asked = (*SMALL, f"learner.compile_cache={caches.PROGRAMS}")
    settings = [word for setting in asked for word in ("--set", setting)]
    return [sys.executable, "-m", "atoll.cli", "up", "--out", str(out), "--corpus", str(corpus), *settings, *words]


def start(out: Path, corpus: Path, *words: str) -> subprocess.Popen[str]:
    """Start `atoll up` with a small model."""
    command = command_of(out, corpus, *words)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the end and return what was said; the exit code must be 0."""
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    return said


def report_of(out: Path) -> dict[str, object]:
    """Return the run's report, which is what its schema says."""
    program = Path(sys.executable).parent / "check-jsonschema"
    check = [str(program), "--schemafile", str(SCHEMA), str(out / "report.json")]
    checked = subprocess.run(check, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert checked.returncode == 0, checked.stdout
    report: dict[str, object] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return report


def logged_lines(log: Path, event: str) -> list[dict[str, Any]]:
    """Return the whole lines of a log that tell of `event`; none if there is no log yet."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if f'"event": "{event}"' in line and line.endswith("}")]


def wait_for_line(log: Path, event: str, count: int = 1) -> dict[str, object]:
    """Return the `count`-th line of a log that tells of `event`, as soon as it is there."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        found = logged_lines(log, event)
        if len(found) >= count:
            return found[count - 1]
        time.sleep(0.05)
    raise AssertionError(f"{log.name} never said {event}")
