"""`up.bulk_brokers`: a run whose fragments lie on two brokers, one of which goes away for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.whole_runs import DEADLINE_S, UNHURRIED, finish, processes_of, report_of, start, wait_for_line

pytestmark = pytest.mark.second_tier
ROUNDS = 6


def rounds(log: Path) -> int:
    return log.read_text(encoding="utf-8").count('"round.committed"')


def asked(*words: str) -> str:
    """Return what `atoll <words>` says."""
    command = [sys.executable, "-m", "atoll.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def host_of(out: Path) -> int:
    [host] = [
        pid
        for pid in processes_of(out)
        if "atoll.local.brokers" in (line := Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8"))
        and "nats/bulk-1" in line
    ]
    return host


def test_a_broker_that_is_away_stops_its_own_fragments_only(run_dir: Path, corpus: Path) -> None:
    """Of two locked brokers one is killed, and nobody starts it: shard 0, whose fragments lie at home, goes on.

    Once it is back, so does shard 1.

    Each token has one fate, the folder answers after the end, and the run goes on.
    """
    words = ("--learners", "2", "--set", "run=spread", "--set", "up.bulk_brokers=1")
    process = start(run_dir, corpus, *words, *UNHURRIED, "--tokens", "0")
    logs = [run_dir / "logs" / f"shard-{shard}.jsonl" for shard in (0, 1)]
    for log in logs:
        wait_for_line(log, "round.committed", ROUNDS)
    host = host_of(run_dir)
    os.kill(host, signal.SIGSTOP)
    threads = Path(f"/proc/{host}/task").iterdir()
    [server] = [int(pid) for thread in threads for pid in (thread / "children").read_text(encoding="utf-8").split()]
    os.kill(server, signal.SIGKILL)
    away = rounds(logs[1])
    wait_for_line(logs[0], "round.committed", rounds(logs[0]) + ROUNDS)
    assert rounds(logs[1]) <= away + 1
    os.kill(host, signal.SIGCONT)
    wait_for_line(logs[1], "round.committed", rounds(logs[1]) + ROUNDS)
    listed = asked("top", "--once", "--out", str(run_dir))
    process.send_signal(signal.SIGINT)
    said = finish(process)
    report = report_of(run_dir)

    assert "learner-1 training" in listed
    assert report["fates_exact"] is True, report["fates_errors"]
    assert "(exact)" in said, said
    assert "every token has one fate" in asked("fates", "--out", str(run_dir))
    trained = report["tokens_trained"]
    assert isinstance(trained, int)
    finish(start(run_dir, corpus, "--tokens", str(trained + 20_000)))
    assert report_of(run_dir)["fates_exact"] is True
