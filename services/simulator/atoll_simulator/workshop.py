"""Prepares a simulated run before its first virtual second: a checked plan, a folder, data, devices, a compiled step.

Nothing here may load JAX before `use_cores` has set it up.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from atoll.base.clock import SystemClock
from atoll.base.errors import INTERRUPTED, AtollError, SettingsError
from atoll.base.logs import logging_to
from atoll.local.console import PlainConsole, RunConsole, TerminalConsole
from atoll.local.options import UpPlan, UpRequest, plan, shard_names, standby_names
from atoll.local.program_cache import program_cache
from atoll.report.write import summary
from atoll.run.folder import RunFolder, move_aside, read_run_file
from atoll.settings import FlagText, Settings
from atoll_learner.data.prepare import prepare
from atoll_learner.data.sources import files_of, stdlib_files
from atoll_learner.data.tokenizer import Vocabulary
from atoll_learner.process import enable_compile_cache, prepare_work
from atoll_simulator.scenario import Scenario, scenario_of


def use_cores(learners: int) -> None:
    """Make JAX create as many one-thread CPU devices as can work side by side; only before JAX is first used."""
    devices = max(1, min(os.cpu_count() or 1, learners))
    # The count comes first: XLA stops reading at the first word that is not its own flag, and the last one is not.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    told = os.environ.get("XLA_FLAGS", "")
    if flags not in told:
        os.environ["XLA_FLAGS"] = f"{told} {flags} intra_op_parallelism_threads=1".strip()


class InterruptHandler:
    """Whether a signal asked the simulation to end in good order; a second one raises `KeyboardInterrupt`.

    The default handler raises wherever Python is, and an exception inside JAX's hook of the garbage collector is lost.
    """

    def __init__(self) -> None:
        self.wanted = False

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while the block runs."""
        former = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulated run: exit code, folder, report (None if untrained), steps and real seconds."""

    code: int
    out: Path
    report: dict[str, Any] | None
    steps: int = 0
    steps_took_s: float = 0.0

    @property
    def steps_per_s(self) -> float:
        """Return how many inner steps were computed per real second, from the first to the last."""
        return (self.steps - 1) / self.steps_took_s if self.steps_took_s > 0 else 0.0


def run_sim(request: UpRequest, *, again: bool = False, face: RunConsole | None = None) -> SimulationResult:
    """Run the requested simulation; the exit code is 0, or 130 when it was interrupted.

    Raises:
        AtollError: a setting is wrong, the folder cannot be used, or the run could not train to its end; its work until
            then is reported first.
    """
    up, scenario = plan_run(request)
    if read_run_file(up.out) is not None:
        if not again:
            raise SettingsError(
                "this folder holds a run already", got=up.out, todo="choose another --out, or --again to move it aside"
            )
        move_aside(up.out)
    use_cores(len(up.learners))
    settings, interrupted = up.settings, InterruptHandler()
    with (
        interrupted.handle_signals(),
        RunFolder(up.out) as folder,
        logging_to(folder.path("logs", "sim.jsonl"), settings.log.level, role="sim", run=settings.run),
    ):
        return _simulate(up, scenario, folder, face or _stderr(), interrupted)


def _stderr() -> RunConsole:
    console = Console(stderr=True)
    return TerminalConsole(console, SystemClock()) if console.is_terminal else PlainConsole(console, SystemClock())


def _simulate(
    up: UpPlan, scenario: Scenario, folder: RunFolder, face: RunConsole, interrupted: InterruptHandler
) -> SimulationResult:
    clock = SystemClock()
    began_s = clock.monotonic()
    for warning in scenario.slow_links():
        face.say(warning)
    try:
        from atoll_simulator.simulation import simulate  # noqa: PLC0415  (loads JAX)

        settings = with_data(up, folder, face)
        with face.stage("compiling"):
            shared = compile_shared(settings, folder)
        report, outcome = simulate(
            up, scenario, shared, folder=folder, face=face, interrupted=lambda: interrupted.wanted
        )
    except KeyboardInterrupt:
        face.rest()
        face.say("ended at once; the event log and the journal are kept")
        return SimulationResult(INTERRUPTED, folder.out, None)
    if report is not None:
        face.say(summary(report, folder.out))
    elif interrupted.wanted:
        face.say("nothing was trained, so there is nothing to report")
    if outcome.ended == "failed" or (report is None and not interrupted.wanted):
        what = "nothing was trained" if report is None else "the simulated run did not finish"
        raise AtollError(
            what, got=outcome.why or outcome.ended, todo="journal.jsonl in the run's folder says what befell whom"
        )
    code = INTERRUPTED if interrupted.wanted else 0
    ran = SimulationResult(code, folder.out, report, outcome.steps, outcome.steps_took_s)
    took_s = clock.monotonic() - began_s
    face.say(f"  simulated in:  {took_s:,.1f} s, {ran.steps:,} steps at {ran.steps_per_s:,.1f} a second")
    return ran


def plan_run(request: UpRequest) -> tuple[UpPlan, Scenario]:
    """Return the checked plan, as `atoll up` would make it for a new folder, and the scenario.

    Raises:
        SettingsError: see `atoll.local.options.plan` and `scenario_of`.
    """
    unlocked = FlagText("--locked", "up.locked", value=False)
    up = plan(replace(request, run="sim", fresh=True, assignments=(*request.assignments, unlocked)))
    shards = up.settings.protocol.shards
    scenario = scenario_of(
        up.settings.sim, up.learners, (*shard_names(shards), *standby_names(shards, up.settings.up.standbys))
    )
    if not up.settings.protocol.tokens_target and not scenario.max_s:
        raise SettingsError(
            "this run would never end", got="no token target", todo="give --tokens, or set sim.max_s in seconds"
        )
    return replace(up, out=up.settings.up.out or Path("runs") / f"sim-{up.settings.seed}"), scenario


def with_data(up: UpPlan, folder: RunFolder, face: RunConsole) -> Settings:
    """Return the settings with the folder of the token shards, prepared first if the run owns them."""
    settings = up.settings
    if settings.data.source:
        todo = "use `atoll up`, or leave data.source away"
        raise SettingsError(
            "a simulated run reads token shards only", got=f"data.source = {settings.data.source}", todo=todo
        )
    if not up.prepare:
        return settings
    data = folder.path("data").absolute()
    if not (data / "meta.json").exists():
        with face.stage("preparing data"):
            vocabulary = Vocabulary(up.tokenizer) if up.tokenizer else 0
            corpus = list(settings.up.corpus)
            prepare(
                files_of(corpus) if corpus else stdlib_files(),
                data,
                vocabulary=vocabulary,
            )
    return settings.model_copy(update={"data": settings.data.model_copy(update={"dir": data})})


def compile_shared(settings: Settings, folder: RunFolder):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Return the parts that all learners share, compiled."""
    from atoll_learner.export import first_values  # noqa: PLC0415  (loads JAX)
    from atoll_learner.train import make_step  # noqa: PLC0415
    from atoll_simulator.learner import SharedParts, warm  # noqa: PLC0415

    enable_compile_cache(settings.learner.compile_cache or program_cache(folder.out))
    work = prepare_work(settings)
    params = first_values(work.model, settings.seed, settings.learner.initial_model)
    shared = SharedParts(settings, work, params, make_step(work.model, work.train))
    warm(shared)
    return shared
