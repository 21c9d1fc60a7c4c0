"""`atoll up` as a person runs it: real broker, real processes, real text, real signals."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from atoll.cli.main import build
from atoll.protocol.settings import ProtocolSettings
from support import caches
from support.whole_runs import (
    DEADLINE_S,
    SMALL,
    UNHURRIED,
    command_of,
    finish,
    logged_lines,
    processes_of,
    report_of,
    start,
    wait_for_line,
)

PACKED_BITS = 4.3
"""Four bits and a scale for each block, with what frames it; a version is sent whole once in `keyframe_versions`."""


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    finish(start(out, corpus, "--learners", "1", "--tokens", "20000"))
    return out


def learner_pid(out: Path, learner: str) -> int:
    """Return the process that runs `learner`."""
    for pid in processes_of(out):
        variables = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
        command = (Path("/proc") / str(pid) / "cmdline").read_bytes()
        if f"ATOLL_LEARNER__ID={learner}".encode() in variables and b"atoll_learner" in command:
            return pid
    raise AssertionError(f"no process runs {learner}")


def test_a_text_that_cannot_be_used_leaves_the_folder_free_for_another(tmp_path: Path) -> None:
    for number in (1, 2):
        text = tmp_path / f"empty-{number}.txt"
        text.touch()
        process = start(tmp_path / "run", text)
        said, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 2, said
        assert "this text is empty" in said
        assert text.name in said


def test_a_run_trains_reports_and_leaves_nothing_behind(run_dir: Path, corpus: Path) -> None:
    """A small run ends by itself with a lower loss, exact ledgers, a report, a model, its average and a sample.

    On a busy machine a learner may begin when the other could have ended the run: a quorum of two awaits it.
    """
    asked = ["protocol.average_versions=4", "protocol.ending=together", "protocol.quorum=2", "train.optimizer=muon"]
    flags = [word for one in asked for word in ("--set", one)]
    said = finish(
        start(run_dir, corpus, "--learners", "2", "--shards", "2", "--tokens", "60000", "--seed", "3", *flags)
    )
    report = report_of(run_dir)
    validation = report["validation"]
    fates = report["tokens_by_fate"]

    assert isinstance(validation, dict)
    assert isinstance(fates, dict)
    assert validation["final_bits_per_byte"] < validation["initial_bits_per_byte"] - 1.0, said
    assert report["fates_exact"] is True
    assert sum(fates.values()) == report["tokens_trained"]
    assert report["seed"] == 3
    assert load_file(run_dir / "model.safetensors")["model.embed_tokens.weight"].shape == (256, 32)
    averaged = load_file(run_dir / "model-average.safetensors")
    assert averaged.keys() == load_file(run_dir / "model.safetensors").keys()
    assert validation["average_bits_per_byte"] < validation["initial_bits_per_byte"] - 0.5
    assert any("average_bits_per_byte" in point for point in validation["curve"])
    check_last_point(run_dir, validation)
    assert (run_dir / "sample.txt").read_text(encoding="utf-8").startswith("def ")
    check_ledger(report)
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    frames = json.loads(page.partition('id="frames">')[2].partition("</script>")[0])
    assert frames["report"]["moved"] == report["moved"]
    assert "rounds" in {part["of"] for part in frames["causes"]["slow"]}
    curves = report["curves"]
    assert isinstance(curves, dict)
    assert [len(one["at_s"]) > 1 for one in curves["learners"]] == [True, True]
    assert report["faults"] == 0
    assert 'src="http' not in page
    assert 'href="http' not in page
    ask_after_the_end(run_dir)


def check_last_point(run_dir: Path, validation: dict[str, object]) -> None:
    """The last point of the curve is the exported model, which the evaluator wrote: no further process had to."""
    curve = validation["curve"]
    assert isinstance(curve, list)
    assert curve[-1]["bits_per_byte"] == validation["final_bits_per_byte"]
    assert curve[-1]["average_bits_per_byte"] == validation["average_bits_per_byte"]
    assert not (run_dir / "logs" / "export.jsonl").exists()


def evaluator_of(run_dir: Path) -> int:
    wait_for_line(run_dir / "logs" / "evaluator.jsonl", "model.evaluated")
    return next(
        pid for pid in processes_of(run_dir) if b"evaluate" in (Path("/proc") / str(pid) / "cmdline").read_bytes()
    )


def hold_until_export(process: subprocess.Popen[str], evaluator: int) -> None:
    os.kill(evaluator, signal.SIGSTOP)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("measuring and writing the model"):
            break


@pytest.mark.second_tier
def test_an_evaluator_that_dies_at_the_end_costs_no_model(run_dir: Path, corpus: Path) -> None:
    """It is held fast from its first measurement on, and killed when it is asked for the model."""
    process = start(run_dir, corpus, "--learners", "1", "--shards", "1", "--tokens", "20000")
    hold_until_export(process, evaluator := evaluator_of(run_dir))
    os.kill(evaluator, signal.SIGKILL)
    said = finish(process)

    assert "exporting the model: done" in said
    assert (run_dir / "sample.txt").read_text(encoding="utf-8").startswith("def ")
    assert load_file(run_dir / "model.safetensors")


@pytest.mark.second_tier
def test_an_evaluator_that_is_told_to_stop_while_it_loads_measures_and_exports(run_dir: Path, corpus: Path) -> None:
    """A short run may be over before an evaluator has loaded JAX. It was ended then, and the run had no curve."""
    words = ("--learners", "1", "--shards", "1", "--tokens", "5000", "--set", "protocol.average_versions=4")
    process = start(run_dir, corpus, *words)
    hold_until_export(process, evaluator := loading_evaluator_of(run_dir))
    os.kill(evaluator, signal.SIGCONT)
    finish(process)

    validation = report_of(run_dir)["validation"]
    assert isinstance(validation, dict)
    check_last_point(run_dir, validation)


def loading_evaluator_of(run_dir: Path) -> int:
    """Return the process of a run's evaluator when it handles SIGTERM, and has not loaded JAX."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        for pid in processes_of(run_dir):
            place = Path("/proc") / str(pid)
            with contextlib.suppress(OSError):
                handled = re.search(r"SigCgt:\s*(\w+)", (place / "status").read_text())
                handles = handled and int(handled[1], 16) >> (signal.SIGTERM - 1) & 1
                is_loading = handles and "jaxlib" not in (place / "maps").read_text()
                if is_loading and b"evaluate" in (place / "cmdline").read_bytes():
                    return pid
        time.sleep(0.005)
    raise AssertionError("no evaluator handled SIGTERM before it had loaded JAX")


