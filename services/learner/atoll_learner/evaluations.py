"""Evaluations of a merged model: the reference model's bits per byte, or the numbers of a function of somebody's own.

The function of somebody's own loop (`atoll evaluate --with module:function`) gets the merged parameters and returns a number,
or several by name:

    def accuracy(params) -> float | dict[str, float]

`params` are NumPy arrays by their names in the run; with `--like module:attribute` they are a pytree like that one, or like
what it returns if it is a function. If the run keeps an average of its values, the function is called on that, too.

After a run's last commit the measurement at the interval and that of the export are of the same values, so `MeasureOnce`
answers from memory: by the values' bytes, because versions of a run that was rebuilt are given out a second time.
"""

from __future__ import annotations

import hashlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from atoll.base.errors import AtollError, SettingsError
from atoll.client.model_reader import check_like, place_like
from atoll.run.folder import unusable
from atoll.run.merged_model import MergedModel
from atoll.settings import Settings
from atoll.wire.events import EvaluatedEvent, ValidationEvent
from atoll.wire.messages import RunRecord
from atoll_learner.plug_ins import FAILURES, callable_of, describe_failure, load_object
from atoll_learner.process import LearnerWork
from atoll_learner.run_export import Measure, Measured, sampler_of, work_of, write_measured, write_model

if TYPE_CHECKING:
    from atoll_learner.model import Sampler

VALUES_MAX: Final = 64
NAME_CHARS_MAX: Final = 64
ONE: Final = "value"
"""The name of a single number."""
Values = dict[str, float]
ANSWERS_KEPT = 4
"""The first values, the newest, their average, and one more."""


class Evaluation(ABC):
    """One kind of measurement; where it writes no model out, `atoll export` does."""

    @abstractmethod
    def measure(self, run: RunRecord, merged: MergedModel, tokens: int) -> ValidationEvent | EvaluatedEvent:
        """Return the event about a run's model after so many tokens."""

    def prepare(self) -> None:  # noqa: B027  (nothing, where nothing is exported)
        """Get ready for `write` after the first measurement, while nobody waits for it."""

    def write(self, run: RunRecord, merged: MergedModel) -> None:  # noqa: B027
        """Write a model out; it may be measured meanwhile."""

    def conclude(self, run: RunRecord, merged: MergedModel, began_s: float) -> None:  # noqa: B027
        """Write out how the model measured that was measured last; the export began at `began_s`, by the monotonic clock."""


class ReferenceEvaluation(Evaluation):
    """Bits per byte of the reference model. Its program is compiled when there is something to measure."""

    def __init__(self, settings: Settings, work: LearnerWork, out: Path | None) -> None:
        self._settings = settings
        self._work = work
        self._out = out
        self._measure: Measure | None = None
        self._initial: float | None = None
        self._last: ValidationEvent | None = None
        self._shapes: dict[str, Any] = {}
        self._sampler: Sampler | None = None

    def measure(self, run: RunRecord, merged: MergedModel, tokens: int) -> ValidationEvent:
        """Measure the newest values, and their average where the run keeps one."""
        self._work = work_of(run, self._work)
        self._last = measure_merged(merged, self._measure_values, tokens)
        if merged.versions_max == 0:
            self._initial = self._last.bits_per_byte
        self._shapes = {name: (leaf.shape, leaf.dtype) for name, leaf in merged.params.items()}
        return self._last

    def prepare(self) -> None:
        """Compile what draws the sample, if there will be one."""
        if self._out is not None and self._sampler is None:
            self._sampler = sampler_of(self._work)
            self._sampler.compile(self._shapes)

    def write(self, run: RunRecord, merged: MergedModel) -> None:
        """Write the model and a sample of its text, if there is a folder for them."""
        if self._out is None:
            return
        work = work_of(run, self._work)
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            write_model(work, self._out, run, merged, self._sampler or sampler_of(work))
        except OSError as error:
            raise unusable(self._out, error) from error

    def conclude(self, run: RunRecord, merged: MergedModel, began_s: float) -> None:
        """Write `validation.json`, if there is a folder for it."""
        if self._out is None or self._last is None:
            return
        found = Measured(self._first(run), self._last.bits_per_byte, self._last.average)
        try:
            write_measured(self._work, self._out, merged, found, began_s)
        except OSError as error:
            raise unusable(self._out, error) from error

    def _measure_values(self, params: dict[str, Any]) -> float:
        from atoll_learner.train import make_evaluator  # noqa: PLC0415  (loads JAX)

        if self._measure is None:
            work = self._work
            self._measure = MeasureOnce(make_evaluator(work.model, work.train, work.shards, work.held_out_tokens))
        return self._measure(params)

    def _first(self, run: RunRecord) -> float:
        """Return the measure of the values that the run began with; an evaluator that came late has not seen them."""
        from atoll_learner.export import first_values  # noqa: PLC0415  (loads JAX)

        if self._initial is None:
            first = first_values(self._work.model, run.seed, self._settings.learner.initial_model)
            self._initial = round(self._measure_values(first), 5)
        return self._initial


