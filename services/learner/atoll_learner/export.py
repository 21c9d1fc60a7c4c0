"""Models as files: safetensors, written whole or not at all, and read only if they hold the model that is wanted.

Parameters have the names and shapes of a Llama, Qwen 2 or Qwen 3 from Hugging Face already, so `from_pretrained` needs only
`config.json`, `generation_config.json` and `tokenizer.json` beside `model.safetensors`. In the other direction, what a
`config.json` says (`model_config`) is compared with the settings, because a model of other heads has the same shapes and other
logits; and its `tokenizer.json` with that of the text, because other tokens are another language. Writing needs no JAX.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from atoll.base.errors import CheckpointError, DataError, StorageFull, is_full
from atoll.base.files import read_text
from atoll.base.parsing import parsed
from atoll.model.model_files import check_header, files_of, unreadable
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
from atoll_learner.model_settings import EMBEDDINGS, LATER, ModelSettings

if TYPE_CHECKING:
    from atoll_learner.model import Params

HEAD = EMBEDDINGS[1]
MODEL_MODE = 0o644
"""A model is no secret: safetensors makes files that only their owner can read, and tells others that there is none."""


_FREQUENCIES = ".rotary_emb.inv_freq"


def save_safetensors(params: Params, path: Path, metadata: Mapping[str, str]) -> None:
    """Write `params` to `path`; a reader never sees half a file, and equal arguments make equal bytes."""
    draft = path.with_suffix(".partial")
    try:
        save_file({name: np.asarray(leaf) for name, leaf in params.items()}, draft, {"format": "pt", **metadata})
        draft.chmod(MODEL_MODE)
        with draft.open("r+b") as handle:
            _sort_metadata(handle)
            handle.flush()
            os.fsync(handle.fileno())
        draft.replace(path)
    except (OSError, SafetensorError) as error:
        draft.unlink(missing_ok=True)
        if is_full(error) or "No space" in str(error):
            raise StorageFull(
                "no room for the model", got=str(path), todo="free space or use another folder"
            ) from error
        raise


def _sort_metadata(handle: BinaryIO) -> None:
    """Write the header of a safetensors file again, in its place, with its metadata in the order of their names.

    The library writes them in the order of a hash table with a random seed. Format: https://github.com/huggingface/safetensors.
    """
    size = int.from_bytes(handle.read(8), "little")
    header = json.loads(handle.read(size))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size)
    if len(text) != size:  # would shift the tensors
        raise CheckpointError("a header of safetensors changed its length", got=len(text), allowed=size)
    handle.seek(8)
    handle.write(text)


def _kind(dtype: Any) -> str:  # noqa: ANN401  (whatever names a dtype)
    """Return what numbers of a dtype are: floats of any width may be loaded as floats of another."""
    import jax.numpy as jnp  # noqa: PLC0415  (loading is for learners, which have JAX)

    return "of floats" if jnp.issubdtype(dtype, jnp.floating) else f"of {np.dtype(dtype).name}"


def _read_tensors(
    file: Path, like: Params, check: Callable[[Path, Mapping[str, str] | None], None] | None
) -> dict[str, Any]:
    """Return the tensors of a file that are to be loaded; one of another shape is refused before its values are read.

    Former versions of Transformers stored the frequencies of rotations, which follow from the settings: they are left out.
    """
    check_header(file)
    found: dict[str, Any] = {}
    with safe_open(file, framework="numpy") as opened:
        if check is not None:
            check(file, opened.metadata())
        for name in opened.keys():  # noqa: SIM118  (not a mapping)
            if name.endswith(_FREQUENCIES):
                continue
            # A head that shares the embedding's weights may be stored as a copy of them.
            wanted = like.get(EMBEDDINGS[0] if name == HEAD and HEAD not in like else name)
            shape = tuple(opened.get_slice(name).get_shape())
            if wanted is None or shape != wanted.shape:
                allowed = f"no {name}" if wanted is None else f"{name} {wanted.shape}"
                raise _another(file, f"{name} {shape}", allowed)
            found[name] = opened.get_tensor(name)
    return found


def _another(path: Path, got: str, allowed: str) -> CheckpointError:
    return CheckpointError(
        "this model file holds another model",
        got=f"{path}: {got}",
        allowed=allowed,
        todo="set model.* to what the file was trained with, or name another file",
    )


def _less_copied_head(found: dict[str, Any], like: Params) -> dict[str, Any]:
    head, embedding = found.get(HEAD), found.get(EMBEDDINGS[0])
    if HEAD not in like and head is not None and embedding is not None and np.array_equal(head, embedding):
        return {name: held for name, held in found.items() if name != HEAD}
    return found


def load_safetensors(
    files: Sequence[Path], like: Params, check: Callable[[Path, Mapping[str, str] | None], None] | None = None
) -> Params:
    """Return the tensors of some files, which must have the names and shapes of `like`, in the dtypes of `like`.

    `check` is called with each file and its metadata before anything is compared.

    Raises:
        CheckpointError: a file is missing, truncated, not safetensors, not finite, or they hold another model.
    """
    import jax.numpy as jnp  # noqa: PLC0415

    found: dict[str, Any] = {}
    for file in files:
        try:
            held = _read_tensors(file, like, check)
            if twice := sorted(held.keys() & found.keys()):
                raise CheckpointError(
                    "two files of this model hold the same tensor", got=f"{file}: {twice[0]}", todo="remove one of them"
                )
            found |= held
        except (OSError, SafetensorError, ValueError, AttributeError, KeyError, TypeError) as error:
            # The last three are what the library says of a dtype that NumPy does not have, 8-bit floats for example.
            raise unreadable(file, str(error)) from error
    path = files[0] if len(files) == 1 else files[0].parent
    found = _less_copied_head(found, like)
    for name in sorted(like.keys() | found.keys()):
        got = f"{name} {found[name].shape} {_kind(found[name].dtype)}" if name in found else f"no {name}"
        allowed = f"{name} {like[name].shape} {_kind(like[name].dtype)}" if name in like else f"no {name}"
        if got != allowed:
            raise _another(path, got, allowed)
        if not np.isfinite(found[name].astype(np.float32)).all():
            raise CheckpointError(
                "this model file holds infinities or NaN", got=f"{path}: {name}", todo="name a file of a sound run"
            )
    return {name: jnp.asarray(found[name], dtype=leaf.dtype) for name, leaf in like.items()}


def first_values(model: ModelSettings, seed: int, initial_model: Path | None) -> Params:
    """Return the values that a run of this model begins with: drawn from its seed, or those of a model that somebody has.

    That is a safetensors file, or a folder as Hugging Face lays it out: one file, or several with an index, and a
    `config.json`. The folder's description of the model is compared with the settings before its numbers are read.

    Raises:
        CheckpointError: there is no such model, it is damaged, or it is another model than `model`.
    """
    from atoll_learner.model import init_params  # noqa: PLC0415  (loads JAX)

    drawn = init_params(model, seed)
    if initial_model is None:
        return drawn
    files = files_of(initial_model)
    check_beside(files[0], model)
    return load_safetensors(files, drawn, lambda file, metadata: check_metadata(file, metadata, model))


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
