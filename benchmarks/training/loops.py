"""What being an island asks of the loops people have, and what they survive: `make bench-loops`.

Every loop of `examples/` is played by the commands at its head, by two islands, a shard and a broker of its own, in three
scenes: undisturbed; one island killed and started again; both. SIGKILL comes when the run has trained `KILL_SHARE` of its
tokens, and the same command follows at once. `own lines` are those that the example marks. A step is one turn of the loop, as
long as it took beside the other island on the same machine. The cost of an island is the time inside `island.step` over all
time, by its own clock; a bound is set where a step takes 100 ms or longer.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from atoll.base.errors import SettingsError
from atoll.bus.open import open_bus
from atoll.bus.server import EmbeddedBroker
from atoll.run import ledger
from atoll.run.record import founded_run, recorded_progress
from benchmarks.lib.harness import Figure, at_most, fact, run_benchmark
from support.documents import ROOT, documented

KILL_SHARE = 0.2
DEADLINE_S = 900.0
POLL_S = 0.02
MARK = "# atoll"
_LOSSES = re.compile(
    r"loss (?P<first>[\d.]+) to (?P<last>[\d.]+) in (?P<steps>\d+) steps, "
    r"(?P<inside_ms>[\d.]+) ms of each in the island, (?P<overhead>[\d.]+)% of the time"
)
_MEASURE = re.compile(r"(?P<what>accuracy|loss) on held-out \w+ (?P<value>[\d.]+)")


@dataclass(frozen=True, slots=True)
class Loop:
    """One example: `before` makes what it needs, `shard` and `learners` are its commands."""

    name: str
    own_lines: int
    before: tuple[str, ...]
    shard: str
    learners: tuple[str, ...]

    @property
    def run(self) -> str:
        return self.shard.rpartition(" ")[2]


@dataclass(frozen=True, slots=True)
class LearnerWords:
    """A learner's printed losses and costs (`steps` is 0 if it came when the run was over), and the merged model's measure."""

    first: float
    last: float
    steps: int
    inside_ms: float
    overhead: float
    measure: str

    @property
    def step_ms(self) -> float:
        return self.inside_ms / self.overhead if self.overhead else 0.0


@dataclass(frozen=True, slots=True)
class SceneOutcome:
    """Outcome of one scene: the learners' last words, seconds, tokens trained and lost, whether each has exactly one fate."""

    words: tuple[LearnerWords, ...]
    took_s: float
    trained: int
    lost: float
    exact: bool

    @property
    def agree(self) -> bool:
        """Return whether all islands measured the same merged model."""
        return len({word.measure for word in self.words}) == 1


def loop_of(example: str) -> Loop:
    text = (ROOT / "examples" / f"{example}.py").read_text(encoding="utf-8")
    lines = documented(ast.get_docstring(ast.parse(text)) or "")
    at = next(i for i, line in enumerate(lines) if line.startswith("atoll broker"))
    marked = sum(line.endswith(MARK) for line in text.splitlines())
    return Loop(example, marked, tuple(lines[:at]), lines[at + 1], tuple(lines[at + 2 :]))