@pytest.mark.second_tier
def test_a_run_whose_console_is_gone_ends_in_order(run_dir: Path, corpus: Path) -> None:
    """With `| tee log` Ctrl-C ends `tee` as well: nothing can be printed any more, and nothing may be lost for that."""
    process = start(run_dir, corpus, "--learners", "1", "--shards", "1", "--tokens", "5000000")
    assert process.stdout is not None
    for line in process.stdout:
        if " 1 training" in line and "no step yet" not in line:
            break
    process.stdout.close()
    process.send_signal(signal.SIGINT)

    assert process.wait(DEADLINE_S) == 0
    assert json.loads((run_dir / "run.json").read_text())["sessions"][-1]["ended"] == "stopped"
    assert report_of(run_dir)["fates_exact"] is True
    assert (run_dir / "model.safetensors").exists()
    assert logged_lines(run_dir / "logs" / "up.jsonl", "console.gone")


@pytest.mark.second_tier
def test_a_model_that_cannot_be_written_is_no_success(run_dir: Path, corpus: Path) -> None:
    """The run has ended and has its report; its program leaves with the error of the export."""
    process = start(run_dir, corpus, "--learners", "1", "--shards", "1", "--tokens", "20000")
    evaluator_of(run_dir)
    (run_dir / "sample.txt").mkdir()
    said, _ = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 2, said
    assert "exporting the model failed: " in said
    assert "finished: " in said
    assert json.loads((run_dir / "run.json").read_text())["sessions"][-1]["ended"] == "finished"
    assert (run_dir / "report.html").exists()


