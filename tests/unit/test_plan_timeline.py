"""The graph of compute and communication on cases that can be counted by hand."""

from __future__ import annotations

import pytest

from atoll_simulator.planner import timeline, utilisation
from atoll_simulator.planner.timeline import COMPUTE, LINK, GraphStep, GraphWork, Stream, ends


def test_a_resource_does_one_thing_at_a_time_and_the_rest_runs_at_once() -> None:
    works = [
        GraphWork(COMPUTE, 1.0),
        GraphWork(COMPUTE, 2.0),
        GraphWork(None, 1.5),
        GraphWork(None, 1.5),
        GraphWork(LINK, 1.0, (1, 3)),
    ]

    assert ends(works) == [1.0, 3.0, 1.5, 1.5, 4.0]


def test_who_is_ready_first_is_served_first() -> None:
    """The second is ready at 0.5 and the third at 0.2, while the link is busy."""
    works = [
        GraphWork(LINK, 1.0),
        GraphWork(None, 0.5),
        GraphWork(None, 0.2),
        GraphWork(LINK, 1.0, (1,)),
        GraphWork(LINK, 1.0, (2,)),
    ]

    assert ends(works)[3:] == [3.0, 2.0]


def test_one_layer_hides_nothing() -> None:
    assert timeline.data_parallel(GraphStep(1.0, 1), 1.0) == pytest.approx(0.5)


def test_layers_hide_a_reduction_in_the_backward_pass_but_for_the_last() -> None:
    """Four layers, backward 2/3 s: 0.4 s of reduction leaves a tenth after the last layer."""
    assert timeline.data_parallel(GraphStep(1.0, 4), 0.4) == pytest.approx(1.0 / 1.1)


def test_without_overlap_a_reduction_stops_everything() -> None:
    assert timeline.diloco(GraphStep(1.0, 4), 10.0, 30, overlap=False) == pytest.approx(0.75)


def test_a_fragment_that_returns_within_tau_steps_costs_nothing() -> None:
    assert timeline.streaming(1.0, Stream(24, 24, 2, 0.5, 1.5)) == pytest.approx(1.0)


def test_a_link_that_is_shared_carries_one_fragment_at_a_time() -> None:
    """Two seconds for each of one fragment a second: half the pace; a link each: all in time."""
    assert timeline.streaming(1.0, Stream(24, 24, 2, 2.0)) == pytest.approx(0.5, abs=0.01)
    assert timeline.streaming(1.0, Stream(24, 24, 2, 2.0, shared=False)) == pytest.approx(1.0)


def test_the_stall_of_one_fragment_a_period_is_what_exceeds_the_overlap() -> None:
    """One fragment every ten steps, two hidden: five seconds leave three, in thirteen."""
    assert timeline.streaming(1.0, Stream(1, 10, 2, 5.0)) == pytest.approx(10 / 13)


def test_nobody_waits_and_the_interval_grows() -> None:
    """A fragment of two seconds where one is due every second: 48 steps; a long journey: as long as it is."""
    assert utilisation.interval_reached(1.0, Stream(24, 24, 2, 2.0)) == 48
    assert utilisation.interval_reached(1.0, Stream(24, 24, 2, 0.5, 99.5)) == 100
    assert utilisation.interval_reached(1.0, Stream(24, 24, 2, 0.5)) == 24


def test_no_bandwidth_is_enough_where_latency_is_the_loss() -> None:
    assert utilisation.required_rate(lambda _: 0.4, 0.5) is None
    assert utilisation.required_rate(lambda rate: min(1.0, rate / 1e9), 0.5) == pytest.approx(5e8)
