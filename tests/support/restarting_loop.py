"""A training loop of its own that keeps checkpoints: the program that the test of a run whose every island died kills.

    python restarting_loop.py URL RUN LEARNER FOLDER [fresh]

It writes one line of JSON per step: the step count of Adam, the place in the data, the loss and the run's tokens. With `fresh`
it does not look for checkpoints: what a loop without them does after a restart.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import atoll
from atoll.protocol.settings import ProtocolSettings

BATCH = 32
PROTOCOL = ProtocolSettings(fragments=2, interval_steps=20, shards=1, silence_s=2.0, tokens_target=160_000)
OPTIMIZER = optax.adam(optax.exponential_decay(2e-2, 150, 0.5))
"""Its schedule goes by its own step count: a loop that forgets the count begins at the largest rate again."""


def init() -> dict[str, jax.Array]:
    """Return a perceptron for 8 x 8 images and ten classes."""
    hidden, out = jax.random.split(jax.random.key(0))
    return {"w1": jax.random.normal(hidden, (64, 64)) * 0.1, "w2": jax.random.normal(out, (64, 10)) * 0.1}


@jax.jit
def step(params: Any, opt: Any, key: Any, x: Any, y: Any) -> Any:  # noqa: ANN401
    """Return parameters, state, key and loss after a step on images with a tenth of their pixels left out."""
    key, mask = jax.random.split(key)
    x = x * jax.random.bernoulli(mask, 0.9, x.shape)

    def loss_of(params: Any) -> Any:  # noqa: ANN401
        scores = jax.nn.relu(x @ params["w1"]) @ params["w2"]
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

    loss, gradient = jax.value_and_grad(loss_of)(params)
    updates, opt = OPTIMIZER.update(gradient, opt)
    return optax.apply_updates(params, updates), opt, key, loss


def main(url: str, run: str, learner: str, folder: Path, *, fresh: bool) -> None:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    seed = sum(learner.encode())
    params = init()
    options = atoll.JoinOptions(log_adoptions=True)  # the test counts them
    with atoll.join(url, run=run, learner=learner, params=params, protocol=PROTOCOL, options=options) as island:
        params = island.params
        like = {"opt": OPTIMIZER.init(params), "key": jax.random.key(seed), "read": 0}
        place = folder / "none" if fresh else folder
        kept = island.checkpoints(place, like=like, every_s=0.2)  # the first of the two lines
        opt, key, read = (kept.restored[name] for name in ("opt", "key", "read"))
        say({"source": kept.source, "read": read, "age_tokens": kept.age_tokens})
        while not island.done:
            chosen = np.random.default_rng([seed, read]).integers(0, len(images), BATCH)
            read += 1
            params, opt, key, loss = step(params, opt, key, images[chosen], labels[chosen])
            params = island.step(params, tokens=BATCH, loss=float(loss))
            kept.save({"opt": opt, "key": key, "read": read})  # the second
            say({"count": int(opt[0].count), "read": read, "loss": round(float(loss), 4), "run": island.run_tokens})
    merged = island.merged().params
    right = (jnp.argmax(jax.nn.relu(images @ merged["w1"]) @ merged["w2"], axis=1) == labels).mean()
    say({"accuracy": round(float(right), 3)})


def say(told: dict[str, Any]) -> None:
    """Write a line of JSON to standard output, where nobody else writes: the log has standard error."""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), fresh="fresh" in sys.argv[5:])
