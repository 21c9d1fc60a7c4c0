r"""Settings of training, and the learning rate of a step by the run's tokens: warm-up, hold, a straight fall to nothing.

With s the share of the run's token target that is trained, w the warm-up's share and d that of the decay, `wsd` (warmup,
stable, decay) is

.. math::

    r(s) = r_{max} \cdot \min\left(1,\; \frac{s}{w},\; m + (1 - m) \frac{1 - s}{d}\right)

where m is `rate_min_ratio`. It is at least as good as a cosine (Hu et al., arXiv 2404.06395; Haegele et al., arXiv 2405.18392),
and the longer a run, the sooner its fall should begin, against the noise of its steps (Bergsma et al., arXiv 2502.15938). So
where nobody says d, the rate is held for about as many steps whatever the run's length, as far as d keeps its bounds:

.. math::

    d = \max\left(\tfrac{2}{5},\; 1 - \frac{900 \cdot \text{tokens of a step}}{\text{token target}}\right), \qquad d \le 1 - w

The 900 are steps of all learners together, because a learner does not know how many others there will be (docs/adr/0061).
`cosine` is half a wave from the rate to its share `rate_min_ratio`. JAX is not loaded here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from atoll.base.errors import SettingsError
from atoll.settings.errors import section_error
from atoll_learner.model_settings import ModelSettings

SEQUENCE_MAX = 1024
"""The default at most: contexts of models that somebody has are far longer than what a step can hold."""
ANCHOR_RATE: Final = 2e-4
ANCHOR_PARAMETERS: Final = 1.2e9
EXPONENT: Final = 1.0 / 3.0
RATE_MAX: Final = 1e-2
TIMES: Final = {"adamw": 1.0, "muon": 4.0}
"""Rate of each inner optimizer, usual and at most, in rates of AdamW."""
WARMUP: Final = {"adamw": 0.1, "muon": 0.02}
"""Share of a run's token target during which the rate rises. Muon's steps have one length from the first on; AdamW's second
moments have to become known (docs/adr/0061)."""


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

    The learning rate rises linearly during warm-up, is held, and falls at the end. Without a token target it stays constant.

    Attributes:
        batch: sequences of one micro-batch.
        sequence: tokens of one sequence; if not given, the model's context, at most 1024.
        accumulation: micro-batches of one step.
        rate: largest learning rate; if not given, it follows from model and optimizer.
        schedule: "wsd", which holds the rate and then lets it fall in a straight line; or "cosine", which lets it fall from the
            warm-up on.
        warmup: share of the run's token target during which the rate rises; if not given, it follows from the optimizer.
        decay: share of the run's token target, at its end, during which the rate falls; for "wsd". "auto" follows from the
            target: the longer a run, the larger. 0 holds the rate to the last token.
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


def layer_parameters(model: ModelSettings) -> int:
    """Return the parameters in matrices of all layers: attention and feed-forward, no embeddings, gains or biases."""
    queries = model.heads * model.head_dim
    keys_and_values = 2 * model.kv_heads * model.head_dim
    attention = model.width * (2 * queries + keys_and_values)
    return model.layers * (attention + 3 * model.width * model.ffn)


def usual_rate(model: ModelSettings, optimizer: str) -> float:
    r"""Return the largest learning rate for `model` with an inner optimizer (`TIMES`), to two digits.

    For AdamW, with N the parameters of the layers' matrices (embeddings are left out: a larger vocabulary makes no layer
    wider),

    .. math::

        r_0(N) = \min\left(r_{max},\; 2 \cdot 10^{-4} \left(\frac{1.2 \cdot 10^9}{N}\right)^{1/3}\right)

    The anchor is GPT-3 XL, 2e-4 for 1.2 billion (Brown et al., arXiv 2005.14165, table 2.1), and the rates of that table from
    85 million to 13 billion are within a fifth of the line. The exponent says that the rate falls as the width does: where
    models grow in all directions N ~ width^3, and maximal update parametrisation wants 1 / width for matrices (Yang et al.,
    arXiv 2203.03466). Four to five orders below the anchor it was looked at with one seed for each of three sizes
    (docs/adr/0056).

    Muon's steps have the root mean square of AdamW's, and still it wants four times the rate, at four sizes from 16 thousand
    parameters to a million (docs/adr/0059); at eight million twice was 1.5 % better, so for a larger model half of its rate is
    worth a try. Left out: the tokens of a run (its schedule knows them), its batch, and the number of learners (each steps with
    a batch of its own).

    Examples:
        >>> from atoll_learner.model_settings import model_settings
        >>> sizes = [model_settings({"size": size}, vocab=256) for size in ("xs", "s", "m", "l")]
        >>> [usual_rate(size, "adamw") for size in sizes]
        [0.0043, 0.0021, 0.0011, 0.00071]
        >>> [usual_rate(size, "muon") for size in sizes]
        [0.017, 0.0085, 0.0043, 0.0028]
    """
    rate = ANCHOR_RATE * (ANCHOR_PARAMETERS / layer_parameters(model)) ** EXPONENT
    return float(f"{TIMES[optimizer] * min(RATE_MAX, rate):.2g}")


HOLD_STEPS: Final = 900
"""The rate begins to fall after so many steps of all learners, where the bounds of the decay allow it."""
DECAY_MIN: Final = 0.4


def learning_rate(train: TrainSettings, run_tokens: int, tokens_target: int) -> float:
    """Return the rate of the step that begins after `run_tokens` of `tokens_target` tokens; constant without a target.

    Tokens that were trained before the run count as the first of both. During warm-up the rate is that of the step's end: a
    first step of next to no length would be the measure by which shards judge the next ones (`atoll.protocol.quarantine`).
    """
    if tokens_target <= 0:
        return train.rate
    run_tokens, tokens_target = run_tokens + train.tokens_before, tokens_target + train.tokens_before
    warm = max(1.0, train.warmup * tokens_target)
    risen = min(1.0, (run_tokens + train.tokens_per_step) / warm) if run_tokens < warm else 1.0
    if train.schedule == "cosine":
        share = min(1.0, max(0.0, run_tokens - warm) / max(1.0, tokens_target - warm))
        left = 0.5 * (1.0 + math.cos(math.pi * share))
    else:
        falling = max(1.0, decay_share(train, tokens_target) * tokens_target)
        left = min(1.0, max(0, tokens_target - run_tokens) / falling)
    return train.rate * min(risen, train.rate_min_ratio + (1.0 - train.rate_min_ratio) * left)


def decay_share(train: TrainSettings, tokens_target: int) -> float:
    """Return the share of `tokens_target` (> 0) during which the rate of "wsd" falls."""
    if train.decay != "auto":
        return train.decay
    return min(1.0 - train.warmup, max(DECAY_MIN, 1.0 - HOLD_STEPS * train.tokens_per_step / tokens_target))
