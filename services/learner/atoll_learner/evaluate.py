"""Measures the merged model on held-out text while the run goes on, and exports it at the end.

The evaluator is a reader: it takes the newest frame of every fragment, puts the parameters together and computes bits per
byte on the same held-out bytes each time. It holds no lease and answers no call, so no process waits for it
(`atoll.run.merged_model`). If the run keeps an average of its values, the evaluator measures and exports that too, as
`model-average.safetensors`; each file's metadata name which it is.

How far the run is comes from the shards' leases, so the count goes on when the evaluator is started again. A model of
somebody's own loop is measured by a function of theirs (`own_evaluation`), as `evaluated` events.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.base.clock import SystemClock
from atoll.base.errors import AtollError, BrokerUnavailable, BusError, PeerMisbehaved
from atoll.base.extras import installed
from atoll.base.health import live
from atoll.base.logs import configure, get
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.cli.reading import opened
from atoll.keys.rights import KINDS
from atoll.run.folder import unusable
from atoll.run.heads import read_heads
from atoll.run.merged_model import MergedModel, read_merged, warn_if_partial, warn_if_unmerged
from atoll.run.record import founded_run, read_run, recorded_progress
from atoll.settings import Settings, bus_options
from atoll.wire.event_log import EVALUATOR
from atoll.wire.messages import RunRecord, encode, event
from atoll.wire.subjects import Subjects
from atoll_learner.process import LearnerWork, limit_threads, prepare_work

log = get(__name__)

FOLLOW_TOKENS_MAX = 16_384
EXPORT_TOKENS_MAX = 131_072
SAMPLE_BYTES = 400
SAMPLE_PROMPT = b"def "
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is measured: the kind of its event, and a function from the run, its model and its tokens to the event's fields."""

    kind: str
    fields: Callable[[RunRecord, MergedModel, int], dict[str, Any]]


def follow(settings: Settings, every_s: float, own: str = "", like: str = "") -> None:
    """Evaluate every `every_s` seconds and append each result to the event log, until told to stop.

    `own` names a function (`module:function`) that measures in place of the reference model's bits per byte.

    Raises:
        SettingsError: the settings, or what `own` and `like` name, are wrong.
        AtollError: the first evaluation by `own` failed. Later ones that fail are logged and passed over.
    """
    configure(settings.log.format, settings.log.level, role=EVALUATOR, run=settings.run)
    work = None if own else prepare_work(settings)
    limit_threads(settings.learner.threads or 1)

    if installed("jax"):  # a function of somebody's own may do without
        from atoll_learner.compiling import enable_compile_cache  # noqa: PLC0415  (only after the thread limits are set)

        enable_compile_cache(settings.learner.compile_cache)
    os.nice(5)
    asyncio.run(_follow(settings, _of_own(own, like) if work is None else _of_reference(work), every_s))


def _of_reference(work: LearnerWork) -> Evaluation:
    from atoll_learner.train import make_evaluator  # noqa: PLC0415

    measure = make_evaluator(work.model, work.train, work.shards, FOLLOW_TOKENS_MAX)
    return Evaluation("validation", lambda _run, merged, tokens: measured(merged, measure, tokens))


def _of_own(own: str, like: str) -> Evaluation:
    from atoll_learner.own_evaluation import OwnEvaluation  # noqa: PLC0415

    evaluation = OwnEvaluation(own, like)
    return Evaluation(
        "evaluated",
        lambda run, merged, tokens: {
            "run_tokens": tokens,
            **evaluation.values(run, merged),
            "versions_min": merged.versions_min,
            "versions_max": merged.versions_max,
        },
    )


async def _follow(settings: Settings, evaluation: Evaluation, every_s: float) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    bus = await open_bus(settings.broker.url, settings.run, name=EVALUATOR, options=bus_options(settings))
    try:
        life = asyncio.create_task(live(settings.health_file, bus.reach))
        sound = False
        while not stop.is_set():
            run = await read_run(bus, Subjects(settings.run))
            if run is None or await _incomplete(bus, run):
                await _pause(stop, POLL_S)
                continue
            try:
                sound = await evaluate_once(bus, run, evaluation) or sound
            except AtollError as error:
                if not sound:
                    raise
                log.warning("evaluation.failed", reason=str(error))
            await _pause(stop, every_s)
        life.cancel()
    finally:
        await bus.close()


async def _incomplete(bus: Bus, run: RunRecord) -> bool:
    return len(await read_heads(bus, run)) < len(run.layout.fragments)


