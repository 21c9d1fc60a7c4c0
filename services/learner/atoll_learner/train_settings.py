"""Settings of training: batch, schedule by tokens, Muon or AdamW; without loading JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from atoll.base.errors import SettingsError
from atoll.settings import section_error
from atoll_learner.model_settings import ModelSettings
from atoll_learner.rate_rule import WARMUP, usual_rate

SEQUENCE_MAX = 1024
"""The default at most: contexts of models that somebody has are far longer than what a step can hold."""


def _share_or_auto(value: Any) -> Literal["auto"] | float:  # noqa: ANN401  (whatever somebody wrote)
    """Return a share of the target, or "auto"; pydantic's own union would refuse a wrong number as a wrong word."""
    if value == "auto":
        return "auto"
    try:
        share = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        share = math.nan
    if not 0.0 <= share <= 1.0:
        raise ValueError("neither a share from 0 to 1 nor auto")
    return share


class TrainSettings(BaseModel):
    """The inner optimizer and its schedule, by tokens of the run.

    The learning rate rises linearly during warm-up, is held, and falls at the end (`atoll_learner.schedule`). Without a token
    target it stays constant.

    Attributes:
        batch: sequences of one micro-batch.
        sequence: tokens of one sequence; if not given, the model's context, at most 1024.
        accumulation: micro-batches of one step.
        rate: largest learning rate; if not given, it follows from model and optimizer (`atoll_learner.rate_rule`).
        schedule: "wsd", which holds the rate and then lets it fall in a straight line; or "cosine", which lets it fall from the
            warm-up on.
        warmup: share of the run's token target during which the rate rises; if not given, it follows from the optimizer
            (`atoll_learner.rate_rule`).
        decay: share of the run's token target, at its end, during which the rate falls; for "wsd". "auto" follows from the
            target: the longer a run, the larger (`atoll_learner.schedule`). 0 holds the rate to the last token.
        rate_min_ratio: learning rate at the end, as a share of `rate`.
        tokens_before: tokens that were trained before this run began from `learner.initial_model`; the schedule covers both
            runs and goes on where the first one stood.
        optimizer: "muon", which moves matrices by Muon and everything else (embeddings, gains) by AdamW at the same `rate`,
            because Muon's steps are scaled to the root mean square that AdamW's usually have (arXiv 2502.16982); or "adamw".
        muon_momentum: momentum of Muon.
        weight_decay: weight decay.
        beta1: decay of AdamW's first moment.
        beta2: decay of AdamW's second moment.
        clip: largest global norm of a gradient; longer ones are shortened to it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: int = Field(default=8, ge=1, le=1 << 16)
    sequence: int = Field(default=128, ge=2, le=1 << 20)
    accumulation: int = Field(default=1, ge=1, le=4096)
    rate: float = Field(gt=0.0, le=1.0)
    schedule: Literal["wsd", "cosine"] = "wsd"
    warmup: float = Field(ge=0.0, le=0.5)
    decay: Annotated[
        Literal["auto"] | float,
        PlainValidator(_share_or_auto),
        Field(description="auto, or at least 0 and at most 1"),
    ] = "auto"
    rate_min_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    tokens_before: int = Field(default=0, ge=0, le=1 << 62)
    optimizer: Literal["muon", "adamw"] = "muon"
    muon_momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    weight_decay: float = Field(default=0.1, ge=0.0, le=1.0)
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.99, ge=0.0, lt=1.0)
    clip: float = Field(default=1.0, gt=0.0)

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens one step trains on."""
        return self.batch * self.sequence * self.accumulation


def usual_sequence(model: ModelSettings) -> int:
    """Return the tokens of one sequence where nobody says them."""
    return min(model.context, SEQUENCE_MAX)


def train_settings(table: Mapping[str, Any], *, model: ModelSettings) -> TrainSettings:
    """Return what `table` (the `[train]` section) asks for to train `model`: its size decides what nobody has said.

    Raises:
        SettingsError: a name is unknown, a value out of range, or the sequence exceeds the context.
    """
    follows = {"sequence": usual_sequence(model), "rate": 1.0, "warmup": 0.0}
    try:
        train = TrainSettings(**(follows | dict(table)))
    except ValidationError as error:
        raise section_error(error, "train", TrainSettings) from error
    if "rate" not in table:
        train = train.model_copy(update={"rate": usual_rate(model, train.optimizer)})
    if "warmup" not in table:
        train = train.model_copy(update={"warmup": WARMUP[train.optimizer]})
    if train.sequence > model.context:
        raise SettingsError(
            "train.sequence is longer than the model's context",
            got=train.sequence,
            allowed=f"at most model.context = {model.context}",
            todo="shorten the sequence or widen the context",
        )
    return train
