"""The reference model in the words of Hugging Face: files written beside it, and compared with it.

The parameters have the names and shapes of a Llama, Qwen 2 or Qwen 3 from Hugging Face already, so a folder needs only
`config.json`, `generation_config.json` and `tokenizer.json` beside `model.safetensors` to be loaded by `from_pretrained`. In
the other direction, what a `config.json` says (`model_config`) is compared with the settings, because a model of other heads
has the same shapes and other logits; and its `tokenizer.json` with that of the text, because other tokens are another language.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from atoll.base.errors import CheckpointError, DataError
from atoll.base.files import read_text
from atoll.base.parsing import parsed
from atoll_learner.data.shards import TokenShards
from atoll_learner.data.tokenizer import BPE_FILE, TOKENIZER_BYTES_MAX
from atoll_learner.model_config import (
    ARCHITECTURES,
    CONFIG,
    EXTRAS,
    FIELDS,
    SCALED,
    dimensions_of,
    family_of,
    read_config,
    unsupported,
)
from atoll_learner.model_settings import LATER, ModelSettings

GENERATION: Final = "generation_config.json"
COMPARED: Final = (*FIELDS.values(), *SCALED.values(), *EXTRAS["llama"])
"""The settings of which a model's logits are a function, beside its tensors."""
NOT_OF_THE_TOKENS: Final = frozenset({"truncation", "padding", "version"})
"""Parts of a `tokenizer.json` that do not change the tokens of a text that is encoded whole."""
RELATIVE: Final = 1e-9


def config_of(model: ModelSettings, *, end_token: int | None) -> dict[str, Any]:
    """Return the `config.json` of a model, in the form that versions 4 and 5 of Transformers read.

    `end_token` stands between documents.
    """
    family = family_of(qkv_bias=model.qkv_bias, qk_norm=model.qk_norm)
    scaled = {name: getattr(model, ours) for name, ours in SCALED.items()}
    return {
        "architectures": [f"{ARCHITECTURES[family]}ForCausalLM"],
        "model_type": family,
        **{name: getattr(model, ours) for name, ours in FIELDS.items()},
        "rope_scaling": {"rope_type": "llama3", **scaled} if model.rope_factor != 1.0 else None,
        "max_position_embeddings": model.context,
        "hidden_act": "silu",
        **({"use_sliding_window": False} if family != "llama" else {"mlp_bias": False}),
        **({"attention_bias": False} if family != "qwen2" else {}),
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
    said = read_config(config)
    if said is not None:
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
    said, ours = LATER | said, model.model_dump()
    compared = (name for name in COMPARED if name in said and name in ours)
    _refuse(
        file, [f"{name} = {said[name]}, not {ours[name]}" for name in compared if not _equal(said[name], ours[name])]
    )


def check_tokenizer(model: Path, shards: TokenShards) -> None:
    """Raise `DataError` if text was prepared with another tokenizer than the `tokenizer.json` of a model, a file or folder.

    Without such a file there is nothing to compare.
    """
    theirs, ours = (model if model.is_dir() else model.parent) / BPE_FILE, shards.folder / BPE_FILE
    if not theirs.exists():
        return
    used = shards.meta.tokenizer == "bpe"
    if used and _of_the_tokens(theirs) == _of_the_tokens(ours):
        return
    raise DataError(
        "this text was prepared with another tokenizer than the model's",
        got=f"{ours if used else f'plain bytes in {shards.folder}'}",
        allowed=str(theirs),
        todo=f"prepare the text with --tokenizer {theirs}",
    )


def _of_the_tokens(file: Path) -> dict[str, Any]:
    """Return what decides how a `tokenizer.json` cuts a text."""
    try:
        said = parsed(read_text(file, TOKENIZER_BYTES_MAX), dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError("this vocabulary cannot be read", got=f"{file}: {why}", todo="mend or remove it") from error
    return {name: value for name, value in said.items() if name not in NOT_OF_THE_TOKENS}


def _differences(said: Mapping[str, Any], model: ModelSettings) -> Iterator[str]:
    refused = unsupported(said)
    yield from refused
    if any(each.startswith("model_type") or each.endswith("is missing") for each in refused):
        return  # what the other fields mean depends on these
    told = {each.partition(" = ")[0] for each in refused}
    for ours, (name, there) in dimensions_of(said).items():
        here = getattr(model, ours)
        if name in told or _equal(there, here):
            continue
        if name == "model_type":
            yield f"{name} = {json.dumps(said[name])}, which has model.{ours} = {json.dumps(there)}"
        else:
            yield f"{name} = {json.dumps(there)}, not {json.dumps(here)} (model.{ours})"
    longest = said.get("max_position_embeddings")
    if isinstance(longest, int) and longest < model.context:
        yield f"max_position_embeddings = {longest}, less than {model.context} (model.context)"


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
            todo="set model.config to the folder of the model, model.* to what it was trained with, or name another file",
        )
