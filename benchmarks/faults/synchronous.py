"""A synchronous baseline under a storm: data-parallel training in lock-step, by real processes over a real broker.

It models a group of fixed size under an elastic launcher (torchrun, or a lighthouse that admits no smaller quorum) with the
model, data, optimizer and pacing of the reference learner. Every step each worker sends its gradient and gets the mean of all.
Whenever a member or the way to it is lost, all wait until the group is complete, load the last checkpoint and go on. In the
storm a learner is a worker, an owner the coordinator; a standby is nobody.

What favours it over systems of its kind: survivors keep their processes and compiled programs; a death is known the moment the
dead process is back, a broken link at once or after `COLLECTIVE_S`; a checkpoint costs nothing, is never half lost, and comes
every few seconds; reordering data after a rollback is not counted. What does not: the group cannot go on with fewer members, as
some systems can (torchft), and there is one coordinator. Gradients travel through it, which at this size is little.

    coordinator ── anew ─────────► workers          a new coordinator knows nobody: join again
    worker ── join ──────────────► coordinator      again and again, until all are there: a new generation begins
    worker ── reduce + gradient ─► coordinator      answered with the mean when all are there, or empty: join again
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from atoll.base.clock import SystemClock
from atoll.base.errors import BrokerUnavailable, BusError
from atoll.base.machine import commit, machine
from atoll.bus.interface import Bus, CoreMessage
from atoll.bus.open import open_bus
from atoll.bus.server import EmbeddedBroker
from atoll.local.processes import ChildPlan, ProcessGroup
from atoll.local.run_settings import without_settings
from atoll.settings.sections import DataSettings
from atoll.wire.subjects import Subjects
from atoll_learner.data.shards import TokenShards
from atoll_learner.feed import BatchReader
from atoll_learner.model_settings import model_settings
from atoll_learner.process import enable_compile_cache, limit_threads
from atoll_learner.train_settings import train_settings
from benchmarks.faults.metrics import SCHEMA, Course, Extract, Row
from benchmarks.faults.storm import Planned, Storm, StormLinks, Victim, chosen, storm
from benchmarks.faults.up_in_storm import BEGIN_MAX_S, CALM_S, PACE
from benchmarks.lib.harness import sources
from benchmarks.lib.runs import wait_until

COORDINATOR = "coordinator"
RESTARTS_MAX = 1_000_000
PROGRAM = "benchmarks.faults.synchronous"


def run_group(course: Course, corpus: Path, out: Path) -> Extract:
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
    return [f"worker-{i}" for i in range(1, course.learners + 1)]


class GroupMember(msgspec.Struct, frozen=True):
    """Request to a process of the group."""

    name: str
    size: int
    url: str
    folder: Path
    corpus: Path
    seed: int
    run: str = "group"

    @property
    def number(self) -> int:
        """Return which worker it is; 0 for the coordinator."""
        return int(self.name.partition("-")[2] or 0)


def child(name: str, course: Course, corpus: Path, out: Path, url: str) -> ChildPlan:
    member = GroupMember(name, course.learners, url, out.absolute(), corpus.absolute(), course.seed)
    words = (sys.executable, "-m", PROGRAM, msgspec.json.encode(member, enc_hook=str).decode())
    environment = {**without_settings(os.environ), "PYTHONUNBUFFERED": "1"}
    return ChildPlan(name, words, environment, restarts_max=RESTARTS_MAX)


def await_steps(log: Path, fleet: ProcessGroup) -> None:
    def stepped() -> bool:
        fleet.poll()
        return log.exists() and '"what":"step"' in log.read_text(encoding="utf-8")

    wait_until("a step of the group", stepped, BEGIN_MAX_S)


class GroupGround:
    """Finds who is meant in the synchronous group."""

    def __init__(self, broker: EmbeddedBroker, links: StormLinks, fleet: ProcessGroup, course: Course) -> None:
        self.broker = broker
        self.links = links
        self._fleet = fleet
        self._workers = workers(course)

    def tick(self) -> None:
        self._fleet.poll()

    def victim(self, planned: Planned) -> Victim | None:
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


CHECKPOINT_STEPS = 10
COLLECTIVE_S = 10.0
JOIN_S = 1.0
JOIN_STALE_S = 2.0
AGAIN_S = 0.2
EPOCHS = 64
LATE_STEPS = 32
SIZE = "xs"

Vector = npt.NDArray[np.float32]


class Line(msgspec.Struct):
    """A line of the coordinator's log: the group `formed` at a step, or took a `step` of so many seconds."""

    at_s: float
    what: str
    generation: int
    step: int
    step_s: float = 0.0


