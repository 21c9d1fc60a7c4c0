"""The `config.json` of a Llama, a Qwen 2 or a Qwen 3, as settings of our model: what a model's tensors do not say.

    llama   no biases, no norms of queries and keys; rotations may be scaled as in Llama 3
    qwen2   biases of queries, keys and values
    qwen3   queries and keys of every head are normalised; heads may be wider than width / heads

A field that a file leaves out has the value of Transformers, which differs by family. What this model cannot do is listed by
the field's name, all of it at once. A field that none of the three families reads is passed over.

Source: `configuration_llama.py`, `configuration_qwen2.py`, `configuration_qwen3.py` and `modeling_rope_utils.py` of
Transformers 5.23, which also reads `rope_theta` and `rope_scaling` as version 4 wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from atoll.base.errors import CheckpointError
from atoll.base.files import read_text
from atoll.base.parsing import parsed

CONFIG: Final = "config.json"
FIELDS: Final = {
    "hidden_size": "width",
    "intermediate_size": "ffn",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "tied",
    "vocab_size": "vocab",
}
"""Fields that a `config.json` and the settings of a model both have, by their names there and here."""
SCALED: Final = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_context",
}
"""The same for the four numbers of a rotation of type `llama3`."""
REQUIRED: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
ARCHITECTURES: Final = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
EXTRAS: Final[Mapping[str, Mapping[str, bool]]] = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
}
"""Settings that follow from `model_type` alone."""
ONLY: Final[Mapping[str, tuple[object, ...]]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "sliding_window": (None,),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "compression_config": (None,),
}
"""Values of a `config.json` that this model supports; a name that is missing there is no question."""
COUNT: Final = "a whole number from 1"
LEAST, MOST = 1e-30, 1e30
POSITIVE: Final = f"a number from {LEAST:g} to {MOST:g}"
FLAG: Final = "true or false"
KINDS: Final[Mapping[str, str]] = {
    "hidden_size": COUNT,
    "intermediate_size": COUNT,
    "num_hidden_layers": COUNT,
    "num_attention_heads": COUNT,
    "num_key_value_heads": COUNT,
    "head_dim": COUNT,
    "vocab_size": COUNT,
    "max_position_embeddings": COUNT,
    "rms_norm_eps": POSITIVE,
    "rope_theta": POSITIVE,
    "tie_word_embeddings": FLAG,
    "factor": POSITIVE,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "original_max_position_embeddings": COUNT,
}
"""Types of fields, where they are given; JSON's `true` is no number, and `"8"` none either."""
UNREAD: Final[Mapping[str, frozenset[str]]] = {
    "llama": frozenset(),
    "qwen2": frozenset({"attention_bias", "mlp_bias", "pretraining_tp", "sliding_window"}),
    "qwen3": frozenset({"mlp_bias", "pretraining_tp", "sliding_window"}),
}
"""Fields that a family does not read; the window of a Qwen counts where `use_sliding_window` says so."""


def family_of(*, qkv_bias: bool, qk_norm: bool) -> str:
    """Return the `model_type` of a model with these extras.

    Raises:
        ValueError: no family has both.
    """
    for family, extras in EXTRAS.items():
        if extras == {"qkv_bias": qkv_bias, "qk_norm": qk_norm}:
            return family
    raise ValueError("qkv_bias and qk_norm exclude each other: Qwen 2 has the first, Qwen 3 the second, none has both")


