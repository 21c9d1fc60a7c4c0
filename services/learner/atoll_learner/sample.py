"""Text from a model, to look at: one token at a time, in one compiled loop that remembers the keys and values of each layer.

The model is `atoll_learner.model`'s own; only how it attends differs (`_OneToken`). A token attends to as many tokens as the
model's context holds, itself among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from atoll_learner.data.tokenizer import Tokenizer
from atoll_learner.model import Attending, Params, make_forward, rotate, turns
from atoll_learner.model_settings import ModelSettings

DEGREES: Final = 0.7
Remembered = tuple[tuple[jax.Array, jax.Array], ...]
"""Keys and values of each layer, both (1, S, K, H), for a text of S tokens."""


class _OneToken(Attending):
    """The token at place `at` attends to what is `remembered`; `now` is that with its own keys and values."""

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


def generate(  # noqa: PLR0913  (a choice each)
    params: Params,
    settings: ModelSettings,
    tokenizer: Tokenizer,
    prompt: bytes,
    count: int,
    *,
    seed: int,
    temperature: float = DEGREES,
) -> str:
    """Return `prompt` and `count` tokens after it, as a `Sampler` does."""
    return Sampler(settings, tokenizer, prompt, count).text(params, seed, temperature)


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
