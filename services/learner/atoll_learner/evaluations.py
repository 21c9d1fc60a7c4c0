"""What an evaluator measures: the reference model's bits per byte, or what a function of somebody's own says of their model.

Only the reference model is written out as well: the same process has its program and its last measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from atoll.run.folder import unusable
from atoll.run.merged_model import MergedModel
from atoll.settings import Settings
from atoll.wire.messages import RunRecord
from atoll_learner.exporting import Measure, Measured, sampler_of, write_measured, write_model
from atoll_learner.measure_once import MeasureOnce
from atoll_learner.process import LearnerWork
from atoll_learner.run_model import work_of

if TYPE_CHECKING:
    from atoll_learner.sample import Sampler


class Evaluation(Protocol):
    """What is measured."""

    kind: str
    """That of its events."""

    def fields(self, run: RunRecord, merged: MergedModel, tokens: int) -> dict[str, Any]:
        """Return the fields of an event about a run's model after so many tokens."""

    def prepare(self) -> None:
        """Get ready for `write` after the first measurement, while nobody waits for it."""

    def write(self, run: RunRecord, merged: MergedModel) -> None:
        """Write a model out; it may be measured meanwhile."""

    def conclude(self, run: RunRecord, merged: MergedModel, began_s: float) -> None:
        """Write out how the model measured that was measured last; the export began at `began_s`, by the monotonic clock."""


class ReferenceEvaluation:
    """Bits per byte of the reference model. Its program is compiled when there is something to measure."""

    kind = "validation"

    def __init__(self, settings: Settings, work: LearnerWork, out: Path | None) -> None:
        self._settings = settings
        self._work = work
        self._out = out
        self._measure: Measure | None = None
        self._initial: float | None = None
        self._last: dict[str, Any] = {}
        self._shapes: dict[str, Any] = {}
        self._sampler: Sampler | None = None

    def fields(self, run: RunRecord, merged: MergedModel, tokens: int) -> dict[str, Any]:
        """Measure the newest values, and their average where the run keeps one."""
        self._work = work_of(run, self._work)
        self._last = measured(merged, self._measured, tokens)
        if merged.versions_max == 0:
            self._initial = self._last["bits_per_byte"]
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
        if self._out is None:
            return
        found = Measured(self._first(run), self._last["bits_per_byte"], self._last.get("average"))
        try:
            write_measured(self._work, self._out, merged, found, began_s)
        except OSError as error:
            raise unusable(self._out, error) from error

    def _measured(self, params: dict[str, Any]) -> float:
        from atoll_learner.train import make_evaluator  # noqa: PLC0415  (loads JAX)

        if self._measure is None:
            work = self._work
            self._measure = MeasureOnce(make_evaluator(work.model, work.train, work.shards, work.held_out_tokens))
        return self._measure(params)

    def _first(self, run: RunRecord) -> float:
        """Return the measure of the values that the run began with; an evaluator that came late has not seen them."""
        from atoll_learner.beginning import first_values  # noqa: PLC0415  (loads JAX)

        if self._initial is None:
            first = first_values(self._work.model, run.seed, self._settings.learner.initial_model)
            self._initial = round(self._measured(first), 5)
        return self._initial


class OwnLoopEvaluation:
    """What a function of somebody's own says of the model of their loop."""

    kind = "evaluated"

    def __init__(self, own: str, like: str) -> None:
        from atoll_learner.own_evaluation import OwnEvaluation  # noqa: PLC0415

        self._evaluation = OwnEvaluation(own, like)

    def fields(self, run: RunRecord, merged: MergedModel, tokens: int) -> dict[str, Any]:
        """Return the numbers of that function."""
        return {
            "run_tokens": tokens,
            **self._evaluation.values(run, merged),
            "versions_min": merged.versions_min,
            "versions_max": merged.versions_max,
        }

    def prepare(self) -> None:
        """Nothing is exported."""

    def write(self, run: RunRecord, merged: MergedModel) -> None:
        """Write nothing: `atoll export` writes the model of any loop."""

    def conclude(self, run: RunRecord, merged: MergedModel, began_s: float) -> None:
        """Nothing was written."""


def measured(
    merged: MergedModel, measure: Callable[[dict[str, Any]], float], run_tokens: int
) -> dict[str, int | float]:
    """Return the fields of a `validation` event."""
    average = {} if merged.average is None else {"average": round(measure(merged.average), 5)}
    return {
        "run_tokens": run_tokens,
        "bits_per_byte": round(measure(merged.params), 5),
        **average,
        "versions_min": merged.versions_min,
        "versions_max": merged.versions_max,
        "token_fragments_merged": merged.token_fragments,
    }
