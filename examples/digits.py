"""Your own JAX loop as an island: a small classifier of handwritten digits.

    atoll broker --store runs/digits        a broker, if you have none
    atoll synchronizer --run digits         one shard is enough
    python examples/digits.py a             a learner
    python examples/digits.py b             another; as many as you like

Only the lines marked `atoll` differ from the loop you would write for one machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import atoll  # atoll
from atoll.protocol.settings import ProtocolSettings  # atoll
from outcome import print_losses

PROTOCOL = ProtocolSettings(fragments=4, interval_steps=200, shards=1, tokens_target=1_000_000)  # atoll
BATCH = 64


def init(seed: int) -> dict[str, jax.Array]:
    """Return a two-layer perceptron for 8 x 8 images and ten classes."""
    hidden, out = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(hidden, (64, 128)) * 0.1,
        "b1": jnp.zeros(128),
        "w2": jax.random.normal(out, (128, 10)) * 0.1,
        "b2": jnp.zeros(10),
    }


def logits(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return class scores, shape (batch, 10)."""
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return jnp.asarray(hidden @ params["w2"] + params["b2"])


def loss_of(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y))


def batches(x: np.ndarray, y: np.ndarray, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield random batches; every learner draws its own."""
    rng = np.random.default_rng(list(name.encode()))
    while True:
        chosen = rng.integers(0, len(x), BATCH)
        yield x[chosen], y[chosen]


def main(name: str, broker: str) -> float:
    """Train until the run is over and return the accuracy on held-out digits."""
    digits = load_digits()
    x, y = digits.data.astype(np.float32) / 16.0, digits.target
    test_x, test_y, train_x, train_y = x[::5], y[::5], x[1::5], y[1::5]
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(params, state, bx, by):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        loss, gradient = jax.value_and_grad(loss_of)(params, bx, by)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    feed, losses = batches(train_x, train_y, name), []
    with atoll.join(broker, run="digits", learner=name, params=init(0), protocol=PROTOCOL) as island:  # atoll
        params = island.params  # atoll
        state = optimizer.init(params)
        while not island.done:  # atoll
            params, state, loss = step(params, state, *next(feed))
            losses.append(float(loss))
            params = island.step(params, tokens=BATCH, loss=losses[-1])  # atoll
    merged = island.merged().params  # atoll
    accuracy = float(jnp.mean(jnp.argmax(logits(merged, test_x), axis=1) == test_y))
    print_losses(name, losses, island.inside_s, island.overhead)
    print(f"{name}: accuracy on held-out digits {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "a", sys.argv[2] if len(sys.argv) > 2 else "nats://127.0.0.1:4222")
