"""A vision set trained by a convolutional network as an island: plain JAX, images that are shifted at random.

    atoll broker --store runs/cnn              a broker, if you have none
    atoll synchronizer --run cnn               one shard is enough
    python examples/cnn.py a                   a learner
    python examples/cnn.py b                   another; as many as you like

The set is scikit-learn's: 1797 handwritten digits of 8 x 8 pixels (UCI, Alpaydin and Kaynak 1998); nothing is downloaded.
Only the lines marked `atoll` differ from the loop you would write for one machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import atoll  # atoll
from atoll.protocol.settings import ProtocolSettings  # atoll
from outcome import print_losses

PROTOCOL = ProtocolSettings(fragments=6, interval_steps=12, shards=1, tokens_target=100_000)  # atoll
BATCH = 512
CHANNELS = (1, 32, 48, 64)
STRIDES = (1, 1, 2)


def init(seed: int) -> dict[str, dict[str, jax.Array]]:
    """Return three convolutions of 3 x 3 and a linear layer for ten classes."""
    keys = jax.random.split(jax.random.key(seed), len(CHANNELS))
    pairs = list(pairwise(CHANNELS))
    params = {
        f"conv{i}": {
            "kernel": jax.random.normal(keys[i], (3, 3, inputs, outputs)) * (2 / (9 * inputs)) ** 0.5,
            "bias": jnp.zeros(outputs),
        }
        for i, (inputs, outputs) in enumerate(pairs)
    }
    head = {"kernel": jax.random.normal(keys[-1], (16 * CHANNELS[-1], 10)) * 0.02, "bias": jnp.zeros(10)}
    return params | {"head": head}


def logits(params: dict[str, dict[str, jax.Array]], images: jax.Array) -> jax.Array:
    """Return class scores (batch, 10) of images (batch, 8, 8, 1)."""
    x, axes = images, ("NHWC", "HWIO", "NHWC")
    for i, stride in enumerate(STRIDES):
        layer = params[f"conv{i}"]
        x = jax.lax.conv_general_dilated(x, layer["kernel"], (stride, stride), "SAME", dimension_numbers=axes)
        x = jax.nn.relu(x + layer["bias"])
    return jnp.asarray(x.reshape(len(x), -1) @ params["head"]["kernel"] + params["head"]["bias"])


def loss_of(params: dict[str, dict[str, jax.Array]], x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y))


def batches(images: np.ndarray, labels: np.ndarray, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield random images, each batch moved by up to one pixel; every learner draws its own."""
    rng = np.random.default_rng(list(name.encode()))
    while True:
        chosen = rng.integers(0, len(images), BATCH)
        yield np.roll(images[chosen], rng.integers(-1, 2, 2), axis=(1, 2)), labels[chosen]


def main(name: str, broker: str) -> float:
    """Train until the run is over and return the merged model's accuracy on held-out digits."""
    digits = load_digits()
    images, labels = digits.images.astype(np.float32)[..., None] / 16.0, digits.target
    test = np.arange(len(images)) % 5 == 0
    feed, losses = batches(images[~test], labels[~test], name), []
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params, state, bx, by):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        loss, gradient = jax.value_and_grad(loss_of)(params, bx, by)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    with atoll.join(broker, run="cnn", learner=name, params=init(0), protocol=PROTOCOL) as island:  # atoll
        params = island.params  # atoll
        state = optimizer.init(params)
        while not island.done:  # atoll
            params, state, loss = step(params, state, *next(feed))
            losses.append(float(loss))
            params = island.step(params, tokens=BATCH, loss=losses[-1])  # atoll
    merged = island.merged().params  # atoll
    accuracy = float(jnp.mean(jnp.argmax(logits(merged, images[test]), axis=1) == labels[test]))
    print_losses(name, losses, island.inside_s, island.overhead)
    print(f"{name}: accuracy on held-out digits {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "a", sys.argv[2] if len(sys.argv) > 2 else "nats://127.0.0.1:4222")
