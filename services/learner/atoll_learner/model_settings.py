"""The model's dimensions, from one dial, without loading JAX.

The dial is `depth`, the number of layers L. Everything else follows (values in brackets for the demo's L = 4):

    width   d = 32 L, at least 32                          (128)
    heads   one per 32 channels, at least 1                (4)
    kv_heads  half of the heads, at least 1 (GQA)          (2)
    ffn     4 d                                            (512)
    context 128 tokens up to L = 8, 512 beyond

which makes 1.0 million parameters of the demo's model over bytes. The aspect ratio d/L = 32 and the wide ffn are choices
for models of one to thirty million parameters, where training time is short; they are not tuned. Any value can be given
instead. Named sizes: xs = 2, s = 4 (the demo), m = 8, l = 12.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from atoll.base.errors import SettingsError
from atoll.settings import refusal

SIZES = {"xs": 2, "s": 4, "m": 8, "l": 12}
SIZE_DEFAULT = "s"


class ModelSettings(BaseModel):
    """Dimensions of a Llama-shaped decoder; `describe` is what the run record keeps.

    Attributes:
        vocab: size of the vocabulary; it comes with the data.
        layers: layers.
        width: width of the residual stream; an even multiple of `heads`.
        heads: attention heads.
        kv_heads: heads of keys and values; `heads` must be a multiple of it.
        ffn: width of the feed-forward layers.
        context: longest sequence, in tokens.
        tied: whether the output layer shares the embedding's weights.
        rope_theta: base of the rotary position embedding.
        norm_eps: what the normalisation adds to a variance.
        compute: number format of the activations; parameters are float32.
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

    @model_validator(mode="after")
    def _related(self) -> ModelSettings:
        """Check the relations between dimensions."""
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must be an even multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        return self

    @property
    def head_dim(self) -> int:
        """Return the channels of one head."""
        return self.width // self.heads

    def describe(self) -> str:
        """Return the dimensions as canonical JSON."""
        return self.model_dump_json()


def model_settings(table: Mapping[str, Any], *, vocab: int) -> ModelSettings:
    """Return the model that `table` (the `[model]` section) asks for over a vocabulary of `vocab` tokens.

    Raises:
        SettingsError: a name is unknown, a value out of range, or two dimensions contradict each other.
    """
    given = dict(table)
    if "vocab" in given:
        raise SettingsError("model.vocab follows from the data", got=given["vocab"], todo="leave it away")
    size = given.pop("size", SIZE_DEFAULT)
    depth = SIZES.get(str(size)) or (int(size) if str(size).isdigit() and 0 < int(size) <= 64 else 0)
    if not depth:
        raise SettingsError(
            "unknown model size", got=size, allowed=f"{', '.join(SIZES)} or a depth from 1 to 64", todo="set model.size"
        )
    width = max(32, 32 * depth)
    heads = max(1, width // 32)
    derived: dict[str, Any] = {
        "vocab": vocab,
        "layers": depth,
        "width": width,
        "heads": heads,
        "kv_heads": max(1, heads // 2),
        "ffn": 4 * width,
        "context": 128 if depth <= 8 else 512,
    }
    try:
        return ModelSettings(**(derived | given))
    except ValidationError as error:
        raise refusal(
            error, "model", ["size", *(name for name in ModelSettings.model_fields if name != "vocab")]
        ) from error
