"""The merged model as a file: safetensors, written whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from atoll.errors import CheckpointError, StorageFull
from atoll_learner.model import Params


def save_safetensors(params: Params, path: Path, metadata: Mapping[str, str]) -> None:
    """Write `params` to `path`; a reader never sees half a file."""
    draft = path.with_suffix(".partial")
    try:
        save_file({name: np.asarray(leaf) for name, leaf in params.items()}, draft, {"format": "pt", **metadata})
        with draft.open("rb") as handle:
            os.fsync(handle.fileno())
        draft.replace(path)
    except (OSError, SafetensorError) as error:
        draft.unlink(missing_ok=True)
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space" in str(error):
            raise StorageFull(
                "no room for the model", got=str(path), todo="free space or use another folder"
            ) from error
        raise


def load_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file that `save_safetensors` wrote.

    Raises:
        CheckpointError: the file is missing, truncated or not safetensors.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            "this model file cannot be read", got=f"{path}: {error}", todo="export it again, or name another file"
        ) from error
