"""The decoder and its training step, against few-line references."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from atoll.base.errors import CheckpointError
from atoll_learner.data.tokenizer import ByteTokenizer
from atoll_learner.export import load_safetensors, save_safetensors
from atoll_learner.model import (
    Attending,
    Params,
    Sampler,
    embedding_rules,
    frequencies,
    init_params,
    make_forward,
    product,
    rotate,
    turns,
)
from atoll_learner.model_settings import ModelSettings, model_settings
from atoll_learner.train import init_optimizer, make_loss, make_step
from atoll_learner.train_settings import TrainSettings, train_settings

SMALL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "context": 16}


def small(**changes: object) -> ModelSettings:
    return model_settings(SMALL | changes, vocab=64)


def batch(rows: int = 4, length: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, (rows, length + 1)).astype(np.int32)


def test_rotary_positions_turn_channel_pairs_half_a_head_apart() -> None:
    x = np.random.default_rng(1).normal(size=(1, 5, 2, 8)).astype(np.float32)
    angle = np.arange(5)[:, None] * 100.0 ** (-np.arange(4) / 4)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)[:, None, :]

    got = np.asarray(rotate(jnp.array(x), *turns(5, 100.0 ** (-np.arange(4) / 4))))

    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=1e-5)


def test_the_future_does_not_change_the_past() -> None:
    forward, params = jax.jit(make_forward(small())), init_params(small(), 0)
    tokens = batch()[:, :-1]
    changed = tokens.copy()
    changed[:, 9:] = (changed[:, 9:] + 1) % 64

    before, after = forward(params, tokens), forward(params, changed)

    np.testing.assert_allclose(before[:, :9], after[:, :9], atol=1e-5)
    assert not np.allclose(before[:, 9:], after[:, 9:])


def reference(params: dict[str, jax.Array], s: ModelSettings, tokens: np.ndarray) -> np.ndarray:
    p = {name: np.asarray(leaf, dtype=np.float64) for name, leaf in params.items()}

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        scaled: np.ndarray = x / np.sqrt((x * x).mean(-1, keepdims=True) + s.norm_eps) * gain
        return scaled

    x = p["model.embed_tokens.weight"][tokens]
    length = tokens.shape[1]
    for layer in range(s.layers):
        w = {
            k.removeprefix(f"model.layers.{layer}."): v for k, v in p.items() if k.startswith(f"model.layers.{layer}.")
        }
        h = norm(x, w["input_layernorm.weight"])
        heads = []
        for head in range(s.heads):
            group = head // (s.heads // s.kv_heads)
            rows, kv = slice(head * 8, head * 8 + 8), slice(group * 8, group * 8 + 8)
            q = h @ w["self_attn.q_proj.weight"][rows].T
            k = h @ w["self_attn.k_proj.weight"][kv].T
            q, k = (
                np.asarray(rotate(jnp.array(a[:, :, None, :]), *turns(length, frequencies(s))))[:, :, 0] for a in (q, k)
            )
            scores = q @ k.transpose(0, 2, 1) / np.sqrt(8.0)
            scores[:, np.triu(np.ones((length, length), dtype=bool), 1)] = -np.inf
            share = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(share / share.sum(-1, keepdims=True) @ (h @ w["self_attn.v_proj.weight"][kv].T))
        x = x + np.concatenate(heads, -1) @ w["self_attn.o_proj.weight"].T
        h = norm(x, w["post_attention_layernorm.weight"])
        gate = h @ w["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    head_name = "model.embed_tokens.weight" if s.tied else "lm_head.weight"
    logits: np.ndarray = norm(x, p["model.norm.weight"]) @ p[head_name].T
    return logits


@pytest.mark.parametrize("tied", [True, False])
def test_the_decoder_equals_an_explicit_reference(*, tied: bool) -> None:
    settings = small(tied=tied)
    params = init_params(settings, 3)
    tokens = batch()[:, :-1]

    got = np.asarray(jax.jit(make_forward(settings))(params, tokens))

    np.testing.assert_allclose(got, reference(params, settings, tokens), atol=2e-4)
    assert ("lm_head.weight" in params) == (not tied)
    assert set(embedding_rules(settings)) <= set(params)


@pytest.mark.parametrize(("out", "inputs"), [(12, 5), (5, 12)], ids=["tall", "wide"])
def test_the_gradients_of_a_product_are_those_that_jax_derives(out: int, inputs: int) -> None:
    """The backward pass of a linear layer is written by hand; JAX differentiates the same product."""
    rows, weight, back = (
        jnp.asarray(np.random.default_rng(number).normal(size=shape), dtype=jnp.float32)
        for number, shape in enumerate([(7, inputs), (out, inputs), (7, out)])
    )

    got = jax.vjp(product, rows, weight)[1](back)
    expected = jax.vjp(lambda x, w: x @ w.T, rows, weight)[1](back)

    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kv_heads", "dtype"), [(1, jnp.float32), (2, jnp.float32), (4, jnp.float32), (2, jnp.bfloat16)]
)
def test_attention_and_its_gradients_are_those_of_jax(kv_heads: int, dtype: Any) -> None:  # noqa: ANN401  (a dtype)
    """Query heads that share a key head, laid below each other, and the library's form with an axis of its own."""
    random = np.random.default_rng(2)
    q, k, v, back = (
        jnp.asarray(random.normal(size=(2, 6, heads, 8)), dtype=dtype) for heads in (4, kv_heads, kv_heads, 4)
    )

    def with_gradients(mixed: Callable[..., jax.Array]) -> tuple[jax.Array, ...]:
        def both(*given: jax.Array) -> tuple[jax.Array, ...]:
            got, pulled = jax.vjp(mixed, *given)
            return got, *pulled(back)

        made: tuple[jax.Array, ...] = jax.jit(both)(q, k, v)  # operation by operation, a hundred programs are compiled
        return made

    got = with_gradients(Attending().mixed)
    expected = with_gradients(lambda *a: jax.nn.dot_product_attention(*a, is_causal=True))

    tolerance = 1e-5 if dtype == jnp.float32 else 0.05
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), atol=tolerance)


