"""One run of the synchronous baseline (see `synchronous`) under a storm, by the same hand as `up_in_storm`.

Roles are mapped: a learner is a worker, an owner the coordinator, the broker the broker; a standby is nobody, because
there is none. Children are started, and started again after the same pause, by the fleet of `atoll up`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from atoll.base.clock import SystemClock
from atoll.base.provenance import commit, machine
from atoll.bus.server import EmbeddedBroker
from atoll.local.processes import ChildPlan, ProcessGroup
from atoll.local.run_settings import without_settings
from atoll.settings.sections import DataSettings
from atoll_learner.data.shards import TokenShards
from atoll_learner.model_settings import model_settings
from atoll_learner.train_settings import train_settings
from benchmarks.faults.extracts import SCHEMA, Course, Extract, Row
from benchmarks.faults.fault_schedule import Planned, storm
from benchmarks.faults.storm import Storm, StormLinks, Victim, chosen
from benchmarks.faults.synchronous import SIZE, Line, compile_program, read_checkpoint
from benchmarks.faults.up_in_storm import BEGIN_MAX_S, CALM_S, PACE
from benchmarks.lib.results import sources

COORDINATOR = "coordinator"
RESTARTS_MAX = 1_000_000
PROGRAM = "benchmarks.faults.synchronous"


def run_group(course: Course, corpus: Path, out: Path) -> Extract:
    """Run one course and return its extract."""
    (out / "logs").mkdir(parents=True)
    names = [COORDINATOR, *workers(course)]
    extract = Extract(course=course, sources=sources(), machine=machine(), commit=commit(), began_s=0.0)
    extract.schema = SCHEMA
    with tempfile.TemporaryDirectory() as store, EmbeddedBroker(Path(store)) as broker:
        fleet = ProcessGroup(out / "logs", SystemClock())
        with StormLinks(names, broker.port) as links:
            try:
                for name in names:
                    fleet.start(child(name, course, corpus, out, links.urls[name]))
                ground = GroupGround(broker, links, fleet, course)
                await_steps(out / "steps.jsonl", fleet)
                extract.began_s = time.time()
                raging = Storm(ground, storm(course.seed, course.per_minute, course.seconds, course.partition_s))
                raging.rage(course.seconds)
                raging.rage(CALM_S)
            finally:
                fleet.kill_all()
    extract.faults, extract.missed = raging.faults, raging.missed
    enter_report(extract, corpus, out)
    return extract


def workers(course: Course) -> list[str]:
    """Return the names of the workers."""
    return [f"worker-{i}" for i in range(1, course.learners + 1)]


def child(name: str, course: Course, corpus: Path, out: Path, url: str) -> ChildPlan:
    """Return the plan of the coordinator or a worker."""
    role, _, number = name.partition("-")
    words = [sys.executable, "-m", PROGRAM, role, "--number", number or "0", "--size", str(course.learners)]
    words += ["--run", "group", "--url", url, "--folder", str(out.absolute()), "--corpus", str(corpus.absolute())]
    words += ["--seed", str(course.seed), "--pace", f"{PACE:g}"]
    environment = {**without_settings(os.environ), "PYTHONUNBUFFERED": "1"}
    return ChildPlan(name, tuple(words), environment, restarts_max=RESTARTS_MAX)


def await_steps(log: Path, fleet: ProcessGroup) -> None:
    """Return once the group has taken a step."""
    deadline_s = time.monotonic() + BEGIN_MAX_S
    while not (log.exists() and '"what":"step"' in log.read_text(encoding="utf-8")):
        fleet.poll()
        if time.monotonic() > deadline_s:
            raise SystemExit("the group took no step")
        time.sleep(0.2)


class GroupGround:
    """Finds who is meant in the synchronous group."""

    def __init__(self, broker: EmbeddedBroker, links: StormLinks, fleet: ProcessGroup, course: Course) -> None:
        """Look at the children of `fleet`."""
        self.broker = broker
        self.links = links
        self._fleet = fleet
        self._workers = workers(course)

    def tick(self) -> None:
        """Start again what has ended."""
        self._fleet.poll()

    def victim(self, planned: Planned) -> Victim | None:
        """Return the process that a role means now."""
        if planned.role == "broker":
            return Victim("broker") if self.broker.pid else None
        if planned.role == "standby":
            return None
        name = COORDINATOR if planned.role == "owner" else chosen(planned.pick, self._alive())
        pid = self._fleet.pid(name) if name else 0
        return Victim(name, pid) if name and pid else None

    def _alive(self) -> list[str]:
        return [name for name in self._workers if self._fleet.pid(name)]


def enter_steps(extract: Extract, text: str) -> None:
    """Enter the coordinator's log: one life per generation of the group, and what became of its steps.

    Of a coordinator that is killed while it writes a line, the line is left out.
    """
    lives: dict[str, list[Row]] = {}
    formed, taken = 0, 0
    lines = [msgspec.json.decode(line, type=Line) for line in text.splitlines() if line.endswith("}")]
    for line in lines:
        at_s = round(line.at_s - extract.began_s, 3)
        rows = lives.setdefault(f"all/{line.generation}", [])
        if line.what == "formed":
            formed = line.step
            rows.append((at_s, line.step, 0, 0.0))
        else:
            taken += 1
            rows.append((at_s, line.step, (line.step - formed) * extract.step_tokens, round(line.step_s, 4)))
    extract.lives = lives
    kept = lines[-1].step if lines else 0
    tokens = extract.step_tokens
    extract.report = {
        "tokens_trained": taken * tokens,
        "tokens_by_fate": {"merged": kept * tokens, "merged_late": 0, "lost": (taken - kept) * tokens},
    }


def enter_report(extract: Extract, corpus: Path, out: Path) -> None:
    """Measure the last checkpoint on the held-out text that Atoll's export uses."""
    from atoll_learner.train import make_evaluator  # noqa: PLC0415  (JAX only where it is needed)

    program, _, tokens = compile_program(corpus, out / "cache", extract.course.seed)
    extract.step_tokens = tokens * extract.course.learners
    enter_steps(extract, (out / "steps.jsonl").read_text(encoding="utf-8"))
    shards = TokenShards(corpus)
    model = model_settings({"size": SIZE}, vocab=shards.meta.vocab)
    measure = make_evaluator(model, train_settings({}, model=model), shards, DataSettings().held_out_tokens)
    first, values = measure(program.params), (program.params, program.state)
    if (out / "checkpoint.npz").exists():
        values, _ = read_checkpoint(out / "checkpoint.npz", values)
    last = measure(values[0])
    extract.report["validation"] = {"initial_bits_per_byte": first, "final_bits_per_byte": last, "curve": []}