@pytest.mark.second_tier
def test_an_evaluator_that_somebody_ends_leaves_no_old_model(run_dir: Path, corpus: Path) -> None:
    """Asked to leave in the middle of a run, it writes what is merged until then; the run's model is of its end."""
    process = start(run_dir, corpus, "--learners", "1", "--shards", "1", "--tokens", "1500000")
    os.kill(evaluator_of(run_dir), signal.SIGTERM)  # long before the end: it must have left by then
    said = finish(process)
    former = logged_lines(run_dir / "logs" / "evaluator.jsonl", "model.exported")[0]
    commits = logged_lines(run_dir / "logs" / "shard-0.jsonl", "round.committed")
    last = {commit["fragment"]: commit["version"] for commit in commits}.values()
    validation = msgspec.json.decode((run_dir / "validation.json").read_bytes())

    assert "exporting the model: done" in said
    assert (validation["versions_min"], validation["versions_max"]) == (min(last), max(last)), "the model is of the end"
    assert former["versions_min"] < min(last), "there was a former one"
    assert "the evaluator was told to leave" in said
    told = report_of(run_dir)["validation"]
    assert isinstance(told, dict)
    assert told["curve"][-1]["bits_per_byte"] == told["final_bits_per_byte"], "the curve ends with that model"


def ask_after_the_end(run_dir: Path) -> None:
    """The folder of a run that has ended answers what its broker would, and is left as it was."""
    verbs = CliRunner()
    rounds = verbs.invoke(build(), ["why", "--out", str(run_dir)])
    one = verbs.invoke(build(), ["why", "--out", str(run_dir), "--fragment", "0"])
    fates = verbs.invoke(build(), ["fates", "--out", str(run_dir)])
    beside = verbs.invoke(build(), ["report", "compare", str(run_dir), str(run_dir / "report.json")])

    assert "from the call of a round until its version was visible" in rounds.output
    assert "why it waited" in one.output
    assert "every token has one fate" in fates.output
    assert beside.output.count("finished") == 2
    assert (rounds.exit_code, one.exit_code, fates.exit_code) == (0, 0, 0)


def check_ledger(report: dict[str, object]) -> None:
    """Every link's bytes are there, each kind within the next, and what learners sent is what the shards have read."""
    moved = report["moved"]
    assert isinstance(moved, dict)
    links = {link["link"]: link for link in moved["links"]}
    assert set(links) == {"learner-1", "learner-2", "shard-0", "shard-1"}
    for link in links.values():
        for way in ("up", "down"):
            assert 0 < link[f"frames_{way}"] <= link[f"blobs_{way}"] < link[f"payload_{way}"] < link[f"wire_{way}"]
    assert moved["all"]["frames_down"] > moved["all"]["frames_up"] > moved["learners"]["frames_up"]
    read = links["shard-0"]["frames_down"] + links["shard-1"]["frames_down"]
    assert 0.5 * moved["learners"]["frames_up"] < read <= moved["learners"]["frames_up"]
    assert moved["learners"]["payload_up"] >= report["bytes_up"]
    assert moved["tokens"] == report["tokens_trained"]
    assert moved["data_parallel_bytes_per_token"] > moved["bytes_per_token_all_links"] > moved["bytes_per_token"] > 0
    # Less what zstd saves, which is up to the machine's pace: the fewer steps, the more rows that have not changed.
    assert 0.0 < moved["bits_per_parameter_up"] < PACKED_BITS
    assert 0.0 < moved["bits_per_parameter_published"] < PACKED_BITS + 33.0 / ProtocolSettings().keyframe_versions


