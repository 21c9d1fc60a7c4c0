"""A run from one file, and a second one from the report of the first: real processes, as a person starts them."""

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

from atoll.local.run_settings import RUN_AS_FOUND
from support import caches
from support.documents import MARK, processes_of

DEADLINE_S = 240.0
FILE = f"""
seed = 3

[up]
learners = 1
corpus = ["text"]
out = "first"

[protocol]
shards = 1
fragments = 4
interval_steps = 8
silence_s = 2
tokens_target = 4000

[model]
layers = 1
width = 32
heads = 2
kv_heads = 1
ffn = 64
context = 32

[train]
batch = 4
sequence = 32

[learner]
compile_cache = "{caches.PROGRAMS}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    text = tmp_path / "described" / "text"
    text.mkdir(parents=True)
    for path in sorted(Path(os.__file__).parent.glob("*.py"))[:30]:
        (text / path.name).write_bytes(path.read_bytes())
    (tmp_path / "described" / "run.toml").write_text(FILE, encoding="utf-8")
    yield tmp_path
    left = processes_of(tmp_path)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == [], "processes were left behind"


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start `atoll up` in `folder`, with no setting of the caller's environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    return subprocess.Popen(
        [sys.executable, "-m", "atoll.cli", "up", *words],
        cwd=folder,
        env={**kept, MARK: str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def first_step(out: Path, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what the learner of the run in `out` said of its first step, as soon as it has."""
    log, deadline_s = out / "logs" / "learner-1.jsonl", time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        for line in lines:
            if '"event": "learner.first_step"' in line and line.endswith("}"):
                said: dict[str, Any] = json.loads(line)
                return said
        assert process.poll() is None or lines, process.communicate()[0]
        time.sleep(0.05)
    raise AssertionError("the learner never said learner.first_step")


@pytest.mark.second_tier
def test_a_file_is_a_run_and_its_report_is_another_that_begins_alike(folder: Path) -> None:
    """`up run.toml` trains to the file's target; `up --like` its report has the same settings and the same first loss."""
    process = start(folder, "described/run.toml")
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    out = folder / "described" / "first"
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))

    assert report["tokens_trained"] >= 4000
    assert report["fates_exact"] is True, report["fates_errors"]
    assert (report["settings"]["up.learners"], report["seed"]) == (1, 3)
    assert report["settings"]["up.corpus"] == [str(folder / "described" / "text")]

    again = start(folder, "--like", "described/first/report.json", "--out", "second")
    begun = first_step(folder / "second", again)
    again.send_signal(signal.SIGINT)
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=DEADLINE_S)
    kept = json.loads((folder / "second" / "run.json").read_text(encoding="utf-8"))

    assert begun["loss"] == first_step(out, process)["loss"]
    mine = {"run", *RUN_AS_FOUND}
    alike = [{name: value for name, value in one["settings"].items() if name not in mine} for one in (kept, report)]
    assert alike[0] == alike[1]
    assert kept["run"] != report["run"]
    assert kept["commit"]
    assert report["commit"]
