"""Keras 3 on JAX as an island: `model.fit` with one more callback. Batch normalisation and dropout are part of the model.

    atoll broker --store runs/keras                       a broker, if you have none
    atoll synchronizer --run keras                        one shard is enough
    KERAS_BACKEND=jax python examples/keras_digits.py a   a learner
    KERAS_BACKEND=jax python examples/keras_digits.py b   another; as many as you like

Only the lines marked `atoll` differ from the program you would write for one machine. Trainable variables and the moving
averages of batch normalisation travel; dropout's seed and the optimizer's variables stay on their island.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
from sklearn.datasets import load_digits

import atoll.keras  # atoll
from atoll.protocol.settings import ProtocolSettings  # atoll
from outcome import print_losses

PROTOCOL = ProtocolSettings(fragments=4, interval_steps=50, shards=1, tokens_target=250_000)  # atoll
BATCH = 64


def main(name: str, broker: str) -> float:
    """Train until the run is over and return the merged model's accuracy on held-out digits."""
    digits = load_digits()
    x, y = digits.data.astype(np.float32) / 16.0, digits.target
    test = np.arange(len(x)) % 5 == 0
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, use_bias=False, name="hidden"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.ReLU(name="relu"),
            keras.layers.Dropout(0.2, name="dropout"),
            keras.layers.Dense(10, name="classes"),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

    island = atoll.keras.IslandCallback(broker, run="keras", learner=name, tokens=BATCH, protocol=PROTOCOL)  # atoll
    fit = model.fit(x[~test], y[~test], batch_size=BATCH, epochs=10_000, verbose=0, callbacks=[island])
    island.merged()  # atoll
    losses = fit.history.get("loss", [])
    accuracy = float(model.evaluate(x[test], y[test], verbose=0)[1])
    print_losses(name, losses, island.inside_s, island.overhead, steps=int(model.optimizer.iterations))
    print(f"{name}: accuracy on held-out digits {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "a", sys.argv[2] if len(sys.argv) > 2 else "nats://127.0.0.1:4222")
