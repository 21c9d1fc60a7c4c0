"""Which variables of a Keras model travel with a run, by name.

    trainable         all travel
    moving averages   `moving_mean` and `moving_variance` of normalisation layers travel, merged by their mean
    the rest          seeds of dropout, frozen weights, variables of optimizer and metrics: each island keeps its own

A name is Keras's path of the variable below the model, `dense/kernel`. Islands agree on it if they run the same program.
Keras numbers the layers of a process that have no name of their own, so a program that builds other models first gets other
names; `join` then refuses its model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from atoll.model.leaf_conventions import STATISTICS

Values = dict[str, dict[str, Any]]


class TravellingVariables:
    """The variables of one built model that travel; values are a pytree {"trainable" | "statistics": {name: array}}."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401  (a Keras model; Keras has no types)
        """Name them; the model must be built."""
        statistics = (v for v in model.non_trainable_variables if v.path.rsplit("/", 1)[-1] in STATISTICS)
        below = f"{model.name}/"
        named = {"trainable": by_name(model.trainable_variables, below), "statistics": by_name(statistics, below)}
        self._variables = {kind: variables for kind, variables in named.items() if variables}

    def values(self) -> Values:
        """Return the arrays that the variables hold, not copied."""
        return jax.tree.map(lambda variable: variable.value, self._variables)  # type: ignore[no-any-return]

    def assign(self, values: Values) -> None:
        """Let the variables hold these values: copies of them, which Keras may donate to its next step."""
        for kind, arrays in _copied(values).items():
            for name, array in arrays.items():
                self._variables[kind][name].assign(array)


def by_name(variables: Iterable[Any], below: str) -> dict[str, Any]:
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
def _copied(values: Values) -> Values:
    """Return copies on the arrays' own devices; nothing waits for them."""
    return jax.tree.map(jnp.copy, values)  # type: ignore[no-any-return]
