"""What libraries call leaves that no optimizer trains: each library's own tree, and what becomes of every leaf in it."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from atoll.client.parameters import checked_parameters, rules_of
from atoll.model.layout import TensorSpec
from atoll.model.leaf_conventions import is_variance, looks_untrained
from atoll_learner.model import init_params
from atoll_learner.model_settings import ModelSettings

# Names, dtypes and rules as they were read from the library of this version; those that our lock has are built below.
TORCH_2_STATE_DICT = """
    0.weight                        float32  pseudo_gradient
    1.weight                        float32  pseudo_gradient
    1.bias                          float32  pseudo_gradient
    1.running_mean                  float32  mean
    1.running_var                   float32  mean
    1.num_batches_tracked           int64    local
    layer1.0.bn1.running_var        float16  mean
    layer1.0.bn1.num_batches_tracked float32 local
    n_averaged                      int64    local
    module.embed.weight             float32  direct
"""
HAIKU_0_0_17 = """
    params/batch_norm/offset                float32  pseudo_gradient
    params/batch_norm/scale                 float32  pseudo_gradient
    params/linear/w                         float32  pseudo_gradient
    params/lstm/hidden                      float32  pseudo_gradient
    state/batch_norm/~/mean_ema/average     float32  mean
    state/batch_norm/~/mean_ema/counter     int32    local
    state/batch_norm/~/mean_ema/hidden      float32  local
    state/batch_norm/~/var_ema/average      float32  mean
    state/batch_norm/~/var_ema/counter      int32    local
    state/batch_norm/~/var_ema/hidden       float32  local
    ema_params_tree/linear__w/average       float32  mean
    ema_params_tree/linear__w/counter       int32    local
    ema_params_tree/linear__w/hidden        float32  local
"""
KERAS_3_15 = """
    sequential/normalization/mean                       float32  mean
    sequential/normalization/variance                   float32  mean
    sequential/normalization/count                      int32    local
    sequential/dense/kernel                             float32  pseudo_gradient
    sequential/batch_normalization/gamma                float32  pseudo_gradient
    sequential/batch_normalization/moving_mean          float32  mean
    sequential/batch_normalization/moving_variance      float32  mean
    seed_generator/seed_generator_state                 uint32   local
"""
FLAX_UNDER_ANOTHER_NAME = """
    state/BatchNorm_0/mean          float32  mean
    state/BatchNorm_0/var           float32  mean
    encoder/bn1/mean                float32  mean
    encoder/bn1/var                 float32  mean
    policy/head/mean                float32  pseudo_gradient
    policy/head/log_std             float32  pseudo_gradient
    posterior/mean                  float32  pseudo_gradient
    posterior/var                   float32  pseudo_gradient
"""

WEIGHTS = """
    model.embed_tokens.weight model.layers.0.input_layernorm.weight lm_head.weight norm/scale
    norm/bias time_step/kernel timestep_embedder/mlp.0.weight schema/w
    country/kernel mean_pool/kernel attention/value cinema/w
    discount/kernel step_net/w wte/embedding ln_f/gamma
    state_proj/w hidden/kernel counterfactual/w
"""


@pytest.mark.parametrize("tree", [TORCH_2_STATE_DICT, HAIKU_0_0_17, KERAS_3_15, FLAX_UNDER_ANOTHER_NAME])
def test_a_library_s_names_have_their_rules(tree: str) -> None:
    """Paths are split at slashes and at dots; a row that needs neighbours fits nothing without them."""
    rows = [line.split() for line in tree.strip().splitlines()]
    rules = rules_of([TensorSpec(name, (4,), dtype) for name, dtype, _ in rows], {})

    assert rules.by_name == {name: rule for name, _, rule in rows}


def ruled(params: Any, *, doubtful: tuple[str, ...] = ()) -> dict[str, str]:  # noqa: ANN401  (any pytree)
    _, rules = checked_parameters(params, {})
    assert rules.doubtful == doubtful
    return {name: rule for name, rule in rules.by_name.items() if rule != "pseudo_gradient"}


class Net(nnx.Module):
    """A module with a variable of every kind that NNX knows."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.plain = nnx.BatchNorm(4, use_scale=False, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.cached = nnx.Cache(jnp.zeros(4))
        self.mean, self.var = nnx.Param(jnp.zeros(4)), nnx.Param(jnp.ones(4))  # trained, whatever they are called
        self.scale = nnx.Param(jnp.ones(4))


