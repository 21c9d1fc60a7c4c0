"""The learning rate over a run's tokens, and what it follows from: it rises, is held and falls, or falls as a cosine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from atoll.base.errors import SettingsError
from atoll.settings import load
from atoll_learner.model_settings import model_settings
from atoll_learner.train_settings import (
    DECAY_MIN,
    HOLD_STEPS,
    RATE_MAX,
    TrainSettings,
    decay_share,
    learning_rate,
    train_settings,
    usual_rate,
)


def test_the_rate_rises_is_held_and_falls_in_a_straight_line_to_nothing() -> None:
    """It begins with that of the first step's end; full rate until the decay, nothing at the target and after it."""
    train = TrainSettings(rate=1.0, warmup=0.1, decay=0.4, batch=2, sequence=5)

    rates = [learning_rate(train, tokens, 1000) for tokens in (0, 10, 90, 100, 590, 600, 700, 900, 999, 1000, 2000)]

    np.testing.assert_allclose(rates, [0.1, 0.2, 1.0, 1.0, 1.0, 1.0, 0.75, 0.25, 0.0025, 0.0, 0.0], rtol=1e-6)


def test_the_longer_a_run_the_larger_the_share_of_its_decay() -> None:
    """About as many steps are at the full rate whatever the length, within bounds; what somebody says counts."""
    train = TrainSettings(rate=1.0, warmup=0.1, batch=2, sequence=5)
    held = HOLD_STEPS * train.tokens_per_step

    assert decay_share(train, held) == DECAY_MIN == decay_share(train, held // 9)
    assert decay_share(train, 4 * held) == pytest.approx(0.75)
    assert learning_rate(train, held, 4 * held) == 1.0 > learning_rate(train, held + 10, 4 * held)
    assert decay_share(train, 1000 * held) == pytest.approx(0.9), "the warm-up is before it"
    assert decay_share(train.model_copy(update={"decay": 0.1}), 1000 * held) == 0.1


def test_a_cosine_falls_from_the_warm_up_on() -> None:
    train = TrainSettings(rate=1.0, schedule="cosine", warmup=0.1, rate_min_ratio=0.1, batch=2, sequence=5)

    rates = [learning_rate(train, tokens, 1000) for tokens in (0, 90, 100, 550, 1000, 2000)]

    np.testing.assert_allclose(rates, [0.1, 1.0, 1.0, 0.55, 0.1, 0.1], rtol=1e-6)


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_without_a_target_the_rate_is_constant_and_a_short_warm_up_is_none(schedule: str) -> None:
    train = train_settings({"rate": 1.0, "schedule": schedule}, model=model_settings({"size": "xs"}, vocab=256))

    assert learning_rate(train, 12345, 0) == 1.0
    assert learning_rate(train, 0, 100) == 1.0, "a warm-up shorter than a step"


def test_a_warm_up_that_reaches_into_the_decay_makes_no_jump() -> None:
    train = TrainSettings(rate=1.0, warmup=0.5, decay=1.0, batch=1, sequence=2)

    rates = [learning_rate(train, tokens, 1000) for tokens in range(0, 1000, 2)]

    assert max(abs(later - rate) for rate, later in itertools.pairwise(rates)) < 0.005
    assert max(rates) == pytest.approx(2 / 3, rel=0.01)


def test_what_is_shown_of_a_decay_that_nobody_said_can_be_typed() -> None:
    """`auto` says so; a number after it is one, and any other word is refused."""
    model = model_settings({"size": "xs"}, vocab=256)

    assert load(None, [], {}).settings.train["decay"] == "auto"
    assert load(None, ["train.decay=0.3", "train.decay=auto"], {}).settings.train["decay"] == "auto"
    assert train_settings({"decay": "0.3"}, model=model).decay == 0.3
    for wrong in ("none", "", 2, -1, "nan", True, None):
        with pytest.raises(SettingsError, match="nor auto"):
            train_settings({"decay": wrong}, model=model)


def test_a_target_that_is_raised_before_the_decay_changes_nothing_of_what_was() -> None:
    """So a run can go on, and is what it had been with the longer target, apart from its warm-up."""
    train = TrainSettings(rate=1.0, warmup=0.0, batch=2, sequence=5)

    for tokens in (0, 3000, 9000):
        assert learning_rate(train, tokens, 20_000) == learning_rate(train, tokens, 60_000) == 1.0


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
