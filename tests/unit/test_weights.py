"""How much a contribution counts: token weights, and the staleness weight of a late one."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.protocol.events import PushKey
from atoll.protocol.round import FragmentRound, Offer, staleness_weight, token_weight
from atoll.protocol.settings import ProtocolSettings


@pytest.mark.parametrize("age_max", [0, 1, 2, 8])
@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0])
def test_the_gate_falls_from_one_to_nothing_where_contributions_are_refused(age_max: int, factor: float) -> None:
    """sigma(age) = cosine gate times the power, the gate's end one version after the oldest that is taken."""
    gate, power = (ProtocolSettings(age_law=law, age_max=age_max, age_damping=factor) for law in ("gate", "power"))
    ages = np.arange(age_max + 2)
    wanted = 0.5 * (1.0 + np.cos(np.pi * ages / (age_max + 1)))

    assert [staleness_weight(power, int(age)) for age in ages] == [factor ** int(age) for age in ages]
    np.testing.assert_allclose([staleness_weight(gate, int(age)) for age in ages], wanted * factor**ages, atol=1e-12)
    assert staleness_weight(gate, 0) == 1.0
    assert staleness_weight(gate, age_max + 1) < 1e-12


def test_weights_are_quantity_times_rate() -> None:
    """Twice the tokens in the same steps weigh four times as much; the same tokens in half the steps, twice."""
    assert token_weight(1000, 10) == 100_000.0
    assert token_weight(2000, 10) == 4 * token_weight(1000, 10)
    assert token_weight(1000, 5) == 2 * token_weight(1000, 10)


def test_a_fold_says_how_fresh_it_is() -> None:
    settings = ProtocolSettings(age_law="gate", age_max=2, age_damping=0.5)
    now = FragmentRound(0, 5, settings)
    folds = [now.fold(Offer(PushKey("a", 1, 0, n), 5 - n, 8, 4, final=False), "") for n in range(3)]

    np.testing.assert_allclose([fold.staleness_weight for fold in folds], [1.0, 0.5 * 0.75, 0.25 * 0.25])
    assert {fold.weight for fold in folds} == {16.0}
