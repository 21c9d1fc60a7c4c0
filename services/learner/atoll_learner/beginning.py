"""The values that a run begins with: drawn from its seed, or read from a model that somebody has.

A model that somebody has is a safetensors file, or a folder as Hugging Face lays it out: one file, or several with an index,
and a `config.json`. What the folder says of the model is compared with the settings before its numbers are read.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from atoll.base.errors import CheckpointError
from atoll.base.parsing import parsed
from atoll_learner.export import load_safetensors
from atoll_learner.hugging_face import check_beside, check_metadata
from atoll_learner.model import Params, init_params
from atoll_learner.model_settings import ModelSettings

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class ShardIndex(msgspec.Struct):
    """Which file of a folder holds which tensor."""

    weight_map: dict[str, str]


def first_values(model: ModelSettings, seed: int, initial_model: Path | None) -> Params:
    """Return the values that a run of this model begins with.

    Raises:
        CheckpointError: there is no such model, it is damaged, or it is another model than `model`.
    """
    drawn = init_params(model, seed)
    if initial_model is None:
        return drawn
    files = files_of(initial_model)
    check_beside(files[0], model)
    return load_safetensors(files, drawn, lambda file, metadata: check_metadata(file, metadata, model))


def files_of(path: Path) -> list[Path]:
    """Return the safetensors files of a model: the file that was named, or those of a folder."""
    if not path.is_dir():
        return [path]
    if (path / WHOLE).exists() and not (path / INDEX).exists():
        return [path / WHOLE]
    try:
        index = parsed((path / INDEX).read_bytes(), ShardIndex)
    except FileNotFoundError as error:
        allowed = f"{WHOLE}, or {INDEX} and the files that it names"
        raise CheckpointError("no model lies in this folder", got=path, allowed=allowed) from error
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError("the index of this model cannot be read", got=f"{path / INDEX}: {error}") from error
    names = sorted(set(index.weight_map.values()))
    if foreign := [name for name in names if not name or name in {".", ".."} or Path(name).name != name]:
        raise CheckpointError("an index that names files elsewhere", got=f"{path / INDEX}: {foreign[0]}")
    if not names:
        raise CheckpointError("an index that names no file", got=path / INDEX)
    return [path / name for name in names]
