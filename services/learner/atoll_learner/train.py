r"""The inner step: next-token loss, Muon or AdamW, a learning rate that comes from outside.

With logits z and targets y, the loss is the mean of -log softmax(z)_y in nats per token. The rate is a function of
the *run's* tokens, not of this learner's steps, so learners at different speeds and newcomers agree on it
(`atoll_learner.train_settings`).

The step does *not* donate its parameters: the island keeps those of the last completed step as its snapshot, and a
donated buffer would be gone. The optimizer's state is donated, it is nobody else's.

It is compiled once per machine, beside the joining. XLA's persistent cache makes a restart cheap, but learners that start
together on one machine would all find it empty and compile the same step: four on two cores took 56 s to their first step. So
they take turns (`atoll.base.user_cache`), and compile in a thread while they join (`CompiledAhead`); tracing needs no turn.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from atoll.base.logs import get
from atoll.base.user_cache import turn
from atoll_learner.data.shards import TokenShards
from atoll_learner.model import Params, make_forward
from atoll_learner.model_settings import EMBEDDINGS, ModelSettings
from atoll_learner.train_settings import TrainSettings

MUON_RMS: Final = 0.2
MUON_ITERATIONS: Final = ((3.4445, -4.7750, 2.0315),) * 5
"""Coefficients of each iteration towards the nearest orthogonal matrix. Optax makes a loop of a list, and 15 products for each
matrix of one triple: a larger program, which compiles longer and is no faster."""
PROGRAMS_MAX: Final = 8
"""Number of steps and losses of different settings that a process keeps traced."""
Step = Callable[[Params, Any, npt.NDArray[np.int32], float], tuple[Params, Any, jax.Array]]


def optimizer(train: TrainSettings) -> optax.GradientTransformation:
    """Return clip by global norm, then Muon or AdamW without its learning rate; matrices decay, gains do not.

    Muon moves the matrices that are no embeddings; its steps are scaled to a root mean square of `MUON_RMS`, about what
    AdamW's are, so one rate and one decay serve both (arXiv 2502.16982).
    """
    direction = optax.scale_by_adam(train.beta1, train.beta2)
    if train.optimizer == "muon":
        downhill = optax.contrib.muon(1.0, MUON_ITERATIONS, beta=train.muon_momentum, consistent_rms=MUON_RMS)
        direction = optax.partition(
            {"muon": optax.chain(downhill, optax.scale(-1.0)), "adam": direction}, _optimizer_of_each
        )
    return optax.chain(
        optax.clip_by_global_norm(train.clip),
        direction,
        optax.add_decayed_weights(train.weight_decay, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
    )


def _optimizer_of_each(params: Params) -> dict[str, str]:
    return {name: "muon" if leaf.ndim == 2 and name not in EMBEDDINGS else "adam" for name, leaf in params.items()}


def init_optimizer(train: TrainSettings, params: Params) -> Any:  # noqa: ANN401  (an optax state)
    """Return a fresh inner-optimizer state for `params`."""
    return jax.jit(optimizer(train).init)(params)


def step_arguments(train: TrainSettings, params: Params) -> tuple[Any, ...]:
    """Return arguments like those of a step, as far as compiling needs them."""
    rows = (train.batch,) if train.accumulation == 1 else (train.accumulation, train.batch)
    batch = jax.eval_shape(lambda: jnp.zeros((*rows, train.sequence + 1), np.int32))
    return params, jax.eval_shape(optimizer(train).init, params), batch, train.rate


@functools.lru_cache(maxsize=PROGRAMS_MAX)
def make_step(model: ModelSettings, train: TrainSettings) -> Step:
    """Return the jitted step `(params, state, batch, rate) -> (params, state, loss)`; equal settings share one.

    `batch` is int32 (B, T + 1), or (A, B, T + 1) with A micro-batches whose gradients are averaged; `loss` is float32.
    """
    loss_of = make_loss(model)
    transform = optimizer(train)

    def gradients(params: Params, batch: jax.Array) -> tuple[jax.Array, Params]:
        if batch.ndim == 2:
            return jax.value_and_grad(loss_of)(params, batch)
        zero = jax.tree.map(jnp.zeros_like, params)

        def add(carry: tuple[jax.Array, Params], micro: jax.Array) -> tuple[tuple[jax.Array, Params], None]:
            loss, gradient = jax.value_and_grad(loss_of)(params, micro)
            return (carry[0] + loss, jax.tree.map(jnp.add, carry[1], gradient)), None

        (loss, gradient), _ = jax.lax.scan(add, (jnp.zeros(()), zero), batch)
        return loss / batch.shape[0], jax.tree.map(lambda leaf: leaf / batch.shape[0], gradient)

    def step(params: Params, state: Any, batch: jax.Array, rate: jax.Array) -> tuple[Params, Any, jax.Array]:  # noqa: ANN401
        loss, gradient = gradients(params, batch)
        updates, state = transform.update(gradient, state, params)
        params = jax.tree.map(lambda leaf, update: leaf - rate * update, params, updates)
        return params, state, loss

    return jax.jit(step, donate_argnums=(1,))


def make_loss(model: ModelSettings) -> Callable[[Params, jax.Array], jax.Array]:
    """Return the mean nats per token of a batch int32 (B, T + 1)."""
    forward = make_forward(model)

    def loss_of(params: Params, batch: jax.Array) -> jax.Array:
        logits = forward(params, batch[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]))

    return loss_of


@functools.lru_cache(maxsize=PROGRAMS_MAX)
def _compiled_loss(model: ModelSettings) -> Callable[[Params, npt.NDArray[np.int32]], jax.Array]:
    return jax.jit(make_loss(model))


def make_evaluator(
    model: ModelSettings, train: TrainSettings, shards: TokenShards, tokens_max: int
) -> Callable[[Params], float]:
    """Return a function from parameters to bits per byte on the first `tokens_max` held-out tokens, at least a window's.

    Bits per byte is nats per token over ln 2, times tokens per byte of the held-out text: comparable over vocabularies.
    """
    shards.check_measurable(train.sequence)
    # Of a mixture each part gives its share, rounded down.
    held_out = shards.validation(max(tokens_max, train.sequence + 1 + len(shards.meta.parts)))
    rows = (len(held_out) - 1) // train.sequence
    batch = min(train.batch, rows)
    starts = np.arange(rows // batch * batch) * train.sequence
    windows = np.stack([held_out[s : s + train.sequence + 1] for s in starts]).astype(np.int32)
    batches = windows.reshape(-1, batch, train.sequence + 1)
    loss_of = _compiled_loss(model)
    per_byte = shards.meta.validation_tokens / shards.meta.validation_bytes

    def measure(params: Params) -> float:
        nats = float(np.mean([float(loss_of(params, batch)) for batch in batches]))
        return nats / math.log(2.0) * per_byte

    return measure


log = get(__name__)


class CompiledAhead:
    """A jitted function, compiled for arguments like some in a thread; a process that ends waits for its compiler."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], cache: Path | None) -> None:  # noqa: ANN401  (jax.stages.Wrapped)
        """Begin; `arguments` may be shapes (`jax.ShapeDtypeStruct`) in place of arrays."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._work = pool.submit(_compile, function, arguments, cache)
        pool.shutdown(wait=False)

    def result(self) -> Any:  # noqa: ANN401  (jax.stages.Compiled)
        """Return the compiled function, once it is ready. Raises what the compiler raised."""
        return self._work.result()


def _compile(function: Any, arguments: tuple[Any, ...], cache: Path | None) -> Any:  # noqa: ANN401
    began_s = time.monotonic()
    lowered = function.lower(*arguments)
    traced_s = time.monotonic() - began_s
    with turn(cache):
        compiled = lowered.compile()
    log.info("step.compiled", traced_s=round(traced_s, 2), took_s=round(time.monotonic() - began_s, 2))
    return compiled
