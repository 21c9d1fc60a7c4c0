"""Rules of leaves in whole runs: statistics stay means of what learners have, what is local or frozen never travels."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from structlog.testing import capture_logs

from atoll.base.errors import LayoutMismatch
from atoll.client.model_reader import read_model
from atoll.model.leaf_conventions import is_variance
from support.links import unique_run
from support.memory_world import STEP_S, MemoryWorld, settings

BASE = np.arange(8, dtype=np.float32)
MERGE = {"base": "frozen", "mine": "local"}
REACHED = {"a": (1.0, 2.0), "b": (3.0, 6.0)}
"""What each learner's statistics are after every step."""


def given(mine: float, base: np.ndarray = BASE) -> dict[str, Any]:
    return {
        "w": jnp.zeros((6, 3)),
        "batch_stats": {"var": jnp.array([2.0, 4.0])},
        "base": jnp.asarray(base),
        "mine": jnp.full(2, mine),
        "steps": jnp.int32(0),
    }


def test_every_leaf_goes_by_its_rule() -> None:
    """Four bits, momentum and carried progress turn trained leaves; a variance stays a mean of the learners' variances."""
    world = MemoryWorld(
        unique_run(), settings(codec_up="int4", codec_down="int4", adoption="carry", outer_momentum=0.6, quorum=1)
    )
    least, final = dict.fromkeys(REACHED, np.inf), dict[str, Any]()

    def train(learner: str) -> None:
        mine = 1.0 if learner == "a" else 2.0
        with world.join(learner, given(mine), merge=MERGE) as island:
            params = island.params
            while not island.done:
                least[learner] = min(least[learner], float(params["batch_stats"]["var"].min()))
                reached = {"var": jnp.array(REACHED[learner])}
                stepped = params["w"] + 0.05 * (1.0 - params["w"])
                params = params | {"w": stepped, "batch_stats": reached, "steps": params["steps"] + 1}
                time.sleep(STEP_S)
                params = island.step(params, tokens=10)
        final[learner] = params, island.merged(settle_s=30.0).params

    world.go(lambda: train("a"), lambda: train("b"))
    plain = read_model(world.bus, run=world.run, home=world.home)
    with pytest.raises(LayoutMismatch, match="the leaf 'base'"):
        read_model(world.bus, run=world.run, like=given(0.0, BASE + 1.0), home=world.home)
    ledger = world.ledger()
    world.home.stop()

    first, second = (float(value) for value in plain.params["batch_stats/var"])
    assert 1.0 < first < 3.0  # of both, though a round is often of one
    assert second == pytest.approx(2.0 * first, rel=1e-6)  # so is every mean of (1, 2) and (3, 6)
    assert min(least.values()) >= 1.0
    assert set(plain.params) == {"w", "batch_stats/var"}
    assert plain.run.protocol.value_fragments == 1
    for learner, mine in (("a", 1.0), ("b", 2.0)):
        own, merged = final[learner]
        assert np.array_equal(own["mine"], [mine, mine])
        assert np.array_equal(merged["base"], BASE)
        assert int(own["steps"]) > 0
        assert np.array_equal(merged["batch_stats"]["var"], plain.params["batch_stats/var"])
        assert (
            float(jnp.abs(merged["w"] - 1.0).max()) < 0.75
        )  # it began at 1, and how many rounds there are is up to the machine
    assert set(ledger.accounts) == {"a/1", "b/1"}


@functools.cache
def normalised(library: str, var: float) -> dict[str, Any]:
    """Return parameters with a batch normalisation as a library names it; a step takes them a thousand times."""
    stats = {"mean": -var * jnp.arange(1.0, 5.0), "var": var * jnp.arange(1.0, 5.0)}
    if library == "torch":
        return {
            "0.weight": jnp.ones((6, 4)),
            "1.weight": jnp.ones(4),
            "1.running_mean": stats["mean"],
            "1.running_var": stats["var"],
            "1.num_batches_tracked": jnp.int32(0),
        }
    if library == "haiku":
        sums = {name: {"average": stats[name], "hidden": stats[name], "counter": jnp.int32(0)} for name in stats}
        state = {f"bn/~/{name}_ema": leaves for name, leaves in sums.items()}
        return {"params": {"linear": {"w": jnp.ones((6, 4))}, "bn": {"scale": jnp.ones(4)}}, "state": state}
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    norm.mean[...], norm.var[...] = stats["mean"], stats["var"]
    return {"dense": jnp.ones((6, 4)), "norm": nnx.state(norm)}


