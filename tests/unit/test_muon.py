"""Muon as the inner optimizer: which tensors it moves and how far, and that its state survives whatever AdamW's does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from structlog.testing import capture_logs

from atoll.client.checkpoints import CheckpointNote, Checkpoints
from atoll.client.optimizer_state import host_copy, rebuild_state
from atoll.codec import pack_arrays, unpack_arrays
from atoll_learner.checkpoints import impossible
from atoll_learner.model import Params
from atoll_learner.model_settings import EMBEDDINGS
from atoll_learner.train import MUON_RMS, init_optimizer, optimizer
from atoll_learner.train_settings import TrainSettings, learning_rate

TRAIN = TrainSettings(rate=2e-3, warmup=0.0, batch=4, sequence=16, optimizer="muon", clip=1e9, weight_decay=0.0)
ADAMW = TRAIN.model_copy(update={"optimizer": "adamw"})
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
FINISH_S = 240.0
LIFE = CheckpointNote(
    run="r", nonce="n", model="m", layout="l", learner="a", incarnation=1, anchors=(), steps=0, tokens=0, run_tokens=0,
    saved_at_s=0.0,
)  # fmt: skip


def toy() -> Params:
    """Return a model's kinds of tensors: an embedding, a wide and a tall matrix, gains, an output matrix."""
    shapes = {EMBEDDINGS[0]: (9, 4), EMBEDDINGS[1]: (9, 4), "gains": (4,), "tall": (6, 4), "wide": (4, 6)}
    random = np.random.default_rng(0)
    return {name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in sorted(shapes.items())}


def gradients_of(params: Params, seed: int) -> Params:
    random = np.random.default_rng(seed)
    return {name: jnp.asarray(random.normal(size=leaf.shape), jnp.float32) for name, leaf in params.items()}


def updates_of(train: TrainSettings, state: Any, seeds: Sequence[int]) -> tuple[Params, Any]:  # noqa: ANN401
    params, update = toy(), jax.jit(optimizer(train).update)
    got: Params = {}
    for seed in seeds:
        got, state = update(gradients_of(params, seed), state, params)
    return got, state


def muon_reference(first: Any, second: Any) -> npt.NDArray[np.float64]:  # noqa: ANN401  (a gradient)
    """Return Muon's second update of a matrix in float64: Nesterov, bias correction, five iterations, scaled to its RMS."""
    beta = TRAIN.muon_momentum
    one, two = (np.asarray(gradient, np.float64) for gradient in (first, second))
    mu = beta * (1 - beta) * one + (1 - beta) * two
    x = beta * mu / (1 - beta**3) + (1 - beta) * two / (1 - beta**2)
    flip = x.shape[0] > x.shape[1]
    x = x.T if flip else x
    x = x / np.linalg.norm(x)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    scaled: npt.NDArray[np.float64] = MUON_RMS * np.sqrt(max(x.shape)) * (x.T if flip else x)
    return scaled


def test_muon_moves_the_matrices_and_adamw_the_rest() -> None:
    """Updates of two steps: of inner matrices as the algorithm says, of embeddings and gains as with AdamW alone."""
    params, seen = toy(), [gradients_of(toy(), seed) for seed in (1, 2)]
    got, _ = updates_of(TRAIN, init_optimizer(TRAIN, params), (1, 2))
    plain, _ = updates_of(ADAMW, init_optimizer(ADAMW, params), (1, 2))

    inner = [name for name, leaf in params.items() if leaf.ndim == 2 and name not in EMBEDDINGS]
    assert inner == ["tall", "wide"]
    for name in params:
        if name in inner:
            wanted = muon_reference(seen[0][name], seen[1][name])
            np.testing.assert_allclose(got[name], wanted, rtol=0, atol=2e-3 * np.abs(wanted).max())
        else:
            np.testing.assert_array_equal(got[name], plain[name])


def test_a_warm_start_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """From an own checkpoint and from a peer's bytes: the next step is the one that would have been."""
    fresh = init_optimizer(TRAIN, toy())
    _, state = updates_of(TRAIN, fresh, range(4))
    checkpoints = Checkpoints(tmp_path, LIFE)
    checkpoints.save(host_copy(state), LIFE)
    assert checkpoints.finish(FINISH_S)
    loaded = checkpoints.load(fresh)
    assert loaded is not None
    lent = rebuild_state(fresh, unpack_arrays(pack_arrays(host_copy(state)), 1 << 24))

    kept, *others = (updates_of(TRAIN, held, (9,)) for held in (state, loaded.state, lent))

    for other in others:
        for one, two in zip(jax.tree.leaves(kept), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def test_a_checkpoint_of_another_optimizer_is_refused_and_not_called_damaged(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, LIFE)
    checkpoints.save(host_copy(init_optimizer(ADAMW, toy())), LIFE)
    assert checkpoints.finish(FINISH_S)
    with capture_logs() as said:
        loaded = checkpoints.load(init_optimizer(TRAIN, toy()))

    assert loaded is None
    (line,) = (line for line in said if str(line["event"]).startswith("checkpoint."))
    assert line["event"] == "checkpoint.refused"
    assert "another optimizer or model" in line["reason"]
    assert "None" not in line["reason"]


def test_a_state_that_no_gradients_make_is_refused() -> None:
    """A negative count, other coefficients, a momentum longer than what gradients are clipped to, Adam's as ever."""
    train = TRAIN.model_copy(update={"clip": 1.0})
    fresh = init_optimizer(train, toy())
    _, state = updates_of(train, fresh, range(5))

    def changed(kind: Any, **fields: Any) -> Any:  # noqa: ANN401  (a class of states)
        def one(node: Any) -> Any:  # noqa: ANN401
            return node._replace(**fields) if isinstance(node, kind) and node.mu else node

        return jax.tree.map(one, state, is_leaf=lambda node: isinstance(node, kind))

    muon = optax.contrib.MuonState
    longer = jax.tree.map(lambda leaf: leaf + 1.0, _momentum(state))
    assert impossible(state, train) == ""
    assert impossible(fresh, train) == ""
    assert "count" in impossible(changed(muon, count=jnp.asarray(-1)), train)
    assert "coefficients" in impossible(changed(muon, ns_coeffs=jnp.asarray([9.0, 0.0, 0.0])), train)
    assert "momentum of length" in impossible(changed(muon, mu=longer), train)
    assert "count" in impossible(changed(optax.ScaleByAdamState, count=jnp.asarray(-3)), train)


def _momentum(state: Any) -> Any:  # noqa: ANN401
    kind = optax.contrib.MuonState
    found = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return next(node.mu for node in found if isinstance(node, kind))


def test_a_run_that_continues_another_does_not_warm_up_again() -> None:
    """After 300 tokens of another run, a target of 700 makes the schedule of one run of 1000, from token 300 on."""
    whole, rest = TrainSettings(rate=1.0, warmup=0.1), TrainSettings(rate=1.0, warmup=0.1, tokens_before=300)

    assert [learning_rate(rest, tokens, 700) for tokens in (0, 350, 700)] == [
        learning_rate(whole, tokens, 1000) for tokens in (300, 650, 1000)
    ]
    assert learning_rate(rest, 0, 0) == 1.0
