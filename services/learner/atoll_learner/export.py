"""Models as files: safetensors, written whole or not at all, and read only if they hold the model that is wanted.

Writing needs no JAX: `atoll export` writes any run's model with the base installation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from atoll.base.errors import CheckpointError, StorageFull, is_full
from atoll.model.model_files import check_header, files_of, unreadable
from atoll_learner.hugging_face import check_beside, check_metadata
from atoll_learner.model_settings import EMBEDDINGS, ModelSettings

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
    """Return `found` without a head that is a copy of the embedding."""
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
