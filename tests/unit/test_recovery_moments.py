"""What a learner adopts as its optimizer's state: moments that gradients can have made, from the best source there is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atoll.client.checkpoints import CheckpointNote, DataPlace, LoadedCheckpoint
from atoll.client.optimizer_state import Borrowed
from atoll.wire.events import RecoveredEvent
from atoll_learner.checkpoints import GOOD_HORIZONS, USABLE_HORIZONS, impossible, recover
from atoll_learner.data.prepare import prepare
from atoll_learner.data.shards import TokenShards
from atoll_learner.feed import BatchReader
from atoll_learner.model import Params, init_params
from atoll_learner.model_settings import model_settings
from atoll_learner.train import init_optimizer, make_step, optimizer
from atoll_learner.train_settings import TrainSettings

TRAIN = TrainSettings(rate=2e-3, warmup=0.0, batch=4, sequence=32, optimizer="adamw")
HORIZON_TOKENS = int(TRAIN.tokens_per_step / (1 - TRAIN.beta2))


def params() -> Params:
    return {"w": jnp.ones((3, 2)), "g": jnp.ones((4,))}


def trained(steps: int, scale: float = 1.0) -> Any:  # noqa: ANN401  (an optax state)
    state, random = init_optimizer(TRAIN, params()), np.random.default_rng(steps)
    for _ in range(steps):
        gradient = jax.tree.map(lambda leaf: jnp.asarray(scale * random.standard_normal(leaf.shape)), params())
        state = optimizer(TRAIN).update(gradient, state, params())[1]
    return state


def changed(state: Any, **fields: Any) -> Any:  # noqa: ANN401
    return tuple(part._replace(**fields) if hasattr(part, "nu") else part for part in state)


@pytest.mark.parametrize(("steps", "scale"), [(0, 1.0), (1, 1.0), (200, 1e-6), (200, 1e3)])
def test_whatever_gradients_made_is_possible(steps: int, scale: float) -> None:
    assert impossible(trained(steps, scale), TRAIN) == ""


def test_moments_that_no_gradients_make_are_refused() -> None:
    """Finite all of them: each would throw the parameters far away, or to NaN, in one step."""
    adam = next(part for part in trained(5) if hasattr(part, "nu"))
    negative = {**adam.nu, "w": adam.nu["w"].at[0, 0].set(-1e-6)}
    unmatched = {**adam.mu, "g": adam.mu["g"].at[1].set(1e6)}

    assert "negative second" in impossible(changed(trained(5), nu=negative), TRAIN)
    assert "rules out" in impossible(changed(trained(5), mu=unmatched), TRAIN)
    assert "count" in impossible(changed(trained(5), count=jnp.asarray(-3)), TRAIN)


class Fake:
    """An island and a folder of checkpoints, as far as `recover` uses them."""

    rebuilt_since = False

    def __init__(self, run_tokens: int, own: Any = None, own_tokens: int = 0, peer: Any = None) -> None:  # noqa: ANN401
        self.run_tokens = run_tokens
        self.asked = 0
        self.done = False
        self.incarnation = 2
        self.noted: list[str] = []
        self._own, self._own_tokens, self._peer = own, own_tokens, peer

    def load(self, like: Any) -> LoadedCheckpoint | None:  # noqa: ANN401
        del like
        note = CheckpointNote(
            run="r",
            nonce="n",
            model="m",
            layout="l",
            learner="a",
            incarnation=1,
            anchors=(1,),
            steps=9,
            tokens=9,
            run_tokens=self._own_tokens,
            saved_at_s=0.0,
            cursor=(DataPlace((0, 0, 4), 3, 8),),
        )
        return None if self._own is None else LoadedCheckpoint(self._own, note, 10, 0.1, self.rebuilt_since)

    def place(self) -> dict[tuple[int, int, int], tuple[int, int]]:
        return {}

    def recovered_state(self, like: Any) -> Borrowed | None:  # noqa: ANN401
        del like
        self.asked += 1
        return None if self._peer is None else Borrowed(self._peer, "b", 50, self.run_tokens, 10, 0.1)

    def note_recovery(self, recovered: RecoveredEvent) -> None:
        assert recovered.took_s is not None
        self.noted.append(recovered.source)


def source_of(fake: Any) -> str:  # noqa: ANN401
    start = recover(fake, fake, TRAIN, trained(0))
    assert [start.source] == fake.noted
    assert start.cursor == ({(0, 0, 4): (3, 8)} if fake.load(None) else {})
    return start.source


def test_a_young_checkpoint_comes_first_then_a_peer_then_an_older_one_then_nothing() -> None:
    """Age is counted in the run's tokens, in horizons of the second moment; an ancient state is worse than none."""
    young, older, ancient = 10, int(GOOD_HORIZONS * HORIZON_TOKENS) + 20, int(USABLE_HORIZONS * HORIZON_TOKENS) + 20
    own, peer = trained(9), trained(50)

    assert source_of(Fake(young, own, 0, peer)) == "checkpoint"
    assert source_of(Fake(older, own, 0, peer)) == "peer"
    assert source_of(Fake(older, own, 0, None)) == "checkpoint"
    assert source_of(Fake(ancient, own, 0, None)) == "fresh"
    assert source_of(Fake(young, None, 0, peer)) == "peer"
    assert source_of(Fake(young)) == "fresh"


