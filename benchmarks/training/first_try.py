"""The first thing that a user tries: a model of a million parameters, two learners or four, one machine. Atoll beside others.

    data-parallel       a process for each learner, PyTorch's DistributedDataParallel over gloo
    DiLoCo              a process for each learner, torchft's DiLoCo with its lighthouse
    Atoll               `atoll up --learners 2 --shards 1`
    JAX apart           a process for each learner, and none speaks: what Atoll's arithmetic costs by itself
    torch apart         what JAX apart does, in PyTorch
    JAX alone           one process, two threads, the batches of all
    torch alone         what JAX alone does, in PyTorch

All train the same number of tokens of the same text from the same first values, with the same schedule and batch per learner;
those apart have first values and batches of their own. All but Atoll do it with AdamW, which a user of theirs gets, and with
Muon, Atoll's default, at Atoll's rate. The wall clock is that of the whole command, the processor time that of all its
processes; Atoll's also writes a report, an archive and an export, and finds no compiled programs. The loss is that of the same
held-out text, measured afterwards by one program. Frameworks differ: what they take apart, as processes of one thread, tells by
how much, and a goal for Atoll's wall clock is adjusted by it.

Atoll, and data-parallel training and DiLoCo with Muon, run with every seed, and with each seed another one comes first; all
others with the first seed only. AdamW is raced with two learners, those alone with two learners and a short budget.
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
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from atoll.local.run_settings import without_settings
from atoll_learner.data.shards import TokenShards
from atoll_learner.export import config_of, first_values, save_safetensors
from atoll_learner.model_settings import ModelSettings
from atoll_learner.train import make_evaluator
from atoll_learner.train_settings import TrainSettings, learning_rate, train_settings
from benchmarks.lib.harness import Figure, at_most, fact
from benchmarks.lib.kept_parts import KeptParts
from benchmarks.lib.runs import HERE, environment, lighthouse, start_program, up_command
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
APART_SEED: Final = 100
"""Those apart have the seeds from this times the seed of the race on."""
MEASURED_TOKENS: Final = 131_072
LONG_TOKENS: Final = 2_000_000
"""From so many tokens on the loss has a goal beside data-parallel training's, and nobody trains alone."""


def peer_settings(train: TrainSettings) -> dict[str, Any]:
    """Return what a worker of PyTorch must know of the model and its inner optimizer."""
    return {
        "model": config_of(MODEL, end_token=None) | {"architectures": None},
        "batch": train.batch,
        "sequence": train.sequence,
        "rate": train.rate,
        "betas": [train.beta1, train.beta2],
        "weight_decay": train.weight_decay,
        "clip": train.clip,
    }


