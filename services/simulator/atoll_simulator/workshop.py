"""What a simulated run needs before its first virtual second: a checked plan, a folder, data, devices, a compiled step.

Nothing here may load JAX before `use_cores` has said how: every learner's step is one thread, and the steps of several
learners are computed side by side on as many devices as the machine has cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from atoll.cli import INTERRUPTED
from atoll.clock import SystemClock
from atoll.errors import SettingsError
from atoll.logs import logging_to
from atoll.settings import Settings
from atoll.up.folder import RunFolder, move_aside, read_run_file
from atoll.up.live import Face, PlainFace, TerminalFace
from atoll.up.options import UpPlan, UpRequest, plan, shard_names, standby_names
from atoll.up.report.write import summary
from atoll_learner.data.prepare import prepare
from atoll_learner.data.sources import files_of, stdlib_files
from atoll_learner.process import limit_threads, prepare_work
from atoll_simulator.scenario import Scenario, scenario_of


def run_sim(request: UpRequest, *, again: bool = False) -> int:
    """Carry out what was asked for and return the exit code: 0, or 130 when it was interrupted.

    Raises:
        AtollError: a setting is wrong, or the folder cannot be used.
    """
    up, scenario = planned_run(request)
    if read_run_file(up.out) is not None:
        if not again:
            raise SettingsError(
                "this folder holds a run already", got=up.out, todo="choose another --out, or --again to move it aside"
            )
        move_aside(up.out)
    use_cores(len(up.learners))
    clock = SystemClock()
    console = Console(stderr=True)
    face: Face = TerminalFace(console, clock) if console.is_terminal else PlainFace(console, clock)
    settings = up.settings
    with (
        RunFolder(up.out) as folder,
        logging_to(folder.path("logs", "sim.jsonl"), settings.log.level, role="sim", run=settings.run),
    ):
        return _simulate(up, scenario, folder, face)


def _simulate(up: UpPlan, scenario: Scenario, folder: RunFolder, face: Face) -> int:
    from atoll_simulator.simulation import Interrupted, simulate  # noqa: PLC0415  (loads JAX)

    clock, interrupted = SystemClock(), Interrupted()
    with interrupted.heard():
        settings = with_data(up, folder, face)
        with face.stage("compiling"):
            trade = trade_of(settings, folder)
        began_s = clock.monotonic()
        try:
            report, outcome = simulate(up, scenario, trade, folder=folder, face=face, interrupted=interrupted)
        except KeyboardInterrupt:
            face.rest()
            face.say("ended at once; the tape and the journal are kept")
            return INTERRUPTED
    took_s = clock.monotonic() - began_s
    face.say(summary(report, folder.out))
    face.say(f"  simulated in:  {took_s:,.1f} s, {outcome.steps:,} steps, {outcome.steps / took_s:,.1f} steps/s")
    return INTERRUPTED if interrupted.wanted else 0


def planned_run(request: UpRequest) -> tuple[UpPlan, Scenario]:
    """Return the checked plan, as `atoll up` would make it for a new folder, and the scenario.

    Raises:
        SettingsError: see `atoll.up.options.plan` and `scenario_of`.
    """
    up = plan(replace(request, run="sim", fresh=True))
    shards = up.settings.protocol.shards
    scenario = scenario_of(up.settings.sim, up.learners, (*shard_names(shards), *standby_names(shards, up.standbys)))
    if not up.settings.protocol.tokens_target and not scenario.max_s:
        raise SettingsError(
            "this run would never end", got="no token target", todo="give --tokens, or set sim.max_s in seconds"
        )
    return replace(up, out=request.out or Path("runs") / f"sim-{up.settings.seed}"), scenario


def use_cores(learners: int) -> None:
    """Have JAX make as many CPU devices as can work side by side; only before JAX is first used."""
    limit_threads(1)
    devices = max(1, min(os.cpu_count() or 1, learners))
    flags = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def with_data(up: UpPlan, folder: RunFolder, face: Face) -> Settings:
    """Return the settings with the folder of the token shards, which are prepared if they are ours to prepare."""
    settings = up.settings
    if not up.prepare:
        return settings
    data = folder.path("data").absolute()
    if not (data / "meta.json").exists():
        with face.stage("preparing data"):
            prepare(files_of(list(up.corpus)) if up.corpus else stdlib_files(), data)
    return settings.model_copy(update={"data": settings.data.model_copy(update={"dir": data})})


def trade_of(settings: Settings, folder: RunFolder):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Return what all learners share."""
    from atoll_learner.compiling import enable_compile_cache  # noqa: PLC0415  (loads JAX)
    from atoll_learner.export import load_safetensors  # noqa: PLC0415
    from atoll_learner.model import init_params  # noqa: PLC0415
    from atoll_learner.train import make_step  # noqa: PLC0415
    from atoll_simulator.learner import Trade  # noqa: PLC0415

    enable_compile_cache(settings.learner.compile_cache or folder.path("cache", "jax"))
    work = prepare_work(settings)
    params = init_params(work.model, settings.seed)
    if settings.learner.initial_model is not None:
        params = load_safetensors(settings.learner.initial_model, params)
    return Trade(settings, work, params, make_step(work.model, work.train))


@contextmanager
def silent() -> Iterator[Face]:
    """Yield a face that says nothing."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        yield PlainFace(Console(file=nowhere), SystemClock())
