"""Parameters that are NumPy's, from a loop in another framework: scikit-learn's `MLPClassifier`, trained batch by batch.

    atoll broker --store runs/numpy            a broker, if you have none
    atoll synchronizer --run numpy             one shard is enough
    python examples/numpy_loop.py a            a learner
    python examples/numpy_loop.py b            another; as many as you like

scikit-learn changes its arrays in place. So after each step the island copies them (every array that may be written to): what
it pushes later must be the values of one step. What it returns are the same arrays, or new ones where a newer version has
arrived; those are copied back into the framework's own arrays, which its optimizer knows.

Only the lines marked `atoll` differ from the loop you would write for one machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

import atoll  # atoll
from atoll.protocol.settings import ProtocolSettings  # atoll
from outcome import print_losses

PROTOCOL = ProtocolSettings(fragments=4, interval_steps=50, shards=1, tokens_target=250_000)  # atoll
BATCH = 64

Arrays = dict[str, list[np.ndarray]]


def own(model: MLPClassifier) -> Arrays:  # atoll
    """Return the framework's own arrays."""
    return {"coefs": model.coefs_, "intercepts": model.intercepts_}  # atoll


def put(model: MLPClassifier, values: Arrays) -> None:  # atoll
    """Write `values` into the framework's own arrays; most are there already."""
    for kind, arrays in own(model).items():  # atoll
        for mine, theirs in zip(arrays, values[kind], strict=True):  # atoll
            if theirs is not mine:  # atoll
                mine[...] = theirs  # atoll


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
    model: Any = MLPClassifier((128,), batch_size=BATCH, random_state=0)
    model.partial_fit(*next(feed), classes=np.arange(10))
    with atoll.join(broker, run="numpy", learner=name, params=own(model), protocol=PROTOCOL) as island:  # atoll
        put(model, island.params)  # atoll
        while not island.done:  # atoll
            model.partial_fit(*next(feed))
            losses.append(float(model.loss_))
            put(model, island.step(own(model), tokens=BATCH, loss=losses[-1]))  # atoll
    put(model, island.merged().params)  # atoll
    accuracy = float(model.score(x[test], y[test]))
    print_losses(name, losses, island.inside_s, island.overhead)
    print(f"{name}: accuracy on held-out digits {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "a", sys.argv[2] if len(sys.argv) > 2 else "nats://127.0.0.1:4222")
