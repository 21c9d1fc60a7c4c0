"""Equinox as an island: the floating arrays of the model travel, everything else in the module stays where it is.

    atoll broker --store runs/equinox          a broker, if you have none
    atoll synchronizer --run equinox           one shard is enough
    python examples/equinox_digits.py a        a learner
    python examples/equinox_digits.py b        another; as many as you like

Only the lines marked `atoll` differ from the loop you would write for one machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import atoll  # atoll
from atoll.protocol.settings import ProtocolSettings  # atoll
from outcome import print_losses

PROTOCOL = ProtocolSettings(fragments=4, interval_steps=50, shards=1, tokens_target=250_000)  # atoll
BATCH = 64


def loss_of(model: eqx.nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y))


def batches(x: np.ndarray, y: np.ndarray, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield random batches; every learner draws its own."""
    rng = np.random.default_rng(list(name.encode()))
    while True:
        chosen = rng.integers(0, len(x), BATCH)
        yield x[chosen], y[chosen]


def main(name: str, broker: str) -> float:
    """Train until the run is over and return the merged model's accuracy on held-out digits."""
    digits = load_digits()
    x, y = digits.data.astype(np.float32) / 16.0, digits.target
    test = np.arange(len(x)) % 5 == 0
    feed, losses = batches(x[~test], y[~test], name), []
    model = eqx.nn.MLP(64, 10, width_size=128, depth=1, key=jax.random.key(0))
    optimizer = optax.adam(1e-3)

    @eqx.filter_jit
    def step(model, state, bx, by):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        loss, gradient = eqx.filter_value_and_grad(loss_of)(model, bx, by)
        updates, state = optimizer.update(gradient, state)
        return eqx.apply_updates(model, updates), state, loss

    arrays, rest = eqx.partition(model, eqx.is_inexact_array)  # atoll
    with atoll.join(broker, run="equinox", learner=name, params=arrays, protocol=PROTOCOL) as island:  # atoll
        model = eqx.combine(island.params, rest)  # atoll
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        while not island.done:  # atoll
            model, state, loss = step(model, state, *next(feed))
            losses.append(float(loss))
            arrays = island.step(eqx.filter(model, eqx.is_inexact_array), tokens=BATCH, loss=losses[-1])  # atoll
            model = eqx.combine(arrays, rest)  # atoll
    model = eqx.combine(island.merged().params, rest)  # atoll
    accuracy = float(jnp.mean(jnp.argmax(jax.vmap(model)(x[test]), axis=1) == y[test]))
    print_losses(name, losses, island.inside_s, island.overhead)
    print(f"{name}: accuracy on held-out digits {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "a", sys.argv[2] if len(sys.argv) > 2 else "nats://127.0.0.1:4222")
