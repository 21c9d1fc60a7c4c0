"""A Llama-shaped decoder in Flax NNX: RMSNorm, rotary positions (half-split), SwiGLU, grouped-query attention.

With biases of queries, keys and values it is a Qwen 2, with norms of queries and keys a Qwen 3.

Parameters live outside as one flat mapping from the names of Hugging Face to arrays, because that is what travels in
fragments, what the checkpoint stores and what other tools expect. Matrices are kept as (out, in), as those tools do.
The NNX module is the reference structure: `forward` puts the mapping into it and runs it, so names and mathematics are
written once. A sample of text is drawn one token at a time, in one compiled loop that remembers the keys and values of each
layer: only how it attends differs (`_OneToken`). Matrices start as N(0, 1/in), those that write into the residual stream scaled
by 1/sqrt(2 L); embeddings as N(0, 0.02^2). NumPy draws them: a compiled program that draws is needed once, and
costs a learner a second and a half before its first step.

Shapes: B batch, T time, D width, N heads, K kv-heads, H channels of a head, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from atoll.client.parameters import Rule
from atoll_learner.data.tokenizer import Tokenizer
from atoll_learner.model_settings import EMBEDDINGS, ModelSettings

Params = dict[str, jax.Array]
Draw = Callable[[float, tuple[int, ...]], Any]
"""Returns normal numbers of a standard deviation and a shape."""

EMBEDDING_STD = 0.02


@jax.custom_vjp
def product(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Return rows (R, in) times weight (out, in), (R, out)."""
    return rows @ weight.T


