"""The model's dimensions, from one dial, without loading JAX.

The dial is `depth`, the number of layers L: xs = 2, s = 4 (the demo), m = 8, l = 12. Everything else follows (for L = 4):

    width   d = 32 L, at least 32                          (128)
    heads   one per 32 channels, at least 1                (4)
    kv_heads  half of the heads, at least 1 (GQA)          (2)
    ffn     4 d                                            (512)
    context 128 tokens up to L = 8, 512 beyond

The aspect ratio d/L = 32 and the wide ffn are choices for models of one to thirty million parameters, where training time is
short; they are not tuned. Any value can be given instead, and `model.config` names the `config.json` of a model whose
dimensions take the place of the dial's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from atoll.base.errors import CheckpointError, SettingsError
from atoll.settings.errors import section_error
from atoll_learner.data.tokenizer import BYTES
from atoll_learner.model_config import CONFIG, dimensions_of, family_of, read_config, unsupported

SIZES = {"xs": 2, "s": 4, "m": 8, "l": 12}
SIZE_DEFAULT = "s"
DEPTH_MAX = 64
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")
LATER = {
    "qkv_bias": False,
    "qk_norm": False,
    "rope_factor": 1.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_original_context": 8192,
}
"""Values where a description does not name them: those of former runs do not."""


class ModelSettings(BaseModel):
    """Dimensions of a decoder as Llama, Qwen 2 and Qwen 3 have it; `describe` is what the run record keeps.

    Attributes:
        vocab: size of the vocabulary: that of the data, or a larger one, of which the data does not use all.
        layers: layers.
        width: width of the residual stream; a multiple of `heads`.
        heads: attention heads.
        kv_heads: heads of keys and values; `heads` must be a multiple of it.
        ffn: width of the feed-forward layers.
        context: longest sequence, in tokens.
        tied: whether the output layer shares the embedding's weights.
        rope_theta: base of the rotary position embedding.
        norm_eps: what the normalisation adds to a variance.
        compute: number format of the activations; parameters are float32.
        head_dim: channels of one head, an even number; `width` / `heads`, if not given.
        qkv_bias: whether queries, keys and values have biases, as in Qwen 2.
        qk_norm: whether the queries and keys of every head are normalised before they are turned, as in Qwen 3.
        rope_factor: how much longer waves the slow rotations get, as in Llama 3; 1 for none.
        rope_low_freq_factor: waves longer than `rope_original_context` over this get the whole factor.
        rope_high_freq_factor: waves shorter than `rope_original_context` over this get none; more than `rope_low_freq_factor`.
        rope_original_context: tokens of the context before rotations were scaled.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab: int = Field(ge=2, le=1 << 20)
    layers: int = Field(ge=1, le=256)
    width: int = Field(ge=8, le=1 << 16)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    ffn: int = Field(ge=8)
    context: int = Field(ge=8, le=1 << 20)
    tied: bool = True
    rope_theta: float = Field(default=10_000.0, gt=1.0)
    norm_eps: float = Field(default=1e-5, gt=0.0)
    compute: Literal["float32", "bfloat16"] = "float32"
    head_dim: int = Field(default_factory=lambda given: given["width"] // given["heads"], ge=2, le=1 << 12)
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_factor: float = Field(default=1.0, ge=1.0, le=1024.0)
    rope_low_freq_factor: float = Field(default=1.0, gt=0.0)
    rope_high_freq_factor: float = Field(default=4.0, gt=0.0)
    rope_original_context: int = Field(default=8192, ge=8, le=1 << 24)

    @model_validator(mode="after")
    def _related(self) -> ModelSettings:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even (width {self.width}, heads {self.heads})")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if self.rope_low_freq_factor >= self.rope_high_freq_factor:
            raise ValueError(
                f"rope_low_freq_factor {self.rope_low_freq_factor} must be below "
                f"rope_high_freq_factor {self.rope_high_freq_factor}"
            )
        family_of(qkv_bias=self.qkv_bias, qk_norm=self.qk_norm)
        return self

    def describe(self) -> str:
        """Return the dimensions as canonical JSON; later ones only where they are not what a model without them has."""
        plain = {name for name, value in LATER.items() if getattr(self, name) == value}
        follows = {"head_dim"} if self.head_dim * self.heads == self.width else set()
        return self.model_dump_json(exclude=plain | follows)


class ModelTable(ModelSettings):
    """Dimensions of a decoder as Llama, Qwen 2 and Qwen 3 have it, as the `[model]` section of a file gives them.

    Attributes:
        size: the one dial of the model, from which width, heads, ffn and context follow; each can also be given by itself.
        config: a `config.json` of a Llama, Qwen 2 or Qwen 3, or its folder: all dimensions are those of that model.
    """

    size: str = Field(default=SIZE_DEFAULT, description=f"{', '.join(SIZES)}, or a depth from 1 to {DEPTH_MAX}")
    config: Path | None = None


def model_settings(table: Mapping[str, Any], *, vocab: int | None) -> ModelSettings:
    """Return the model that `table` (the `[model]` section) asks for over data of `vocab` tokens; None: not known yet.

    Raises:
        SettingsError: a name is unknown, a value out of range, two dimensions contradict each other, the vocabulary is
            smaller than the data's, or `model.config` names a model that ours cannot be.
    """
    given = dict(table)
    size, config = given.pop("size", SIZE_DEFAULT), given.pop("config", None)
    dimensions = _of_the_dial(size) if config is None else _of_a_config(config)
    try:
        model = ModelSettings(**({"vocab": vocab or BYTES} | dimensions | given))
    except ValidationError as error:
        raise section_error(error, "model", ModelSettings, ("size", "config")) from error
    if vocab is not None and model.vocab < vocab:
        raise SettingsError(
            "the data has tokens that the model has not",
            got=f"model.vocab = {model.vocab}, {vocab} tokens in the data",
            allowed=f"at least {vocab}",
            todo="leave model.vocab away, or prepare the text with the model's tokenizer",
        )
    return model


def _of_the_dial(size: object) -> dict[str, Any]:
    depth = SIZES.get(str(size)) or (int(str(size)) if str(size).isdigit() and 0 < int(str(size)) <= DEPTH_MAX else 0)
    if not depth:
        raise SettingsError(
            "unknown model size",
            got=size,
            allowed=f"{', '.join(SIZES)} or a depth from 1 to {DEPTH_MAX}",
            todo="set model.size",
        )
    width = max(32, 32 * depth)
    heads = max(1, width // 32)
    return {
        "layers": depth,
        "width": width,
        "heads": heads,
        "kv_heads": max(1, heads // 2),
        "ffn": 4 * width,
        "context": 128 if depth <= 8 else 512,
    }


def _of_a_config(place: object) -> dict[str, Any]:
    if not isinstance(place, str | Path):
        raise SettingsError(
            "setting model.config is wrong: not a path",
            allowed=f"a {CONFIG} or its folder",
            todo="name one",
            setting="model.config",
        )
    path = Path(place)
    file = path / CONFIG if os.path.isdir(path) else path  # noqa: PTH112  (a path that no system can have is no folder)
    try:
        said = read_config(file)
    except CheckpointError as error:
        raise SettingsError("model.config cannot be read", got=error.got, todo="mend it, or name another") from error
    if said is None:
        raise SettingsError(
            "model.config names no configuration", got=path, allowed=f"a {CONFIG} or its folder", todo="check the path"
        )
    if refused := unsupported(said):
        raise SettingsError(
            "model.config is of a model that this one cannot be",
            got=f"{file}: {'; '.join(refused)}",
            allowed="a Llama, Qwen 2 or Qwen 3 with full attention, in floating-point numbers",
            todo="begin from another model",
        )
    longest = said.get("max_position_embeddings")
    if longest is None:
        raise SettingsError(
            "model.config does not say its context", got=f"{file}: max_position_embeddings is missing", todo="add it"
        )
    return {ours: value for ours, (_, value) in dimensions_of(said).items()} | {"context": longest}
