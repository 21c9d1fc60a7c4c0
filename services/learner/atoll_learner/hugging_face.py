"""The reference model in the words of Hugging Face: `config.json` written and read, `generation_config.json`, `tokenizer.json`.

The parameters have the names and shapes of a Llama from Hugging Face already, so a folder needs only these files beside
`model.safetensors` to be loaded by `from_pretrained`. In the other direction a `config.json` says what numbers cannot: how many
heads a matrix has, the base of the rotation, the epsilon of the norms. A model of other heads has the same shapes and other
logits. So what a file says is compared with the settings, and what this model cannot do is refused by name.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from atoll.base.errors import CheckpointError
from atoll.base.parsing import parsed
from atoll_learner.data.shards import TokenShards
from atoll_learner.data.tokenizer import BPE_FILE
from atoll_learner.model_settings import ModelSettings

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
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
"""What a `config.json` and the settings of a model both say, by their names there and here."""
DEFAULTS: Final[Mapping[str, object]] = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
"""What Transformers takes for a Llama where a `config.json` is silent."""
ONLY: Final[Mapping[str, tuple[object, ...]]] = {
    "model_type": ("llama",),
    "architectures": (["LlamaForCausalLM"], ["LlamaModel"], None),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "rope_scaling": (None, {}, {"rope_type": "default"}, {"type": "default"}),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "logit_scale": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
}
"""What this model can do of what a `config.json` may ask for; a name that is missing there is no question."""
ROPE: Final[Mapping[str, tuple[object, ...]]] = {
    "rope_type": ("default",),
    "type": ("default",),
    "partial_rotary_factor": (1, 1.0, None),
}
"""The same for what is in its `rope_parameters`, beside `rope_theta`."""
RELATIVE: Final = 1e-9


def config_of(model: ModelSettings, *, end_token: int | None) -> dict[str, Any]:
    """Return the `config.json` of a model; `end_token` stands between documents."""
    said = {name: getattr(model, ours) for name, ours in FIELDS.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **said,
        "max_position_embeddings": model.context,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_token,
        "eos_token_id": end_token,
        "pad_token_id": end_token,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def write_beside(folder: Path, model: ModelSettings, shards: TokenShards) -> None:
    """Write what `from_pretrained` needs beside the model in `folder`."""
    separator = shards.tokenizer().separator
    generation = {"bos_token_id": separator, "eos_token_id": separator, "pad_token_id": separator, "do_sample": True}
    for name, content in ((CONFIG, config_of(model, end_token=separator)), (GENERATION, generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if shards.meta.tokenizer == "bpe":
        shutil.copyfile(shards.folder / BPE_FILE, folder / BPE_FILE)


def check_beside(file: Path, model: ModelSettings) -> None:
    """Raise `CheckpointError` if the `config.json` beside a model file says that it is another model than `model`.

    Every difference is named. Without such a file there is nothing to compare.
    """
    config = file.parent / CONFIG
    try:
        said = parsed(config.read_bytes(), dict[str, Any])
    except FileNotFoundError:
        return
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            "the configuration beside this model file cannot be read",
            got=f"{config}: {error}",
            todo="mend or remove it",
        ) from error
    _refuse(config, list(_differences(said, model)))


def check_metadata(file: Path, metadata: Mapping[str, str] | None, model: ModelSettings) -> None:
    """Raise `CheckpointError` if the description that Atoll wrote into a model file is of another model than `model`."""
    described = (metadata or {}).get("model", "")
    if not described:
        return
    try:
        said = parsed(described.encode(), dict[str, Any])
    except msgspec.MsgspecError:
        return  # somebody else's metadata
    ours = model.model_dump()
    compared = (name for name in FIELDS.values() if name in said and name in ours)
    _refuse(
        file, [f"{name} = {said[name]}, not {ours[name]}" for name in compared if not _equal(said[name], ours[name])]
    )


def _differences(said: Mapping[str, Any], model: ModelSettings) -> Iterator[str]:
    for name, allowed in ONLY.items():
        if name in said and said[name] not in allowed:
            yield f"{name} = {json.dumps(said[name])}, which this model cannot do ({', '.join(map(json.dumps, allowed))})"
    heads = said.get("num_attention_heads")
    rope = said.get("rope_parameters")  # as newer versions of Transformers write it
    if rope is not None:
        inside = rope if isinstance(rope, dict) else {"rope_type": rope}
        for name, value in inside.items():
            if name != "rope_theta" and value not in ROPE.get(name, ()):
                yield f"rope_parameters: {name} = {json.dumps(value)}, which this model cannot do"
        said = {**said, "rope_theta": inside.get("rope_theta", said.get("rope_theta"))}
    said = {**DEFAULTS, **{name: value for name, value in said.items() if value is not None}}
    for name, ours in FIELDS.items():
        here = getattr(model, ours)
        there = said.get(name)
        if there is None and name == "num_key_value_heads":
            there = heads  # as Transformers takes it
        if there is not None and not _equal(there, here):
            yield f"{name} = {json.dumps(there)}, not {json.dumps(here)} (model.{ours})"


def _equal(one: object, other: object) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        try:
            return math.isclose(float(one), float(other), rel_tol=RELATIVE)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            return False
    return type(one) is type(other) and one == other


def _refuse(file: Path, differences: list[str]) -> None:
    if differences:
        raise CheckpointError(
            "this model file holds another model",
            got=f"{file}: {'; '.join(differences)}",
            allowed="what model.* says",
            todo="set model.* to what the file was trained with, or name another file",
        )