class GroupMessage(msgspec.Struct, array_like=True):
    """A worker's request: to join (generation 0), or to reduce its gradient; `step` is the one it is at."""

    worker: int
    generation: int
    step: int
    step_s: float = 0.0
    gradient: bytes = b""


class Formed(msgspec.Struct, array_like=True):
    """The answer to a join."""

    generation: int


@dataclass(slots=True)
class WorkerGroup:
    """The coordinator's decisions, without the network: who is here, and what each is answered. Pure.

    `seen` is when each worker last asked to join, `told` who knows of the present generation. One that asks again although
    it was told has left; one that was never told, because it died before it could be, is told in its next life.
    """

    size: int
    generation: int = 0
    seen: dict[int, float] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    reducing: dict[int, tuple[str, GroupMessage]] = field(default_factory=dict)

    def on_join(self, message: GroupMessage, reply: str, now_s: float) -> list[tuple[str, bytes]]:
        """Return answers by reply subject: the generation once all are there, else nothing yet; it is over for the rest."""
        answers: list[tuple[str, bytes]] = []
        if message.worker in self.told:
            answers = [(waiting, b"") for waiting, _ in self.reducing.values()]
            self.reducing.clear()
            self.told.clear()
            self.seen.clear()
            self.generation = 0
        self.seen[message.worker] = now_s
        here = [worker for worker, at_s in self.seen.items() if now_s - at_s <= JOIN_STALE_S]
        if not self.generation and len(here) == self.size:
            self.generation = int(now_s * 1000)
        if not self.generation:
            return [*answers, (reply, b"")]
        self.told.add(message.worker)
        return [*answers, (reply, msgspec.msgpack.encode(Formed(self.generation)))]

    def on_reduce(self, message: GroupMessage, reply: str) -> list[tuple[str, bytes]]:
        """Return the mean for all when the last gradient has come; nothing (join again) for one of a broken group."""
        if not self.generation or message.generation != self.generation:
            return [(reply, b"")]
        self.reducing[message.worker] = (reply, message)
        if len(self.reducing) < self.size:
            return []
        gradients = [np.frombuffer(m.gradient, np.float32) for _, m in self.reducing.values()]
        mean: Vector = np.mean(gradients, axis=0, dtype=np.float32)
        answers = [(waiting, mean.tobytes()) for waiting, _ in self.reducing.values()]
        self.reducing.clear()
        return answers


async def coordinate(member: GroupMember) -> None:
    """Answer workers until killed, and write down every group that forms and every step it takes."""
    bus = await open_bus(member.url, member.run, name=COORDINATOR)
    group, subject = WorkerGroup(member.size), f"{Subjects(member.run).prefix}.sync"
    hearing = await bus.listen(subject)
    await tell(bus, f"{subject}.anew", b"")
    with (member.folder / "steps.jsonl").open("a", encoding="utf-8") as lines:
        async for core_message in hearing:
            answers, line = answer(group, core_message)
            if line is not None:
                lines.write(msgspec.json.encode(line).decode() + "\n")
                lines.flush()
            for reply, data in answers:
                await tell(bus, reply, data)