def _product_and_factors(rows: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(rows, weight), (rows, weight)


def _gradients(factors: tuple[jax.Array, jax.Array], back: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of both factors; that of a tall weight is computed as its transpose.

    XLA's CPU backend computes a.T @ b at 103 GFLOP/s if it is wide (128, 512), and at 57 if it is tall (512, 128). The
    barrier keeps the compiler from turning the first into the second.
    """
    rows, weight = factors
    if weight.shape[0] > weight.shape[1]:
        wide: jax.Array = jax.lax.optimization_barrier(rows.T @ back)  # type: ignore[no-untyped-call]
        return back @ weight, wide.T
    return back @ weight, back.T @ rows


product.defvjp(_product_and_factors, _gradients)


class Linear(nnx.Module):
    """y = W x, or W x + b; `weight` has shape (out, in)."""

    def __init__(
        self, inputs: int, outputs: int, draw: Draw, *, scale: float = 1.0, std: float = 0.0, bias: bool = False
    ) -> None:
        """Draw the weight with standard deviation `std`, or `scale` / sqrt(in) where none is given; a bias begins at zero."""
        std = std or scale / inputs**0.5
        self.weight = nnx.Param(draw(std, (outputs, inputs)))
        self.bias = nnx.Param(np.zeros(outputs, dtype=np.float32)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (..., in) to (..., out) in the dtype of `x`.

        As one product of two matrices: XLA's CPU backend turns the gradient of a product with two leading axes into
        slower code.
        """
        rows = product(x.reshape(-1, x.shape[-1]), self.weight[...].astype(x.dtype))
        if self.bias is not None:
            rows = rows + self.bias[...].astype(x.dtype)
        return rows.reshape(*x.shape[:-1], -1)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        self.weight = nnx.Param(np.ones(width, dtype=np.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis."""
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        gain: jax.Array = self.weight[...]
        return (wide * scale * gain).astype(x.dtype)


def frequencies(settings: ModelSettings) -> npt.NDArray[np.float64]:
    r"""Return by how many radians each of the H/2 channel pairs turns from one position to the next.

    f_i = theta^(-2i/H). Scaled as in Llama 3.1, with wave length w = 2 pi / f, original context C, factor s, l < h:
    f / s where w > C / l, f where w < C / h, and between them (1 - m) f / s + m f with m = (C / w - l) / (h - l).
    """
    half = settings.head_dim // 2
    plain: npt.NDArray[np.float64] = settings.rope_theta ** (-np.arange(half) / half)
    if settings.rope_factor == 1.0:
        return plain
    low, high = settings.rope_low_freq_factor, settings.rope_high_freq_factor
    waves_in_context = settings.rope_original_context * plain / (2.0 * np.pi)
    kept = np.clip((waves_in_context - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / settings.rope_factor


def turns(length: int, frequency: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return cosines and sines (T, 1, H/2) of position times `frequency` (H/2,).

    Constants of the compiled step: left to the compiler they are computed anew for every value that is turned, which was a
    quarter of the step of a small model.
    """
    angle = np.arange(length)[:, None, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate(x: jax.Array, cos: npt.ArrayLike, sin: npt.ArrayLike) -> jax.Array:
    """Return x (B, T, N, H) with rotary positions: channel i turns with i + H/2 by the angle of `cos` and `sin` (T, 1, H/2)."""
    half = x.shape[-1] // 2
    cos, sin = (jnp.asarray(part, dtype=x.dtype) for part in (cos, sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attending:
    """Turning and mixing of positions: here all of a text at once, each with those before it. A sample goes one by one."""

    def turned(self, x: jax.Array, frequency: npt.NDArray[np.float64]) -> jax.Array:
        """Return x (B, T, N, H) with rotary positions."""
        return rotate(x, *turns(x.shape[1], frequency))

    def mixed(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Return the values (B, T, N, H) that queries (B, T, N, H) find by keys (B, T, K, H). Called once a layer, in order.

        The queries of a key head lie below each other, G = N/K times T rows, so each head is one product. JAX's own
        attention has a fifth axis for them, and XLA's CPU backend turns the probabilities around it four times.
        """
        shape = b, t, heads, channels = q.shape
        shared = k.shape[2]
        q = q.reshape(b, t, shared, -1, channels).transpose(0, 2, 3, 1, 4).reshape(b, shared, -1, channels)
        scores = jnp.einsum("bkqh,bskh->bkqs", q * channels**-0.5, k, preferred_element_type=jnp.float32)
        seen = np.tile(np.tri(t, dtype=np.bool_), (heads // shared, 1))
        found = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(v.dtype)
        mixed = jnp.einsum("bkqs,bskh->bkqh", found, v)
        return mixed.reshape(b, shared, -1, t, channels).transpose(0, 3, 1, 2, 4).reshape(shape)


class Attention(nnx.Module):
    """Causal grouped-query attention: N/K query heads share one key and value head."""

    def __init__(self, settings: ModelSettings, scale: float, draw: Draw) -> None:
        s = settings
        self.settings = settings
        self.q_proj = Linear(s.width, s.heads * s.head_dim, draw, bias=s.qkv_bias)
        self.k_proj = Linear(s.width, s.kv_heads * s.head_dim, draw, bias=s.qkv_bias)
        self.v_proj = Linear(s.width, s.kv_heads * s.head_dim, draw, bias=s.qkv_bias)
        self.o_proj = Linear(s.heads * s.head_dim, s.width, draw, scale=scale)
        self.q_norm = RMSNorm(s.head_dim, s.norm_eps) if s.qk_norm else None
        self.k_norm = RMSNorm(s.head_dim, s.norm_eps) if s.qk_norm else None

    def __call__(self, x: jax.Array, attending: Attending) -> jax.Array:
        """Map (B, T, D) to (B, T, D)."""
        s, (b, t, _) = self.settings, x.shape
        q = self.q_proj(x).reshape(b, t, s.heads, s.head_dim)
        k = self.k_proj(x).reshape(b, t, s.kv_heads, s.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        frequency = frequencies(s)
        q, k = attending.turned(q, frequency), attending.turned(k, frequency)
        v = self.v_proj(x).reshape(b, t, s.kv_heads, s.head_dim)
        mixed = attending.mixed(q, k, v)
        return self.o_proj(mixed.reshape(b, t, s.heads * s.head_dim))


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, settings: ModelSettings, scale: float, draw: Draw) -> None:
        s = settings
        self.gate_proj = Linear(s.width, s.ffn, draw)
        self.up_proj = Linear(s.width, s.ffn, draw)
        self.down_proj = Linear(s.ffn, s.width, draw, scale=scale)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (B, T, D) to (B, T, D)."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """One decoder layer with residual connections."""

    def __init__(self, settings: ModelSettings, scale: float, draw: Draw) -> None:
        self.input_layernorm = RMSNorm(settings.width, settings.norm_eps)
        self.self_attn = Attention(settings, scale, draw)
        self.post_attention_layernorm = RMSNorm(settings.width, settings.norm_eps)
        self.mlp = MLP(settings, scale, draw)

    def __call__(self, x: jax.Array, attending: Attending) -> jax.Array:
        """Map (B, T, D) to (B, T, D)."""
        x = x + self.self_attn(self.input_layernorm(x), attending)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """The whole model; its parameter paths are the names of the flat mapping."""

    def __init__(self, settings: ModelSettings, draw: Draw) -> None:
        """Draw all weights, in this order."""
        scale = (2 * settings.layers) ** -0.5
        self.settings = settings
        self.embed_tokens = Linear(settings.width, settings.vocab, draw, std=EMBEDDING_STD)
        self.layers = nnx.List([Layer(settings, scale, draw) for _ in range(settings.layers)])
        self.norm = RMSNorm(settings.width, settings.norm_eps)
        self.lm_head = None if settings.tied else Linear(settings.width, settings.vocab, draw)

    def __call__(self, tokens: jax.Array, attending: Attending) -> jax.Array:
        """Map token ids (B, T) to logits (B, T, V), float32."""
        table = self.embed_tokens.weight[...]
        x = table[tokens].astype(self.settings.compute)
        for layer in self.layers:
            x = layer(x, attending)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return head(self.norm(x)).astype(jnp.float32)


def init_params(settings: ModelSettings, seed: int) -> Params:
    """Return the initial parameters of `seed`: equal bits for equal seeds with one release of NumPy."""
    random = np.random.default_rng(seed)
    drawn = _leaves(Decoder(settings, lambda std, shape: std * random.standard_normal(shape, dtype=np.float32)))
    return {name: jnp.asarray(leaf[...]) for name, leaf in drawn.items()}


def make_forward(settings: ModelSettings):  # type: ignore[no-untyped-def]  # noqa: ANN201  (a pure function, see below)
    """Return `forward(params, tokens) -> logits`, pure: (mapping, int32 (B, T)) to float32 (B, T, V).

    An `Attending` as the third argument turns and mixes positions in its way.
    """
    abstract = nnx.eval_shape(lambda: Decoder(settings, lambda _, shape: jnp.zeros(shape, dtype=jnp.float32)))
    graph, state = nnx.split(abstract, nnx.Param)
    paths = [path for path, _ in nnx.to_flat_state(state)]
    leaves = [leaf for _, leaf in nnx.to_flat_state(state)]

    def forward(params: Params, tokens: jax.Array, attending: Attending | None = None) -> jax.Array:
        filled = [leaf.replace(params[_name(path)]) for path, leaf in zip(paths, leaves, strict=True)]
        model = nnx.merge(graph, nnx.from_flat_state(list(zip(paths, filled, strict=True))))
        return model(tokens, attending or Attending())

    return forward


def embedding_rules(settings: ModelSettings) -> dict[str, Rule]:
    """Return the rules of the tensors that are merged by the plain weighted mean (App. D.2): embeddings and an untied head."""
    return dict.fromkeys(EMBEDDINGS[:1] if settings.tied else EMBEDDINGS, "direct")


def _leaves(model: Decoder) -> dict[str, nnx.Param[Any]]:
    return {_name(path): leaf for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def _name(path: tuple[object, ...]) -> str:
    dotted = ".".join(str(part) for part in path)
    return dotted if dotted.startswith("lm_head") else f"model.{dotted}"


DEGREES: Final = 0.7
Remembered = tuple[tuple[jax.Array, jax.Array], ...]
"""Keys and values of each layer, both (1, S, K, H), for a text of S tokens."""


class _OneToken(Attending):
    """The token at place `at` attends to what is `remembered`, at most a context's tokens; `now` has its own added."""

    def __init__(self, context: int, at: jax.Array, remembered: Remembered) -> None:
        self._at = at
        self._remembered = remembered
        self._tokens = remembered[0][0].shape[1]
        places = jnp.arange(self._tokens)
        self._seen = (places <= at) & (places > at - context)
        self.now: Remembered = ()

    def turned(self, x: jax.Array, frequency: npt.NDArray[np.float64]) -> jax.Array:
        return rotate(x, *(jnp.asarray(part)[self._at][None] for part in turns(self._tokens, frequency)))

    def mixed(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        former = self._remembered[len(self.now)]
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(all_, one, self._at, 1)
            for all_, one in zip(former, (k, v), strict=True)
        )
        self.now = (*self.now, (keys, values))
        return jax.nn.dot_product_attention(q, keys, values, mask=self._seen[None, None, None, :])


class Sampler:
    """Draws texts of one length after one prompt from models of one shape, by one program."""

    def __init__(self, settings: ModelSettings, tokenizer: Tokenizer, prompt: bytes, count: int) -> None:
        """Prepare to draw `count` tokens after `prompt`; the program is compiled when it is first needed, or by `compile`."""
        self._tokenizer = tokenizer
        given = np.asarray([int(token) for token in tokenizer.encode(prompt)], dtype=np.int32)
        self._text = np.pad(given, (0, count))
        self._draw: Any = jax.jit(_drawing(settings, tokenizer.vocab, len(given), len(self._text)))

    def compile(self, shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """Compile the program for parameters of such shapes and dtypes, for a later `text`."""
        params = {name: jax.eval_shape(functools.partial(jnp.zeros, *shape)) for name, shape in shapes.items()}
        self._draw = self._draw.lower(params, self._text, jax.random.key(0), DEGREES).compile()

    def text(self, params: Params, seed: int, temperature: float = DEGREES) -> str:
        """Return the prompt and what is drawn after it at `temperature`; bytes that are not UTF-8 are marked."""
        drawn = self._draw(params, self._text, jax.random.key(seed), temperature)
        return self._tokenizer.decode([int(token) for token in drawn]).decode("utf-8", errors="replace")


def _drawing(settings: ModelSettings, vocab: int, given: int, length: int) -> Callable[..., jax.Array]:
    """Return the program `(params, text, key, temperature) -> text` that draws what follows the first `given` of `length`."""
    forward = make_forward(settings)
    empty = np.zeros((1, length, settings.kv_heads, settings.head_dim), dtype=settings.compute)

    def draw(params: Params, text: jax.Array, key: jax.Array, temperature: jax.Array) -> jax.Array:
        def one(so_far: Any, step: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:  # noqa: ANN401  (text, remembered)
            (text, remembered), (at, key) = so_far, step
            attending = _OneToken(settings.context, at, remembered)
            logits = forward(params, text[at][None, None], attending)[0, 0]
            # Rows of the embedding that no token of the text has were never trained.
            drawn = jax.random.categorical(key, logits[:vocab] / temperature)
            follows = jnp.where(at + 1 < given, text[at + 1], drawn)
            return (text.at[at + 1].set(follows), attending.now), None

        steps = (jnp.arange(length - 1), jax.random.split(key, length - 1))
        nothing = tuple((jnp.asarray(empty), jnp.asarray(empty)) for _ in range(settings.layers))
        (drawn, _), _ = jax.lax.scan(one, (text, nothing), steps)
        return jnp.asarray(drawn)

    return draw