def test_a_run_that_went_back_is_as_far_from_a_checkpoint_as_one_that_went_on() -> None:
    """Rebuilt from its archive it is behind its learners' checkpoints; in a run that only goes on, ahead is no age."""
    older, ancient = int(GOOD_HORIZONS * HORIZON_TOKENS) + 20, int(USABLE_HORIZONS * HORIZON_TOKENS) + 20
    rebuilt = [Fake(10, trained(9), 10 + ahead, peer) for ahead, peer in ((5, 1), (older, 1), (older, 0), (ancient, 0))]
    for fake in rebuilt:
        fake.rebuilt_since = True
        fake._peer = trained(50) if fake._peer else None

    assert [source_of(fake) for fake in rebuilt] == ["checkpoint", "peer", "checkpoint", "fresh"]
    assert source_of(Fake(10, trained(9), 10 + ancient, trained(50))) == "checkpoint"


def test_nobody_is_asked_in_a_run_that_has_not_trained() -> None:
    fake = Fake(0)

    assert source_of(fake) == "fresh"
    assert fake.asked == 0


def test_impossible_moments_are_passed_over_whoever_they_come_from() -> None:
    bad = changed(trained(5), count=jnp.asarray(-3))

    assert source_of(Fake(10, None, 0, bad)) == "fresh"
    assert recover(Fake(10, bad, 0, trained(9)), Fake(10, bad), TRAIN, trained(0)).source == "peer"  # type: ignore[arg-type]


def test_recovered_moments_beat_fresh_ones(tmp_path: Path) -> None:
    """Real text: after a restart, steps with the kept, a somewhat older or a peer's state lose less than with none."""
    texts = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    prepare(texts, tmp_path / "data", validation=0.05, block_tokens=512)
    shards = TokenShards(tmp_path / "data")
    model = model_settings(
        {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "context": 32}, vocab=shards.meta.vocab
    )
    train = replace_batch(8)
    step = make_step(model, train)
    reader, peers = (BatchReader(shards, 32, 8, seed) for seed in (0, 1))
    for each in (reader, peers):
        each.grant(0, 0, shards.blocks)

    def after(steps: int, params: Params, state: Any, source: BatchReader) -> tuple[Params, Any, list[float]]:  # noqa: ANN401
        losses = []
        for _ in range(steps):
            params, state, loss = step(params, state, source.next(), 2e-3)
            losses.append(float(loss))
        return params, state, losses

    def copy(tree: Any) -> Any:  # noqa: ANN401
        return jax.tree.map(jnp.copy, tree)

    begun = init_params(model, 0)
    middle, older, _ = after(300, begun, init_optimizer(train, begun), reader)
    now, kept, _ = after(100, middle, copy(older), reader)
    _, peer, _ = after(150, now, init_optimizer(train, now), peers)
    place = reader.progress()
    losses = {}
    for name, state in {"kept": kept, "older": older, "peer": peer, "fresh": init_optimizer(train, now)}.items():
        again = BatchReader(shards, 32, 8, 0)
        ((unit, (read, of)),) = place.items()
        again.grant(*unit, read=read, of=of)
        losses[name] = float(np.mean(after(24, copy(now), copy(state), again)[2]))

    assert max(losses["kept"], losses["older"], losses["peer"]) < losses["fresh"], losses


def replace_batch(batch: int) -> TrainSettings:
    return TRAIN.model_copy(update={"batch": batch})