def test_a_step_is_clipped_adamw_and_two_runs_agree_bit_for_bit() -> None:
    model = small()
    train = train_settings({"batch": 4, "optimizer": "adamw"}, model=model)
    params = init_params(model, 0)
    step = make_step(model, train)
    loss_of = make_loss(model)
    by_hand = optax.chain(
        optax.clip_by_global_norm(train.clip),
        optax.adamw(
            1e-3,
            b1=train.beta1,
            b2=train.beta2,
            weight_decay=train.weight_decay,
            mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree),
        ),
    )

    @jax.jit  # operation by operation, hundreds of programs would be compiled
    def step_by_hand(params: Params, state: Any, rows: jax.Array) -> tuple[Params, Any]:  # noqa: ANN401  (an optax state)
        updates, state = by_hand.update(jax.grad(loss_of)(params, rows), state, params)
        return {name: params[name] + updates[name] for name in params}, state

    expected, held = params, by_hand.init(params)
    got, state = params, init_optimizer(train, params)
    again, other = params, init_optimizer(train, params)
    for number in range(3):
        expected, held = step_by_hand(expected, held, jnp.array(batch(seed=number)))
        got, state, _ = step(got, state, batch(seed=number), 1e-3)
        again, other, _ = step(again, other, batch(seed=number), 1e-3)

    for name in params:
        np.testing.assert_allclose(got[name], expected[name], rtol=2e-3, atol=2e-5)
        assert (got[name] == again[name]).all()


