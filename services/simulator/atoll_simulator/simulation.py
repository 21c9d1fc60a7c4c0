"""`atoll sim train`: the sequence of a simulated run, from an empty folder to a report.

    data ─► broker in memory, shards, learners, evaluator in virtual time ─► drain ─► event log ─► export ─► report

The same code as of `atoll up` makes the results, with groups of tasks in place of processes. A run ends by itself, by
`sim.max_s`, or by a signal. The evaluator stands beside the broker and takes no virtual time; it measures at the round that
crosses the next distance in merged tokens, so at the same merged tokens in every run, counted as the report counts them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import msgspec

from atoll.base.clock import Clock, SystemClock
from atoll.base.errors import PeerMisbehaved
from atoll.base.logs import get
from atoll.base.wording import DAY_S
from atoll.bus.interface import PAGE_EVENTS, Bus, CoreMessage
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.local.console import ConsolePicture, RunConsole
from atoll.local.journal import Journal
from atoll.local.options import UpPlan, shard_names, standby_names
from atoll.local.run_store import last_facts
from atoll.local.services import LEARNERS_LEAVE_S
from atoll.local.supervisor import SHARDS_FINISH_S, SHARDS_LEAVE_S
from atoll.protocol.ledger import Ledger
from atoll.report.collect import BrokerFacts
from atoll.report.write import write_report
from atoll.run.folder import EVENTS_FILE, SIMULATED, RunFolder
from atoll.run.history import History
from atoll.run.merged_model import MergedModel, read_merged
from atoll.run.record import read_run
from atoll.run.watch import Watch
from atoll.settings.sections import ArchiveSettings
from atoll.wire.events import EVALUATOR, RoundEvent, event_of, fields_of, log_entry
from atoll.wire.messages import RunRecord, encode
from atoll.wire.subjects import Subjects
from atoll_learner.evaluations import measure_merged
from atoll_learner.model import Params
from atoll_learner.run_export import measure_model, write_out
from atoll_learner.train import make_evaluator
from atoll_simulator.learner import Liar, LifeParts, SharedParts, SimulatedLearner, StepPace
from atoll_simulator.loop import LoopClock, VirtualLoop
from atoll_simulator.scenario import Scenario
from atoll_simulator.world import ProcessLife, SimulatedWorld
from atoll_synchronizer.process import Host, wait_for_run

POLL_S: Final = 0.25
SHOW_REAL_S: Final = 1.0
EVALUATIONS: Final = 25
IDLE_S: Final = DAY_S
STREAM_BYTES_MAX: Final = 8 << 30
IDLE_STEPS: Final = 10.0
log = get(__name__)

NEWS_WAITING_MAX: Final = 1 << 16
Measure = Callable[[Params], float]


@dataclass(slots=True)
class SimulationOutcome:
    """End of a simulated run, the merged model, and the inner steps with the real time they took.

    `why` says what is wrong with the end, empty for a good one. `ledgers` are the ledgers that the heads name, read if a
    shard did not close its own.
    """

    ended: str
    why: str
    run: RunRecord | None
    merged: MergedModel | None
    ledger: Ledger | None
    steps: int
    steps_took_s: float


class Simulation:
    """One simulated run on the running virtual loop."""

    def __init__(
        self,
        up: UpPlan,
        scenario: Scenario,
        shared: SharedParts,
        *,
        view: History,
        face: RunConsole,
        interrupted: Callable[[], bool],
    ) -> None:
        self._up = up
        self._settings = shared.settings
        self._scenario = scenario
        self._shared = shared
        self._liars = {name: Liar(lie, f"{name}/{up.settings.seed}") for name, lie in scenario.liars.items()}
        self._view = view
        self._face = face
        self._interrupted = interrupted
        self.clock: Clock = LoopClock(asyncio.get_running_loop())
        self._broker = MemoryBroker(
            stream_bytes_max=self._settings.broker.stream_bytes_max or STREAM_BYTES_MAX, clock=self.clock
        )
        self._bus = MemoryBus(self._settings.run, self._broker)
        self.world = SimulatedWorld(self._settings.run, self._settings.seed, scenario, self._broker, self.clock)
        self._watch = Watch(self._bus, self._settings.run, view, self.clock)
        self._devices = jax.local_devices()
        self._shards = shard_names(self._settings.protocol.shards)
        self._standbys = standby_names(self._settings.protocol.shards, up.settings.up.standbys)
        self._steps = 0
        self._stepped_s = 0.0
        self._first_real_s = self._last_real_s = 0.0
        self._shown_s = 0.0

    async def run(self) -> SimulationOutcome:
        """Train to the end and return the outcome."""
        loop = asyncio.get_running_loop()
        evaluator = self._evaluator()
        helpers = [loop.create_task(work) for work in (self._watch.follow(), evaluator.follow())]
        await asyncio.sleep(0)
        self._populate()
        try:
            ended, why = await self._until_over(helpers)
            self._face.rest()
            await self._drain()
            await self._watch.catch_up()
            run = await read_run(self._bus, Subjects(self._settings.run))
            merged = None
            if run is not None and self._view.trained_tokens > 0:
                await evaluator.evaluate()
                await self._watch.catch_up()
                merged = await read_merged(self._bus, run)
            ledger = (await last_facts(self._bus, self._settings.run, self._view)).ledger
            if ended == "finished" and ledger is not None:
                ended, why = "failed", "a shard did not close its ledger"
            return SimulationOutcome(
                ended, why, run, merged, ledger, self._steps, self._last_real_s - self._first_real_s
            )
        finally:
            self.world.end()
            for helper in helpers:
                helper.cancel()

    async def events(self) -> bytes:
        """Return the whole event log, one JSON object per line: sequence, subject and event of each entry."""
        lines: list[bytes] = []
        after = 0
        while True:
            events = Subjects(self._settings.run).event("*", "*")
            entries = await self._bus.replay(events, after=after, limit=PAGE_EVENTS)
            for entry in entries:
                after = entry.sequence
                line = {"sequence": after, "subject": entry.subject, "event": msgspec.Raw(entry.data)}
                lines.append(msgspec.json.encode(line) + b"\n")
            if len(entries) < PAGE_EVENTS:
                return b"".join(lines)

    def _evaluator(self) -> SimulatedEvaluator:
        work, protocol = self._shared.work, self._settings.protocol
        interval = protocol.interval_steps * work.train.tokens_per_step * len(self._up.learners)
        every = self._scenario.evaluate_tokens or max(1, protocol.tokens_target // EVALUATIONS or interval)
        return SimulatedEvaluator(
            self._bus,
            self._settings.run,
            protocol.fragments,
            every,
            view=self._view,
            clock=self.clock,
            measure=make_evaluator(work.model, work.train, work.shards, work.held_out_tokens),
        )

    # --- processes ----------------------------------------------------------------------------------------------------

    def _populate(self) -> None:
        """Register every process; they start in the order in which `atoll up` starts them."""
        for number, name in enumerate(self._shards):
            self.world.add(name, self._server(number))
        for name, number in self._standbys.items():
            self.world.add(name, self._server(number))
        for name in self._up.learners:
            self.world.add(name, self._serve_learner, at_s=self._scenario.joins.get(name, 0.0))
            self.world.fail_at_random(name)
        self.world.begin()

    def _server(self, shard: int) -> Any:  # noqa: ANN401  (a coroutine function of a life)
        async def serve(life: ProcessLife) -> None:
            record = await wait_for_run(life.bus, self._settings.run, life.stop)
            if record is not None:
                own_outer = self._settings.protocol.outer
                host = Host(
                    life.bus, record, (shard,), self.clock, ArchiveSettings(), life.identity, own_outer=own_outer
                )
                await host.serve(life.stop)
            await life.bus.close()

        return serve

    async def _serve_learner(self, life: ProcessLife) -> None:
        name = life.name
        scenario, mean_s = self._scenario, self._mean_s(name)
        dice = self.world.dice(name, life.number, "pace")
        parts = LifeParts(
            clock=self.clock,
            identity=life.identity,
            pace=StepPace(mean_s, scenario.step_cv, dice, compile_s=scenario.compile_s.get(name, 0.0)),
            device=self._devices[self._up.learners.index(name) % len(self._devices)],
            stop=life.stop,
            on_step=self._on_step,
            start_s=scenario.start_s,
            liar=self._liars.get(name),
        )
        await SimulatedLearner(self._shared, name, life.bus, parts).live()

    def _mean_s(self, name: str) -> float:
        throttle = self._settings.up.throttle.get(name, self._settings.learner.throttle)
        return self._scenario.step_s * throttle / self._scenario.speed.get(name, 1.0)

    def _on_step(self) -> None:
        """Count a step and its real time; that is for information only and decides nothing."""
        self._last_real_s = SystemClock().monotonic()
        self._first_real_s = self._first_real_s or self._last_real_s
        self._steps += 1
        self._stepped_s = self.clock.monotonic()

    # --- the sequence -------------------------------------------------------------------------------------------------

    async def _until_over(self, helpers: list[asyncio.Task[None]]) -> tuple[str, str]:
        target = self._settings.protocol.tokens_target
        while True:
            self._check(helpers)
            self._show()
            if self._interrupted() or 0 < self._scenario.max_s <= self.clock.monotonic():
                return "stopped", ""
            if self.clock.monotonic() - self._stepped_s > self._idle_s():
                return "failed", f"nobody has trained for {self._idle_s():,.0f} s of virtual time"
            if not any(self.world.actor(name).alive for name in self._up.learners):
                reached = bool(target) and self._view.run_tokens >= target
                if reached or any(self.world.actor(name).left for name in self._up.learners):
                    return "finished", ""
                if not any(self.world.actor(name).due for name in self._up.learners):
                    return self._without_learners()
            await asyncio.sleep(POLL_S)

    def _idle_s(self) -> float:
        """Return the longest time of a run without a step: a day, and some of its slowest steps."""
        scenario = self._scenario
        slowest = max(self._mean_s(name) + scenario.compile_s.get(name, 0.0) for name in self._up.learners)
        return IDLE_S + scenario.start_s + IDLE_STEPS * slowest

    def _without_learners(self) -> tuple[str, str]:
        if all(self.world.actor(name).dismissed for name in self._up.learners):
            return "stopped", ""
        return "failed", "every learner is dead or has failed, and none returns"

    async def _drain(self) -> None:
        learners, shards = self._up.learners, [*self._shards, *self._standbys]
        for name in learners:
            self.world.dismiss(name)
        await self._until_gone(learners, LEARNERS_LEAVE_S)
        target = self._settings.protocol.tokens_target
        if target and self._view.run_tokens >= target:
            await self._until_gone(shards, SHARDS_FINISH_S)
        for name in shards:
            self.world.dismiss(name)
        await self._until_gone(shards, SHARDS_LEAVE_S)

    async def _until_gone(self, names: Any, patience_s: float) -> None:  # noqa: ANN401  (names)
        deadline_s = self.clock.monotonic() + patience_s
        while any(self.world.actor(name).alive for name in names) and self.clock.monotonic() < deadline_s:
            self._check([])
            await asyncio.sleep(POLL_S)

    def _check(self, helpers: list[asyncio.Task[None]]) -> None:
        if self.world.failure is not None:
            raise self.world.failure
        for helper in helpers:
            if helper.done():
                helper.result()

    def _show(self) -> None:
        """Show the run at intervals of the real clock; a picture decides nothing."""
        now_s = SystemClock().monotonic()
        if now_s - self._shown_s < SHOW_REAL_S:
            return
        self._shown_s = now_s
        settings = self._settings
        now_s = self.clock.monotonic()
        self._face.show(ConsolePicture(self._view, settings.run, settings.protocol, 0.0, now_s, virtual=True))


def simulate(
    up: UpPlan,
    scenario: Scenario,
    shared: SharedParts,
    *,
    folder: RunFolder,
    face: RunConsole,
    interrupted: Callable[[], bool],
) -> tuple[dict[str, Any] | None, SimulationOutcome]:
    """Run a simulation in `folder` and return its report and outcome; there is no report if nothing was trained."""
    view = History(virtual=True)

    async def main() -> SimulationOutcome:
        simulation = Simulation(up, scenario, shared, view=view, face=face, interrupted=interrupted)
        journal = Journal(replace(up, broker=SIMULATED), folder, view, simulation.clock)
        journal.begin()
        try:
            outcome = await simulation.run()
            journal.end(outcome.ended)
        except (asyncio.CancelledError, KeyboardInterrupt):
            journal.end("killed")
            raise
        except BaseException:
            journal.end("failed")
            raise
        finally:
            lines = [msgspec.json.encode(line) + b"\n" for line in simulation.world.journal]
            folder.write("journal.jsonl", b"".join(lines))
            folder.write(EVENTS_FILE, await simulation.events())
            journal.save()
        files.append(journal)
        return outcome

    files: list[Journal] = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        outcome = runner.run(main())
    if outcome.run is None or outcome.merged is None:
        return None, outcome
    with face.stage("measuring and writing the model"):
        work = shared.work
        measure = make_evaluator(work.model, work.train, work.shards, work.held_out_tokens)
        write_out(work, folder.out, outcome.run, outcome.merged, measure_model(measure, outcome.merged, shared.params))
    last = BrokerFacts(outcome.run.data, outcome.ledger, view)
    report, unwritten = write_report(folder, view, files[0].file, last, "virtual")
    if unwritten is not None:
        raise unwritten
    return report, outcome


class SimulatedEvaluator:
    """Measures a run of `fragments` into its event log: at its beginning, then every `every_tokens` merged tokens."""

    def __init__(  # noqa: PLR0913  (the one place that puts it together)
        self, bus: Bus, run: str, fragments: int, every_tokens: int, *, view: History, clock: Clock, measure: Measure
    ) -> None:
        """Measure nothing yet; `bus` has no link, so that reading takes no time."""
        self._bus = bus
        self._subjects = Subjects(run)
        self._fragments = fragments
        self._every_tokens = max(1, every_tokens)
        self._view = view
        self._clock = clock
        self._measure = measure
        self._token_fragments = 0
        self._next_tokens = 0
        self._measured = 0

    async def follow(self) -> None:
        """Measure at every distance until cancelled."""
        news = await self._bus.listen(self._subjects.tap("ev.*.*"), len_max=NEWS_WAITING_MAX)
        async for core_message in news:
            if await self._crosses(core_message):
                await self.evaluate()

    async def _crosses(self, core_message: CoreMessage) -> bool:
        """Count a round and return whether it crosses the next distance; the first learner to join finds the origin."""
        kind = core_message.subject.split(".")[-2]
        if kind == "round":
            after = int(core_message.headers["Nats-Sequence"]) - 1
            entry = (await self._bus.replay(self._subjects.event(kind, "*"), after=after, limit=1))[0]
            try:
                self._token_fragments += fields_of(event_of(entry.subject, entry.data), RoundEvent).tokens
            except PeerMisbehaved as error:
                log.warning("round.refused", subject=entry.subject, reason=str(error))
                return False
        elif kind != "joined":
            return False
        merged_tokens = self._token_fragments // self._fragments
        if merged_tokens < self._next_tokens:
            return False
        self._next_tokens = (merged_tokens // self._every_tokens + 1) * self._every_tokens
        return True

    async def evaluate(self) -> None:
        """Measure the present model, and write the result to the event log."""
        run = await read_run(self._bus, self._subjects)
        if run is None:
            return
        merged = await read_merged(self._bus, run)
        fields = measure_merged(merged, self._measure, self._view.run_tokens, clock=self._clock.monotonic)
        self._measured += 1
        line = encode(log_entry(fields, EVALUATOR, self._clock.wall()))
        msg_id, info = f"validation-{self._measured}", {"bpb": fields.bits_per_byte}
        await self._bus.publish(self._subjects.event("validation", EVALUATOR), line, msg_id=msg_id, info=info)
        log.info("model.evaluated", **msgspec.to_builtins(fields))
