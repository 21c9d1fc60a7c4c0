r"""The race of the paper's announcement: one model in four regions, over the same shaped links: `make race`.

The announcement tells of 12 billion parameters in four regions, with links of 2 to 5 Gbit/s, more than twenty times as fast as
conventional synchronous training. What decides is the bytes of a gradient over what a link carries in the time of a step, so
here, with a million parameters and steps of half a second, the links are slower by just so much that the number is the same:

.. math::

    bits_s = bits\_s_{12B} \cdot \frac{parameters \cdot step\_s_{12B}}{12 \cdot 10^9 \cdot step\_s}

The step of the 12B model is not published; `STEP_12B_S` is the longest with which a plan of Atoll is twenty times as fast over
5 Gbit/s (docs/results/bench-bandwidth.md). Each region is a host of its own (`support.wan`), 25 ms from each other. All train
the same model from the same values on the same text with the same inner optimizer, no faster than the step time.

    Atoll            broker and synchronizer at a hub, a loop of one's own in each region; P = H = 24, 16 bits both ways
    data-parallel    PyTorch's DistributedDataParallel over gloo, gradients of 16 bits
    DiLoCo           torchft's DiLoCo, streaming over layers, H = 24, overlapped by two steps, over gloo; it sends 32 bits

Tokens a second are counted after the first `WARM_SHARE` of the time. Losses of held-out text are measured afterwards by one
program: of the merged model for Atoll, of worker 0 for the others. The loss that all reach is the highest of the lowest.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from atoll.bus.options import PORT
from atoll.bus.server import EmbeddedBroker
from atoll_learner.data.shards import TokenShards
from atoll_learner.export import first_values
from atoll_learner.train import make_evaluator
from atoll_learner.train_settings import TrainSettings
from benchmarks.lib.figures import line_figure
from benchmarks.lib.harness import RESULTS, Figure, Unfit, at_least, fact, run_benchmark
from benchmarks.lib.runs import HERE, environment, leave, lighthouse, prepare
from benchmarks.training.first_try import MODEL, peer_settings
from support.wan import DEVICE, Wan, Wire, inside, unfit, wan

REGIONS: Final = ("us-central", "us-east", "us-west", "us-south")
HUB: Final = "hub"
STEP_S: Final = 0.5
PARAMETERS_12B: Final = 12e9
STEP_12B_S: Final = 2.656
GIGABITS_12B: Final = (5.0, 20.0, 80.0)
DELAY_S: Final = 0.0125
QUEUE_S: Final = 0.2
INTERVAL_STEPS: Final = 24
MINUTES: Final = 12.0
WARM_SHARE: Final = 0.2
FOUND_S: Final = 90.0
START_S: Final = 30.0
"""Nobody is timed before all are ready. A founder stores the first values and three others read them; peers make their own."""
KEEPS: Final = 20
SPEED_UP_GOAL: Final = 20.0
END_S: Final = 60.0
TRAIN: Final = TrainSettings(batch=4, sequence=128, rate=2e-3, warmup=0.1)
MEASURED_TOKENS: Final = 16_384
"""Held-out tokens of every point of the curves, for all systems alike."""
SYSTEMS: Final = ("Atoll", "data-parallel", "DiLoCo")


@dataclass(frozen=True, slots=True)
class RaceTrack:
    """Terms that all systems of one race share: the rate of the links, how long it takes, where things are."""

    gigabits: float
    bits_s: float
    seconds: float
    seed: int
    folder: Path
    text: Path

    @property
    def common(self) -> dict[str, Any]:
        """Return what decides the first values, and the text."""
        return {"seed": self.seed, "first": str(self.folder / "first.safetensors"), "text": str(self.text)}

    def request(self, system: str, rank: int, begin_s: float, there: Wan) -> dict[str, Any]:
        """Return what a worker must know."""
        return self.common | {
            "rank": rank,
            "world": len(REGIONS),
            "addresses": [there.addresses[region] for region in REGIONS],
            "out": str(self.folder / system),
            "begin_s": begin_s,
            "seconds": self.seconds,
            "step_s": STEP_S,
            "keep_every_s": self.seconds / KEEPS,
        }


@dataclass(frozen=True, slots=True)
class RaceOutcome:
    """The outcome of one system: tokens a second of all regions, loss by seconds, and megabytes that left a region."""

    tokens_per_s: float
    losses: list[tuple[float, float]]
    sent_mb: float

    def seconds_to(self, loss: float) -> float:
        return next((at_s for at_s, found in self.losses if found <= loss), math.inf)


# -- what they share --------------------------------------------------------------------------------------------------


def command(role: str, request: Mapping[str, Any]) -> list[str]:
    return [environment("racing"), str(HERE / "racing.py"), role, json.dumps(request)]


@contextmanager
def running(there: Wan, host: str, words: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    with inside(there.namespaces[host]), log.open("ab") as told:
        process = subprocess.Popen(
            words, env={**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, **variables}, stdout=told, stderr=told
        )
    try:
        yield process
    finally:
        leave(process)


def run_all(workers: list[subprocess.Popen[bytes]], until_s: float) -> None:
    """Wait until all have ended, or the time is long up: synchronous ones end in the middle of a step."""
    for worker in workers:
        try:
            status = worker.wait(max(1.0, until_s - time.time()))
        except subprocess.TimeoutExpired:
            worker.send_signal(signal.SIGKILL)
            continue
        if status not in (0, -signal.SIGKILL):
            raise SystemExit(f"a worker left with {status}; see its log")


# -- the systems ------------------------------------------------------------------------------------------------------


def atoll(course: RaceTrack, there: Wan) -> None:
    out = course.folder / "Atoll"
    with ExitStack() as stack:
        with inside(there.namespaces[HUB]):
            broker = stack.enter_context(EmbeddedBroker(course.folder / "broker", PORT, host=there.addresses[HUB]))
        words, place = (
            [sys.executable, "-m", "atoll.cli", "synchronizer"],
            {"ATOLL_RUN": "race", "ATOLL_BROKER__URL": broker.url},
        )
        stack.enter_context(running(there, HUB, words, out / "synchronizer.log", **place))
        begin_s = time.time() + FOUND_S
        protocol = {
            "fragments": 24,
            "interval_steps": INTERVAL_STEPS,
            "shards": 1,
            "codec_up": "bf16",
            "codec_down": "bf16",
        }
        ours = {
            "broker": broker.url,
            "run": "race",
            "train": TRAIN.model_dump(),
            "model": MODEL.model_dump(),
            "protocol": protocol,
        }
        module = [sys.executable, "-m", "benchmarks.network.race_roles"]
        keeping = json.dumps(course.request("Atoll", -1, begin_s, there) | ours)
        stack.enter_context(running(there, HUB, [*module, "keeper", keeping], out / "keeper.log"))
        workers = [
            stack.enter_context(
                running(
                    there,
                    region,
                    [*module, "learner", json.dumps(course.request("Atoll", rank, begin_s, there) | ours)],
                    out / f"{rank}.log",
                    XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
                )
            )
            for rank, region in enumerate(REGIONS)
        ]
        run_all(workers, begin_s + course.seconds + END_S)


def peers(course: RaceTrack, there: Wan, system: str) -> None:
    """Race data-parallel training, or DiLoCo with its lighthouse at the hub."""
    role = "ddp" if system == "data-parallel" else "diloco"
    out = course.folder / system
    more = peer_settings(TRAIN) | {"port": 29500, "interval_steps": INTERVAL_STEPS, "delay": 2}
    more |= {"outer_rate": 0.7, "outer_momentum": 0.9}
    with ExitStack() as stack:
        if role == "diloco":
            words = lighthouse(len(REGIONS), f"{there.addresses[HUB]}:29510")
            stack.enter_context(running(there, HUB, words, out / "lighthouse.log"))
            more["lighthouse"] = f"http://{there.addresses[HUB]}:29510"
        begin_s = time.time() + START_S
        workers = [
            stack.enter_context(
                running(
                    there,
                    region,
                    command(role, course.request(system, rank, begin_s, there) | more),
                    out / f"{rank}.log",
                    OMP_NUM_THREADS="1",
                )
            )
            for rank, region in enumerate(REGIONS)
        ]
        run_all(workers, begin_s + course.seconds + 2.0 * END_S)


def run_system(course: RaceTrack, system: str) -> RaceOutcome:
    (course.folder / system).mkdir()
    wire = Wire(course.bits_s, DELAY_S, 0.0, QUEUE_S)
    with wan({HUB: None, **dict.fromkeys(REGIONS, wire)}, course.seed) as there:
        if system == "Atoll":
            atoll(course, there)
        else:
            peers(course, there, system)
        sent_mb = sum(there.carried(region)[0].sent_bytes for region in REGIONS) / len(REGIONS) / 1e6
    return RaceOutcome(tokens_per_s(course, system), losses(course, system), sent_mb)


# -- what they did ----------------------------------------------------------------------------------------------------


def tokens_per_s(course: RaceTrack, system: str) -> float:
    rate, warm_s = 0.0, WARM_SHARE * course.seconds
    for rank in range(len(REGIONS)):
        text = (course.folder / system / f"{rank}.jsonl").read_text()
        steps = [step for line in text.splitlines() if warm_s <= (step := json.loads(line))["at_s"] <= course.seconds]
        if len(steps) > 1:
            rate += TRAIN.tokens_per_step * (len(steps) - 1) / (steps[-1]["at_s"] - steps[0]["at_s"])
    return rate


def losses(course: RaceTrack, system: str) -> list[tuple[float, float]]:
    """Return bits per byte of held-out text by seconds."""
    measure = make_evaluator(MODEL, TRAIN, TokenShards(course.text.parent), MEASURED_TOKENS)
    kept = sorted((course.folder / system).glob("*.safetensors"))
    return [(float(file.stem), measure(first_values(MODEL, course.seed, file))) for file in kept]


def figures_of(course: RaceTrack, found: Mapping[str, RaceOutcome]) -> list[Figure]:
    at = f"{course.gigabits:g} Gbit/s"
    scaled = f"scaled to {course.bits_s / 1e6:.2f} Mbit/s, {course.seconds:.0f} s"
    told = [
        fact(f"{at}: {name}", each.tokens_per_s, "tokens/s", f"{scaled}; {each.sent_mb:.1f} MB left a region")
        for name, each in found.items()
    ]
    ours, goal = found["Atoll"], course.gigabits == GIGABITS_12B[0]
    for name, each in found.items():
        if name == "Atoll":
            continue
        ratio = ours.tokens_per_s / max(each.tokens_per_s, 1e-9)
        least = SPEED_UP_GOAL if goal and name == "data-parallel" else None
        told.append(at_least(f"{at}: Atoll over {name}", ratio, "x", least, "tokens a second"))
    level = max((min(loss for _, loss in each.losses) for each in found.values() if each.losses), default=math.nan)
    for name, each in found.items():
        how = (
            f"seconds to {level:.3f} bits per byte, which all reach; lowest {min(loss for _, loss in each.losses):.3f}"
        )
        told.append(fact(f"{at}: {name}, time to a loss", each.seconds_to(level), "s", how))
    return told


def main(
    *, minutes: Annotated[float, "of all races together, starts not counted"] = MINUTES, seed: int = 0
) -> list[Figure]:
    if reason := unfit():
        raise Unfit(reason)
    corpus = prepare()
    parameters = sum(value.size for value in first_values(MODEL, seed, None).values())
    told: list[Figure] = [fact("parameters", float(parameters), "", f"steps of {STEP_S:g} s")]
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
    seconds = 60.0 * minutes / len(GIGABITS_12B) / len(SYSTEMS)
    for gigabits in GIGABITS_12B:
        bits_s = 1e9 * gigabits * parameters * STEP_12B_S / (PARAMETERS_12B * STEP_S)
        with tempfile.TemporaryDirectory() as name:
            course = RaceTrack(gigabits, bits_s, seconds, seed, Path(name), corpus / "train.bin")
            subprocess.run(command("make", course.common | peer_settings(TRAIN)), check=True)
            found = {}
            for system in SYSTEMS:
                print(f"{gigabits:g} Gbit/s: {system} …", end=" ", flush=True)
                found[system] = run_system(course, system)
                lines[system].append((gigabits, found[system].tokens_per_s))
                print(f"{found[system].tokens_per_s:.0f} tokens/s", flush=True)
        told += figures_of(course, found)
    plot = RESULTS / "race-speed.svg"
    RESULTS.mkdir(parents=True, exist_ok=True)
    plot.write_text(line_figure(lines, "Gbit/s of 12B", "tokens/s"), encoding="utf-8")
    return told


if __name__ == "__main__":
    run_benchmark("race", main)
