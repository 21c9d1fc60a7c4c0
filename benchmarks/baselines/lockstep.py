"""What Atoll is compared with, trained with real gradients on the same text: data-parallel, and synchronous DiLoCo.

Both train M learners in lock-step in one process, deterministic to the bit on one machine type, with the model, inner
optimizer, schedule and held-out text of `atoll_learner`. Each learner reads leases of its own, in order of need, as in a run.

- **data-parallel**: one set of parameters; the batches of all M learners make one batch, M times larger.
- **diloco**: M sets of parameters. After H steps (`protocol.interval_steps`) each pseudo-gradient from the last common values
  goes through codec, correction, fold and outer step as in a run, and all go on from the new values with their own optimizer
  states. Nothing overlaps and nobody is late: Atoll without what makes it asynchronous. The last interval may be shorter.

With `protocol.average_versions` an average is kept as a run keeps one; a version of data-parallel training is a step, one of
DiLoCo a meeting. The curve has the shape of `report.json` and `data.held_out_tokens` per point; all tokens count as merged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from atoll.base.errors import SettingsError
from atoll.codec import Encoded, format_of
from atoll.merge.correction import MomentumReference, correction_of
from atoll.merge.fold import Corrections, FragmentFold, slice_norms
from atoll.merge.global_update import averaged_in
from atoll.merge.outer import MOMENTUM, make_outer
from atoll.model.layout import plan_layout
from atoll.model.pytrees import describe, gather
from atoll.protocol.round import token_weight
from atoll.settings import Settings
from atoll_learner.export import first_values
from atoll_learner.feed import BatchReader
from atoll_learner.model import Params, embedding_rules
from atoll_learner.process import LearnerWork
from atoll_learner.train import init_optimizer, make_evaluator, make_step
from atoll_learner.train_settings import learning_rate

Batch = npt.NDArray[np.int32]
Method = Literal["data-parallel", "diloco"]
METHODS: tuple[Method, ...] = ("data-parallel", "diloco")
EVALUATIONS = 16
LEARNERS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Point:
    """The held-out loss when so many tokens had been trained."""

    tokens: int
    bits_per_byte: float


@dataclass(slots=True)
class BaselineResult:
    """The result of a baseline: parameters, curve, and whether its loss stayed finite until the end.

    `initial`, `final` and `average` are bits per byte on the export's share of the held-out text; the last two are None of one
    that diverged, `averaged` and `average` also where no average is kept.
    """

    params: Params
    tokens: int = 0
    steps: int = 0
    finite: bool = True
    initial: float = 0.0
    final: float | None = None
    averaged: Params | None = None
    average: float | None = None
    curve: list[Point] = field(default_factory=list)
    wall_s: float = 0.0


class Feeds:
    """The batches of M learners in lock-step, each reading leases of its own, granted in order of need."""

    def __init__(self, work: LearnerWork, learners: int, lease_blocks: int, seed: int) -> None:
        self._train, self._shards, self._lease_blocks = work.train, work.shards, lease_blocks
        rows = work.train.batch * work.train.accumulation
        self._readers = [BatchReader(work.shards, work.train.sequence, rows, seed) for _ in range(learners)]
        self._epoch = self._position = 0

    def next(self) -> list[Batch]:
        """Return one batch per learner, int32, shape (batch, sequence + 1), or (accumulation, batch, sequence + 1)."""
        return [self._shape(self._filled(reader).next()) for reader in self._readers]

    def _filled(self, reader: BatchReader) -> BatchReader:
        while reader.needs_more():
            stop = min(self._position + self._lease_blocks, self._shards.blocks)
            reader.grant(self._epoch, self._position, stop)
            self._position = stop
            if stop == self._shards.blocks:
                self._epoch, self._position = self._epoch + 1, 0
        reader.forget(frozenset())
        return reader

    def _shape(self, batch: Batch) -> Batch:
        if self._train.accumulation == 1:
            return batch
        return batch.reshape(self._train.accumulation, self._train.batch, -1)


class Average:
    """The exponential average of the parameters of all versions, by the rule of `atoll.merge.global_update`."""

    def __init__(self, horizon_versions: int) -> None:
        self._horizon_versions, self._weight = horizon_versions, 0.0
        self.params: Params | None = None

    def add(self, params: Params) -> None:
        self._weight, share = averaged_in(self._weight, self._horizon_versions)
        self.params = params if self.params is None else _towards(self.params, params, share)


@jax.jit
def _towards(average: Params, params: Params, share: float) -> Params:
    """Return `average` moved towards `params`, float32 as all parameters of the model, by a share of the way."""
    return {name: mean + share * (params[name] - mean) for name, mean in average.items()}


class DataParallel:
    """One set of parameters, stepped with the mean gradient of all learners' batches, computed batch after batch.

    That is the gradient of one batch M times larger, but for the order of additions; in memory it is as small as one learner's.
    """

    def __init__(self, work: LearnerWork, params: Params) -> None:
        self._step = make_step(work.model, work.train)
        self._state = init_optimizer(work.train, params)
        self.params = params

    def step(self, batches: Sequence[Batch], rate: float) -> float:
        together = batches[0] if len(batches) == 1 else np.concatenate([_micro(batch) for batch in batches])
        self.params, self._state, loss = self._step(self.params, self._state, together, rate)
        return float(loss)

    def meet(self) -> None:
        """Nothing: there is one set of parameters only."""


class Diloco:
    """M sets of parameters that move apart until they meet; `params` are the values of the last meeting."""

    def __init__(self, work: LearnerWork, params: Params, settings: Settings, learners: int) -> None:
        protocol = settings.protocol
        self._format = format_of(protocol.codec_up)
        self._step = make_step(work.model, work.train)
        self._protocol, self._correction = protocol, correction_of(protocol)
        self._layout = plan_layout(describe(params), protocol.fragments, tuple(embedding_rules(work.model)))
        self._outer = make_outer(protocol.outer, protocol.outer_lr, protocol.outer_momentum, protocol.outer)
        self._globals = [gather(self._layout, params, p) for p in range(protocol.fragments)]
        self._momenta = [self._outer.init(vector) for vector in self._globals]
        self._learners = [params] * learners
        self._states = [init_optimizer(work.train, params) for _ in range(learners)]
        self._tokens_per_step, self._steps = work.train.tokens_per_step, 0
        self.params = params

    def step(self, batches: Sequence[Batch], rate: float) -> float:
        losses = []
        for m, batch in enumerate(batches):
            self._learners[m], self._states[m], loss = self._step(self._learners[m], self._states[m], batch, rate)
            losses.append(loss)
        self._steps += 1
        return float(np.mean([float(loss) for loss in losses]))

    def meet(self) -> None:
        """Merge every fragment of every learner, take the outer step, and let all go on from the new values."""
        weight = token_weight(self._steps * self._tokens_per_step, self._steps)
        for p in range(self._protocol.fragments):
            slices, corrections = self._layout.slices(p), self._bends_of(p)
            fold = FragmentFold(slices, self._protocol.merge)
            for params in self._learners:
                sent = Encoded.of(self._globals[p] - gather(self._layout, params, p), self._format)
                norms = slice_norms(slices, sent)
                fold.add(sent, norms, weight, corrections=corrections(sent, norms))
            merged = fold.result().pseudo_gradient
            self._globals[p], self._momenta[p] = self._outer.update(self._globals[p], merged, self._momenta[p])
        self.params = self._assembled()
        self._learners = [self.params] * len(self._learners)
        self._steps = 0

    def _bends_of(self, p: int) -> Callable[[Encoded, Sequence[float]], Corrections | None]:
        """Return how pseudo-gradients of fragment `p` are corrected while they are folded, or None."""
        correction, slices = self._correction, self._layout.slices(p)
        if correction is None:
            return lambda _pseudo_gradient, _norms: None
        momentum_reference = MomentumReference.of(self._momenta[p][MOMENTUM], slices)
        return lambda pseudo_gradient, norms: correction.corrections(pseudo_gradient, norms, momentum_reference, slices)

    def _assembled(self) -> Params:
        tensors = {tensor.name: np.array(self.params[tensor.name]) for tensor in self._layout.tensors}
        for p, vector in enumerate(self._globals):
            for tensor_slice in self._layout.slices(p):
                whole = tensors[tensor_slice.tensor_name]
                rows = whole[tensor_slice.start : tensor_slice.stop] if whole.ndim else whole
                rows[...] = vector[tensor_slice.offset : tensor_slice.offset + tensor_slice.size].reshape(rows.shape)
        return {name: jnp.asarray(tensor) for name, tensor in tensors.items()}


def train_baseline(  # noqa: PLR0913  (one per question; all but three have defaults)
    settings: Settings,
    work: LearnerWork,
    method: Method,
    learners: int,
    *,
    stop_tokens: int = 0,
    evaluations: int = EVALUATIONS,
    say: Callable[[int, int, float], None] | None = None,
) -> BaselineResult:
    """Train with `method` to the token target of `settings` and return what came of it.

    `stop_tokens` ends earlier, on the schedule of the whole target: the common phase of a warm start. `say` is told
    (step, steps, loss) after every step. The number of steps is rounded down.

    Raises:
        SettingsError: there is no target, no such method, or that many learners make no sense.
    """
    target = settings.protocol.tokens_target
    group = _checked(method, learners, target, stop_tokens) * work.train.tokens_per_step
    params = first_values(work.model, settings.seed, settings.learner.initial_model)
    trainer = DataParallel(work, params) if method == "data-parallel" else Diloco(work, params, settings, learners)
    apart = 1 if method == "data-parallel" else settings.protocol.interval_steps
    steps = max(1, (min(stop_tokens, target) if stop_tokens else target) // group)
    feeds = Feeds(work, learners, settings.data.lease_blocks, settings.seed)
    measure = make_evaluator(work.model, work.train, work.shards, work.held_out_tokens)
    initial = measure(params)
    trained = BaselineResult(params, initial=initial, curve=[Point(0, initial)])
    average = Average(settings.protocol.average_versions) if settings.protocol.average_versions else None
    began_s = time.monotonic()
    for number in range(steps):
        loss = trainer.step(feeds.next(), learning_rate(work.train, number * group, target))
        if say is not None:
            say(number + 1, steps, loss)
        trained.steps, trained.tokens, trained.finite = number + 1, (number + 1) * group, math.isfinite(loss)
        if not trained.finite:
            break
        if trained.steps % apart == 0 or trained.steps == steps:
            trainer.meet()
            if average is not None:
                average.add(trainer.params)
            if trained.steps == steps or trained.steps * evaluations // steps > len(trained.curve) - 1:
                trained.curve.append(Point(trained.tokens, measure(trainer.params)))
    trained.wall_s = time.monotonic() - began_s
    trained.params = trainer.params
    if trained.finite:
        end = trained.curve[-1].bits_per_byte
        trained.finite = math.isfinite(end)
        trained.final = end if trained.finite else None
    if trained.finite and average is not None and average.params is not None:
        trained.averaged, trained.average = average.params, measure(average.params)
    return trained


def _micro(batch: Batch) -> Batch:
    """Return a learner's batch as micro-batches, shape (accumulation, batch, sequence + 1)."""
    return batch if batch.ndim == 3 else batch[None]


