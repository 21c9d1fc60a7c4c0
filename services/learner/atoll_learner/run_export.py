"""Writes the merged model of a run as files: for `atoll export`, for an evaluator at its end, and for a simulated run.

Of the reference model, if its token shards are here, there are also a sample of its text, the files with which Transformers
loads it, and how it measures (`validation.json`). Of any other run there is `model.safetensors`, from the run's layout alone.
If the run keeps an average of its values, that is `model-average.safetensors`; each file's metadata name which it is.

How a model measures is found by the caller, because an evaluator has measured it already (`atoll_learner.evaluate`). Which
model a run has is said by its record (`ModelSettings.describe`): a reader's own settings do not count.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pydantic import ValidationError

from atoll.base.errors import SettingsError
from atoll.base.files import write_whole
from atoll.base.logs import configure, get
from atoll.base.parsing import parsed
from atoll.cli.reading import reading_bus
from atoll.keys.rights import KINDS
from atoll.run.folder import VALIDATION, unusable
from atoll.run.merged_model import MergedModel, read_merged, warn_if_partial, warn_if_unmerged
from atoll.run.record import founded_run
from atoll.settings import Settings
from atoll.wire.messages import RunRecord
from atoll_learner.model_settings import LATER, ModelSettings
from atoll_learner.process import LearnerWork, enable_compile_cache, limit_threads, prepare_work
from atoll_learner.train_settings import usual_sequence

if TYPE_CHECKING:
    from atoll_learner.model import Sampler


def model_of(run: RunRecord) -> ModelSettings | None:
    """Return the reference model that a run record describes; None where it is a model of somebody's own loop."""
    try:
        return ModelSettings(**(LATER | parsed(run.model.encode(), dict[str, Any])))
    except (msgspec.MsgspecError, ValidationError):
        return None


def work_of(run: RunRecord, work: LearnerWork) -> LearnerWork:
    """Return `work` with the model of the run, and a sequence for it: as long as its learners' by default, or as was said.

    Raises:
        SettingsError: the run is of somebody's own model, or the text here has tokens that the run's model has not.
        DataError: there is less held-out text than a sequence.
    """
    model = model_of(run)
    if model is None:
        raise SettingsError(
            f"the model of run {run.run!r} is not the reference model",
            got=run.model or "no description",
            allowed="a run of `atoll learner` or `atoll up`",
            todo="measure it with `--with`, and export it without data.dir",
        )
    if model == work.model:
        return work
    if model.vocab < work.shards.meta.vocab:
        raise SettingsError(
            f"the data has tokens that the model of run {run.run!r} has not",
            got=f"{work.shards.meta.vocab} tokens in {work.shards.folder}",
            allowed=f"at most {model.vocab}",
            todo="name the run's own text (data.dir)",
        )
    follows = work.train.sequence == usual_sequence(work.model)
    sequence = usual_sequence(model) if follows else min(work.train.sequence, model.context)
    work.shards.check_measurable(sequence)
    log.info("model.of_the_run", model=run.model, sequence=sequence)
    return replace(work, model=model, train=work.train.model_copy(update={"sequence": sequence}))


log = get(__name__)

SAMPLE: Final = "sample.txt"
SAMPLE_BYTES: Final = 400
SAMPLE_PROMPT: Final = b"def "
Measure = Callable[[dict[str, Any]], float]
"""From parameters to bits per byte."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Bits per byte of the values that a run began with, of its newest, and of their average where the run keeps one."""

    initial: float
    final: float
    average: float | None = None


def measure_model(measure: Measure, merged: MergedModel, first: dict[str, Any]) -> Measured:
    """Measure a merged model, and the values that its run began with."""
    average = None if merged.average is None else round(measure(merged.average), 5)
    return Measured(round(measure(first), 5), round(measure(merged.params), 5), average)


