"""The model of a run, for those that read it: evaluator, export, attribution.

A learner's settings say its model, because it may found the run. A reader comes to a run that is there: the run record
describes the model (`ModelSettings.describe`), and nothing has to be said. The settings' own model counts for nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from pydantic import ValidationError

from atoll.base.errors import SettingsError
from atoll.base.logs import get
from atoll.base.parsing import parsed
from atoll.wire.messages import RunRecord
from atoll_learner.model_settings import LATER, ModelSettings
from atoll_learner.process import LearnerWork
from atoll_learner.train_settings import usual_sequence

log = get(__name__)


def model_of(run: RunRecord) -> ModelSettings | None:
    """Return the reference model that a run record describes; None where it is a model of somebody's own loop."""
    try:
        return ModelSettings(**(LATER | parsed(run.model.encode(), dict[str, Any])))
    except (msgspec.MsgspecError, ValidationError):
        return None


def work_of(run: RunRecord, work: LearnerWork) -> LearnerWork:
    """Return `work` with the model of the run, and a sequence for it: as long as its learners' by default, or as was said.

    Raises:
        SettingsError: the run is of somebody's own model, or the text here has tokens that the run's model has not.
        DataError: there is less held-out text than a sequence.
    """
    model = model_of(run)
    if model is None:
        raise SettingsError(
            f"the model of run {run.run!r} is not the reference model",
            got=run.model or "no description",
            allowed="a run of `atoll learner` or `atoll up`",
            todo="measure it with `--with`, and export it without data.dir",
        )
    if model == work.model:
        return work
    if model.vocab < work.shards.meta.vocab:
        raise SettingsError(
            f"the data has tokens that the model of run {run.run!r} has not",
            got=f"{work.shards.meta.vocab} tokens in {work.shards.folder}",
            allowed=f"at most {model.vocab}",
            todo="name the run's own text (data.dir)",
        )
    follows = work.train.sequence == usual_sequence(work.model)
    sequence = usual_sequence(model) if follows else min(work.train.sequence, model.context)
    work.shards.check_measurable(sequence)
    log.info("model.of_the_run", model=run.model, sequence=sequence)
    return replace(work, model=model, train=work.train.model_copy(update={"sequence": sequence}))