def measure_merged(
    merged: MergedModel,
    measure: Callable[[dict[str, Any]], float],
    run_tokens: int,
    clock: Callable[[], float] = time.monotonic,
) -> ValidationEvent:
    """Return the `validation` event of a merged model; `clock` says how long measuring took."""
    began_s = clock()
    return ValidationEvent(
        average=None if merged.average is None else round(measure(merged.average), 5),
        bits_per_byte=round(measure(merged.params), 5),
        run_tokens=run_tokens,
        versions_min=merged.versions_min,
        versions_max=merged.versions_max,
        token_fragments_merged=merged.token_fragments,
        took_s=round(clock() - began_s, 3),
    )


class OwnEvaluation(Evaluation):
    """Numbers of a function of somebody's own about the model of their loop."""

    def __init__(self, function: str, like: str = "") -> None:
        """Load the function, and the pytree that its parameters shall be like.

        Raises:
            SettingsError: there is no such function or pytree.
        """
        self.name = function
        self._function: Callable[[Any], Any] = callable_of(function, "--with")
        self._like = self._pytree(like) if like else None

    def measure(self, run: RunRecord, merged: MergedModel, tokens: int) -> EvaluatedEvent:
        """Return the numbers of that function."""
        began_s = time.monotonic()
        values, average = self.values(run, merged)
        return EvaluatedEvent(
            run_tokens=tokens,
            values=values,
            average=average,
            versions_min=merged.versions_min,
            versions_max=merged.versions_max,
            took_s=round(time.monotonic() - began_s, 3),
        )

    def values(self, run: RunRecord, merged: MergedModel) -> tuple[Values, Values | None]:
        """Return what the function says of the newest values, and of their average where there is one.

        Raises:
            LayoutMismatch: the run is not of the model that the parameters shall be like.
            AtollError: the function fails, or returns what is no number.
        """
        if self._like is not None:
            check_like(run, self._like)
        average = None if merged.average is None else self._call(merged.average)
        return self._call(merged.params), average

    def _pytree(self, like: str) -> Any:  # noqa: ANN401  (any JAX pytree)
        found = load_object(like, "--like")
        try:
            return found() if callable(found) else found
        except FAILURES as error:
            raise SettingsError(
                "--like names a function that fails",
                got=f"{like}: {describe_failure(error)}",
                todo="mend it, or name a pytree",
            ) from error

    def _call(self, params: Mapping[str, Any]) -> Values:
        given = dict(params) if self._like is None else place_like(params, self._like)
        try:
            said = self._function(given)
        except FAILURES as error:
            raise AtollError(
                f"the function {self.name} failed",
                got=describe_failure(error),
                todo="mend it; it gets the merged parameters",
            ) from error
        return self._numbers(said)

    def _numbers(self, said: object) -> Values:
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
    if isinstance(value, bool | str | bytes) or value is None:
        return None
    try:
        array = np.asarray(value)
        number = float(array) if array.shape == () and array.dtype.kind != "b" else math.nan
    except FAILURES:  # the value may be an object of theirs
        return None
    return number if math.isfinite(number) else None


class MeasureOnce:
    """A measure of parameters that remembers its last few answers."""

    def __init__(self, measure: Callable[[dict[str, Any]], float]) -> None:
        self._measure = measure
        self._known: dict[bytes, float] = {}

    def __call__(self, params: dict[str, Any]) -> float:
        """Return the measure of `params`, found once for the same values."""
        digest = _digest(params)
        answer = self._known.pop(digest, None)
        self._known[digest] = self._measure(params) if answer is None else answer
        while len(self._known) > ANSWERS_KEPT:
            del self._known[next(iter(self._known))]  # what was asked for longest ago
        return self._known[digest]


def _digest(params: Mapping[str, Any]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in sorted(params.items()):
        values = np.ascontiguousarray(leaf)
        digest.update(f"{name} {values.dtype} {values.shape}\n".encode())
        digest.update(values.reshape(-1).view(np.uint8).data)
    return digest.digest()
