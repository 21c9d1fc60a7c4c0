"""Atoll beside what a user would take instead, in one run on one machine: `make bench-peers`.

First the syncs of two participants, then the first model that a user trains (`benchmarks.training.first_try`). Three seeds take
hours; what was measured with the same sources is kept in `build/bench-peers`, and `--again` begins anew. **A sync** is two
participants that agree on 64 MiB:

    gloo          all-reduce: the floor, without protection from anything
    torchft       a quorum, an all-reduce and a commit, as in each step of fault-tolerant data-parallel training
    DiLoCo        torchft's: an all-reduce and an outer step
    hivemind      an averaging of peers that find each other
    Atoll         a round of one fragment: called, pushed, merged, stored, read and adopted

All meet over the loopback and do nothing but sync, with a pause between. They take `TURNS` turns, of which the first `SKIPPED`
syncs do not count; of Atoll's count as many as lie between two keyframes. Bytes are those of the loopback, headers included:
what goes through a broker is sent twice. Processor time is that of all processes of a system.

What is unfair: the others keep each participant waiting for the whole sync, and have nothing when one dies in it; Atoll stores
everything on disk, and its participants go on training. The others send float32, Atoll four bits, as each does by default.
hivemind looks for others for half a second, not for five.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import psutil

from atoll.bus.server import EmbeddedBroker
from atoll.codec import frame_bytes
from atoll.protocol.settings import ProtocolSettings
from benchmarks.lib.harness import Figure, at_most, fact, run_benchmark
from benchmarks.lib.kept_parts import KeptParts
from benchmarks.lib.runs import HERE, cpu_s, environment, lighthouse, prepare, read_history, start_program
from benchmarks.training import first_try
from support.regions import free_port

ELEMENTS: Final = 1 << 24
COLUMNS: Final = 4096
PAUSE_S: Final = 0.5
STEP_S: Final = 0.02
INTERVAL_STEPS: Final = 60
"""Of Atoll's participants, which pause instead of a step: rounds are well apart."""
SKIPPED: Final = 3
TURNS: Final = 2
SYNCS: Final = 24
LOOK_S: Final = 0.02
BEGIN_S: Final = 120.0
RUN: Final = "sync-race"
DEFAULTS: Final = ProtocolSettings()
CODECS: Final = {"Atoll": (DEFAULTS.codec_up, DEFAULTS.codec_down), "Atoll, bf16 and f32": ("bf16", "f32")}
GOALS: Final = {"Atoll": (0.30, 0.7)}
"""Seconds and processor seconds of a sync of two, with defaults."""
FOUR_BITS_GOALS: Final = (0.20, 0.5)
"""The same with four bits each way, which the defaults are."""
BYTES_GOAL: Final = 1.25
FOUR_BITS_MB_GOAL: Final = 40.0
CROWD: Final = 8


@dataclass(frozen=True, slots=True)
class Usage:
    """A system's use until a moment: processor seconds by kind of process, bytes on the loopback."""

    cpu_s: Mapping[str, float]
    sent_bytes: int

    def since(self, former: Usage) -> Usage:
        spent = {kind: after - former.cpu_s.get(kind, 0.0) for kind, after in self.cpu_s.items()}
        return Usage(spent, self.sent_bytes - former.sent_bytes)


@dataclass(slots=True)
class SyncTurns:
    """Costs of the counted syncs of a system, in all its turns; per sync."""

    took_s: list[float] = field(default_factory=list)
    blocked_s: list[float] = field(default_factory=list)
    used: list[tuple[int, Usage]] = field(default_factory=list)
    memory_bytes: int = 0

    @property
    def syncs(self) -> int:
        return sum(count for count, _ in self.used)

    def cpu_s(self, kind: str | None = None) -> float:
        """Return the processor seconds of a sync, of all processes or of one kind."""
        spent = sum(sum(one.cpu_s.values()) if kind is None else one.cpu_s.get(kind, 0.0) for _, one in self.used)
        return spent / max(1, self.syncs)

    @property
    def megabytes(self) -> float:
        """Return what the loopback carried for a sync, in MB."""
        return sum(one.sent_bytes for _, one in self.used) / max(1, self.syncs) / 1e6