def test_nnx_says_by_type_what_a_variable_is() -> None:
    """Also of statistics whose names say nothing, and of trained leaves that are called like statistics."""
    expected = {
        "cached": "local",
        "drop/rngs/count": "local",
        "drop/rngs/key": "local",
        "norm/mean": "mean",
        "norm/var": "mean",
        "plain/mean": "mean",
        "plain/var": "mean",
    }
    state = nnx.state(Net())

    assert ruled(state) == {f"{name}/value": rule for name, rule in expected.items()}
    assert ruled({"model": state, "w": jnp.ones(2)}) == {f"model/{name}/value": rule for name, rule in expected.items()}


def test_nnx_as_plain_arrays_is_known_by_its_names() -> None:
    """Without types, `mean` and `var` beside a scale or a bias are statistics; others are asked about."""
    pure = nnx.to_pure_dict(nnx.state(nnx.Sequential(nnx.BatchNorm(4, use_bias=False, rngs=nnx.Rngs(0)))))

    assert ruled(pure) == {"layers/0/mean": "mean", "layers/0/var": "mean"}
    assert ruled({"w": jnp.ones(2), "mean": jnp.ones(2), "var": jnp.ones(2)}, doubtful=("mean", "var")) == {}


def test_an_optimizer_s_state_stays_with_its_island() -> None:
    params = {"w": jnp.ones(3)}
    state = optax.adam(0.1).init(params)
    inner = nnx.state(nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param))

    assert set(ruled({"params": params, "opt_state": state}).values()) == {"local"}
    assert checked_parameters({"inner": inner, "params": params}, {})[1].merged == ("params/w",)


class LinenNet(nn.Module):
    """A module of Linen with statistics."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y: jax.Array = nn.LayerNorm()(nn.BatchNorm(use_running_average=False)(nn.Dense(3)(x)))
        return y


def test_linen_has_a_collection_for_statistics() -> None:
    variables = LinenNet().init(jax.random.key(0), jnp.ones((2, 4)))

    assert ruled(variables) == {"batch_stats/BatchNorm_0/mean": "mean", "batch_stats/BatchNorm_0/var": "mean"}


def test_a_state_of_equinox_has_no_names_and_is_known_by_its_type() -> None:
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="ema")
    rules = ruled({"model": eqx.filter(norm, eqx.is_inexact_array), "state": state})

    assert rules == {"state/0": "local", "state/1/0": "mean", "state/1/1": "mean"}


@pytest.mark.parametrize(
    "name",
    [
        *("ema/dense/kernel", "state/net/avg", "bn.running_std", "moving_scale", "movingAverage/w", "stats/x"),
        *("head/var", "n.mean", "train/step", "tokens_count", "loss_sum", "1.variance"),
    ],
)
def test_what_is_called_like_a_statistic_is_asked_about(name: str) -> None:
    assert looks_untrained(name)
    assert rules_of([TensorSpec(name, (2,), "float32")], {}).doubtful == (name,)
    assert rules_of([TensorSpec(name, (2,), "float32")], {name: "pseudo_gradient"}).doubtful == ()


def test_nothing_is_asked_about_weights() -> None:
    others = WEIGHTS.split()

    assert rules_of([TensorSpec(name, (2, 2), "float32") for name in others], {}).doubtful == ()
    for tied in (True, False):
        ours = ModelSettings(vocab=300, layers=2, width=32, heads=4, kv_heads=2, ffn=48, context=64, tied=tied)
        assert set(ruled(init_params(ours, 0)).values()) <= {"direct"}


def test_variances_are_known_by_their_names() -> None:
    variances = ("1.running_var", "bn/moving_variance", "bn/var", "bn/var/value", "state/bn/~/var_ema/average")

    assert all(map(is_variance, variances))
    assert not any(
        map(
            is_variance,
            ("1.running_mean", "bn/mean", "state/bn/~/mean_ema/average", "bn/~/var_ema/counter", "logvar", ""),
        )
    )
