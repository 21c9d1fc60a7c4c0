"""How far each setting of a run may go, and which settings rest on each other."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from atoll.base.errors import SettingsError
from atoll.protocol.settings import ProtocolSettings

BOUNDS: dict[str, tuple[float, float]] = {
    "fragments": (1, 4096),
    "interval_steps": (1, 100_000),
    "quorum": (1, 4096),
    "grace_gamma": (0.0, 0.999),
    "average_decay": (0.001, 1.0),
    "age_max": (0, 1000),
    "age_damping": (0.0, 1.0),
    "share_max": (1e-4, 1.0),
    "outer_lr": (1e-6, 100.0),
    "outer_momentum": (0.0, 0.9999),
    "average_versions": (0, 1 << 20),
    "blend_alpha": (0.0, 1.0),
    "keyframe_versions": (1, 1024),
    "tokens_target": (0, 1 << 53),
    "lease_s": (0.2, 3600.0),
    "silence_s": (0.2, 3600.0),
    "norm_max": (1e-6, 1e12),
    "outlier_ratio": (0.0, 1e9),
    "step_tokens_max": (0, 1 << 48),
    "steps_per_s_max": (1e-3, 1e6),
    "offences_max": (0, 1 << 20),
}
ROOMY = {"fragments": 1, "shards": 1, "overlap_steps": 1, "grace_cap_steps": 1.0, "correction": "none"}


def asked(**changes: Any) -> ProtocolSettings:  # noqa: ANN401  (settings of any type)
    """Return checked settings in which no other relation stands in the way."""
    return msgspec.structs.replace(ProtocolSettings(), **(ROOMY | changes)).check()


@pytest.mark.parametrize("name", BOUNDS)
def test_a_setting_may_go_to_its_bounds_and_no_further(name: str) -> None:
    """Both bounds are allowed; the next number beyond either is refused with the field, the value and the bounds."""
    whole = isinstance(getattr(ProtocolSettings(), name), int)
    for bound, beyond in zip(BOUNDS[name], (-1, 1), strict=True):
        assert getattr(asked(**{name: bound}), name) == bound
        further = bound + beyond if whole else math.nextafter(bound, beyond * math.inf)
        with pytest.raises(SettingsError, match=name) as raised:
            asked(**{name: further})
        assert raised.value.got == further
        assert f"{BOUNDS[name][0]}..{BOUNDS[name][1]}" in str(raised.value.allowed)


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({"overlap_steps": 8, "interval_steps": 8}, True),
        ({"overlap_steps": 9, "interval_steps": 8}, False),
        ({"overlap_steps": 0}, False),
        ({"shards": 4, "fragments": 4}, True),
        ({"shards": 5, "fragments": 4}, False),
        ({"shards": 0}, False),
        ({"grace_cap_steps": 2.0, "overlap_steps": 2}, True),
        ({"grace_cap_steps": 2.1, "overlap_steps": 2}, False),
        ({"grace_cap_steps": -0.1}, False),
        ({"correction": "heloco", "outer_momentum": 0.0}, False),
    ],
)
def test_settings_that_rest_on_each_other_are_checked_together(change: dict[str, object], fits: bool) -> None:  # noqa: FBT001
    if fits:
        asked(**change)
    else:
        with pytest.raises(SettingsError):
            asked(**change)


def test_a_quorum_is_no_larger_than_the_learners_that_are_expected() -> None:
    settings = msgspec.structs.replace(ProtocolSettings(), quorum=3)
    assert settings.check(learners=3) is settings
    with pytest.raises(SettingsError, match="number of learners"):
        settings.check(learners=2)


def test_fragments_are_dealt_to_shards_in_turn() -> None:
    settings = asked(fragments=7, shards=3)
    owned = [settings.fragments_of(shard) for shard in range(3)]

    assert owned == [(0, 3, 6), (1, 4), (2, 5)]
    assert all(p in owned[settings.shard_of(p)] for p in range(7))