def answer(group: WorkerGroup, core_message: CoreMessage) -> tuple[list[tuple[str, bytes]], Line | None]:
    message = msgspec.msgpack.decode(core_message.data, type=GroupMessage)
    reply, now_s = core_message.reply or "", time.time()
    if message.generation:
        answers = group.on_reduce(message, reply)
        done = len(answers) == group.size and all(data for _, data in answers)
        return answers, Line(now_s, "step", group.generation, message.step + 1, message.step_s) if done else None
    answers = group.on_join(message, reply, now_s)
    formed = group.generation and len(group.told) == 1
    return answers, Line(now_s, "formed", group.generation, message.step) if formed else None


async def tell(bus: Bus, subject: str, data: bytes) -> None:
    """Send; an answer that is lost breaks the group at its time-out, as a lost packet of a collective does."""
    try:
        await bus.tell(subject, data)
    except (BusError, BrokerUnavailable) as error:
        print(f"answer lost: {error}", flush=True)


@dataclass(slots=True)
class Program:
    """A worker's computation: `gradient` of a batch, `apply` of a mean gradient, both on flat vectors."""

    gradient: Callable[[Any, npt.NDArray[np.int32]], Vector]
    apply: Callable[[Any, Any, Vector], tuple[Any, Any]]
    params: Any
    state: Any


def compile_program(corpus: Path, cache: Path, seed: int) -> tuple[Program, BatchReader, int]:
    """Return the compiled program with initial values, this worker's data, and the tokens of one worker's step."""
    import jax  # noqa: PLC0415  (after the thread limits are set)
    from jax.flatten_util import ravel_pytree  # noqa: PLC0415

    from atoll.base.user_cache import turn  # noqa: PLC0415
    from atoll_learner.model import init_params  # noqa: PLC0415
    from atoll_learner.train import init_optimizer, make_loss, optimizer  # noqa: PLC0415

    enable_compile_cache(cache)
    shards = TokenShards(corpus)
    model = model_settings({"size": SIZE}, vocab=shards.meta.vocab)
    train = train_settings({}, model=model)
    reader = BatchReader(shards, train.sequence, train.batch, seed * 1000 + os.getpid() % 1000)
    for epoch in range(EPOCHS):
        reader.grant(epoch, 0, shards.blocks)
    params = init_params(model, seed)
    state = init_optimizer(train, params)
    unravel = ravel_pytree(params)[1]
    rate, transform = train.rate, optimizer(train)
    grad = jax.jit(lambda params, batch: ravel_pytree(jax.grad(make_loss(model))(params, batch))[0])

    @jax.jit
    def apply(params: Any, state: Any, flat: Any) -> tuple[Any, Any]:  # noqa: ANN401  (pytrees)
        updates, state = transform.update(unravel(flat), state, params)
        return jax.tree.map(lambda leaf, update: leaf - rate * update, params, updates), state

    def gradient(params: Any, batch: npt.NDArray[np.int32]) -> Vector:  # noqa: ANN401  (a pytree)
        return np.asarray(grad(params, batch))

    with turn(cache):
        settle(apply(params, state, gradient(params, reader.next())))
    return Program(gradient, apply, params, state), reader, train.tokens_per_step


def settle(values: Any) -> Any:  # noqa: ANN401  (a pytree)
    import jax  # noqa: PLC0415

    wait: Callable[[Any], Any] = jax.block_until_ready
    return wait(values)