@pytest.mark.second_tier
def test_a_killed_learner_returns_under_its_id_and_the_books_add_up(run_dir: Path, corpus: Path) -> None:
    """SIGKILL takes one life of a learner; the next begins where the run is, and every token has a fate."""
    process = start(run_dir, corpus, "--learners", "3", *UNHURRIED, "--tokens", "0", "--seed", "4")
    log = run_dir / "logs" / "learner-2.jsonl"
    wait_for_line(log, "learner.first_step")
    wait_for_line(run_dir / "logs" / "shard-0.jsonl", "round.committed", 40)
    os.kill(learner_pid(run_dir, "learner-2"), signal.SIGKILL)
    joined = wait_for_line(log, "learner.joined", 2)
    again = wait_for_line(log, "learner.first_step", 2)
    process.send_signal(signal.SIGINT)
    finish(process)
    report = report_of(run_dir)
    learners = report["learners"]

    assert isinstance(learners, list)
    assert joined["incarnation"] == 2
    # Fresh values begin at ln 256 = 5.5. On a busy machine the first life may begin late, too, so it is no measure.
    assert float(str(again["loss"])) < 0.75 * math.log(256)
    assert report["fates_exact"] is True, report["fates_errors"]
    assert {entry["learner"]: len(entry["incarnations"]) for entry in learners}["learner-2"] == 2
    moved = report["moved"]
    assert isinstance(moved, dict)
    assert {link["link"]: link["processes"] for link in moved["links"]}["learner-2"] == 2


@pytest.mark.second_tier
def test_ctrl_c_drains_and_the_run_can_be_continued(run_dir: Path, corpus: Path) -> None:
    """The first Ctrl-C pushes what was trained and reports; the same folder goes on from there to a target."""
    process = start(run_dir, corpus, "--learners", "2", *UNHURRIED, "--tokens", "0", "--seed", "5")
    wait_for_line(run_dir / "logs" / "shard-0.jsonl", "round.committed", 4)
    logs = [run_dir / "logs" / f"learner-{number}.jsonl" for number in (1, 2)]
    for log in logs:
        wait_for_line(log, "learner.first_step")  # who has not trained has no state to go on with
    process.send_signal(signal.SIGINT)
    assert f"to continue:   atoll up --out {run_dir}" in finish(process)
    first = report_of(run_dir)
    assert isinstance(first["tokens_trained"], int)
    target = first["tokens_trained"] + 60_000
    said = finish(start(run_dir, corpus, "--learners", "2", "--tokens", str(target)))
    second = report_of(run_dir)

    assert " commits · " in said
    assert " 0 commits · " not in said, "of what went before nothing was known yet"
    assert first["fates_exact"] is True, first["fates_errors"]
    assert isinstance(second["tokens_trained"], int)
    assert second["tokens_trained"] >= target
    assert second["fates_exact"] is True, second["fates_errors"]
    assert isinstance(second["learners"], list)
    assert sum(learner["tokens"] for learner in second["learners"]) == second["tokens_trained"]
    assert "fresh" not in {wait_for_line(log, "learner.recovered", 2)["source"] for log in logs}


@pytest.mark.second_tier
def test_a_second_ctrl_c_stops_at_once(run_dir: Path, corpus: Path) -> None:
    """Two Ctrl-C leave with 130 and no process, whatever the run was doing."""
    process = start(run_dir, corpus, "--learners", "2", *UNHURRIED, "--tokens", "100000000")
    wait_for_line(run_dir / "logs" / "shard-0.jsonl", "round.committed")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)

    assert process.returncode in (0, 130)


@pytest.mark.second_tier
def test_a_run_whose_store_is_damaged_is_not_begun_anew_silently(run_dir: Path, finished: Path, corpus: Path) -> None:
    """What the folder remembers and the broker has lost is an error, exit code 3; the last report stays."""
    shutil.copytree(finished, run_dir)
    before = report_of(run_dir)
    blocks = sorted((run_dir / "nats").rglob("*.blk"))
    for block in blocks:
        os.truncate(block, min(block.stat().st_size, 200))
    process = start(run_dir, corpus, "--tokens", "60000")
    said, _ = process.communicate(timeout=DEADLINE_S)

    assert blocks
    assert process.returncode == 3, said
    assert "has lost a part of this run" in said
    assert report_of(run_dir) == before