def read_config(file: Path) -> dict[str, Any] | None:
    """Return what a `config.json` says; None if there is none.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        return parsed(read_text(file), dict[str, Any])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            "the configuration of this model cannot be read", got=f"{file}: {why}", todo="mend or remove it"
        ) from error


def unsupported(said: Mapping[str, Any]) -> list[str]:
    """Return in words, by field, what a `config.json` asks for and this model cannot do; empty if there is nothing."""
    family = said.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        return [_cannot("model_type", family, tuple(ARCHITECTURES))]
    found = []
    names = [f"{ARCHITECTURES[family]}{head}" for head in ("ForCausalLM", "Model")]
    if said.get("architectures") not in (None, *([name] for name in names)):
        found.append(_cannot("architectures", said["architectures"], tuple(names)))
    found += [
        _cannot(name, said[name], allowed)
        for name, allowed in ONLY.items()
        if name in said and name not in UNREAD[family] and said[name] not in allowed
    ]
    kinds = said.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        found.append(_cannot("layer_types", kinds, ("full_attention",)))
    found += [f"{name} is missing" for name in REQUIRED if said.get(name) is None]
    found += _of_other_kinds(said, (*FIELDS, "max_position_embeddings"))
    return found + list(_unsupported_rotation(said))


def _of_other_kinds(said: Mapping[str, Any], names: Iterable[str], where: str = "") -> Iterator[str]:
    for name in names:
        value, kind = said.get(name), KINDS[name]
        if value is not None and not _is_of(kind, value):
            yield f"{where}{name} = {_shown(value)}, which is not {kind}"


def _shown(value: object) -> str:
    """Return a value of a `config.json` as it stands there; a deeply nested one has no such text."""
    try:
        return json.dumps(value)
    except RecursionError:
        return "a deeply nested value"


def _is_of(kind: str, value: object) -> bool:
    if isinstance(value, bool) or kind == FLAG:
        return isinstance(value, bool) and kind == FLAG
    if kind == COUNT:
        return isinstance(value, int) and value > 0
    return isinstance(value, int | float) and LEAST <= value <= MOST


def dimensions_of(said: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return the settings of the model that a supported `config.json` describes: each with the field's name and its value.

    Values are as the file has them: nothing is checked or converted. `context` is not among them.
    """
    family = said["model_type"]
    heads, kv_heads = said["num_attention_heads"], said.get("num_key_value_heads")
    if "num_key_value_heads" not in said:
        kv_heads = heads if family == "llama" else 32
    values: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    values |= {name: said[name] for name in FIELDS if said.get(name) is not None}
    values["num_key_value_heads"] = heads if kv_heads is None else kv_heads
    values["rope_theta"] = _rotation(said).get("rope_theta") or said.get("rope_theta") or 10_000.0
    if "head_dim" not in values:
        values["head_dim"] = 128 if family == "qwen3" else _ratio(said["hidden_size"], heads)
    rotation = _rotation(said)
    scaled = {name: rotation[name] for name in SCALED} if _rope_type(rotation) == "llama3" else {"factor": 1.0}
    return {
        **{ours: (name, values[name]) for name, ours in FIELDS.items()},
        **{SCALED[name]: (f"rope_parameters: {name}", value) for name, value in scaled.items()},
        **{ours: ("model_type", value) for ours, value in EXTRAS[family].items()},
    }


def _ratio(width: object, heads: object) -> object:
    """Return width / heads as Transformers takes it; what is no pair of numbers is refused when it is compared."""
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def _rotation(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of the rotation beside its base, by its name of today or of before; a word is its type."""
    told = said.get("rope_scaling") or said.get("rope_parameters") or {}
    return told if isinstance(told, dict) else {"rope_type": told}


def _rope_type(rotation: Mapping[str, Any]) -> object:
    return rotation.get("rope_type", rotation.get("type", "default"))


def _unsupported_rotation(said: Mapping[str, Any]) -> Iterator[str]:
    where = "rope_scaling" if said.get("rope_scaling") else "rope_parameters"
    rotation = _rotation(said)
    other = said.get("rope_parameters")
    if (
        said.get("rope_scaling")
        and isinstance(other, dict)
        and _without_base(other) not in ({}, _without_base(rotation))
    ):
        yield f"rope_scaling = {_shown(said['rope_scaling'])}, which is not what rope_parameters say"
    kind = _rope_type(rotation)
    scaled = kind == "llama3"
    if kind not in ("default", "llama3"):
        yield _cannot(f"{where}: rope_type", kind, ("default", "llama3"))
    if scaled:
        yield from (f"{where}: {name} is missing" for name in SCALED if rotation.get(name) is None)
        yield from _of_other_kinds(rotation, SCALED, f"{where}: ")
    yield from _of_other_kinds(rotation, ("rope_theta",), f"{where}: ")
    read = {"rope_type", "type", "rope_theta", *(SCALED if scaled else ())}
    for name, value in rotation.items():
        if name not in read and not (name == "partial_rotary_factor" and value in (1, None)):
            yield f"{where}: {name} = {_shown(value)}, which this model cannot do"


def _without_base(rotation: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in rotation.items() if name not in ("rope_theta", "rope_type", "type")}
    return kept if _rope_type(rotation) == "default" else {**kept, "rope_type": _rope_type(rotation)}


def _cannot(name: str, value: object, allowed: tuple[object, ...]) -> str:
    return f"{name} = {_shown(value)}, which this model cannot do ({', '.join(map(_shown, allowed))})"
