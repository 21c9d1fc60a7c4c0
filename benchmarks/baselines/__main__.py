"""`python -m benchmarks.baselines`: train data-parallel or by synchronous DiLoCo, to compare runs with.

A baseline from flags to files: settings as `atoll up` reads them, then training, then `report.json` and the model.

The report says what `lockstep.report_of` says, and where it comes from: settings, machine, commit. Lock-step
has no clock of its own here, so `wall_s` is what the training took on this machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

import atoll
from atoll.base.errors import SettingsError
from atoll.base.files import write_whole
from atoll.base.logs import configure, get
from atoll.base.machine import commit, machine
from atoll.cli.main import run_verb
from atoll.cli.options import Assignments, Config, with_flags
from atoll.local import run_settings
from atoll.local.run_settings import flat
from atoll.run.folder import unusable
from atoll.settings import Settings, load
from atoll_learner.process import enable_compile_cache, limit_threads, prepare_work

if TYPE_CHECKING:
    from benchmarks.baselines.lockstep import Method

log = get(__name__)

SAY_SHARE = 10
REPORT = "report.json"
MODEL = "model.safetensors"
MODEL_AVERAGE = "model-average.safetensors"


@dataclass(frozen=True, slots=True)
class Request:
    """A request, unchecked."""

    method: str
    learners: int
    stop_tokens: int
    evaluations: int
    out: Path
    config: Path | None = None
    assignments: tuple[str, ...] = ()


def baseline_settings(config: Path | None, assignments: tuple[str, ...], learners: int) -> Settings:
    """Return the settings of a baseline: where nobody says anything, those that `atoll up` sets for so many learners.

    Raises:
        SettingsError: a setting is unknown, out of range or contradicts another.
    """
    return load(config, assignments, fallback=run_settings.default_fallback(learners)).settings


def run_baseline(request: Request) -> None:
    """Train and write `report.json` and `model.safetensors` to `request.out`, `model-average.safetensors` where one is kept.

    Raises:
        SettingsError: a setting is wrong, or the folder cannot be used; nothing was trained.
        StorageFull: there is no room for what was trained.
    """
    settings = baseline_settings(request.config, request.assignments, request.learners)
    _claim(request.out)
    configure(settings.log.format, settings.log.level, role="baseline", method=request.method)
    work = prepare_work(settings)
    limit_threads(settings.learner.threads)

    from atoll_learner.export import save_safetensors  # noqa: PLC0415
    from benchmarks.baselines.lockstep import report_of, train_baseline  # noqa: PLC0415

    enable_compile_cache(settings.learner.compile_cache)
    trained = train_baseline(
        settings,
        work,
        cast("Method", request.method),
        request.learners,
        stop_tokens=request.stop_tokens,
        evaluations=request.evaluations,
        say=_say,
    )
    report: dict[str, Any] = {
        "method": request.method,
        "group": request.learners,
        **report_of(trained, work),
        "seed": settings.seed,
        "wall_s": round(trained.wall_s, 3),
        "machine": machine(),
        "atoll": atoll.__version__,
        "commit": commit(),
        "data_source_hash": work.shards.meta.source,
        "settings": flat(settings),
    }
    try:
        if trained.finite:
            save_safetensors(trained.params, request.out / MODEL, {"method": request.method, "values": "newest"})
        if trained.averaged is not None:
            words = {"method": request.method, "values": f"average of {settings.protocol.average_versions} versions"}
            save_safetensors(trained.averaged, request.out / MODEL_AVERAGE, words)
        write_whole(request.out / REPORT, (json.dumps(report, indent=2) + "\n").encode())
    except OSError as error:
        raise unusable(request.out, error) from error
    final = trained.final
    log.info("baseline.done", steps=trained.steps, tokens=trained.tokens, bits_per_byte=final, wall_s=trained.wall_s)


def _claim(out: Path) -> None:
    """Make the folder of the result, before hours are spent on what could not be kept; nobody's result is replaced."""
    there = [name for name in (REPORT, MODEL, "run.json") if (out / name).exists()]
    if there:
        raise SettingsError(
            "this folder holds a result already", got=f"{out}: {', '.join(there)}", todo="choose another --out"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise unusable(out, error) from error


def _say(step: int, steps: int, loss: float) -> None:
    if step * SAY_SHARE // steps > (step - 1) * SAY_SHARE // steps:
        log.info("baseline.progress", step=step, of=steps, loss=round(loss, 4))


def baseline(  # noqa: PLR0913  (one option each)
    *,
    method: Annotated[str, typer.Option(help="data-parallel or diloco.")],
    out: Annotated[Path, typer.Option(help="Folder for report.json and model.safetensors.")],
    learners: Annotated[int, typer.Option(help="How many learners' batches make a step.")] = 1,
    tokens: Annotated[int | None, typer.Option(help="Train this many tokens in all.  [default: 2500000]")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of model and data order.")] = None,
    stop: Annotated[int, typer.Option(help="Stop after so many tokens, on the schedule of all; 0: at the end.")] = 0,
    evaluations: Annotated[int, typer.Option(min=1, max=1000, help="Points of the validation curve.")] = 16,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Train in this process, in lock-step, and write a report whose validation curve has the shape of a run's."""
    from benchmarks.baselines.__main__ import Request, run_baseline  # noqa: PLC0415  (a verb loads what it needs)

    flags = tuple(with_flags(assignments, seed=seed, protocol__tokens_target=tokens))
    run_baseline(Request(method, learners, stop, evaluations, out, config, flags))


if __name__ == "__main__":
    run_verb(baseline)
