"""The learner's own sections of the settings: complete, checked where they are given, without JAX."""

from __future__ import annotations

import msgspec
import pytest

from atoll.base.errors import SettingsError
from atoll.base.quantities import Description, Text
from atoll.settings import load
from atoll_learner.model_settings import ModelSettings, model_settings
from atoll_learner.sections import complete
from atoll_learner.train_settings import TrainSettings


def test_every_dimension_follows_from_the_dial() -> None:
    model, train = complete({"size": "m"}, {})

    assert model["layers"] == 8
    assert model["size"] == "m"
    assert set(model) == {"size", "config", *ModelSettings.model_fields} - {"vocab"}
    assert set(train) == set(TrainSettings.model_fields)
    assert train["sequence"] == model["context"]


def test_a_completed_section_completes_to_itself() -> None:
    once = complete({"layers": "2", "width": "64", "heads": "4"}, {"batch": "4"})

    assert complete(*once) == once


def test_every_description_fits_into_a_run_record() -> None:
    longest = {
        "layers": 256,
        "width": 65536,
        "heads": 1024,
        "kv_heads": 512,
        "ffn": 250000,
        "context": 1 << 20,
        "tied": False,
        "rope_theta": 1234567.890123,
        "norm_eps": 1.2345678901234e-05,
        "compute": "bfloat16",
        "head_dim": 4094,
        "qk_norm": True,
        "rope_factor": 12.345678901234,
        "rope_low_freq_factor": 1.2345678901234,
        "rope_high_freq_factor": 4.3456789012345,
        "rope_original_context": 1 << 24,
    }
    model = model_settings(longest, vocab=1 << 20)
    said = msgspec.json.decode(model.describe().encode())

    assert len(msgspec.convert(model.describe(), Description)) > 256
    assert ModelSettings(**said) == model
    assert "qkv_bias" not in said
    assert len(msgspec.convert(model_settings({}, vocab=256).describe(), Text)) < 200


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("model.layer=2", "unknown setting model.layer"),
        ("model.layers=many", "model.layers"),
        ("model.vocab=1", "model.vocab"),
        ("model.head_dim=7", "head_dim 7 must be even"),
        ("model.rope_low_freq_factor=4", "must be below"),
        ("model.heads=3", "heads 3"),
        ("model.size=xxl", "model size"),
        ("train.rate=7", "train.rate"),
        ("train.colour=blue", "unknown setting train.colour"),
        ("train.sequence=4096", "longer than the model's context"),
    ],
)
def test_a_mistake_is_refused_where_settings_are_read(assignment: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load(None, [assignment], {})