def export_run(settings: Settings, out: Path) -> None:
    """Write the merged model of a run as it stands now to `out`."""
    configure(settings.log.format, settings.log.level, role="export", run=settings.run)
    try:
        out.mkdir(parents=True, exist_ok=True)
        run, merged = asyncio.run(_read_now(settings))
        ours = bool(run.data) and model_of(run) is not None
        if not ours or not (settings.data.dir / "meta.json").exists():
            write_values(out, run, merged)
            reason = f"no token shards in {settings.data.dir}" if ours else "a run of somebody's own loop"
            log.info("model.exported", out=str(out), tensors=len(merged.params), measured=False, reason=reason)
            return
        work = work_of(run, prepare_work(settings))
        limit_threads(settings.learner.threads)

        from atoll_learner.export import first_values  # noqa: PLC0415  (JAX only after the thread limits are set)
        from atoll_learner.train import make_evaluator  # noqa: PLC0415

        enable_compile_cache(settings.learner.compile_cache)
        first = first_values(work.model, run.seed, settings.learner.initial_model)
        measure = make_evaluator(work.model, work.train, work.shards, work.held_out_tokens)
        write_out(work, out, run, merged, measure_model(measure, merged, first))
    except OSError as error:
        raise unusable(out, error) from error


async def _read_now(settings: Settings) -> tuple[RunRecord, MergedModel]:
    async with reading_bus(settings, "export", kinds=KINDS) as bus:
        run = await founded_run(bus, settings.run)
        return run, await read_merged(bus, run)


def write_values(out: Path, run: RunRecord, merged: MergedModel) -> None:
    """Write the merged values, and their average where the run keeps one, to `out`.

    How a former model there measured, and its text, are removed first: they are not this one's.
    """
    from atoll_learner.export import save_safetensors  # noqa: PLC0415

    for name in (VALIDATION, SAMPLE):
        (out / name).unlink(missing_ok=True)
    warn_if_unmerged(run, merged)
    warn_if_partial(run)
    metadata = {"run": run.run, "model": run.model, "versions": f"{merged.versions_min}..{merged.versions_max}"}
    save_safetensors(merged.params, out / "model.safetensors", metadata | {"values": "newest"})
    average = out / "model-average.safetensors"
    average.unlink(missing_ok=True)
    if merged.average is not None:
        horizon = f"average of horizon {run.protocol.average_versions} versions"
        save_safetensors(merged.average, average, metadata | {"values": horizon})


def sampler_of(work: LearnerWork) -> Sampler:
    """Return what draws the sample of an exported model."""
    from atoll_learner.model import Sampler  # noqa: PLC0415  (loads JAX)

    return Sampler(work.model, work.shards.tokenizer(), SAMPLE_PROMPT, SAMPLE_BYTES)


def write_out(work: LearnerWork, out: Path, run: RunRecord, merged: MergedModel, measured: Measured) -> None:
    """Write the merged model, a sample of its text and how it measures to `out`."""
    began_s = time.monotonic()
    write_model(work, out, run, merged, sampler_of(work))
    write_measured(work, out, merged, measured, began_s)


def write_model(work: LearnerWork, out: Path, run: RunRecord, merged: MergedModel, sampler: Sampler) -> None:
    """Write the merged model to `out`, with the files that Transformers wants beside it, and a sample of its text."""
    from atoll_learner.export import write_beside  # noqa: PLC0415

    write_values(out, run, merged)
    write_beside(out, work.model, work.shards)
    (out / SAMPLE).write_text(sampler.text(merged.params, run.seed), encoding="utf-8")


def write_measured(work: LearnerWork, out: Path, merged: MergedModel, measured: Measured, began_s: float) -> None:
    """Write how a model measures to `out`, the last file of an export that began at `began_s` of the monotonic clock."""
    meta = work.shards.meta
    result = {
        "initial_bits_per_byte": measured.initial,
        "final_bits_per_byte": measured.final,
        **({} if measured.average is None else {"average_bits_per_byte": measured.average}),
        "validation_bytes": round(
            min(work.held_out_tokens, meta.validation_tokens) * meta.validation_bytes / meta.validation_tokens
        ),
        "source_hash": meta.source,
        "versions_min": merged.versions_min,
        "versions_max": merged.versions_max,
        "token_fragments_merged": merged.token_fragments,
        "data_fingerprint": meta.fingerprint,
    }
    write_whole(out / VALIDATION, (json.dumps(result, indent=2) + "\n").encode())
    log.info("model.exported", took_s=round(time.monotonic() - began_s, 2), **result)
