"""One learner as a process: join the run, train until it is done, leave in good order.

    settings ─► data, model, compile cache ─┬─► atoll.join ─► recover ─┬─► steps … ─► drain ─► goodbye
                                            └─► compile ───────────────┘

The inner schedule is driven by the *run's* tokens, so learners that come and go, or run at different speeds, agree on the
learning rate. The first SIGTERM or SIGINT lets the present step end, then returns the data, pushes the last pseudo-gradient,
says goodbye and keeps a checkpoint, all of it within `learner.drain_s` (`checkpoints`); the second stops at once.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from atoll.base import fact_dumps, large_arrays, spans
from atoll.base.health import rest
from atoll.base.logs import configure, get
from atoll.client.join import IslandHandle, join
from atoll.client.options import JoinOptions
from atoll.protocol.claims import with_declared_batch
from atoll.protocol.data import Progress
from atoll.settings import Settings
from atoll_learner.data.shards import TokenShards
from atoll_learner.data.token_source import SourceFeed, SourceRequest, fingerprint_with, start_of
from atoll_learner.export import check_tokenizer
from atoll_learner.feed import BatchReader, LeasedFeed
from atoll_learner.model_settings import ModelSettings, model_settings
from atoll_learner.train_settings import TrainSettings, layer_parameters, learning_rate, train_settings

if TYPE_CHECKING:
    from atoll_learner.train import CompiledAhead

log = get(__name__)

SAY_S = 10.0
LATE_STEPS = 32
WARM_STEPS = 32
UNREAD_MAX = 0.1
"""A learner whose windows leave more of each block unread says so."""


class Interrupt:
    """Remembers that a signal asked the process to stop; the second one ends it at once."""

    def __init__(self) -> None:
        self.wanted = False
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.wanted:
            os._exit(128 + number)
        self.wanted = True


@dataclass(frozen=True, slots=True)
class LearnerWork:
    """Work of a learner: model, schedule and data, all checked."""

    model: ModelSettings
    train: TrainSettings
    shards: TokenShards
    held_out_tokens: int


def prepare_work(settings: Settings) -> LearnerWork:
    """Return the checked model, training and data settings.

    Raises:
        SettingsError: a model or training setting is unknown or out of range, or they contradict the data.
        DataError: the token shards are missing or damaged, have too little held-out text, or are made with another tokenizer
            than that of the model to begin from.
    """
    shards = TokenShards(settings.data.dir)
    if settings.learner.initial_model is not None:
        check_tokenizer(settings.learner.initial_model, shards)
    model = model_settings(settings.model, vocab=shards.meta.vocab)
    train = train_settings(settings.train, model=model)
    shards.check_measurable(train.sequence)
    if not settings.data.source:
        shards.check_trainable(train.sequence)
    return LearnerWork(model, train, shards, settings.data.held_out_tokens)


def train(settings: Settings) -> None:
    """Train as the learner that `settings` names."""
    learner = settings.learner.id
    configure(settings.log.format, settings.log.level, role="learner", run=settings.run, learner=learner)
    began_s = time.monotonic()
    interrupt = Interrupt()
    fact_dumps.policy.folder = settings.log.dump_dir
    fact_dumps.dump_on_signal()
    work = prepare_work(settings)
    limit_threads(settings.learner.threads)
    large_arrays.policy.bytes_min, large_arrays.policy.folder = (
        settings.learner.spill_bytes,
        settings.learner.scratch_dir,
    )

    from atoll_learner.export import first_values  # noqa: PLC0415  (after the thread limits are set)
    from atoll_learner.train import CompiledAhead, make_step, step_arguments  # noqa: PLC0415

    cache = settings.learner.compile_cache
    enable_compile_cache(cache)
    params = first_values(work.model, settings.seed, settings.learner.initial_model)
    step = CompiledAhead(make_step(work.model, work.train), step_arguments(work.train, params), cache)
    with join(
        settings.broker.url,
        run=settings.run,
        learner=learner,
        params=params,
        protocol=with_declared_batch(settings.protocol, work.train.tokens_per_step),
        options=join_options(settings, work, began_s),
    ) as island:
        log.info(
            "learner.ready",
            took_s=round(time.monotonic() - began_s, 2),
            tokens=work.shards.meta.tokens,
            optimizer=work.train.optimizer,
            rate=work.train.rate,  # said, or what follows from the next number (`train_settings`)
            layer_parameters=layer_parameters(work.model),
        )
        trainer = Trainer(settings, work, island, interrupt, began_s)
        trainer.train(step)
    if settings.stay and not interrupt.wanted:
        rest(settings.health_file)


def join_options(settings: Settings, work: LearnerWork, began_s: float) -> JoinOptions:
    """Return the options by which a learner joins that began to start at `began_s`."""
    from atoll_learner.model import embedding_rules  # noqa: PLC0415  (loads JAX)

    source, fingerprint = settings.data.source, work.shards.meta.fingerprint
    return replace(
        JoinOptions.of(settings.broker, settings.learner),
        merge=embedding_rules(work.model),
        model=work.model.describe(),
        data=fingerprint_with(source, fingerprint) if source else fingerprint,
        data_blocks=0 if source else work.shards.blocks,
        seed=settings.seed,
        health_file=settings.health_file,
        start_s=time.monotonic() - began_s,
        log_adoptions=True,  # its log is a file of its own, and no person's prints are in it
    )


class Trainer:
    """The inner loop: batches, jitted steps, the schedule by run tokens, checkpoints, and the throttle."""

    def __init__(
        self, settings: Settings, work: LearnerWork, island: IslandHandle, interrupt: Interrupt, began_s: float
    ) -> None:
        from atoll_learner.checkpoints import Keeper, recover  # noqa: PLC0415
        from atoll_learner.profiling import StepProfiler  # noqa: PLC0415
        from atoll_learner.train import init_optimizer  # noqa: PLC0415

        self._settings = settings
        self._work = work
        self._island = island
        self._interrupt = interrupt
        self._began_s = began_s
        self._keeper = Keeper(settings, island, work.train.tokens_per_step)
        learner = settings.learner
        self._profiler = StepProfiler(learner.profile, learner.profile_steps, f"{learner.id}-{island.incarnation}")
        self._late_s: deque[float] = deque(maxlen=LATE_STEPS)
        self._first_losses: list[float] = []
        self._sound = True
        start = recover(island, self._keeper.checkpoints, work.train, init_optimizer(work.train, island.params))
        self._state: Any = start.state
        self._feed = feed_of(settings, work, island, start.cursor)

    def train(self, compiling: CompiledAhead) -> None:
        """Step until the run is done or the process is told to stop; then leave in good order."""
        from atoll_learner.checkpoints import leave  # noqa: PLC0415

        island, train = self._island, self._work.train
        params: Any = island.params
        step = compiling.result()
        said_s, steps = 0.0, 0
        while not self._over():
            began_s = time.monotonic()
            with self._profiler.step(steps):
                with spans.span("batch"):
                    batch = self._feed.next(self._over)
                if batch is None:
                    break
                rate = learning_rate(train, island.run_tokens, island.run.protocol.tokens_target)
                with spans.span("compute"):
                    params, self._state, loss = step(params, self._state, self._shape(batch), rate)
                    value = float(loss)
                if steps > 0:
                    self._throttle(time.monotonic() - began_s)
                with spans.span("island step"):
                    params = island.step(params, tokens=train.tokens_per_step, loss=value)
                island.share(self._state)
                self._sound = math.isfinite(value)
                if self._sound:
                    self._keeper.keep(self._state, self._feed.cursor)
            steps += 1
            self._say_first(steps, value)
            if time.monotonic() - said_s >= SAY_S:
                said_s = time.monotonic()
                self._say(steps, value, rate, time.monotonic() - began_s)
        self._profiler.end()
        leave(island, self._feed, self._keeper, self._state if self._sound else None, self._settings.learner.drain_s)

    def _over(self) -> bool:
        return self._island.done or self._interrupt.wanted or self._island.session.driver.failure is not None

    def _shape(self, batch: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the batch as the step wants it: (accumulation, batch, sequence + 1) when gradients accumulate."""
        if self._work.train.accumulation == 1:
            return batch
        return batch.reshape(self._work.train.accumulation, self._work.train.batch, -1)

    def _throttle(self, step_s: float) -> None:
        """Stretch a step after the first to `throttle` times the quickest of late, to stand in for slower hardware.

        The quickest, not this one: learners that share a machine slow each other down, and sleeping in proportion to that
        would make it worse.
        """
        factor = self._settings.learner.throttle
        if factor > 1.0:
            self._late_s.append(step_s)
            time.sleep(max(0.0, factor * min(self._late_s) - step_s))

    def _say_first(self, steps: int, loss: float) -> None:
        if steps <= WARM_STEPS:
            self._first_losses.append(loss)
        if steps == 1:
            log.info("learner.first_step", took_s=round(time.monotonic() - self._began_s, 2), loss=round(loss, 4))
        if steps == WARM_STEPS:
            log.info("learner.warm", steps=steps, loss=round(sum(self._first_losses) / steps, 4))

    def _say(self, steps: int, loss: float, rate: float, step_s: float) -> None:
        log.info(
            "learner.progress",
            step=steps,
            loss=round(loss, 4),
            learning_rate=round(rate, 6),
            step_s=round(step_s, 4),
            run_tokens=self._island.run_tokens,
            overhead=round(self._island.overhead, 5),
        )


