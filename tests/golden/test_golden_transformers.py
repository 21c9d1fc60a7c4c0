"""Folders that Transformers wrote, with the logits that it computes from them: ours are within 1e-4.

`python benchmarks/peers/huggingface.py make FOLDER 16 0` wrote them, in the environment of `make bench-transformers`; each
`config.json` has the version. A benchmark with all combinations compares in both directions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll_learner.export import first_values
from atoll_learner.model import make_forward
from atoll_learner.model_settings import ModelSettings, model_settings

pytestmark = pytest.mark.second_tier

FOLDERS = sorted(path for path in Path(__file__).with_name("written_by_transformers").iterdir() if path.is_dir())
TOLERANCE = 1e-4


def compared(folder: Path, model: ModelSettings, read_as: ModelSettings | None = None) -> float:
    """Return how far our logits are from those of Transformers at most; `read_as` is the model that reads the file."""
    kept = np.load(folder.with_name(f"{folder.name}.npz"))
    params = first_values(read_as or model, 0, folder)
    return float(np.abs(np.asarray(make_forward(model)(params, kept["tokens"])) - kept["logits"]).max())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_our_logits_are_those_of_transformers(folder: Path) -> None:
    assert compared(folder, model_settings({"config": str(folder)}, vocab=None)) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama3-untied-bfloat16", {"rope_factor": 1.0}),
        ("llama3-untied-bfloat16", {"rope_high_freq_factor": 8.0}),
        ("qwen2-tied-bfloat16", {"rope_theta": 10_000.0}),
        ("qwen3-untied-bfloat16", {"norm_eps": 0.1}),
    ],
)
def test_what_the_tensors_do_not_say_makes_other_logits(family: str, change: dict[str, float]) -> None:
    folder = next(folder for folder in FOLDERS if folder.name == family)
    model = model_settings({"config": str(folder)}, vocab=None)

    assert compared(folder, model.model_copy(update=change), model) > 100 * TOLERANCE
