"""Flax NNX as an island: a model with batch normalisation and dropout, in the loop that NNX shows.

    atoll broker --store runs/nnx              a broker, if you have none
    atoll synchronizer --run nnx               one shard is enough
    python examples/nnx_batchnorm.py a         a learner
    python examples/nnx_batchnorm.py b         another; as many as you like

Only the lines marked `atoll` differ from the loop you would write for one machine. Parameters and running averages travel;
the optimizer's state and the random numbers of dropout stay on their island.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import atoll  # atoll
from atoll.protocol.settings import ProtocolSettings  # atoll
from outcome import print_losses

PROTOCOL = ProtocolSettings(fragments=4, interval_steps=50, shards=1, tokens_target=250_000)  # atoll
BATCH = 64


class Classifier(nnx.Module):
    """A perceptron with one hidden layer for 8 x 8 images and ten classes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Draw the weights."""
        self.hidden = nnx.Linear(64, 128, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(128, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.classes = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return class scores, shape (batch, 10)."""
        return jnp.asarray(self.classes(self.dropout(nnx.relu(self.norm(self.hidden(x))))))


@nnx.jit
def step(model: Classifier, optimizer: nnx.Optimizer[Classifier], x: jax.Array, y: jax.Array) -> jax.Array:
    """Take one optimizer step and return its loss; model and optimizer change in place."""

    def loss_of(model: Classifier) -> jax.Array:
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(x), y))

    loss, gradient = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradient)
    return jnp.asarray(loss)


def travelling(model: Classifier) -> dict[str, Any]:  # atoll
    """Return what the islands share of a model."""
    return {"params": nnx.state(model, nnx.Param), "batch_stats": nnx.state(model, nnx.BatchStat)}  # atoll


def batches(x: np.ndarray, y: np.ndarray, name: str) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yield random batches; every learner draws its own."""
    rng = np.random.default_rng(list(name.encode()))
    while True:
        chosen = rng.integers(0, len(x), BATCH)
        yield jnp.asarray(x[chosen]), jnp.asarray(y[chosen])


def main(name: str, broker: str) -> float:
    """Train until the run is over and return the merged model's accuracy on held-out digits."""
    digits = load_digits()
    x, y = digits.data.astype(np.float32) / 16.0, digits.target
    test = np.arange(len(x)) % 5 == 0
    feed, losses = batches(x[~test], y[~test], name), []
    model = Classifier(nnx.Rngs(0))
    model.train()  # type: ignore[no-untyped-call]
    with atoll.join(broker, run="nnx", learner=name, params=travelling(model), protocol=PROTOCOL) as island:  # atoll
        nnx.update(model, *island.params.values())  # atoll
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        while not island.done:  # atoll
            losses.append(float(step(model, optimizer, *next(feed))))
            nnx.update(model, *island.step(travelling(model), tokens=BATCH, loss=losses[-1]).values())  # atoll
    nnx.update(model, *island.merged().params.values())  # atoll
    model.eval()  # type: ignore[no-untyped-call]
    accuracy = float(jnp.mean(jnp.argmax(model(jnp.asarray(x[test])), axis=1) == y[test]))
    print_losses(name, losses, island.inside_s, island.overhead)
    print(f"{name}: accuracy on held-out digits {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "a", sys.argv[2] if len(sys.argv) > 2 else "nats://127.0.0.1:4222")
