"""The values that a run begins with: drawn from its seed, or read from a model that somebody has.

A model that somebody has is a safetensors file, or a folder as Hugging Face lays it out: one file, or several with an index,
and a `config.json`. The folder's description of the model is compared with the settings before its numbers are read.
"""

from __future__ import annotations

from pathlib import Path

from atoll.model.model_files import files_of
from atoll_learner.export import load_safetensors
from atoll_learner.hugging_face import check_beside, check_metadata
from atoll_learner.model import Params, init_params
from atoll_learner.model_settings import ModelSettings


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