def report_of(trained: BaselineResult, work: LearnerWork) -> dict[str, Any]:
    """Return the parts of `report.json` that a baseline has, in the same shape: `validation` and the fates."""
    meta = work.shards.meta
    measured = min(work.held_out_tokens, meta.validation_tokens) * meta.validation_bytes / meta.validation_tokens
    curve = [
        {"run_tokens": p.tokens, "tokens_merged": p.tokens, "bits_per_byte": round(p.bits_per_byte, 5)}
        for p in trained.curve
        if math.isfinite(p.bits_per_byte)
    ]
    return {
        "ended": "finished" if trained.finite else "failed",
        "tokens_trained": trained.tokens,
        "tokens_by_fate": {"merged": trained.tokens, "merged_late": 0, "superseded": 0, "lost": 0},
        "validation": {
            "initial_bits_per_byte": trained.initial,
            "final_bits_per_byte": trained.final,
            **({} if trained.average is None else {"average_bits_per_byte": trained.average}),
            "validation_bytes": round(measured),
            "curve": curve,
        },
    }


def _checked(method: str, learners: int, target: int, stop_tokens: int) -> int:
    if method not in METHODS:
        raise SettingsError("unknown baseline", got=method, allowed=", ".join(METHODS), todo="set --method")
    if not 1 <= learners <= LEARNERS_MAX:
        raise SettingsError("that many learners make no sense", got=learners, allowed=f"1..{LEARNERS_MAX}")
    if target < 1:
        raise SettingsError(
            "a baseline needs an end", got=target, allowed="a token target above 0", todo="set --tokens"
        )
    if not 0 <= stop_tokens <= target:
        raise SettingsError("--stop is beyond the target", got=stop_tokens, allowed=f"0 (none) to {target}")
    return learners
