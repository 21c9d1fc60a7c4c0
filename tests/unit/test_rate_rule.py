"""The inner learning rate that follows from the shape of a model."""

from __future__ import annotations

import pytest

from atoll.settings import load
from atoll_learner.model_settings import model_settings
from atoll_learner.train_settings import RATE_MAX, usual_rate

GPT_3 = {  # arXiv 2005.14165, table 2.1: layers, width, rate
    "small": (12, 768, 6.0e-4),
    "medium": (24, 1024, 3.0e-4),
    "large": (24, 1536, 2.5e-4),
    "xl": (24, 2048, 2.0e-4),
    "6.7B": (32, 4096, 1.2e-4),
    "13B": (40, 5120, 1.0e-4),
}


@pytest.mark.parametrize("name", GPT_3)
def test_the_rule_passes_through_the_rates_of_the_literature(name: str) -> None:
    """Our feed-forward layers have three matrices of a width w and theirs two of 4 w: 8/3 w gives as many parameters."""
    layers, width, rate = GPT_3[name]
    shape = {"layers": layers, "width": width, "heads": width // 64, "kv_heads": width // 64, "ffn": 8 * width // 3}

    found = usual_rate(model_settings({**shape, "context": 2048}, vocab=50257), "adamw")

    assert found == pytest.approx(rate, rel=0.35)


def test_a_vocabulary_changes_no_rate_and_a_wider_model_has_a_smaller_one() -> None:
    sizes = [usual_rate(model_settings({"size": size}, vocab=256), "muon") for size in ("xs", "s", "m", "l")]

    assert sizes == sorted(set(sizes), reverse=True)
    assert usual_rate(model_settings({"size": "xs"}, vocab=1 << 16), "muon") == sizes[0]
    assert usual_rate(model_settings({"size": 1, "ffn": 8}, vocab=256), "adamw") == RATE_MAX


def test_who_says_a_rate_has_it_and_all_others_see_what_follows() -> None:
    """`atoll config` shows the value, and what it hands to its children is the same."""
    told = load(None, ["model.size=xs"], {}).settings
    again = load(None, [f"train.rate={told.train['rate']}", "model.size=xs"], {}).settings

    assert told.train["rate"] == usual_rate(model_settings({"size": "xs"}, vocab=None), "muon")
    assert told.train == again.train
    assert load(None, ["model.size=xs", "train.rate=1e-3"], {}).settings.train["rate"] == 1e-3
