"""The scale bench: what is computed from what was sampled."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.protocol.ledger import Account, Ledger
from atoll.run.history import RoundLine
from atoll.wire.events import RoundEvent
from benchmarks.lib.harness import Figure
from benchmarks.network import scale
from support.events import fields


def use(learners: int, **changed: object) -> scale.CrowdUse:
    usual: dict[str, Any] = {
        "lasted_s": 10.0,
        "commits": 10,
        "contributions": 10 * learners,
        "cpu_s": {
            "broker": [0.02 * learners],
            "shard": [0.01 * learners, 0.03 * learners],
            "monitor": [0.1],
            "learners": [1.0],
        },
        "memory": {"broker": [5_000_000], "shard": [1_000_000, 3_000_000]},
        "broker": {"in_msgs": 50.0 * learners},
    }
    return scale.CrowdUse(f"{learners} learners", learners, **usual | changed)


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


def test_the_busiest_process_says_what_saturates_first() -> None:
    """Two shards at 0.8 and 2.4 per cent of a core count as 2.4; at 8 contributions a second."""
    found = by_name(scale.crowd_figures(use(8)))

    assert found["8 learners: shard, processor time a contribution"].value == pytest.approx(4.0)
    assert found["8 learners: shard, memory"].value == 3.0
    assert found["8 learners: broker, messages received a contribution"].value == 5.0
    assert found["8 learners: first process to fill a core"].value == pytest.approx(8 / 0.024)
    assert "shard is first" in found["8 learners: first process to fill a core"].how


@pytest.mark.parametrize(("dearer", "holds"), [(1.2, True), (1.3, False)])
def test_a_learner_of_many_is_compared_with_one_of_few(dearer: float, holds: bool) -> None:  # noqa: FBT001
    """By processor time of a contribution: as many more contributions may take as much more."""
    large = use(128, cpu_s={"broker": [0.02 * 128 * dearer], "shard": [0.04 * 128]})
    found = by_name(scale.growth_figures(use(8), large))

    assert found["broker: one of 128 learners beside one of 8 learners"].value == pytest.approx(dearer)
    assert found["broker: one of 128 learners beside one of 8 learners"].holds is holds
    assert found["shard: one of 128 learners beside one of 8 learners"].value == pytest.approx(1.0)


def test_the_fixed_cost_of_a_round_is_of_one_learner() -> None:
    found = by_name(scale.round_figures(use(2, cpu_s={"broker": [0.1], "shard": [0.04], "learners": [0.04, 0.04]})))

    assert found["a round of a tiny fragment: the shard"].value == pytest.approx(4.0)
    assert found["a round of a tiny fragment: the shard"].holds
    assert found["a round of a tiny fragment: a learner"].value == pytest.approx(4.0)
    assert found["a round of a tiny fragment: a learner"].holds is False


def test_memory_is_flat_after_the_warm_up() -> None:
    samples = [(0.0, 900), (1.9, 900), (2.0, 100), (5.9, 110), (6.0, 120), (10.0, 125), (10.1, 900)]

    assert scale.halves(samples, 2.0, 10.0) == ([100, 110], [120, 125])
    ratio, most = scale.flat_figures({"shard": samples}, 0.0, 10.0, warm_s=1.0)
    assert ratio.value == pytest.approx(120 / 100)
    assert ratio.holds is False
    assert most.value == pytest.approx(125e-6)
    assert scale.flat_figures({"shard": samples}, 0.0, 10.0, warm_s=6.0)[0].value == pytest.approx(125 / 120)


def test_rounds_that_meet_make_memory_no_less_flat() -> None:
    """What is held between them decides: a peak is given back, and what leaks is there in every sample."""
    peaks = [100] * 9 + [900]

    assert scale.at_rest(peaks) == 100
    assert scale.at_rest([size + 50 for size in peaks]) == 150
    assert scale.at_rest([]) == 0


def line(*pushes: int) -> RoundLine:
    told = [{"learner": "a", "incarnation": 1, "age": 0, "tokens": 64, "weight": 1.0, "push": push} for push in pushes]
    return RoundLine(0.0, "shard-0", fields(RoundEvent, fragment=0, version=1, contributors=told))


def test_fates_are_exact_only_if_both_sides_agree() -> None:
    """Two shards with a fragment each: what was trained twice over is pushed, and pushed is settled."""
    halves_of = [Ledger({"a/1": Account(trained=128, pushed=256, merged=128, left=True)}) for _ in range(2)]
    assert all(figure.holds for figure in scale.fate_figures("run", halves_of, [line(1), line(2)], 2))

    lost = [Ledger({"a/1": Account(trained=128, pushed=256, merged=128, refused={"stale": 64}, left=True)})]
    found = by_name(scale.fate_figures("run", lost, [line(1), line(1)], 2))
    assert found["run: token-fragments without exactly one fate"].value == 64 + 64
    assert found["run: contributions merged twice"].value == 1
    assert (found["run: refused"].value, found["run: refused"].how) == (64, "stale")
