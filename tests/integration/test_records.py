"""What a monitor writes down beside a real run, read with the libraries for which it is written."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.collectors import collecting
from support.monitored_run import DEADLINE_S, SteadyRun, monitoring, until

pytestmark = [pytest.mark.connected, pytest.mark.second_tier]

SINKS = '["wandb","tensorboard","trackio"]'
# Each library reads what it has written in a process of its own: they start threads, and warn of things of their own.
READ = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(f"{folder}/tensorboard/{run}")
found.Reload()
tag = "learner_loss/a"
told = [(one.step, one.value) for one in found.Scalars(tag)] if tag in found.Tags()["scalars"] else []
""",
    "trackio": """
from trackio.sqlite_storage import SQLiteStorage
told = [(one["step"], one["learner_loss/a"]) for one in SQLiteStorage.get_logs("atoll", run) if "learner_loss/a" in one]
""",
    "wandb": """
from pathlib import Path
from wandb.proto import wandb_internal_pb2

def records(data, block=32768):
    # A log of LevelDB after a head of 7 bytes: blocks of parts, each with checksum, length and kind (1 whole, 4 the last).
    at, parts = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""

[path] = Path(folder).glob("wandb/offline-run-*/*.wandb")
told = []
for record in records(path.read_bytes()):
    items = {"/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in record.history.item}
    if "learner_loss/a" in items:
        told.append((record.history.step.num, items["learner_loss/a"]))
""",
}


def events_of(folder: Path, run: str) -> list[int]:
    lines = [json.loads(line) for line in (folder / f"{run}.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["sequence"] for line in lines if line["kind"] == "event"]


def curve_of(library: str, folder: Path, run: str) -> list[tuple[int, float]]:
    program = f"import json, sys\nfolder, run = sys.argv[1:]\n{READ[library]}\nprint('told', json.dumps(told))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), run],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[tuple[int, float]] = json.loads(done.stdout.rpartition("told ")[2])
    return found


def test_journal_sinks_and_traces_of_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed monitor loses at most its last second, and the next one has every event once; each library reads its curves."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    written = tmp_path / "written"
    sampling = ("monitor.sample_s=1", f"monitor.sinks={SINKS}")

    def has(count: int) -> bool:
        return (written / f"{run.run}.jsonl").exists() and len(events_of(written, run.run)) > count

    with collecting() as (collector, spans), SteadyRun(tmp_path) as run:
        settings = (f"monitor.folder={written}", f"monitor.traces={collector}", *sampling)
        with monitoring(tmp_path, run.run, run.broker.url, run.reader, f"monitor.folder={written}"):
            until("events are written", lambda: has(5))
        with monitoring(tmp_path, run.run, run.broker.url, run.reader, *settings) as monitor:
            before = len(events_of(written, run.run))
            until("more events are written", lambda: has(before + 5))
            until("TensorBoard has curves", lambda: len(curves_of_tensorboard(written)) > 2)
            assert monitor.count("atoll_monitor_dropped_lines_total") == 0
            monitor.process.send_signal(signal.SIGTERM)
            assert monitor.process.wait(DEADLINE_S) == 0
            assert "sink.failed" not in monitor.log.read_text()

    assert any(span.name.startswith("contribution of a") for span in spans)
    assert {len(span.trace_id) for span in spans} == {16}
    numbers = events_of(written, run.run)
    assert numbers == sorted(set(numbers))
    samples = [
        json.loads(line) for line in (written / f"{run.run}.jsonl").read_text().splitlines() if "metrics" in line
    ]
    assert samples[-1]["values"]["atoll_commits_total"] > 0
    [name] = names_of_tensorboard(written)
    assert name.startswith(f"{run.run}-")
    for library in READ:
        told = curve_of(library, written, name)
        assert len(told) > 2, library
        assert {value for _, value in told} == {2.5}, library
        assert [step for step, _ in told] == sorted(step for step, _ in told), library


def names_of_tensorboard(folder: Path) -> list[str]:
    """Return the names under which TensorBoard has curves: the run's, with the beginning of its founding's nonce."""
    return [each.name for each in (folder / "tensorboard").glob("*")]


def curves_of_tensorboard(folder: Path) -> list[Any]:
    """Return what TensorBoard reads so far; nothing before there is a file."""
    return [value for name in names_of_tensorboard(folder) for value in curve_of("tensorboard", folder, name)]
