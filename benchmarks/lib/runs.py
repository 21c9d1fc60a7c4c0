"""What benchmarks run: `atoll up` with its text and its report, and programs of other projects in their environments."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import psutil

from atoll.bus.open import open_bus
from atoll.local.run_settings import without_settings
from atoll.run.history import History
from atoll.wire.subjects import Subjects

CORPUS: Final = Path("build/corpus")
EVENTS_MAX: Final = 1 << 30
LEAVE_S: Final = 30.0
LOOK_S: Final = 0.2


def prepare(corpus: Path = CORPUS) -> Path:
    """Make the token shards of the standard library once, and return their folder; who comes second waits."""
    corpus.parent.mkdir(parents=True, exist_ok=True)
    with corpus.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (corpus / "meta.json").exists():
            words = [sys.executable, "-m", "atoll.cli", "data", "prepare", "--stdlib", "--out", str(corpus)]
            subprocess.run(words, check=True)
    return corpus


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """Return flags by name as words of a command; True has no value, None is left out."""
    given = [(f"--{name}", value) for name, value in flags.items() if value is not None]
    return [word for name, value in given for word in ([name] if value is True else [name, str(value)])]


def up_command(
    out: Path,
    flags: Mapping[str, object],
    *,
    settings: Iterable[str] = (),
    throttle: Mapping[str, float] | None = None,
    via: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the command of a run in `out`: `flags`, then `settings` (a.b=c).

    `throttle` says how many times longer than its own computing a step of a learner takes, `via` through which relay a
    process reaches the broker.
    """
    words = [sys.executable, "-m", "atoll.cli", "up", "--out", str(out)]
    words += flag_words(flags)
    words += [word for setting in settings for word in ("--set", setting)]
    words += [word for name, factor in (throttle or {}).items() for word in ("--throttle", f"{name}={factor:g}")]
    return words + [word for name, url in (via or {}).items() for word in ("--via", f"{name}={url}")]


@contextmanager
def shard_process(url: str, run: str, **settings: object) -> Iterator[psutil.Process]:
    """Serve a run's shards by a process of its own until the block ends; `settings` are by environment, as broker__identity."""
    given = {"run": run, "broker__url": url, "log__level": "warning", **settings}
    place = {f"ATOLL_{name.upper()}": str(value) for name, value in given.items() if value is not None}
    process = subprocess.Popen([sys.executable, "-m", "atoll_synchronizer"], env=os.environ | place)
    try:
        yield psutil.Process(process.pid)
    finally:
        leave(process)


def leave(process: subprocess.Popen[bytes]) -> None:
    """Have a process leave in good order, or kill it where it does not in time."""
    process.terminate()
    try:
        process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def start_program(words: list[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start a program that says all in `log`, its errors beside it; of the settings of ours it has `variables` only."""
    with log.open("wb") as out, log.with_suffix(".err").open("wb") as errors:
        return subprocess.Popen(words, env={**without_settings(os.environ), **variables}, stdout=out, stderr=errors)


def cpu_s(process: psutil.Process) -> float:
    """Return the processor seconds that a process and those it has started have used."""
    return float(sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True))))


class Polled(Protocol):
    """A training process, as `wait_until` asks it."""

    def poll(self) -> int | None:
        """Return the exit code; None while it trains."""


def wait_until(what: str, holds: Callable[[], object], within_s: float, up: Polled | None = None) -> float:
    """Return after how many seconds something holds; end the benchmark when it does not in time, or when `up` has ended."""
    began_s = time.monotonic()
    while not holds():
        if time.monotonic() - began_s > within_s or (up is not None and up.poll() is not None):
            raise SystemExit(f"within {within_s:.0f} s this did not come: {what}")
        time.sleep(LOOK_S)
    return time.monotonic() - began_s


def end_in_order(up: subprocess.Popen[bytes], out: Path, within_s: float) -> None:
    up.send_signal(signal.SIGINT)
    if up.wait(within_s):
        raise SystemExit(f"atoll up left with {up.returncode}; see {out / 'logs'}")


def learner_names(count: int) -> list[str]:
    return [f"learner-{number}" for number in range(1, count + 1)]


def read_report(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return report


async def read_history(url: str, run: str) -> History:
    bus, history = await open_bus(url, run, name="reader"), History()
    try:
        await history.read(bus, Subjects(run))
    finally:
        await bus.close()
    return history


async def stored_events(url: str, run: str) -> list[bytes]:
    """Return the events as the broker has stored them, oldest first."""
    bus = await open_bus(url, run, name="reader")
    try:
        return [entry.data for entry in await bus.replay(Subjects(run).event("*", "*"), limit=EVENTS_MAX)]
    finally:
        await bus.close()


def merged_tokens(report: dict[str, Any]) -> int:
    return sum(report["tokens_by_fate"][fate] for fate in ("merged", "merged_late"))


def loss_at(report: dict[str, Any], tokens: int, by: str = "tokens_merged") -> float:
    """Return the held-out bits per byte when so many tokens were merged, between two points of the curve."""
    curve = report["validation"]["curve"]
    return float(np.interp(tokens, [point[by] for point in curve], [point["bits_per_byte"] for point in curve]))


def loss_beside(report: dict[str, Any], plain: dict[str, Any]) -> tuple[float, str]:
    """Return by which share a run's held-out loss is above the plain run's at equal merged tokens, and both in words."""
    equal = min(merged_tokens(plain), merged_tokens(report))
    ours, theirs = loss_at(report, equal), loss_at(plain, equal)
    return ours / theirs - 1.0, f"{ours:.4f} and {theirs:.4f} bits per byte at {equal} merged tokens"


HERE: Final = Path(__file__).parents[1] / "peers"
FOLDER: Final = Path("build/peers")
PEERS: Final = {"Flower": "flower", "tsugi-mend": "tsugi"}


def peer_seconds(peer: str, contributions: int, elements: int, seed: int) -> tuple[float, str]:
    """Return how long a peer's merge of so many float32 vectors takes, and in words what it does and by which version."""
    name = PEERS[peer]
    script = [str(HERE / "merging.py"), name, str(contributions), str(elements), str(seed)]
    done = subprocess.run([environment(name), *script], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["seconds"], f"{answer['what']}; {answer['versions']}, best of {answer['repeats']}"


def environment(name: str) -> str:
    """Make the environment of a peer where there is none yet, and return its interpreter."""
    folder = FOLDER / name
    python, wanted, there = folder / "bin/python", HERE / f"{name}.txt", folder / "requirements.txt"
    if not there.exists() or there.read_bytes() != wanted.read_bytes():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--requirement", str(wanted)], check=True)
        there.write_bytes(wanted.read_bytes())
    return str(python)


def lighthouse(replicas: int, bind: str) -> list[str]:
    """Return the command of torchft's lighthouse at an address, for so many replicas."""
    program = Path(environment("racing")).with_name("torchft_lighthouse")
    return [str(program), "--min_replicas", str(replicas), "--bind", bind]
