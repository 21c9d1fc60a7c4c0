"""`model.fit` of Keras 3 on JAX as an island: one callback, and the run decides when training ends.

    island = atoll.keras.IslandCallback("nats://broker:4222", run="my-run", learner="a", tokens=64)
    model.fit(x, y, batch_size=64, epochs=1000, callbacks=[island])
    island.merged()                                         # the model now holds the run's values

It needs the extra `keras` and `KERAS_BACKEND=jax`. `fit` keeps the state of training in arrays of its own. After a batch,
`jax_state_sync` puts them into the model's variables, and `fit` reads the variables again before the next batch. So the
callback reads the variables there, calls `island.step`, and assigns what that returns.

Keras donates its state to the next step, and an island must be able to read its last parameters until the step after. So
Keras gets copies, made on the device by one compiled program: the memory of the parameters once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras

from atoll.base.errors import ProtocolMisuse, SettingsError
from atoll.bus.interface import Bus
from atoll.client.join import IslandHandle, join
from atoll.client.model_reader import SETTLE_S, ReadModel
from atoll.client.options import DEFAULTS, JoinOptions
from atoll.model.leaf_conventions import STATISTICS
from atoll.protocol.settings import ProtocolSettings

__all__ = ["IslandCallback"]

Values = dict[str, dict[str, Any]]


class IslandCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Joins a run when `fit` begins, steps after every batch, ends `fit` when the run is over, and leaves.

    Give `fit` more epochs than the run can last. The loss that the run sees is the one that Keras logs, the mean since the
    epoch began. At the end the model holds the island's own values; `merged` puts the run's into it.
    """

    def __init__(
        self,
        broker: str | Callable[[], Coroutine[Any, Any, Bus]],
        *,
        run: str,
        learner: str,
        tokens: int,
        protocol: ProtocolSettings | None = None,
        options: JoinOptions = DEFAULTS,
    ) -> None:
        """Prepare; nothing is opened before `fit`. All but `tokens` is as `atoll.join` takes it.

        One batch trains on so many `tokens`, in whatever you count progress in (images, words); the last batch of an epoch
        counts as much, if it is smaller. Raises `SettingsError` where Keras runs on another backend than JAX.
        """
        super().__init__()
        if keras.backend.backend() != "jax":
            raise SettingsError(
                "atoll.keras needs Keras on JAX",
                got=f"the backend {keras.backend.backend()}",
                allowed="jax",
                todo="set the environment variable KERAS_BACKEND=jax before Keras is imported",
            )
        self._join = partial(join, broker, run=run, learner=learner, protocol=protocol, options=options)
        self._tokens = tokens
        self._handle: IslandHandle | None = None
        self._variables: TravellingVariables | None = None
        self._over = False
        self._batches = 0
        self._began_s = 0.0
        self.inside_s = 0.0
        self.overhead = 0.0
        """The share of the time since the first batch that was spent in this callback."""

    @property
    def island(self) -> IslandHandle:
        """Return the handle of the island, from the beginning of `fit` on."""
        if self._handle is None:
            raise ProtocolMisuse("the island has not joined yet: `fit` has not begun")
        return self._handle

    def merged(self, *, settle_s: float = SETTLE_S) -> ReadModel:
        """Put the run's merged model into the Keras model and return it, see `IslandHandle.merged`; after `fit`."""
        found = self.island.merged(settle_s=settle_s)
        self._travelling.assign(found.params)
        return found

    def close(self) -> None:
        """Push the rest and leave; idempotent. `fit` does this at its end, but not when it fails."""
        if self._handle is not None:
            self._handle.close()

    # --- what Keras calls -------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Join, and let the model hold the run's values."""
        del logs
        self.close()
        self._variables = TravellingVariables(self.model)
        self._handle = self._join(params=self._variables.values())
        self._variables.assign(self._handle.params)
        self._over = self._handle.done
        self._began_s = self.inside_s = self.overhead = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the batches of an epoch from its beginning."""
        del epoch, logs
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Report the step and let the next batch train on what `island.step` returned."""
        began_s = time.monotonic()
        # With `steps_per_execution` Keras calls once for several batches, with the number of the last.
        batches, self._batches = batch + 1 - self._batches, batch + 1
        self.model.jax_state_sync()
        if self._over:
            # Keras trains one batch before it looks at `stop_training`; a run that is over takes no more steps.
            self._travelling.assign(self.island.params)
        else:
            loss = (logs or {}).get("loss")
            continued = self.island.step(self._travelling.values(), tokens=batches * self._tokens, loss=loss)
            self._travelling.assign(continued)
        if self.island.done:
            self.model.stop_training = True
        self._clock(began_s)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Push the rest and leave."""
        del logs
        self.close()

    @property
    def _travelling(self) -> TravellingVariables:
        if self._variables is None:
            raise ProtocolMisuse("the island has not joined yet: `fit` has not begun")
        return self._variables

    def _clock(self, began_s: float) -> None:
        now_s = time.monotonic()
        if not self._began_s:
            self._began_s = now_s
            return
        self.inside_s += now_s - began_s
        self.overhead = self.inside_s / (now_s - self._began_s)


class TravellingVariables:
    """The variables of one built model that travel; values are a pytree {"trainable" | "statistics": {name: array}}.

    trainable         all travel
    moving averages   `moving_mean` and `moving_variance` of normalisation layers travel, merged by their mean
    the rest          seeds of dropout, frozen weights, variables of optimizer and metrics: each island keeps its own

    A name is Keras's path of the variable below the model, `dense/kernel`. Islands agree on it if they run the same program.
    Keras numbers the layers of a process that have no name of their own, so a program that builds other models first gets other
    names; `join` then refuses its model.
    """

    def __init__(self, model: Any) -> None:  # noqa: ANN401  (a Keras model; Keras has no types)
        statistics = (v for v in model.non_trainable_variables if v.path.rsplit("/", 1)[-1] in STATISTICS)
        below = f"{model.name}/"
        named = {
            "trainable": named_variables(model.trainable_variables, below),
            "statistics": named_variables(statistics, below),
        }
        self._variables = {kind: variables for kind, variables in named.items() if variables}

    def values(self) -> Values:
        """Return the arrays that the variables hold, not copied."""
        return jax.tree.map(lambda variable: variable.value, self._variables)  # type: ignore[no-any-return]

    def assign(self, values: Values) -> None:
        """Let the variables hold these values: copies of them, which Keras may donate to its next step."""
        for kind, arrays in _copy_values(values).items():
            for name, array in arrays.items():
                self._variables[kind][name].assign(array)


def named_variables(variables: Iterable[Any], below: str) -> dict[str, Any]:
    """Return variables by their paths without `below`; of those that share one, the second is called `path~2`, and so on."""
    named: dict[str, Any] = {}
    for variable in variables:
        path = name = variable.path.removeprefix(below)
        count = 1
        while name in named:
            count += 1
            name = f"{path}~{count}"
        named[name] = variable
    return named


@jax.jit
def _copy_values(values: Values) -> Values:
    return jax.tree.map(jnp.copy, values)  # type: ignore[no-any-return]
