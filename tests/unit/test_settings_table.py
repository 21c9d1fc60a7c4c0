"""How far each setting of a run may go, and which settings rest on each other."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from atoll.base.errors import SettingsError
from atoll.protocol.settings import BOUNDS, ProtocolSettings

FREE = {name: (each.low, each.high) for name, each in BOUNDS.items() if not isinstance(each.high, str)}
"""The bounds of settings that rest on no other setting."""
ROOMY = {"fragments": 1, "shards": 1, "overlap_steps": 1, "grace_cap_steps": 1.0, "correction": "none"}


def asked(**changes: Any) -> ProtocolSettings:  # noqa: ANN401  (settings of any type)
    """Return checked settings in which no other relation stands in the way."""
    return msgspec.structs.replace(ProtocolSettings(), **(ROOMY | changes)).check()


@pytest.mark.parametrize("name", FREE)
def test_a_setting_may_go_to_its_bounds_and_no_further(name: str) -> None:
    """Both bounds are allowed; the next number beyond either is refused with the field, the value and the bounds."""
    whole = isinstance(getattr(ProtocolSettings(), name), int)
    for bound, beyond in zip(FREE[name], (-1, 1), strict=True):
        assert getattr(asked(**{name: bound}), name) == bound
        further = bound + beyond if whole else math.nextafter(bound, beyond * math.inf)
        with pytest.raises(SettingsError, match=name) as raised:
            asked(**{name: further})
        assert raised.value.got == further
        assert f"{FREE[name][0]}..{FREE[name][1]}" in str(raised.value.allowed)


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