@pytest.mark.second_tier
def test_accumulated_gradients_equal_one_larger_batch() -> None:
    model, train = small(), TrainSettings(rate=2e-3, warmup=0.0, batch=4, sequence=16, accumulation=2)
    params, rows = init_params(model, 0), batch(8)
    step = make_step(model, train)

    whole, _, loss = step(params, init_optimizer(train, params), rows, 1e-3)
    parts, _, mean = step(params, init_optimizer(train, params), rows.reshape(2, 4, 17), 1e-3)

    assert float(loss) == pytest.approx(float(mean), rel=1e-5)
    for name in whole:
        np.testing.assert_allclose(whole[name], parts[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_loss_falls_on_a_text_that_repeats(compute: str) -> None:
    model = small(compute=compute)
    train = train_settings({"batch": 4}, model=model)
    params = init_params(model, 0)
    state, step = init_optimizer(train, params), make_step(model, train)
    rows = np.tile(np.arange(17, dtype=np.int32), (4, 1))
    losses = []
    for _ in range(40):
        params, state, loss = step(params, state, rows, 3e-3)
        losses.append(float(loss))

    assert losses[-1] < 0.3 * losses[0]


def test_equal_models_make_equal_files(tmp_path: Path) -> None:
    """The order of the metadata, which the library draws from a hash table, is that of their names."""
    params, path = init_params(small(), 0), tmp_path / "model.safetensors"
    metadata = {name: f'"{name}" \\ \n é \x01' for name in ("run", "model", "versions", "values", "others", "more")}
    written: set[bytes] = set()
    read: list[Mapping[str, str] | None] = []
    for _ in range(16):
        save_safetensors(params, path, metadata)
        written.add(path.read_bytes())
    loaded = load_safetensors([path], params, lambda _, found: read.append(found))

    assert len(written) == 1
    assert read == [{"format": "pt", **metadata}]
    assert all((loaded[name] == params[name]).all() for name in params)


def test_a_truncated_or_missing_model_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    params = init_params(small(), 0)
    save_safetensors(params, path, {"run": "x"})
    data = path.read_bytes()
    for content in (data[: len(data) // 2], data[:5], b""):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_safetensors([path], params)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_safetensors([path], params)


def test_a_file_of_another_model_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    params = init_params(small(), 0)
    name = min(params)
    for wrong, said in (
        ({**params, name: params[name][:-1]}, "another model"),
        ({key: leaf for key, leaf in params.items() if key != name}, "another model"),
        ({**params, name: params[name] * np.nan}, "infinities or NaN"),
    ):
        save_safetensors(wrong, path, {})
        with pytest.raises(CheckpointError, match=said) as refusal:
            load_safetensors([path], params)
        assert name in str(refusal.value)


@pytest.mark.parametrize(("dtype", "bytes_each"), [("F8_E4M3", 1), ("C64", 8), ("I64", 8), ("BOOL", 1)])
def test_a_file_whose_numbers_are_no_floats_is_refused(tmp_path: Path, dtype: str, bytes_each: int) -> None:
    """Also where the library has no word for what it finds; nothing is turned into floats unasked."""
    header = json.dumps({"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4 * bytes_each]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * bytes_each))

    with pytest.raises(CheckpointError, match=r"cannot be read|another model"):
        load_safetensors([path], {"w": jnp.zeros(4)})


def test_sampling_is_deterministic_and_starts_with_its_prompt() -> None:
    settings = model_settings(SMALL, vocab=256)
    params = init_params(settings, 0)

    texts = [Sampler(settings, ByteTokenizer(), b"def ", 30).text(params, 1) for _ in range(2)]

    assert texts[0] == texts[1]
    assert texts[0].startswith("def ")


def test_a_sample_attends_to_what_the_whole_model_attends_to() -> None:
    """The likeliest tokens, with remembered keys and values, are those of the decoder run over all of the text each time."""
    settings = model_settings(SMALL, vocab=256)
    params, forward = init_params(settings, 0), jax.jit(make_forward(settings))
    tokenizer = ByteTokenizer()
    text = [int(token) for token in tokenizer.encode(b"def ")]

    got = Sampler(settings, tokenizer, b"def ", settings.context - 4).text(params, 1, 1e-6)
    for at in range(4, settings.context):
        padded = np.zeros((1, settings.context), dtype=np.int32)
        padded[0, :at] = text
        text.append(int(np.argmax(forward(params, padded)[0, at - 1])))

    assert got == tokenizer.decode(text).decode("utf-8", errors="replace")
