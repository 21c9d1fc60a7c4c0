"""The planner's share of merged tokens beside the one that production machines reach in a simulated fleet."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest

from atoll.protocol.settings import ProtocolSettings
from atoll_simulator.fleet.parameters import Exchange, FleetParameters
from atoll_simulator.fleet.rounds import StepWindow, rounds
from atoll_simulator.planner.answer import answer
from atoll_simulator.planner.failures import Failures
from atoll_simulator.planner.links import UNSURE, held_s
from atoll_simulator.planner.question import PlanLinks, Question

NEVER_DAYS = 1e6
STEPS = 700
KEEPS_UP, WITH_FAILURES = 0.03, 0.06


def both(
    busy: float,
    *,
    learners: int = 4,
    chips: int = 25_600,
    fleet: FleetParameters | None = None,
    carry: bool = False,
    **agreed: int,
) -> tuple[float, float]:
    """Return the share that is merged, planned and simulated, on a link that is `busy` of the time."""
    sizes = Exchange(loss=0.0, **agreed)
    every_s = sizes.interval_steps / sizes.fragments
    exchange = Exchange(loss=0.0, gbit_s=8e-9 * sizes.fragment_bytes / (busy * every_s), **agreed)
    made = fleet or FleetParameters(mtbi_days=NEVER_DAYS)
    told = rounds(made, exchange, StepWindow(chips, learners, STEPS), 0)
    link = (1e9 * exchange.gbit_s,)
    question = Question(
        round(exchange.parameters),
        1.0,
        PlanLinks(link, link, rtt_s=2.0 * exchange.latency_s, window_bytes=1 << 50),
        learners=learners,
        protocol=msgspec.structs.replace(
            ProtocolSettings(**agreed),  # type: ignore[arg-type]
            codec_up="bf16",
            codec_down="bf16",
            adoption="carry" if carry else "overwrite",
        ),
        chips=chips // learners,
        failures=Failures(mtbi_s=made.mtbi_s),
        stream_bytes_max=1 << 50,
        shard_memory_bytes=1e12,
    )
    return answer(question).systems[0].merged, told.share("merged", "merged_late")


def further(*places: tuple[Any, ...]) -> list[Any]:
    """Return more places of the same comparison: each is a simulation of a second or more."""
    return [pytest.param(*values, marks=pytest.mark.second_tier) for values in places]


@pytest.mark.parametrize(
    ("busy", "agreed"),
    [
        (0.3, {}),
        (0.95, {}),
        *further(
            (0.8, {}),
            (0.8, {"fragments": 8}),
            (0.6, {"interval_steps": 96, "fragments": 12}),
            (0.8, {"learners": 8, "chips": 51_200, "quorum": 8}),
        ),
    ],
)
def test_where_the_link_keeps_up_the_share_is_that_of_the_simulation(busy: float, agreed: dict[str, Any]) -> None:
    planned, simulated = both(busy, **agreed)

    assert 0.7 < planned < 0.96
    assert planned == pytest.approx(simulated, abs=KEEPS_UP)


@pytest.mark.parametrize(
    ("busy", "interval_steps"),
    [
        (1.05, 24),
        (1.67, 48),
        (6.67, 24),
        *further((1.67, 24), (2.22, 24), (3.33, 24), (1.05, 48), (2.22, 48), (3.33, 48), (6.67, 48)),
    ],
)
def test_where_it_does_not_the_estimate_is_as_wrong_as_it_says(busy: float, interval_steps: int) -> None:
    planned, simulated = both(busy, interval_steps=interval_steps)

    assert planned < 0.85
    assert planned == pytest.approx(simulated, abs=UNSURE / 100.0)


@pytest.mark.parametrize("quorum", [4, *further((1,), (3,))])
def test_a_quorum_that_waits_for_who_stands_still_costs_what_the_simulation_says(quorum: int) -> None:
    planned, simulated = both(0.33, chips=1_200_000, fleet=FleetParameters(), quorum=quorum)

    assert planned == pytest.approx(simulated, abs=WITH_FAILURES)
    assert planned < 0.86 if quorum == 4 else planned > 0.9


@pytest.mark.parametrize(("busy", "low"), [(0.8, 0.99), (3.33, 0.29), *further((0.3, 0.99), (1.67, 0.59))])
def test_carried_tokens_are_merged_and_the_plan_promises_no_more(
    monkeypatch: pytest.MonkeyPatch, busy: float, low: float
) -> None:
    carrying = functools.partial(ProtocolSettings, adoption="carry")
    monkeypatch.setattr("atoll_simulator.fleet.rounds.ProtocolSettings", carrying)
    planned, simulated = both(busy, carry=True)

    assert low <= planned <= simulated + 0.01


def test_who_waits_for_all_waits_for_the_longest_rest() -> None:
    """Two learners that are away half of the time, an hour at a time: half of the time half an hour; one waits for nobody."""
    broken = Failures(loss_per_hour=1.0, return_s=3600.0)

    assert held_s(broken, 2, 1, 2) == pytest.approx(0.5 * 1800.0)
    assert held_s(broken, 2, 1, 1) == 0.0
    assert held_s(broken, 1000, 1, 2) == pytest.approx(0.0, abs=1e-6)
