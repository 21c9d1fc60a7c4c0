"""The learner's own sections of the settings: complete, checked where they are given, without JAX."""

from __future__ import annotations

import pytest

from atoll.base.errors import SettingsError
from atoll.settings import load
from atoll_learner.model_settings import ModelSettings
from atoll_learner.sections import complete
from atoll_learner.train_settings import TrainSettings


def test_every_dimension_follows_from_the_dial() -> None:
    """What is not given is derived; the vocabulary is left to the data."""
    model, train = complete({"size": "m"}, {})

    assert model["layers"] == 8
    assert model["size"] == "m"
    assert set(model) == {"size", *ModelSettings.model_fields} - {"vocab"}
    assert set(train) == set(TrainSettings.model_fields)
    assert train["sequence"] == model["context"]


def test_a_completed_section_completes_to_itself() -> None:
    """A run that is continued reads back what it wrote."""
    once = complete({"layers": "2", "width": "64", "heads": "4"}, {"batch": "4"})

    assert complete(*once) == once


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("model.layer=2", "unknown setting model.layer"),
        ("model.layers=many", "model.layers"),
        ("model.vocab=300", "follows from the data"),
        ("model.heads=3", "heads 3"),
        ("model.size=xxl", "model size"),
        ("train.rate=7", "train.rate"),
        ("train.colour=blue", "unknown setting train.colour"),
        ("train.sequence=4096", "longer than the model's context"),
    ],
)
def test_a_mistake_is_refused_where_settings_are_read(assignment: str, said: str) -> None:
    """Every verb refuses it, before anything is started."""
    with pytest.raises(SettingsError, match=said):
        load(None, [assignment], {})