@dataclass(frozen=True, slots=True)
class Try:
    """One training: seconds of the whole command, processor seconds of all its processes, bits per byte of held-out text."""

    wall_s: float
    cpu_s: float
    bits_per_byte: float


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """One training: tokens, learners, seed, text, a folder of its own."""

    tokens: int
    learners: int
    seed: int
    corpus: Path
    folder: Path

    @property
    def first(self) -> Path:
        return self.folder / "first.safetensors"

    def request(self, rank: int, world: int, train: TrainSettings, **more: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return what a worker of PyTorch must know; one alone has the batches of all. `more` may say other than one thread."""
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
            **peer_settings(train),
            "batch": batch,
            "threads": 1,
            **more,
        }


def run_together(words: list[list[str]], log: Path, **variables: str) -> tuple[float, float]:
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
    return in_jax([task], train, threads=2)


def jax_apart(task: TrainingTask, train: TrainSettings) -> tuple[float, float, Path]:
    return in_jax(_apart(task), train)


def in_jax(tasks: list[TrainingTask], train: TrainSettings, threads: int = 1) -> tuple[float, float, Path]:
    """Run a process of ours for each task; the values are those of the first."""
    words = []
    for task in tasks:
        mine = [sys.executable, "-m", "benchmarks.baselines", "--method", "data-parallel"]
        mine += ["--learners", str(task.learners), "--tokens", str(task.tokens), "--seed", str(task.seed)]
        mine += ["--out", str(task.folder / "jax"), "--evaluations", "1", "--set", f"data.dir={task.corpus}"]
        mine += ["--set", f"learner.threads={threads}", "--set", f"train.optimizer={train.optimizer}"]
        words.append(mine)
    return *run_together(words, tasks[0].folder / "log"), tasks[0].folder / "jax" / "model.safetensors"


def _apart(task: TrainingTask) -> list[TrainingTask]:
    tokens, first = task.tokens // task.learners, APART_SEED * task.seed
    tasks = [
        TrainingTask(tokens, 1, first + place, task.corpus, task.folder / str(place)) for place in range(task.learners)
    ]
    for each in tasks:
        each.folder.mkdir()
    return tasks


def torch_alone(task: TrainingTask, train: TrainSettings) -> tuple[float, float, Path]:
    return in_torch(task, "ddp", [task.request(0, 1, train, port=free_port(), threads=2)])


def torch_apart(task: TrainingTask, train: TrainSettings) -> tuple[float, float, Path]:
    tasks = _apart(task)
    for each in tasks:
        save_safetensors(first_values(MODEL, each.seed, None), each.first, {})
    return in_torch(tasks[0], "ddp", [each.request(0, 1, train, port=free_port()) for each in tasks])


def data_parallel(task: TrainingTask, train: TrainSettings) -> tuple[float, float, Path]:
    port, world = free_port(), task.learners
    return in_torch(task, "ddp", [task.request(rank, world, train, port=port) for rank in range(world)])


def diloco(task: TrainingTask, train: TrainSettings) -> tuple[float, float, Path]:
    """Train in replica groups that meet every `INTERVAL_STEPS` steps."""
    bind = f"127.0.0.1:{free_port()}"
    meeting = start_program(lighthouse(task.learners, bind), task.folder / "lighthouse.log")
    try:
        told_all: dict[str, Any] = {
            "interval_steps": INTERVAL_STEPS,
            "delay": 0,
            "lighthouse": f"http://{bind}",
            "port": 0,  # a store each
            **OUTER,
        }
        world = task.learners
        return in_torch(task, "diloco", [task.request(rank, world, train, **told_all) for rank in range(world)])
    finally:
        meeting.kill()
        meeting.wait()


def in_torch(task: TrainingTask, role: str, requests: list[dict[str, Any]]) -> tuple[float, float, Path]:
    """Run a worker of PyTorch for each request; the values are those of the first."""
    words = [[environment("racing"), str(HERE / "racing.py"), role, json.dumps(each)] for each in requests]
    took = run_together(words, task.folder / "log", OMP_NUM_THREADS=str(requests[0]["threads"]))
    out = Path(requests[0]["out"])
    return *took, max(path for path in out.glob("*.safetensors") if path != task.first)


def atoll_up(task: TrainingTask) -> tuple[float, float, Path]:
    out = task.folder / "up"
    flags = {"learners": task.learners, "shards": 1, "tokens": task.tokens, "seed": task.seed}
    words = up_command(out, flags, settings=[f"data.dir={task.corpus}"])
    programs = {"XDG_CACHE_HOME": str(task.folder / "cache")}
    return *run_together([words], task.folder / "log", **programs), out / "model.safetensors"


System = Callable[[TrainingTask], tuple[float, float, Path]]
OTHERS: Final = {
    "data-parallel": data_parallel,
    "DiLoCo": diloco,
    "JAX apart": jax_apart,
    "torch apart": torch_apart,
    "JAX alone": jax_alone,
    "torch alone": torch_alone,
}
WITH_MUON: Final = ", Muon"
SYSTEMS: Final[dict[str, System]] = {
    name + ending: functools.partial(train_it, train=train)
    for name, train_it in OTHERS.items()
    for ending, train in (("", ADAMW_TRAIN), (WITH_MUON, TRAIN))
} | {"Atoll": atoll_up}
TOGETHER: Final = ("data-parallel" + WITH_MUON, "DiLoCo" + WITH_MUON, "Atoll")
"""Those that run with every seed."""


def systems(tokens: int, learners: int, place: int) -> list[str]:
    """Return who trains so many tokens with so many learners and the seed at `place`, the one that comes first first."""
    names = list(TOGETHER)
    if not place:
        names = [
            name
            for name in SYSTEMS
            if (learners == USUAL_LEARNERS or name in TOGETHER or name.endswith(WITH_MUON))
            and ("alone" not in name or (learners == USUAL_LEARNERS and tokens < LONG_TOKENS))
        ]
    turn = place % len(names)
    return names[turn:] + names[:turn]


Found = dict[str, dict[int, Try]]
"""What each system came to, by its name and the seed."""


def race(
    budgets: Mapping[int, int], learners: tuple[int, ...], first_seed: int, corpus: Path, kept: KeptParts
) -> dict[tuple[int, int], Found]:
    """Let every system train each of `budgets` (tokens, with how many seeds) with each number of learners.

    All seeds come one after the other, so a race that is stopped has fewer seeds of all.
    """
    found: dict[tuple[int, int], Found] = {(tokens, many): {} for tokens in budgets for many in learners}
    with tempfile.TemporaryDirectory() as folder:
        for place in range(max(budgets.values(), default=0)):
            for (tokens, many), tries in found.items():
                if place >= budgets[tokens]:
                    continue
                for name in systems(tokens, many, place):
                    seed = first_seed + place
                    mine = Path(folder) / f"{tokens}-{many}-{seed}-{name.replace(', ', '-').replace(' ', '-')}"
                    task = TrainingTask(tokens, many, seed, corpus, mine)
                    done = Try(**kept.part(mine.name, functools.partial(train_with, name, task)))
                    tries.setdefault(name, {})[seed] = done
                    print(
                        f"{tokens} tokens, {many} learners, seed {seed}: {name}, {done.wall_s:.1f} s, "
                        f"{done.bits_per_byte:.3f} bits per byte",
                        flush=True,
                    )
    return found


def train_with(name: str, task: TrainingTask) -> dict[str, float]:
    task.folder.mkdir(parents=True)
    save_safetensors(first_values(MODEL, task.seed, None), task.first, {})
    wall_s, cpu_s, model = SYSTEMS[name](task)
    loss = _measure(task.corpus)(first_values(MODEL, task.seed, model))
    shutil.rmtree(task.folder)
    return asdict(Try(wall_s, cpu_s, loss))


@functools.cache
def _measure(corpus: Path) -> Callable[[Any], float]:
    """Return what measures values by held-out text; JAX compiles it once."""
    return make_evaluator(MODEL, TRAIN, TokenShards(corpus), MEASURED_TOKENS)


# -- what they did ----------------------------------------------------------------------------------------------------


def figures_of(tokens: int, learners: int, found: Found) -> list[Figure]:
    at, shown = f"{tokens / 1e6:.1f}M tokens{'' if learners == USUAL_LEARNERS else f', {learners} learners'}", []
    for name in [name for name in SYSTEMS if name in found]:
        tries = list(found[name].values())
        least_s, most_s = min(t.wall_s for t in tries), max(t.wall_s for t in tries)
        how = "one seed" if len(tries) == 1 else f"mean of {len(tries)} seeds, {least_s:.1f} to {most_s:.1f} s"
        losses = ", ".join(f"{t.bits_per_byte:.3f}" for t in tries)
        wall_s, cpu_s, loss = (
            statistics.fmean(getattr(t, what) for t in tries) for what in ("wall_s", "cpu_s", "bits_per_byte")
        )
        shown += [
            fact(f"{at}: {name}, wall clock", wall_s, "s", how),
            fact(f"{at}: {name}, processor time", cpu_s, "s", "all its processes"),
            fact(f"{at}: {name}, loss", loss, "bits/byte", losses),
        ]
    for ending in ("", WITH_MUON):
        shown += [
            adjusted(at, found, ending, without)
            for without in ("apart", "alone")
            if {f"{framework} {without}{ending}" for framework in ("JAX", "torch")} <= found.keys()
        ]
    for other, goal in [("DiLoCo", 1.0), ("data-parallel", BEHIND_GOAL if tokens >= LONG_TOKENS else None)]:
        for name in [name for name in (other, other + WITH_MUON) if name in found]:
            over, seeds = ratio(found, "Atoll", name, "bits_per_byte")
            shown.append(at_most(f"{at}: Atoll's loss over that of {name}", over, "x", goal, seeds))
    return shown


def adjusted(at: str, found: Found, ending: str, without: str) -> Figure:
    """Return how long Atoll takes beside data-parallel training by what the frameworks take `without` speaking.

    `ending` says with which optimizer the others train.
    """
    slower, _ = ratio(found, f"JAX {without}{ending}", f"torch {without}{ending}", "wall_s")
    bare, seeds = ratio(found, "Atoll", f"data-parallel{ending}", "wall_s")
    how = f"JAX {without} takes {slower:.2f} times torch's time; unadjusted {bare:.2f}, {seeds}"
    name = f"{at}: Atoll's wall clock over that of data-parallel{ending}, adjusted by those {without}"
    return at_most(name, bare / slower, "x", WALL_GOAL, how)


def ratio(found: Found, one: str, other: str, what: str) -> tuple[float, str]:
    """Return the mean of `what` of one system over that of another, of the seeds that both have, and those in words."""
    seeds = sorted(found[one].keys() & found[other].keys())
    mine, its = ([getattr(found[name][seed], what) for seed in seeds] for name in (one, other))
    each = ", ".join(f"{a / b:.3f}" for a, b in zip(mine, its, strict=True))
    return statistics.fmean(mine) / statistics.fmean(its), "one seed" if len(seeds) == 1 else f"by seed {each}"
