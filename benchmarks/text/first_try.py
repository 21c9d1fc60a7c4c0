"""The first thing that a user tries: a model of a million parameters, two learners or four, one machine. Atoll beside others.

    JAX alone           one process, two threads, the batches of all: what Atoll's arithmetic costs by itself
    torch alone         what JAX alone does, in PyTorch
    data-parallel       a process for each learner, PyTorch's DistributedDataParallel over gloo
    DiLoCo              a process for each learner, torchft's DiLoCo with its lighthouse
    Atoll               `atoll up --learners 2 --shards 1`

All train the same number of tokens of the same text from the same first values, with the same schedule and batch per learner.
All but Atoll do it twice: with AdamW, which a user of theirs gets, and with Muon, which is Atoll's default, at Atoll's rate.
So Atoll has goals beside what people do today, and beside what they could do with the same optimizer.

The wall clock is that of the whole command, from its start to its end, and the processor time that of all its processes.
Atoll's command also writes a report, an archive and an export, and measures the loss on the way; it finds no programs that were
compiled before. Python's byte code it finds, as the others do, whose packages pip has compiled. Its learners ask for huge
pages, as they do for every user (`atoll.base.huge_pages`); the others run as their users start them. The loss is that of the
same held-out text for all, measured afterwards by one program.
With each seed another system comes first.

Frameworks differ: what the two alone take tells by how much. A goal for Atoll's wall clock is adjusted by that.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atoll.local.environment import without_settings
from atoll_learner.beginning import first_values
from atoll_learner.data.shards import TokenShards
from atoll_learner.export import save_safetensors
from atoll_learner.hugging_face import config_of
from atoll_learner.model_settings import ModelSettings
from atoll_learner.schedule import learning_rate
from atoll_learner.train import make_evaluator
from atoll_learner.train_settings import TrainSettings, train_settings
from benchmarks.lib.peer_environments import HERE, environment
from benchmarks.lib.results import Figure
from support.regions import free_port

MODEL: Final = ModelSettings(vocab=256, layers=4, width=128, heads=4, kv_heads=2, ffn=512, context=128)
"""What `atoll up` trains by default."""
TRAIN: Final = train_settings({}, model=MODEL)
"""What Atoll's users get: Muon inside."""
ADAMW_TRAIN: Final = train_settings({"optimizer": "adamw"}, model=MODEL)
"""What PyTorch's users get."""
INTERVAL_STEPS: Final = 24
OUTER: Final = {"outer_rate": 0.6, "outer_momentum": 0.3}
USUAL_LEARNERS: Final = 2
"""Names of figures leave this number out."""
WALL_GOAL: Final = 1.25
BEHIND_GOAL: Final = 1.02
LONGEST_S: Final = 1800.0
LOOK_S: Final = 0.05
MEASURED_TOKENS: Final = 131_072
LONG_TOKENS: Final = 2_000_000
"""From so many tokens on the loss has a goal beside data-parallel training's."""