def feed_of(settings: Settings, work: LearnerWork, island: IslandHandle, cursor: Progress) -> LeasedFeed | SourceFeed:
    """Return the batches of a learner: leased blocks of the token shards, or windows of a source of a person's own."""
    rows, seed = work.train.batch * work.train.accumulation, island.run.seed
    if settings.data.source:
        request = SourceRequest(
            settings.learner.id, seed, work.train.sequence, work.shards.meta.vocab, start_of(cursor)
        )
        return SourceFeed(settings.data.source, request, rows)
    reader = BatchReader(work.shards, work.train.sequence, rows, seed)
    if reader.unread > UNREAD_MAX:
        todo = (
            f"prepare blocks of a multiple of {work.train.sequence} tokens (--block-tokens), or shorten train.sequence"
        )
        log.warning("data.unread", share=round(reader.unread, 3), block_tokens=work.shards.block_tokens, todo=todo)
    return LeasedFeed(island, reader, settings.data.lease_blocks, cursor)


def enable_compile_cache(folder: Path | None) -> None:
    """Keep compiled programs of JAX in `folder` for later processes; None keeps none. Call it after `limit_threads`."""
    if folder is None:
        return
    import jax  # noqa: PLC0415  (only after the thread limits are set)

    folder.mkdir(parents=True, exist_ok=True)
    update: Callable[[str, object], None] = jax.config.update
    update("jax_compilation_cache_dir", str(folder))
    update("jax_persistent_cache_min_compile_time_secs", 0.0)
    update("jax_persistent_cache_min_entry_size_bytes", 0)


def limit_threads(threads: int) -> None:
    """Bound the compute threads of JAX on the CPU to `threads`, 0 for all; only before JAX is first used."""
    if threads <= 0:
        return
    flags = f"--xla_cpu_multi_thread_eigen={'false' if threads == 1 else 'true'} intra_op_parallelism_threads={threads}"
    os.environ.setdefault("PJRT_NPROC", str(threads))  # the pool in which XLA runs the parts of a program heeds no flag
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
