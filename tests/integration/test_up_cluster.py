"""`atoll up --brokers 3`: a run on a broker of three nodes, of which any one may be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.options import BusOptions
from atoll.keys.identity import read_identity
from support.whole_runs import DEADLINE_S, UNHURRIED, finish, report_of, start, wait_for_line

pytestmark = pytest.mark.cluster_faults
STEADY = 3


def server_pid(out: Path, node: int) -> int:
    return int((out / "nats" / f"node-{node}" / "nats-server.pid").read_text(encoding="utf-8"))


async def cluster_of(out: Path, run: str) -> list[dict[str, Any]]:
    """Return what the broker says of the nodes of the run's streams, that of global fragments first."""
    url = ",".join((out / "nats" / f"node-{node}" / "url").read_text(encoding="utf-8") for node in (1, 2, 3))
    operator = read_identity(out / "keys" / "identities" / "operator.toml")
    bus = await JetStreamBus.open(url, run, name="test", options=BusOptions(credentials=operator.credentials()))
    try:
        plans = sorted(bus._plans, key=lambda plan: not plan.name.endswith("_GL"))
        told = [await bus._connection.call(bus._jetstream.api(f"STREAM.INFO.{plan.name}")) for plan in plans]
        assert {each["config"]["num_replicas"] for each in told} == {3}
        return [each["cluster"] for each in told]
    finally:
        await bus.close()


def leading_node(out: Path, run: str) -> int:
    """Return the number of the node that leads the stream of global fragments, once every copy of every stream has all."""
    deadline_s = time.monotonic() + DEADLINE_S
    seen = 0
    while time.monotonic() < deadline_s:
        told = asyncio.run(cluster_of(out, run))
        copies = [copy for each in told for copy in each["replicas"]]
        seen = seen + 1 if all(copy["current"] and not copy.get("lag") for copy in copies) else 0
        if seen == STEADY:
            return int(str(told[0]["leader"]).rpartition("-")[2])
        time.sleep(0.5)
    raise AssertionError("the nodes did not catch up")


def ask(out: Path, verb: str) -> subprocess.CompletedProcess[str]:
    """Ask the folder of a run, by the nodes that run or by nodes started for as long as it takes."""
    asked = [sys.executable, "-m", "atoll.cli", verb, "--out", str(out)]
    return subprocess.run(asked, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_the_leader_of_the_broker_is_killed_and_the_books_add_up(run_dir: Path, corpus: Path) -> None:
    """Twice the node that leads the global fragments is killed: the run goes on at the others, and every token has one fate.

    The former node is back before the next one dies. After the end the folder still answers.
    """
    process = start(
        run_dir, corpus, "--brokers", "3", "--learners", "2", *UNHURRIED, "--tokens", "0", "--set", "run=three"
    )
    log = run_dir / "logs" / "shard-0.jsonl"
    wait_for_line(log, "round.committed", 4)
    for _ in range(2):
        node = leading_node(run_dir, "three")
        os.kill(server_pid(run_dir, node), signal.SIGKILL)
        committed = log.read_text(encoding="utf-8").count('"round.committed"')
        wait_for_line(log, "round.committed", committed + 4)
        wait_for_line(run_dir / "logs" / f"broker-{node}.jsonl", "broker.restarted")
    during = ask(run_dir, "why")
    process.send_signal(signal.SIGINT)
    said = finish(process)
    report = report_of(run_dir)
    fates = report["tokens_by_fate"]
    after = ask(run_dir, "fates")

    assert "from call to end" in during.stdout, during.stderr
    assert report["fates_exact"] is True, report["fates_errors"]
    assert isinstance(fates, dict)
    assert sum(fates.values()) == report["tokens_trained"]
    assert "(exact)" in said, said
    assert "every token has one fate" in after.stdout, after.stderr
