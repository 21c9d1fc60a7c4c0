"""`atoll evaluate --with module:function`: numbers about the merged model of somebody's own loop.

The function gets the merged parameters and returns a number, or several by name:

    def accuracy(params) -> float | dict[str, float]

`params` are NumPy arrays by their names in the run; with `--like module:attribute` they are a pytree like that one, or like
what it returns if it is a function. If the run keeps an average of its values, the function is called on that, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from atoll.base.errors import AtollError, SettingsError
from atoll.client.merged import check_like, placed
from atoll.run.merged_model import MergedModel
from atoll.wire.messages import RunRecord
from atoll_learner.plug_ins import FAILURES, callable_of, loaded, said_by

VALUES_MAX: Final = 64
NAME_CHARS_MAX: Final = 64
ONE: Final = "value"
"""The name of a single number."""
Values = dict[str, float]


class OwnEvaluation:
    """Calls a person's function on merged models."""

    def __init__(self, function: str, like: str = "") -> None:
        """Load the function, and the pytree that its parameters shall be like.

        Raises:
            SettingsError: there is no such function or pytree.
        """
        self.name = function
        self._function: Callable[[Any], Any] = callable_of(function, "--with")
        self._like = self._pytree(like) if like else None

    def values(self, run: RunRecord, merged: MergedModel) -> dict[str, Values]:
        """Return what the function says of the newest values, and of their average where there is one.

        Raises:
            LayoutMismatch: the run is not of the model that the parameters shall be like.
            AtollError: the function fails, or returns what is no number.
        """
        if self._like is not None:
            check_like(run, self._like)
        average = {} if merged.average is None else {"average": self._called(merged.average)}
        return {"values": self._called(merged.params), **average}

    def _pytree(self, like: str) -> Any:  # noqa: ANN401  (any JAX pytree)
        found = loaded(like, "--like")
        try:
            return found() if callable(found) else found
        except FAILURES as error:
            raise SettingsError(
                "--like names a function that fails", got=f"{like}: {said_by(error)}", todo="mend it, or name a pytree"
            ) from error

    def _called(self, params: Mapping[str, Any]) -> Values:
        given = dict(params) if self._like is None else placed(params, self._like)
        try:
            said = self._function(given)
        except FAILURES as error:
            raise AtollError(
                f"the function {self.name} failed", got=said_by(error), todo="mend it; it gets the merged parameters"
            ) from error
        return self._numbers(said)

    def _numbers(self, said: object) -> Values:
        """Return what a function returned as numbers by name."""
        named = said if isinstance(said, Mapping) else {ONE: said}
        found = {}
        for name, value in named.items():
            number = _number(value)
            if not (isinstance(name, str) and 0 < len(name) <= NAME_CHARS_MAX) or number is None:
                raise AtollError(
                    f"the function {self.name} returned what is no number",
                    got=_shown(name, value),
                    allowed=f"a finite number, or a dict of them by names of at most {NAME_CHARS_MAX} characters",
                    todo="return for example float(loss)",
                )
            found[name] = number
        if not 1 <= len(found) <= VALUES_MAX:
            raise AtollError(
                f"the function {self.name} returned too many numbers or none",
                got=len(found),
                allowed=f"1..{VALUES_MAX}",
            )
        return found


def _shown(name: object, value: object) -> str:
    try:
        return f"{name} = {value!r}"[:200]
    except FAILURES:
        return f"a {type(value).__name__}"


def _number(value: object) -> float | None:
    """Return a number, NumPy's and JAX's too, as a float; None for anything else."""
    if isinstance(value, bool | str | bytes) or value is None:
        return None
    try:
        array = np.asarray(value)
        number = float(array) if array.shape == () and array.dtype.kind != "b" else math.nan
    except FAILURES:  # the value may be an object of theirs
        return None
    return number if math.isfinite(number) else None
