"""Fleets on the command line: the same output for one seed, and clear mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import psutil
import pytest

from atoll_simulator.fleet import cells
from atoll_simulator.fleet.parameters import Exchange, FleetParameters
from support.command_line import atoll

ROOT = Path(__file__).resolve().parents[2]
GOODPUT = ("goodput", "--rows", "rigid,elastic,4", "--chips", "150k,600k", "--seeds", "2", "--days", "0.2")
ROUNDS = ("rounds", "--chips", "20k", "--learners", "3", "--steps", "60", "--mtbi-days", "5", "--fragments", "8")
JOIN = (
    "join",
    "--copy-steps",
    "2,8",
    "--learners",
    "2",
    "--fragments",
    "6",
    "--interval-steps",
    "6",
    "--slice-cv",
    "0.2",
)
SCAVENGE = ("scavenge", "--extra", "50", "--learners", "2", "--steps", "60", "--fragments", "4", "--parameters", "1e8")


def sim(*words: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """Run one verb of the group in a process of its own."""
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "atoll.cli", "sim", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)


@pytest.mark.parametrize("words", [GOODPUT, ROUNDS, SCAVENGE, JOIN], ids=lambda words: words[0])
def test_one_seed_has_one_output(tmp_path: Path, words: tuple[str, ...]) -> None:
    more = ("--workers", "1") if words is GOODPUT else ()
    first = sim(*words, "--out", str(tmp_path / "a"), hash_seed="1")
    second = sim(*words, *more, "--out", str(tmp_path / "b"), hash_seed="2")
    other = atoll("sim", *words, "--seed", "9", "--out", str(tmp_path / "c"))
    assert [done.returncode for done in (first, second, other)] == [0, 0, 0], first.stderr + second.stderr

    written = sorted(path.name for path in (tmp_path / "a").iterdir())
    name = f"{words[0]}.json"
    assert name in written
    for each in written:
        assert (tmp_path / "a" / each).read_bytes() == (tmp_path / "b" / each).read_bytes()
    assert json.loads((tmp_path / "a" / name).read_text()) != json.loads((tmp_path / "c" / name).read_text())
    assert first.stdout.replace(str(tmp_path / "a"), "") == second.stdout.replace(str(tmp_path / "b"), "")


def test_the_table_has_every_cell_with_its_interval(tmp_path: Path) -> None:
    done = atoll("sim", *GOODPUT, "--out", str(tmp_path), "--downscale-s", "20")
    document = json.loads((tmp_path / "goodput.json").read_text())

    assert done.stdout.count("±") == 12
    assert "1 rigid" in done.stdout
    assert "M = 4" in done.stdout
    assert document["fleet"]["downscale_s"] == 20.0
    assert len(document["cells"]) == 6
    assert {path.name for path in tmp_path.iterdir()} == {"goodput.json"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("goodput", "--rows", "flexible"), "--rows"),
        (("goodput", "--chips", "many"), "--chips"),
        (("goodput", "--days", "-1"), "--days"),
        (("goodput", "--seeds", "0"), "--seeds"),
        (("goodput", "--mtbi-days", "nan"), "--mtbi-days"),
        (("goodput", "--downscale-s", "soon"), "downscale-s"),
        (("goodput", "--out", "{file}/x"), "--out"),
        (("goodput", "--out", ""), "--out"),
        (("goodput", "--out", "{taken}"), "a folder where a file is to be"),
        (("scavenge", "--mtbi-days", "3"), "--mtbi-days"),
        (("join", "--downscale-s", "3"), "--downscale-s"),
        (("rounds", "--chips", "100M", "--mtbi-days", "0.001"), "too many failures"),
        (("rounds", "--learners", "0"), "--learners"),
        (("rounds", "--learners", "2", "--quorum", "3"), "quorum"),
        (("rounds", "--overlap-steps", "99"), "overlap_steps"),
        (("rounds", "--loss", "1.5"), "--loss"),
        (("scavenge", "--extra", "30"), "whole number of learners"),
        (("scavenge", "--waves", "0"), "--waves"),
        (("join", "--copy-steps", "soon"), "--copy-steps"),
        (("join", "--copy-steps", "-1"), "--copy-steps"),
    ],
)
def test_a_mistake_gets_exit_code_2(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    """What was got, what is allowed; never a traceback."""
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "taken" / "goodput.json").mkdir(parents=True)
    done = atoll("sim", *(word.format(file=file, taken=tmp_path / "taken") for word in words))

    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


LONG = ("goodput", "--days", "200", "--seeds", "20", "--workers", "2", "--chips", "2.4M", "--rows", "16")


@contextmanager
def begun(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Begin one verb in a process group of its own, and yield when it has said what it will do."""
    command = [sys.executable, "-m", "atoll.cli", "sim", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        assert run.stderr is not None
        assert "20 simulations" in run.stderr.readline()
        yield run


def workers_of(run: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """Return the processes that simulate for `run`, as soon as there are `count`."""
    until_s = time.monotonic() + 240.0
    while time.monotonic() < until_s:
        found = [one for one in members(run.pid) if "spawn_main" in " ".join(one.cmdline())]
        if len(found) == count:
            return found
    raise AssertionError(f"{count} workers never came")


@pytest.mark.second_tier
@pytest.mark.parametrize("everybody", [False, True], ids=["one process", "all of them"])
@pytest.mark.parametrize("early", [False, True], ids=["at work", "at once"])
def test_an_interrupt_ends_it_at_once(everybody: bool, early: bool) -> None:  # noqa: FBT001  (a parameter)
    """Exit code 130, nothing said, and no worker left behind, whether one process is told or all, as a terminal does."""
    with begun(*LONG) as run:
        if not early:
            workers_of(run, 2)
        if everybody:
            os.killpg(run.pid, signal.SIGINT)
        else:
            run.send_signal(signal.SIGINT)
        out, error = run.communicate(timeout=240)

    assert run.returncode == 130, error
    assert (out, error) == ("", "")
    _, left = psutil.wait_procs(members(run.pid), timeout=240)
    assert [process for process in left if process in members(run.pid)] == []


@pytest.mark.second_tier
def test_a_worker_that_is_killed_is_told_of() -> None:
    """What memory pressure does: said in a sentence, with exit code 3."""
    with begun(*LONG) as run:
        workers_of(run, 2)[0].kill()
        _, error = run.communicate(timeout=240)

    assert run.returncode == 3, error
    assert "was killed" in error
    assert "Traceback" not in error


def test_one_seed_has_no_interval() -> None:
    done = atoll("sim", "goodput", "--rows", "2", "--chips", "10k", "--seeds", "1", "--days", "0.1")

    assert done.stdout.count("± -") == 2
    assert "9984 of 10000" in done.stdout


def test_help_tells_who_came_and_how_long_it_took_them() -> None:
    head, none, some = atoll("sim", "scavenge", "--extra", "0,50", *SCAVENGE[3:]).stdout.splitlines()

    assert head.split()[-4:] == ["joins", "copy", "merged", "ledger"]
    assert none.split()[-4:-2] == ["0", "-"]
    assert float(some.split()[-4]) > 0.0
    assert some.split()[-5] == "1"


def members(group: int) -> list[psutil.Process]:
    """Return the processes of a process group that are not over and merely waiting to be collected."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


@pytest.mark.parametrize("group", [FleetParameters, Exchange])
def test_every_number_is_documented_with_its_default(group: type[FleetParameters | Exchange]) -> None:
    page = (ROOT / "docs" / "explanation" / "goodput.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `--")]

    for each in fields(group):
        flag = f"| `--{each.name.replace('_', '-')}` | {each.default:,.10g} |".replace(",", "")
        (row,) = [row for row in rows if row.startswith(flag)]
        assert each.metadata["origin"].partition(":")[0].partition(",")[0].split()[0] in row


def test_help_names_every_number() -> None:
    """The flags are made from the fields; every number is a flag of some verb, and of no verb that it does nothing to."""
    goodput, rounds, scavenge = (atoll("sim", verb, "--help").stdout for verb in ("goodput", "rounds", "scavenge"))

    assert all(f"--{each.name.replace('_', '-')} " in goodput + rounds for each in fields(FleetParameters))
    assert all(f"--{each.name.replace('_', '-')} " in rounds for each in fields(Exchange))
    assert "--restart-s" not in rounds
    assert "--step-s" not in goodput
    assert "--step-s" in scavenge
    assert "--upscale-s" not in scavenge


def test_ctrl_c_waits_until_all_workers_have_begun() -> None:
    """Whatever thread it reaches: a worker whose parent is interrupted while it hands over the work prints a traceback."""
    go, told, reached = threading.Event(), threading.Event(), threading.Event()

    def hear() -> None:
        go.wait(60.0)
        signal.raise_signal(signal.SIGINT)
        told.set()

    def begin_workers() -> None:
        with cells._uninterrupted():
            go.set()
            assert told.wait(60.0)
            reached.set()

    threading.Thread(target=hear).start()
    with pytest.raises(KeyboardInterrupt):
        begin_workers()

    assert reached.is_set()