@pytest.mark.second_tier
def test_damaged_token_shards_are_refused_before_anything_trains(run_dir: Path, finished: Path, corpus: Path) -> None:
    """A run that is continued with a truncated file says so, exit code 2; no learner was started for it."""
    shutil.copytree(finished, run_dir)
    log = run_dir / "logs" / "learner-1.jsonl"
    before = log.read_bytes()
    os.truncate(run_dir / "data" / "train.bin", 4096)
    said, _ = (process := start(run_dir, corpus, "--tokens", "60000")).communicate(timeout=DEADLINE_S)

    assert process.returncode == 2, said
    assert "train.bin is not what meta.json says" in said
    assert log.read_bytes() == before


@pytest.mark.second_tier
def test_a_disk_that_fills_and_empties_costs_no_token(run_dir: Path, corpus: Path) -> None:
    """Learners train on while nothing can be stored; with room again the broker recovers and the ledgers are exact."""
    run_dir.mkdir()
    unshare = ("unshare", "--user", "--map-root-user", "--mount")
    mount = f"mount -t tmpfs -o size=300m none {run_dir}"
    if subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    command = shlex.join(command_of(run_dir, corpus, "--learners", "2", *UNHURRIED, "--tokens", "0"))
    process = subprocess.Popen(
        [*unshare, "sh", "-c", f"{mount} && exec {command}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    disk = Path(f"/proc/{process.pid}/root{run_dir}")
    wait_for_line(disk / "logs" / "shard-0.jsonl", "round.committed", 4)
    fill(disk / "ballast")
    assert process.stdout is not None
    said = "".join(iter(process.stdout.readline, "the disk is full\n"))
    committed = (disk / "logs" / "shard-0.jsonl").read_text(encoding="utf-8").count("round.committed")
    (disk / "ballast").unlink()
    wait_for_line(disk / "logs" / "broker.jsonl", "broker.restarted")
    wait_for_line(disk / "logs" / "shard-0.jsonl", "round.committed", committed + 4)
    process.send_signal(signal.SIGINT)
    said += finish(process)

    assert "the broker was away and answers again" in said
    assert "(exact)" in said, said


def fill(ballast: Path) -> None:
    """Write until the disk has no room."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))


@pytest.mark.second_tier
def test_a_learner_that_somebody_else_started_leaves_with_the_run(run_dir: Path, corpus: Path) -> None:
    """Its broker is about to end, so a guest is told to drain like everybody; its tokens have their fates too.

    While it trains, `atoll top` of somebody else's shows it beside the others: the door is open.
    """
    process = start(run_dir, corpus, "--open", "--learners", "1", *UNHURRIED, "--tokens", "0", "--set", "run=guests")
    wait_for_line(run_dir / "logs" / "shard-0.jsonl", "round.committed", 2)
    url = (run_dir / "nats" / "url").read_text(encoding="utf-8")
    told = {"data.dir": run_dir / "data", "learner.compile_cache": caches.PROGRAMS, "log.format": "json"}
    settings = [word for name, value in told.items() for word in ("--set", f"{name}={value}")]
    settings += [word for setting in SMALL for word in ("--set", setting)]
    words = ["learner", "--id", "guest", "--run", "guests", "--broker", url, *settings, *UNHURRIED]
    with (run_dir / "guest.log").open("wb") as log:
        guest = subprocess.Popen([sys.executable, "-m", "atoll.cli", *words], stdout=log, stderr=log)
    wait_for_line(run_dir / "guest.log", "learner.first_step")
    asked = [sys.executable, "-m", "atoll.cli", "top", "--once", "--run", "guests", "--broker", url]
    table = subprocess.run(asked, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    process.send_signal(signal.SIGINT)
    finish(process)
    report = report_of(run_dir)

    assert guest.wait(DEADLINE_S) == 0
    assert report["fates_exact"] is True, report["fates_errors"]
    assert isinstance(report["learners"], list)
    assert {learner["learner"] for learner in report["learners"]} == {"guest", "learner-1"}
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line.strip()}
    assert {"guest", "learner-1", "shard-0"} <= rows.keys()
    assert rows["guest"][1] == rows["learner-1"][1] == "training"
    assert rows["shard-0"][1] == "serving"