@contextmanager
def at_work(command: str, folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of an example's head in `folder`; nothing of it outlives the block."""
    scripts = Path(sys.executable).parent
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    environment["PATH"] = f"{scripts}:{environment['PATH']}"
    with log.open("wb") as said:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {command}"],  # noqa: S607  (wherever it is)
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prepare(loop: Loop, folder: Path) -> None:
    for name in ("examples", "docs"):
        (folder / name).symlink_to(ROOT / name)
    for line in loop.before:
        log = folder / "before.log"
        with at_work(line, folder, log) as process:
            await_end(process, log)


def play(loop: Loop, folder: Path, scene: str, killed: int) -> SceneOutcome:
    place = folder / scene
    place.mkdir()
    began_s = time.monotonic()
    with (
        EmbeddedBroker(place / "store") as broker,
        at_work(f"{loop.shard} --broker {broker.url}", folder, place / "shard.log") as shard,
    ):
        words = tuple(_islands(loop, folder, place, broker.url, killed))
        await_end(shard, place / "shard.log")
        trained, lost, exact = asyncio.run(fates(broker.url, loop.run))
    return SceneOutcome(words, time.monotonic() - began_s, trained, lost, exact)


def _islands(loop: Loop, folder: Path, place: Path, url: str, killed: int) -> Iterator[LearnerWords]:
    lines = [f"{line} {url}" for line in loop.learners]
    logs = [place / f"learner-{i}.log" for i in range(len(lines))]
    again = [place / f"learner-{i}-again.log" for i in range(killed)]
    with (
        at_work(lines[0], folder, logs[0]) as first,
        at_work(lines[1], folder, logs[1]) as second,
    ):
        learners = [first, second]
        if not killed:
            yield from (words_of(await_end(one, log)) for one, log in zip(learners, logs, strict=True))
            return
        asyncio.run(wait_for_share(url, loop.run, learners))
        for one in learners[:killed]:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()
        with at_work(lines[0], folder, again[0]) as first_again:
            if killed == 1:
                yield from (words_of(await_end(*pair)) for pair in ((first_again, again[0]), (second, logs[1])))
                return
            with at_work(lines[1], folder, again[1]) as second_again:
                yield from (words_of(await_end(*pair)) for pair in ((first_again, again[0]), (second_again, again[1])))


async def wait_for_share(url: str, run: str, learners: list[subprocess.Popen[bytes]]) -> None:
    bus = await open_bus(url, run, name="reader")
    deadline_s = time.monotonic() + DEADLINE_S
    try:
        while time.monotonic() < deadline_s:
            try:
                record = await founded_run(bus, run)
                progress = await recorded_progress(bus, record)
            except SettingsError:
                progress = None
            if progress is not None and progress.tokens >= KILL_SHARE * record.protocol.tokens_target:
                return
            if any(one.poll() is not None for one in learners):
                raise SystemExit(f"{run}: a learner ended before it was to be killed")
            await asyncio.sleep(POLL_S)
    finally:
        await bus.close()
    raise SystemExit(f"{run}: the run did not come to {KILL_SHARE:.0%} of its tokens")


async def fates(url: str, run: str) -> tuple[int, float, bool]:
    """Return tokens trained, tokens lost, and whether every token of the run has exactly one fate."""
    bus = await open_bus(url, run, name="reader")
    try:
        record = await founded_run(bus, run)
        lives = await ledger.read_lives(bus, record)
    finally:
        await bus.close()
    fragments = len(record.layout.fragments)
    sums = ledger.total(lives, fragments)
    trained = sum(life.account.trained for life in lives)
    whole = all(tokens >= 0 for tokens in sums.values()) and sum(sums.values()) == fragments * trained
    return trained, sums.get("lost", 0) / fragments, whole


def await_end(process: subprocess.Popen[bytes], log: Path) -> str:
    code = process.wait(DEADLINE_S)
    text = log.read_text(encoding="utf-8", errors="replace")
    if code:
        raise SystemExit(f"{log} left with {code}:\n{text[-3000:]}")
    return text


def words_of(text: str) -> LearnerWords:
    measure = _MEASURE.search(text)
    if measure is None:
        raise SystemExit(f"a learner printed no measure:\n{text[-3000:]}")
    said = _LOSSES.search(text)
    if said is None:
        return LearnerWords(0.0, 0.0, 0, 0.0, 0.0, measure["value"])
    first, last, inside_ms, overhead = (float(said[name]) for name in ("first", "last", "inside_ms", "overhead"))
    return LearnerWords(first, last, int(said["steps"]), inside_ms, overhead / 100.0, measure["value"])


LOOPS = ("digits", "keras_digits", "nnx_batchnorm", "equinox_digits", "cnn", "llama_finetune", "numpy_loop")
SCENES = {"undisturbed": 0, "one killed": 1, "all killed": 2}
LONG_STEP_MS = 100.0
OVERHEAD_MAX = 0.01
FALLS_TO = 0.9


def main(*, only: Annotated[str | None, "this loop alone", LOOPS] = None) -> list[Figure]:
    found: list[Figure] = []
    for name in [only] if only else LOOPS:
        loop = loop_of(name)
        found += figures(loop, scenes_of(loop))
    return found


def scenes_of(loop: Loop) -> dict[str, SceneOutcome]:
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(loop, folder)
        for scene, killed in SCENES.items():
            print(f"{loop.name}: {scene} …", end=" ", flush=True)
            found[scene] = play(loop, folder, scene.replace(" ", "-"), killed)
            print(f"{found[scene].took_s:.0f} s", flush=True)
    return found


def figures(loop: Loop, scenes: dict[str, SceneOutcome]) -> Iterator[Figure]:
    calm = scenes["undisturbed"]
    first = sum(word.first for word in calm.words) / len(calm.words)
    last = sum(word.last for word in calm.words) / len(calm.words)
    steps = sum(word.steps for word in calm.words)
    step_ms = sum(word.step_ms for word in calm.words) / len(calm.words)
    overhead = max(word.overhead for word in calm.words)
    long = step_ms >= LONG_STEP_MS

    def named(what: str) -> str:
        return f"{loop.name}: {what}"

    yield fact(named("own lines"), loop.own_lines, "lines", f"marked in examples/{loop.name}.py")
    yield fact(named("first loss"), first, "", "mean of both islands' first five")
    yield Figure(
        named("last loss"), last, "", f"<= {FALLS_TO} of the first", last <= FALLS_TO * first, f"after {steps} steps"
    )
    how = " and ".join(word.measure for word in calm.words)
    yield Figure(named("merged measure"), float(calm.words[0].measure), "", "islands agree", calm.agree, how)
    yield fact(named("step"), step_ms, "ms", "one turn of the loop; two islands share the machine")
    inside_ms = max(word.inside_ms for word in calm.words)
    yield fact(named("in the island"), inside_ms, "ms", "of each step; the slower island")
    yield at_most(named("overhead"), overhead, "ratio", OVERHEAD_MAX if long else None, "the larger of both islands'")
    for scene in ("one killed", "all killed"):
        yield from survival_figures(loop, scene, scenes[scene])


def survival_figures(loop: Loop, scene: str, outcome: SceneOutcome) -> Iterator[Figure]:
    back = "; ".join(f"{word.steps} steps" for word in outcome.words[: SCENES[scene]])
    how = f"of {outcome.trained} trained; back for {back}"
    lost, exact = outcome.lost, outcome.exact
    yield Figure(f"{loop.name}: {scene}, tokens lost", lost, "tokens", "one fate for each token", exact, how)
    measure, what = float(outcome.words[0].measure), f"in a run of {outcome.took_s:.0f} s"
    yield Figure(f"{loop.name}: {scene}, merged measure", measure, "", "islands agree", outcome.agree, what)


if __name__ == "__main__":
    run_benchmark("bench-loops", main)