@pytest.mark.parametrize("library", ["torch", "haiku", "nnx"])
@pytest.mark.parametrize("codec", ["int4", "bf16"])
def test_statistics_stay_means_whatever_library_names_them(library: str, codec: str) -> None:
    """Nobody gives a rule. Variances that shrink a thousandfold were carried below zero by outer momentum and rounding."""
    world = MemoryWorld(unique_run(), settings(codec_up=codec, codec_down=codec, outer_momentum=0.9, quorum=2))
    finals, least = {"a": 0.001, "b": 0.003}, [np.inf]

    def train(learner: str) -> None:
        variance = 10.0
        with world.join(learner, normalised(library, variance)) as island:
            params = island.params
            while not island.done:
                own = island.leaves
                least[0] = min(least[0], *(float(own[name].min()) for name in own if is_variance(name)))
                variance = max(finals[learner], variance / 2)
                params = jax.tree.map(lambda _, now: now, params, normalised(library, variance))
                time.sleep(STEP_S)
                params = island.step(params, tokens=10)

    with capture_logs() as logs:
        world.go(lambda: train("a"), lambda: train("b"))
    merged = read_model(world.bus, run=world.run, home=world.home).params
    world.home.stop()
    [variances] = [np.asarray(leaf) for name, leaf in merged.items() if is_variance(name)]

    assert least[0] >= 0.001
    assert 0.001 < variances[0] < 0.003  # a mean of both, weighted by what each has trained
    assert np.allclose(variances, variances[0] * np.arange(1, 5), rtol=1e-5)
    counts = {
        "torch": "2 merged, 2 mean, 1 local",
        "haiku": "2 merged, 2 mean, 4 local",
        "nnx": "3 merged, 2 mean, 0 local",
    }
    told = {(line["event"], line["leaves"]) for line in logs if line["event"].startswith("leaves.")}
    assert told == {("leaves.ruled", f"{counts[library]}, 0 frozen")}


def test_a_learner_that_has_left_counts_in_the_mean() -> None:
    world = MemoryWorld(unique_run(), settings(quorum=1, tokens_target=1_200))

    def train(learner: str, until: int) -> None:
        with world.join(learner, given(0.0), merge=MERGE) as island:
            params = island.params
            while island.run_tokens < until and not island.done:
                time.sleep(STEP_S)
                params = island.step(params | {"batch_stats": {"var": jnp.array(REACHED[learner])}}, tokens=10)

    def one_after_the_other() -> None:
        train("a", 600)
        train("b", 1_200)

    world.go(one_after_the_other)
    merged = world.merged().params["batch_stats/var"]
    world.home.stop()

    assert 1.0 < float(merged[0]) < 3.0
    assert float(merged[1]) == pytest.approx(2.0 * float(merged[0]), rel=1e-6)


def test_an_island_with_other_rules_or_another_base_does_not_join() -> None:
    world = MemoryWorld(unique_run(), settings(tokens_target=0))
    with world.join("a", given(1.0), merge=MERGE):
        for params, merge, said in (
            (given(1.0, BASE + 1.0), MERGE, "(?s)the leaf 'base' is not as run .*other values here"),
            (given(1.0), {"mine": "local"}, "in the run"),
            (given(1.0), MERGE | {"batch_stats/*": "local"}, "in the run"),
        ):
            with pytest.raises(LayoutMismatch, match=said):
                world.join("b", params, merge=merge)
    world.home.stop()
