"""`atoll what-if` on the folder of a run of real processes: the simulation of it as it was is near its recording."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.whole_runs import DEADLINE_S, finish, start

NEAR = 0.4
"""A busy machine holds processes up in ways that no recording tells, so a figure of waiting may be so far off."""


@pytest.mark.second_tier
def test_a_real_run_is_simulated_as_it_was_and_as_it_would_be(run_dir: Path, corpus: Path) -> None:
    """The training is the recording's to a tenth, its commits are near; a quorum of both waits for the slower one."""
    paced = ["--set", "learner.throttle=10", "--throttle", "learner-2=20"]
    finish(start(run_dir, corpus, "--learners", "2", "--tokens", "60000", *paced))
    words = ["what-if", str(run_dir), "--set", "protocol.quorum=2", "--miss-max", "5", "--seeds", "8", "--json"]
    command = [sys.executable, "-m", "atoll.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)

    check = {miss["name"]: miss for miss in told["check"]}
    assert all(learner["sampled"] for learner in told["learners"].values())
    assert check["trained_tokens_s"]["share"] < 0.15, check
    assert check["merged_tokens_s"]["share"] < 0.2, check
    assert check["commits"]["share"] < NEAR, check
    commits = next(each for each in told["what_if"] if each["name"] == "commits")
    assert commits["change"]["mean"] < 0.0