async def evaluate_once(bus: Bus, run: RunRecord, evaluation: Evaluation) -> bool:
    """Measure the present model and write the result to the event log; return whether the run could be read.

    Raises:
        AtollError: the evaluation itself failed.
    """
    began_s = time.monotonic()
    try:
        tokens = (await recorded_progress(bus, run)).tokens
        merged = await read_merged(bus, run)
    except (BusError, BrokerUnavailable, PeerMisbehaved) as error:
        log.warning("evaluation.skipped", reason=str(error))
        return False
    fields = await asyncio.to_thread(evaluation.fields, run, merged, tokens)
    fields["took_s"] = round(time.monotonic() - began_s, 3)
    clock = SystemClock()
    line = encode(event(evaluation.kind, EVALUATOR, clock.wall(), **fields))
    msg_id = f"{evaluation.kind}-{os.getpid()}-{clock.monotonic():.6f}"
    shown = fields["values"] if "values" in fields else {"bpb": fields["bits_per_byte"]}
    try:
        await bus.publish(run.subjects.event(evaluation.kind, EVALUATOR), line, msg_id=msg_id, info=shown)
    except (BusError, BrokerUnavailable) as error:
        log.warning("evaluation.skipped", reason=str(error))
        return False
    log.info("model.evaluated", **fields)
    return True


def measured(
    merged: MergedModel, measure: Callable[[dict[str, Any]], float], run_tokens: int
) -> dict[str, int | float]:
    """Return the fields of a `validation` event."""
    average = {} if merged.average is None else {"average": round(measure(merged.average), 5)}
    return {
        "run_tokens": run_tokens,
        "bits_per_byte": round(measure(merged.params), 5),
        **average,
        "versions_min": merged.versions_min,
        "versions_max": merged.versions_max,
    }


async def _pause(stop: asyncio.Event, for_s: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), for_s)
    except TimeoutError:
        return


def export_run(settings: Settings, out: Path) -> None:
    """Write the merged model of a run as it stands now to `out`.

    A run of the reference model whose token shards are here is measured, too: `sample.txt`, `validation.json`, and the files
    with which Transformers loads it. Of any other run there is `model.safetensors`, from the run's layout alone.
    """
    configure(settings.log.format, settings.log.level, role="export", run=settings.run)
    try:
        out.mkdir(parents=True, exist_ok=True)
        run, merged = asyncio.run(_read_now(settings))
        if not run.data or not (settings.data.dir / "meta.json").exists():
            write_values(out, run, merged)
            reason = f"no token shards in {settings.data.dir}" if run.data else "a run of somebody's own loop"
            log.info("model.exported", out=str(out), tensors=len(merged.params), measured=False, reason=reason)
            return
        work = prepare_work(settings)
        limit_threads(settings.learner.threads)

        from atoll_learner.beginning import first_values  # noqa: PLC0415  (JAX only after the thread limits are set)
        from atoll_learner.compiling import enable_compile_cache  # noqa: PLC0415

        enable_compile_cache(settings.learner.compile_cache)
        write_out(work, out, run, merged, first_values(work.model, run.seed, settings.learner.initial_model))
    except OSError as error:
        raise unusable(out, error) from error


async def _read_now(settings: Settings) -> tuple[RunRecord, MergedModel]:
    async with opened(settings, "export", kinds=KINDS) as bus:
        run = await founded_run(bus, settings.run)
        return run, await read_merged(bus, run)


def write_values(out: Path, run: RunRecord, merged: MergedModel) -> None:
    """Write the merged values, and their average where the run keeps one, to `out`."""
    from atoll_learner.export import save_safetensors  # noqa: PLC0415

    warn_if_unmerged(run, merged)
    warn_if_partial(run)
    metadata = {"run": run.run, "model": run.model, "versions": f"{merged.versions_min}..{merged.versions_max}"}
    save_safetensors(merged.params, out / "model.safetensors", metadata | {"values": "newest"})
    average = out / "model-average.safetensors"
    average.unlink(missing_ok=True)
    if merged.average is not None:
        horizon = f"average of horizon {run.protocol.average_versions} versions"
        save_safetensors(merged.average, average, metadata | {"values": horizon})


def write_out(work: LearnerWork, out: Path, run: RunRecord, merged: MergedModel, first: dict[str, Any]) -> None:
    """Write the merged model, a sample of its text and how it measures to `out`; `first` are the values that it began with."""
    from atoll_learner.hugging_face import write_beside  # noqa: PLC0415
    from atoll_learner.sample import generate  # noqa: PLC0415
    from atoll_learner.train import make_evaluator  # noqa: PLC0415

    began_s = time.monotonic()
    write_values(out, run, merged)
    write_beside(out, work.model, work.shards)
    measure = make_evaluator(work.model, work.train, work.shards, EXPORT_TOKENS_MAX)
    meta = work.shards.meta
    result = {
        "initial_bits_per_byte": measure(first),
        "final_bits_per_byte": measure(merged.params),
        **({} if merged.average is None else {"average_bits_per_byte": measure(merged.average)}),
        "validation_bytes": round(
            min(EXPORT_TOKENS_MAX, meta.validation_tokens) * meta.validation_bytes / meta.validation_tokens
        ),
        "source_hash": meta.source,
        "versions_min": merged.versions_min,
        "versions_max": merged.versions_max,
        "data_fingerprint": meta.fingerprint,
    }
    (out / "validation.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    text = generate(merged.params, work.model, work.shards.tokenizer(), SAMPLE_PROMPT, SAMPLE_BYTES, seed=run.seed)
    (out / "sample.txt").write_text(text, encoding="utf-8")
    log.info("model.exported", took_s=round(time.monotonic() - began_s, 2), **result)
