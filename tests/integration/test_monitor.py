"""The monitor as a process beside a real run: it reads with a reader's key, outlives the broker, and nobody misses it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from atoll.client.join import join
from atoll.client.options import JoinOptions
from atoll.protocol.settings import ProtocolSettings
from support.links import unique_run
from support.locked_brokers import LockedBroker
from support.monitored_run import DEADLINE_S, monitoring, until

pytestmark = [pytest.mark.connected, pytest.mark.second_tier]

PACE_S = 0.02


@contextmanager
def training(folder: Path) -> Iterator[tuple[LockedBroker, str, Path]]:
    """Yield a locked broker, a run that trains on it until the block ends, and a reader's key."""
    run, stop, errors = unique_run(), threading.Event(), list[BaseException]()
    with LockedBroker(folder) as broker:
        mine, reader = broker.add(run, "a", founds=True), broker.add(run, "eye", "reader")
        shard_key = broker.add(run, "s", "synchronizer")
        given = [f"run={run}", f"broker.url={broker.url}", f"broker.identity={shard_key}", "log.level=error"]
        flags = [part for each in given for part in ("--set", each)]
        shard = subprocess.Popen([sys.executable, "-m", "atoll_synchronizer", *flags], cwd=folder)

        def train() -> None:
            protocol = ProtocolSettings(fragments=2, shards=1, interval_steps=8, silence_s=2.0)
            start = {"w": np.zeros((64, 8), np.float32)}
            try:
                options = JoinOptions(identity=mine)
                with join(broker.url, run=run, learner="a", params=start, protocol=protocol, options=options) as island:
                    params = island.params
                    while not stop.wait(PACE_S):
                        params = island.step({"w": params["w"] + np.float32(0.001)}, tokens=4)
            except BaseException as error:  # noqa: BLE001  (the test's thread tells of it)
                errors.append(error)

        learner = threading.Thread(target=train)
        learner.start()
        try:
            yield broker, run, reader
        finally:
            stop.set()
            learner.join(DEADLINE_S)
            shard.terminate()
            shard.wait(DEADLINE_S)
    assert errors == []


def test_a_reader_sees_the_run_and_comes_back_after_the_broker(tmp_path: Path) -> None:
    """It serves what it knows while the broker is away, says so, and goes on; SIGTERM ends it with 0."""
    with training(tmp_path) as (broker, run, reader), monitoring(tmp_path, run, broker.url, reader) as monitor:
        until("commits", lambda: monitor.count("atoll_commits_total") >= 2)
        until("the learner is heard", lambda: monitor.value("atoll_learner_up", learner="a") == 1)
        until("streams are known", lambda: monitor.value("atoll_stream_bytes", stream="GL") is not None)
        until(
            "the certificate is known", lambda: monitor.count("atoll_certificate_end_timestamp_seconds") > time.time()
        )
        assert monitor.health() == 200
        assert monitor.count("atoll_disk_size_bytes") > 0

        server = broker.servers[0]
        server.kill()
        until("the outage is told", lambda: monitor.health() == 503)
        before = monitor.count("atoll_commits_total")
        assert before >= 2
        server.start()
        until("it is back", lambda: monitor.health() == 200)
        until("commits go on", lambda: monitor.count("atoll_commits_total") > before + 2)

        monitor.process.send_signal(signal.SIGTERM)
        assert monitor.process.wait(DEADLINE_S) == 0


def test_the_run_goes_on_without_its_monitor_and_a_new_one_knows_as_much(tmp_path: Path) -> None:
    """A killed monitor costs nothing: totals are those of the event log, so they do not begin again."""
    with training(tmp_path) as (broker, run, reader):
        with monitoring(tmp_path, run, broker.url, reader) as first:
            until("commits", lambda: first.count("atoll_commits_total") >= 4)
            seen = first.count("atoll_commits_total")
        with monitoring(tmp_path, run, broker.url, reader) as second:
            until("later commits, and all earlier ones", lambda: second.count("atoll_commits_total") > seen + 2)


def test_a_learners_key_a_taken_port_and_a_wrong_address_are_told_in_words(tmp_path: Path) -> None:
    """So is an address that is none: mistakes of a person, each one message, no traceback, exit code 2."""
    with LockedBroker(tmp_path) as broker:
        learner, reader = broker.add("r", "a"), broker.add("r", "eye", "reader")
        with monitoring(tmp_path, "r", broker.url, reader) as monitor:
            port = monitor.url.rpartition(":")[2]
            said = {}
            asked = (("learner", learner, port, broker.url), ("port", reader, port, broker.url))
            for name, identity, at, url in (*asked, ("address", reader, "0", "foo://bar")):
                command = [sys.executable, "-m", "atoll_monitor", "--run", "r", "--broker", url, "--port", at]
                flags = ["--set", "log.format=console", "--set", f"monitor.folder={tmp_path / name}"]
                done = subprocess.run(
                    [*command, *flags, "--set", f"broker.identity={identity}"],
                    capture_output=True,
                    text=True,
                    timeout=DEADLINE_S,
                    check=False,
                    cwd=tmp_path,
                )
                said[name] = done.stderr
                assert done.returncode == 2, done.stderr
                assert "Traceback" not in done.stderr

    assert "the monitor reads what no learner may" in said["learner"]
    assert "the monitor cannot serve at this address" in said["port"]
    assert port in said["port"]
    assert "'foo://bar'" in said["address"]
