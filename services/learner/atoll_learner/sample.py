"""Text from a model, to look at: one token at a time, in one compiled loop that remembers the keys and values of each layer.

The model is `atoll_learner.model`'s own; only how it attends differs (`_OneToken`). A token attends to as many tokens as the
model's context holds, itself among them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from atoll_learner.data.tokenizer import Tokenizer
from atoll_learner.model import Attending, Params, make_forward, rotate, turns
from atoll_learner.model_settings import ModelSettings

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


def generate(  # noqa: PLR0913  (a choice each)
    params: Params,
    settings: ModelSettings,
    tokenizer: Tokenizer,
    prompt: bytes,
    count: int,
    *,
    seed: int,
    temperature: float = 0.7,
) -> str:
    """Return `prompt` and `count` tokens after it, drawn at `temperature`; bytes that are not UTF-8 are marked."""
    forward = make_forward(settings)
    given = np.asarray([int(token) for token in tokenizer.encode(prompt)], dtype=np.int32)
    length = len(given) + count
    shape = (1, length, settings.kv_heads, settings.head_dim)
    empty = jnp.zeros(shape, dtype=settings.compute)

    @jax.jit
    def draw(params: Params, text: npt.NDArray[np.int32], key: jax.Array) -> jax.Array:
        def one(
            so_far: tuple[jax.Array, Remembered], step: tuple[jax.Array, jax.Array]
        ) -> tuple[tuple[jax.Array, Remembered], None]:
            (text, remembered), (at, key) = so_far, step
            attending = _OneToken(settings.context, at, remembered)
            logits = forward(params, text[at][None, None], attending)[0, 0]
            # Rows of the embedding that no token of the text has were never trained.
            drawn = jax.random.categorical(key, logits[: tokenizer.vocab] / temperature)
            follows = jnp.where(at + 1 < len(given), text[at + 1], drawn)
            return (text.at[at + 1].set(follows), attending.now), None

        steps = (jnp.arange(length - 1), jax.random.split(key, length - 1))
        remembered = tuple((empty, empty) for _ in range(settings.layers))
        (text, _), _ = jax.lax.scan(one, (jnp.asarray(text), remembered), steps)
        return text

    text = np.pad(given, (0, count))
    return tokenizer.decode([int(token) for token in draw(params, text, jax.random.key(seed))]).decode(
        "utf-8", errors="replace"
    )