@dataclass(slots=True)
class Workers:
    """The processes of one turn: participants, and others by kind; what each participant printed."""

    folder: Path
    processes: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    def start(self, kind: str, words: list[str], *, participant: bool = True, **variables: str) -> None:
        log = self.folder / f"{len(self.processes)}.log"
        self.processes.append((kind, start_program(words, log, **variables)))
        if participant:
            self.logs.append(log)

    def lines(self) -> list[list[dict[str, Any]]]:
        texts = [log.read_text(encoding="utf-8").rpartition("\n")[0].splitlines() for log in self.logs]
        return [[json.loads(line) for line in text if line.startswith('{"sync"')] for text in texts]

    def wait_for(self, syncs: int, within_s: float) -> None:
        """Return once each participant has told of so many syncs."""
        until_s = time.monotonic() + within_s
        while min(map(len, self.lines())) < syncs:
            for number, (kind, process) in enumerate(self.processes):
                if process.poll() is not None:
                    said = (self.folder / f"{number}.err").read_text(encoding="utf-8")[-2000:]
                    raise SystemExit(f"{kind} left with {process.returncode}: {said}")
            if time.monotonic() > until_s:
                raise SystemExit(f"sync {syncs} did not come within {within_s:.0f} s; see {self.folder}")
            time.sleep(LOOK_S)

    def usage(self) -> Usage:
        """Return what they have used, with all their children; a broker is a child of this process."""
        kinds = {process.pid: kind for kind, process in self.processes}
        spent: dict[str, float] = {}
        for child in psutil.Process().children():
            kind = kinds.get(child.pid, "broker")
            spent[kind] = spent.get(kind, 0.0) + cpu_s(child)
        return Usage(spent, psutil.net_io_counters(pernic=True)["lo"].bytes_sent)

    def memory_bytes(self) -> int:
        """Return the memory of all together that nobody else has, as far as the kernel tells."""
        every = [each for child in psutil.Process().children() for each in (child, *child.children(recursive=True))]
        return sum(each.memory_full_info().uss for each in every)

    def end(self) -> None:
        for _, process in self.processes:
            family = [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
            process.kill()
            process.wait()
            for each in family:
                if each.is_running():
                    each.kill()


@contextmanager
def worker_group() -> Iterator[Workers]:
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(Path(folder))
        try:
            yield workers
        finally:
            workers.end()


def measure(workers: Workers, found: SyncTurns, syncs: int) -> list[list[dict[str, Any]]]:
    """Let some syncs pass, then measure `syncs` of them; return the lines of these, by participant."""
    workers.wait_for(SKIPPED, BEGIN_S)
    before, first = workers.usage(), min(map(len, workers.lines()))
    workers.wait_for(first + syncs, BEGIN_S + 10.0 * syncs)
    found.used.append((syncs, workers.usage().since(before)))
    found.memory_bytes = max(found.memory_bytes, workers.memory_bytes())
    return [lines[first : first + syncs] for lines in workers.lines()]


# -- the systems ------------------------------------------------------------------------------------------------------


def peer(role: str, found: SyncTurns, syncs: int) -> None:
    with worker_group() as workers:
        request: dict[str, Any] = {
            "elements": ELEMENTS,
            "columns": COLUMNS,
            "pause_s": PAUSE_S,
            "world": 2,
            "port": free_port(),
        }
        request |= {"interval_steps": 2, "meeting": str(workers.folder / "meeting.json")}
        if role in ("quorum", "diloco"):
            bind = f"127.0.0.1:{free_port()}"
            workers.start("lighthouse", lighthouse(2, bind), participant=False)
            request["lighthouse"] = f"http://{bind}"
        for rank in range(2):
            told = json.dumps(request | {"rank": rank})
            place = environment("averaging" if role == "hivemind" else "racing")
            words = [place, str(HERE / "syncing.py"), role, told]
            # hivemind leaves sockets in the folder of temporary files when it is ended.
            workers.start("participant", words, OMP_NUM_THREADS="1", TMPDIR=str(workers.folder))
        lines = measure(workers, found, syncs)
    # A sync is over when it is over for everybody, and took from when the last one began.
    found.took_s += [
        max(line["at_s"] for line in each) - max(line["at_s"] - line["took_s"] for line in each)
        for each in zip(*lines, strict=True)
    ]
    found.blocked_s += [max(line["took_s"] for line in each) for each in zip(*lines, strict=True)]


def atoll(codecs: tuple[str, str], learners: int, found: SyncTurns, syncs: int) -> None:
    """Let Atoll take a turn: a broker with its store on disk, a shard, participants."""
    with ExitStack() as stack:
        workers = stack.enter_context(worker_group())
        broker = stack.enter_context(EmbeddedBroker(workers.folder / "broker"))
        protocol: dict[str, Any] = {"fragments": 1, "shards": 1, "quorum": learners, "interval_steps": INTERVAL_STEPS}
        protocol |= {"codec_up": codecs[0], "codec_down": codecs[1]}
        request: dict[str, Any] = {
            "elements": ELEMENTS,
            "columns": COLUMNS,
            "step_s": STEP_S,
            "broker": broker.url,
            "run": RUN,
        }
        request["protocol"] = protocol
        place = {"ATOLL_RUN": RUN, "ATOLL_BROKER__URL": broker.url}
        workers.start("shard", [sys.executable, "-m", "atoll.cli", "synchronizer"], participant=False, **place)
        for rank in range(learners):
            words = [
                sys.executable,
                "-m",
                "benchmarks.network.race_roles",
                "participant",
                json.dumps(request | {"rank": rank}),
            ]
            workers.start("participant", words)
        lines = measure(workers, found, syncs)
        history = asyncio.run(read_history(broker.url, RUN))
        called_s = [line.called_s for line in history.rounds]
    for each in zip(*lines, strict=True):
        adopted_s = max(line["at_s"] for line in each)
        found.took_s.append(adopted_s - max(moment for moment in called_s if moment < adopted_s))
        found.blocked_s.append(max(line["blocked_s"] for line in each))


SYSTEMS: Final = {
    "gloo": partial(peer, "gloo"),
    "torchft": partial(peer, "quorum"),
    "torchft DiLoCo": partial(peer, "diloco"),
    "hivemind": partial(peer, "hivemind"),
    "Atoll": partial(atoll, CODECS["Atoll"], 2),
    "Atoll, bf16 and f32": partial(atoll, CODECS["Atoll, bf16 and f32"], 2),
    f"Atoll, {CROWD} learners": partial(atoll, CODECS["Atoll"], CROWD),
}


def race(syncs: int) -> dict[str, SyncTurns]:
    """Let all systems take their turns, with so many counted syncs of each in all."""
    found = {name: SyncTurns() for name in SYSTEMS}
    for turn in range(TURNS):
        for name, play in SYSTEMS.items():
            play(found[name], DEFAULTS.keyframe_versions if _is_atoll(name) and syncs >= SYNCS else -(-syncs // TURNS))
            print(f"turn {turn + 1} of {TURNS}: {name}, {statistics.median(found[name].took_s):.3f} s", flush=True)
    return found


# -- what they did ----------------------------------------------------------------------------------------------------


def coded_bytes(codecs: tuple[str, str], learners: int) -> int:
    """Return what frames of these codecs take on the loopback: each goes to the broker once, and from it to its readers."""
    up, down = (frame_bytes(ELEMENTS, codec) for codec in codecs)
    return 2 * learners * up + (1 + learners) * down


def figures_of(found: Mapping[str, SyncTurns]) -> list[Figure]:
    told = []
    for name, turns in found.items():
        seconds_goal, cpu_goal = GOALS.get(name, (None, None))
        took_s, cpu_s = statistics.median(turns.took_s), turns.cpu_s()
        kinds = sorted({kind for _, one in turns.used for kind in one.cpu_s})
        spread = f"median of {len(turns.took_s)} syncs in {TURNS} turns, {min(turns.took_s):.3f} to {max(turns.took_s):.3f} s"
        shares = ", ".join(f"{kind} {turns.cpu_s(kind):.3f}" for kind in kinds)
        told += [
            at_most(f"{name}: sync", took_s, "s", seconds_goal, spread),
            at_most(f"{name}: processor time", cpu_s, "s", cpu_goal, shares),
            *_bytes(name, turns.megabytes),
            fact(f"{name}: training waits", statistics.median(turns.blocked_s), "s", "in a participant's loop"),
            fact(f"{name}: memory", turns.memory_bytes / 1e6, "MB", "of all processes, what is theirs alone"),
        ]
        if name in GOALS:
            told += [
                at_most("four bits: sync", took_s, "s", FOUR_BITS_GOALS[0], f"that of {name}, whose defaults they are"),
                at_most("four bits: processor time", cpu_s, "s", FOUR_BITS_GOALS[1], shares),
            ]
    two, many = found.get("Atoll"), found.get(f"Atoll, {CROWD} learners")
    if two is not None and many is not None:
        for kind in ("broker", "shard"):
            here, there = two.cpu_s(kind) / 2, many.cpu_s(kind) / CROWD
            how = f"{there:.3f} s beside {here:.3f} s"
            name = f"{kind}: processor time per learner, {CROWD} beside 2"
            told.append(at_most(name, there / max(here, 1e-9), "x", 1.0, how))
    return told


def _is_atoll(name: str) -> bool:
    return name.startswith("Atoll")


def _bytes(name: str, megabytes: float) -> list[Figure]:
    if name not in CODECS:
        return [fact(f"{name}: moved", megabytes, "MB", "bytes that the loopback carried for a sync")]
    coded_mb = coded_bytes(CODECS[name], 2) / 1e6
    how = f"{megabytes / coded_mb:.2f} times the {coded_mb:.1f} MB that the frames take, uncompressed"
    if name not in GOALS:
        return [fact(f"{name}: moved", megabytes, "MB", how)]
    return [
        at_most(f"{name}: moved", megabytes, "MB", BYTES_GOAL * coded_mb, how),
        at_most("four bits: moved", megabytes, "MB", FOUR_BITS_MB_GOAL, how),
    ]


BUDGETS: Final = (614_400, 2_457_600)
LEARNERS: Final = (2, 4)
SEEDS: Final = 3
SHORT_SYNCS: Final = 6
SHORT_BUDGETS: Final = (102_400,)
SHORT_LEARNERS: Final = (2,)
ROOTS: Final = (
    *("atoll", "atoll_learner", "atoll_monitor", "atoll_synchronizer"),
    *("benchmarks.baselines", "benchmarks.network.bench_peers", "benchmarks.network.race_roles", "benchmarks.peers"),
    "benchmarks.training.first_try",
)
"""What a part rests on."""


def main(  # noqa: PLR0913  (one flag each)
    *,
    short: Annotated[bool, "few syncs, one small budget, one seed"] = False,
    syncs: Annotated[int, "counted syncs of each system"] = SYNCS,
    tokens: Annotated[tuple[int, ...], "budgets of the trainings"] = BUDGETS,
    learners: Annotated[tuple[int, ...], "of the trainings of each budget"] = LEARNERS,
    seeds: Annotated[tuple[int, ...], "of each budget; the last one of the rest"] = (SEEDS,),
    seed: Annotated[int, "the first one"] = 0,
    only: Annotated[str | None, "one of the two tables", ("syncs", "training")] = None,
    again: Annotated[bool, "measure all parts anew"] = False,
) -> list[Figure]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C: what runs beside is ended
    if short:
        syncs, tokens, learners, seeds = SHORT_SYNCS, SHORT_BUDGETS, SHORT_LEARNERS, (1,)
    of_budgets = dict(zip(tokens, (*seeds, *seeds[-1:] * len(tokens)), strict=False))
    kept = KeptParts(Path("build/bench-peers"), ROOTS, HERE.glob("*.txt"), again=again)
    told: list[Figure] = []
    if only != "training":
        told += [Figure(**each) for each in kept.part(f"syncs-{syncs}", lambda: syncs_of(syncs))]
    if only != "syncs":
        found = first_try.race(of_budgets, tuple(learners), seed, prepare(), kept)
        for (budget, many), tries in found.items():
            told += first_try.figures_of(budget, many, tries)
    return told


def syncs_of(syncs: int) -> list[dict[str, Any]]:
    """Return the figures of a race of syncs, as JSON carries them."""
    return [asdict(figure) for figure in figures_of(race(syncs))]


if __name__ == "__main__":
    run_benchmark("bench-peers", main)