class GroupWorker:
    """One worker: joins, loads the checkpoint, steps until the group breaks, and joins again."""

    def __init__(self, number: int, program: Program, reader: BatchReader, checkpoint: Path, pace: float) -> None:
        import jax  # noqa: PLC0415

        self._jax = jax
        self._number = number
        self._program = program
        self._reader = reader
        self._checkpoint = checkpoint
        self._pace = pace
        self._values: tuple[Any, Any] = (program.params, program.state)
        self._late_s: list[float] = []
        self._step = 0
        self._anew = asyncio.Event()

    async def work(self, bus: Bus, subject: str) -> None:
        hearing = asyncio.create_task(self._hear(await bus.listen(f"{subject}.anew")))
        while not hearing.done():
            self._load()
            generation = await self._join(bus, subject)
            self._load()
            while await self._take_step(bus, subject, generation):
                pass

    async def _hear(self, begins: Any) -> None:  # noqa: ANN401  (Subscription)
        async for _ in begins:
            self._anew.set()

    async def _join(self, bus: Bus, subject: str) -> int:
        while True:
            said = await self._ask(bus, subject, 0)
            if said:
                return msgspec.msgpack.decode(said, type=Formed).generation
            await asyncio.sleep(AGAIN_S)

    async def _take_step(self, bus: Bus, subject: str, generation: int) -> bool:
        """Take one step with everybody; return whether the group still stands."""
        began_s = time.monotonic()
        gradient = self._program.gradient(self._values[0], self._reader.next())
        await asyncio.sleep(self._rest_s(time.monotonic() - began_s))
        said = await self._ask(bus, subject, generation, time.monotonic() - began_s, gradient.tobytes())
        if not said:
            return False
        mean = np.frombuffer(said, np.float32)
        self._values = settle(self._program.apply(*self._values, mean))
        self._step += 1
        if self._number == 1 and self._step % CHECKPOINT_STEPS == 0:
            self._save()
        return True

    def _rest_s(self, step_s: float) -> float:
        """Return how long to rest so that a step takes `pace` times the quickest of late, as a learner's throttle does."""
        self._late_s = [*self._late_s, step_s][-LATE_STEPS:]
        return max(0.0, self._pace * min(self._late_s) - step_s)

    async def _ask(
        self, bus: Bus, subject: str, generation: int, step_s: float = 0.0, gradient: bytes = b""
    ) -> bytes | None:
        """Return the coordinator's answer; None when none comes, or when another coordinator has begun meanwhile."""
        message = GroupMessage(self._number, generation, self._step, step_s, gradient)
        self._anew.clear()
        timeout_s = COLLECTIVE_S if generation else JOIN_S
        asking = asyncio.create_task(bus.ask(subject, msgspec.msgpack.encode(message), timeout_s=timeout_s))
        begun = asyncio.create_task(self._anew.wait())
        await asyncio.wait({asking, begun}, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if not asking.done():
            asking.cancel()
            return None
        try:
            return asking.result()
        except (BusError, BrokerUnavailable):
            return None

    def _save(self) -> None:
        aside = self._checkpoint.with_suffix(".part")
        with aside.open("wb") as file:
            np.savez(file, *[np.asarray(leaf) for leaf in self._jax.tree.leaves(self._values)], step=self._step)
        aside.replace(self._checkpoint)

    def _load(self) -> None:
        self._values, self._step = (self._program.params, self._program.state), 0
        if self._checkpoint.exists():
            self._values, self._step = read_checkpoint(self._checkpoint, self._values)


def read_checkpoint(path: Path, like: Any) -> tuple[Any, int]:  # noqa: ANN401  (a pytree)
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    leaves, shape = jax.tree.flatten(like)
    with np.load(path) as kept:
        return jax.tree.unflatten(shape, [jnp.asarray(kept[f"arr_{i}"]) for i in range(len(leaves))]), int(kept["step"])


async def work(member: GroupMember) -> None:
    limit_threads(1)
    program, reader, _ = compile_program(member.corpus, member.folder / "cache", member.seed)
    worker = GroupWorker(member.number, program, reader, member.folder / "checkpoint.npz", PACE)
    bus = await open_bus(member.url, member.run, name=member.name)
    await worker.work(bus, f"{Subjects(member.run).prefix}.sync")


def main() -> None:
    member = msgspec.json.decode(sys.argv[1], type=GroupMember, dec_hook=lambda kind, value: kind(value))
    asyncio.run(work(member) if member.number else coordinate(member))


if __name__ == "__main__":
    main()