@dataclass(frozen=True, slots=True)
class Try:
    """One training: seconds of the whole command, processor seconds of all its processes, bits per byte of held-out text."""

    wall_s: float
    cpu_s: float
    bits_per_byte: float


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """What one training has to do: tokens, learners, seed, text, a folder of its own."""

    tokens: int
    learners: int
    seed: int
    corpus: Path
    folder: Path

    @property
    def first(self) -> Path:
        """Return the file of the first values."""
        return self.folder / "first.safetensors"

    def request(self, rank: int, world: int, train: TrainSettings, **more: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return what a worker of PyTorch must know; one alone has the batches of all."""
        batch = train.batch * self.learners // world
        together = train.tokens_per_step * self.learners
        rates = [learning_rate(train, step * together, self.tokens) for step in range(self.tokens // together)]
        if train.optimizer == "muon":
            more["muon"] = {"momentum": train.muon_momentum}
        return {
            "seed": self.seed,
            "first": str(self.first),
            "text": str(self.corpus / "train.bin"),
            "rank": rank,
            "world": world,
            "addresses": ["127.0.0.1"] * world,
            "out": str(self.folder),
            "begin_s": 0.0,
            "step_s": 0.0,
            "rates": rates,
            "model": config_of(MODEL, end_token=None) | {"architectures": None},
            "batch": batch,
            "sequence": train.sequence,
            "rate": train.rate,
            "betas": [train.beta1, train.beta2],
            "weight_decay": train.weight_decay,
            "clip": train.clip,
            **more,
        }


def told(words: list[list[str]], log: Path, **variables: str) -> tuple[float, float]:
    """Run commands side by side to their end; return the wall clock and the processor time of all, in seconds."""
    before, began_s = _spent_s(), time.monotonic()
    with log.open("ab") as out:
        place = without_settings(os.environ) | variables
        processes = [subprocess.Popen(each, env=place, stdout=out, stderr=out) for each in words]
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes) or time.monotonic() > began_s + LONGEST_S:
                    break  # the others would wait for the one that is gone
                time.sleep(LOOK_S)
        finally:
            for process in processes:
                process.kill()
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"left with {codes}: {log.read_text(encoding='utf-8', errors='replace')[-3000:]}")
    return time.monotonic() - began_s, _spent_s() - before


def _spent_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# -- the systems ------------------------------------------------------------------------------------------------------


def jax_alone(task: TrainingTask, train: TrainSettings) -> tuple[float, float, Path]:
    """Train in one process."""
    out = task.folder / "jax"
    words = [
        sys.executable,
        "-m",
        "benchmarks.baselines",
        "--method",
        "data-parallel",
        "--learners",
        str(task.learners),
    ]
    words += ["--tokens", str(task.tokens), "--seed", str(task.seed), "--out", str(out), "--evaluations", "1"]
    words += ["--set", f"data.dir={task.corpus}", "--set", "learner.threads=2"]
    words += ["--set", f"train.optimizer={train.optimizer}"]
    return *told([words], task.folder / "log"), out / "model.safetensors"


def torch_alone(task: TrainingTask, train: TrainSettings) -> tuple[float, float, Path]:
    """Train in one process of PyTorch."""
    return in_torch(task, "ddp", 1, train, threads=2)


def data_parallel(task: TrainingTask, train: TrainSettings) -> tuple[float, float, Path]:
    """Train in processes that step together."""
    return in_torch(task, "ddp", task.learners, train)


def diloco(task: TrainingTask, train: TrainSettings) -> tuple[float, float, Path]:
    """Train in replica groups that meet every `INTERVAL_STEPS` steps."""
    bind = f"127.0.0.1:{free_port()}"
    words = [str(Path(environment("racing")).with_name("torchft_lighthouse")), "--min_replicas", str(task.learners)]
    with (task.folder / "lighthouse.log").open("wb") as log:
        lighthouse = subprocess.Popen([*words, "--bind", bind], stdout=log, stderr=log)
    try:
        told_all: dict[str, Any] = {
            "interval_steps": INTERVAL_STEPS,
            "delay": 0,
            "lighthouse": f"http://{bind}",
            **OUTER,
        }
        return in_torch(task, "diloco", task.learners, train, **told_all)
    finally:
        lighthouse.kill()
        lighthouse.wait()


def in_torch(
    task: TrainingTask,
    role: str,
    world: int,
    train: TrainSettings,
    **more: Any,  # noqa: ANN401
) -> tuple[float, float, Path]:
    """Run workers of PyTorch."""
    port = free_port() if role == "ddp" else 0  # replica groups have a store each
    threads = str(more.get("threads", 1))
    words = [
        [
            environment("racing"),
            str(HERE / "racing.py"),
            role,
            json.dumps(task.request(rank, world, train, port=port, **more)),
        ]
        for rank in range(world)
    ]
    took = told(words, task.folder / "log", OMP_NUM_THREADS=threads)
    return *took, max(path for path in task.folder.glob("*.safetensors") if path != task.first)


def atoll_up(task: TrainingTask) -> tuple[float, float, Path]:
    """Do what README says."""
    out = task.folder / "up"
    words = [sys.executable, "-m", "atoll.cli", "up", "--learners", str(task.learners), "--shards", "1"]
    words += ["--tokens", str(task.tokens), "--seed", str(task.seed), "--out", str(out)]
    words += ["--set", f"data.dir={task.corpus}"]
    programs = {"XDG_CACHE_HOME": str(task.folder / "cache")}
    return *told([words], task.folder / "log", **programs), out / "model.safetensors"


System = Callable[[TrainingTask], tuple[float, float, Path]]
OTHERS: Final = {
    "JAX alone": jax_alone,
    "torch alone": torch_alone,
    "data-parallel": data_parallel,
    "DiLoCo": diloco,
}
WITH_MUON: Final = ", Muon"
SYSTEMS: Final[dict[str, System]] = {
    name + ending: functools.partial(train_it, train=train)
    for name, train_it in OTHERS.items()
    for ending, train in (("", ADAMW_TRAIN), (WITH_MUON, TRAIN))
} | {"Atoll": atoll_up}


def tried(tokens: int, learners: int, seeds: range, corpus: Path, folder: Path) -> dict[str, list[Try]]:
    """Let every system train so many tokens with so many learners and with each seed."""
    found: dict[str, list[Try]] = {name: [] for name in SYSTEMS}
    measure = make_evaluator(MODEL, TRAIN, TokenShards(corpus), MEASURED_TOKENS)
    names = list(SYSTEMS)
    for place, seed in enumerate(seeds):
        for name in names[place % len(names) :] + names[: place % len(names)]:
            mine = folder / f"{tokens}-{learners}-{seed}-{name.replace(' ', '-')}"
            shutil.rmtree(mine, ignore_errors=True)
            mine.mkdir(parents=True)
            task = TrainingTask(tokens, learners, seed, corpus, mine)
            save_safetensors(first_values(MODEL, seed, None), task.first, {})
            wall_s, cpu_s, model = SYSTEMS[name](task)
            loss = measure(first_values(MODEL, seed, model))
            found[name].append(Try(wall_s, cpu_s, loss))
            print(
                f"{tokens} tokens, {learners} learners, seed {seed}: {name}, {wall_s:.1f} s, {loss:.3f} bits per byte",
                flush=True,
            )
    return found


# -- what they did ----------------------------------------------------------------------------------------------------


def figures_of(tokens: int, learners: int, found: Mapping[str, list[Try]]) -> list[Figure]:
    """Return the figures of one budget and number of learners."""
    at, shown = f"{tokens / 1e6:.1f}M tokens{'' if learners == USUAL_LEARNERS else f', {learners} learners'}", []
    for name, tries in found.items():
        least_s, most_s = min(t.wall_s for t in tries), max(t.wall_s for t in tries)
        how = "one seed" if len(tries) == 1 else f"mean of {len(tries)} seeds, {least_s:.1f} to {most_s:.1f} s"
        shown += [
            Figure(f"{at}: {name}, wall clock", _mean(t.wall_s for t in tries), "s", "", None, how),
            Figure(f"{at}: {name}, processor time", _mean(t.cpu_s for t in tries), "s", "", None, "all its processes"),
            Figure(
                f"{at}: {name}, loss",
                _mean(t.bits_per_byte for t in tries),
                "bits/byte",
                "",
                None,
                ", ".join(f"{t.bits_per_byte:.3f}" for t in tries),
            ),
        ]
    wall_s, loss = (
        {name: _mean(getattr(t, what) for t in tries) for name, tries in found.items()}
        for what in ("wall_s", "bits_per_byte")
    )
    shown += [adjusted(at, wall_s, ending) for ending in ("", WITH_MUON)]
    for other, goal in [("DiLoCo", 1.0), ("data-parallel", BEHIND_GOAL if tokens >= LONG_TOKENS else None)]:
        for name in (other, other + WITH_MUON):
            apart = loss["Atoll"] / loss[name]
            said, holds = ("", None) if goal is None else (f"<= {goal:g}", apart <= goal)
            shown.append(Figure(f"{at}: Atoll's loss over that of {name}", apart, "x", said, holds, "held-out"))
    return shown


def adjusted(at: str, wall_s: Mapping[str, float], ending: str) -> Figure:
    """Return how long Atoll takes beside data-parallel training; `ending` says with which optimizer the others train."""
    slower = wall_s["JAX alone" + ending] / wall_s["torch alone" + ending]
    bare = wall_s["Atoll"] / wall_s["data-parallel" + ending]
    how = f"JAX alone{ending} takes {slower:.2f} times torch's time; unadjusted {bare:.2f}"
    name = f"{at}: Atoll's wall clock over that of data-parallel{ending}, adjusted"
    return Figure(name, bare / slower, "x", f"<= {WALL_GOAL}", bare / slower <= WALL_GOAL, how)


def _mean(values: Any) -> float:  # noqa: ANN401  (any iterable of floats)
    return statistics.fmean(values)
