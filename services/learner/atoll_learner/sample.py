"""Text from a model, to look at: one token at a time over a fixed window, so that the program compiles once."""

from __future__ import annotations

import jax
import numpy as np
import numpy.typing as npt

from atoll_learner.data.tokenizer import Tokenizer
from atoll_learner.model import Params, make_forward
from atoll_learner.model_settings import ModelSettings


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
    text = [int(token) for token in tokenizer.encode(prompt)]
    window = min(settings.context, len(text) + count)  # a model that somebody has may have a context of 2^17

    @jax.jit
    def draw(params: Params, tokens: npt.NDArray[np.int32], last: np.int32, key: jax.Array) -> jax.Array:
        logits = forward(params, tokens[None, :])[0, last]
        # Rows of the embedding that no token of the text has were never trained.
        return jax.random.categorical(key, logits[: tokenizer.vocab] / temperature)

    for key in jax.random.split(jax.random.key(seed), count):
        recent = text[-window:]
        padded = np.zeros(window, dtype=np.int32)
        padded[: len(recent)] = recent
        text.append(int(draw(params, padded, np.int32(len(recent) - 1), key)))
    return tokenizer.decode(text).decode("utf-8", errors="replace")
