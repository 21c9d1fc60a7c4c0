"""What must hold of any plan: more bandwidth never hurts, less to send never needs more, and two roads to one figure agree."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.codec import FORMATS
from atoll.protocol.settings import ProtocolSettings
from atoll_simulator.planner import timeline, utilisation
from atoll_simulator.planner.answer import answer
from atoll_simulator.planner.failures import Failures, goodput
from atoll_simulator.planner.links import burst, utilisation_at
from atoll_simulator.planner.question import PlanLinks, Question
from atoll_simulator.planner.timeline import GraphStep, Stream
from atoll_simulator.planner.traffic import bits_per_number, traffic

ROUNDING = 1e-9
few = settings(max_examples=60, deadline=None)
steps = st.builds(GraphStep, st.floats(0.05, 20.0), st.integers(1, 60), st.floats(0.3, 0.8))


@st.composite
def streams(draw: st.DrawFn, *, even: bool) -> tuple[float, Stream]:
    """Return seconds of a step and a stream; `even` ones have H a multiple of P."""
    fragments = draw(st.integers(1, 24))
    interval = fragments * draw(st.integers(1, 4)) if even else draw(st.integers(1, 60))
    step_s = draw(st.floats(0.1, 3.0))
    overlap = draw(st.integers(1, min(interval, 8)))
    send_s = draw(st.floats(0.0, 3.0)) * step_s * interval / fragments
    after_s = draw(st.sampled_from([0.0, 0.5, 4.0])) * step_s
    return step_s, Stream(fragments, interval, overlap, send_s, after_s, shared=draw(st.booleans()))


@st.composite
def questions(draw: st.DrawFn) -> Question:
    fragments = draw(st.integers(1, 48))
    interval = draw(st.integers(1, 100))
    protocol = ProtocolSettings(
        fragments=fragments,
        interval_steps=interval,
        overlap_steps=draw(st.integers(1, min(interval, 10))),
        shards=1,
        codec_up=draw(st.sampled_from(tuple(FORMATS))),
        codec_down=draw(st.sampled_from(tuple(FORMATS))),
    )
    link = (10.0 ** draw(st.floats(6.0, 12.0)),)
    return Question(
        parameters=draw(st.integers(10**6, 10**12)),
        step_s=draw(st.floats(0.1, 30.0)),
        links=PlanLinks(link, link, rtt_s=draw(st.floats(0.0, 0.5))),
        learners=draw(st.integers(1, 64)),
        protocol=protocol,
    )


@few
@given(steps, st.floats(0.0, 20.0), st.integers(1, 500), st.booleans())
def test_the_closed_form_of_diloco_is_its_graph(
    step: GraphStep,
    steps_long: float,
    interval: int,
    overlap: bool,  # noqa: FBT001
) -> None:
    reduce_s = steps_long * step.takes_s

    assert utilisation.diloco(step, reduce_s, interval, overlap=overlap) == pytest.approx(
        timeline.diloco(step, reduce_s, interval, overlap=overlap), rel=1e-9
    )


@few
@given(streams(even=True))
def test_the_closed_form_of_streaming_is_its_graph_where_h_is_a_multiple_of_p(case: tuple[float, Stream]) -> None:
    """To a point: the graph is played for a thousand steps, not for ever."""
    assert utilisation.streaming(*case) == pytest.approx(timeline.streaming(*case), abs=0.01)


@few
@given(streams(even=False))
def test_the_closed_form_of_streaming_is_near_its_graph_everywhere(case: tuple[float, Stream]) -> None:
    """The worst of 6,000 random cases is 20 points apart, with H one below P and a link that is nearly full."""
    assert utilisation.streaming(*case) == pytest.approx(timeline.streaming(*case), abs=0.25)


@few
@given(questions(), st.floats(1.0, 100.0))
def test_more_bandwidth_never_lowers_utilisation(asked: Question, factor: float) -> None:
    moved, rate = traffic(asked), asked.links.up[0]

    assert utilisation_at(asked, moved, rate * factor) >= utilisation_at(asked, moved, rate) - ROUNDING


@few
@given(questions())
def test_more_bandwidth_never_lowers_anybodys_pace(asked: Question) -> None:
    wider = replace(asked, links=replace(asked.links, up=(asked.links.up[0] * 2,), down=(asked.links.down[0] * 2,)))

    for narrow, wide in zip(answer(asked).systems, answer(wider).systems, strict=True):
        assert wide.utilisation >= narrow.utilisation - ROUNDING


@few
@given(questions(), st.sampled_from(tuple(FORMATS)))
def test_a_smaller_codec_never_needs_more(asked: Question, codec: str) -> None:
    other = replace(asked, protocol=msgspec.structs.replace(asked.protocol, codec_up=codec))
    small, large = sorted((asked, other), key=lambda each: bits_per_number(each.protocol.codec_up))
    less, more = (answer(each) for each in (small, large))

    assert less.traffic.hub_in <= more.traffic.hub_in
    assert less.regions[0].journey_s <= more.regions[0].journey_s * (1 + ROUNDING)
    for wanted, rate in more.systems[0].required.items():
        needed = less.systems[0].required[wanted]
        assert rate is None or (needed is not None and needed <= rate * (1 + 1e-6))


@few
@given(questions())
def test_more_overlap_never_needs_a_larger_burst(asked: Question) -> None:
    moved, overlap = traffic(asked), asked.protocol.overlap_steps
    longer = msgspec.structs.replace(asked.protocol, overlap_steps=min(asked.protocol.interval_steps, overlap + 1))
    short, long = burst(asked, moved), burst(replace(asked, protocol=longer), moved)

    assert short is None or (long is not None and long <= short * (1 + ROUNDING))


@few
@given(questions())
def test_the_required_bandwidth_is_what_is_required(asked: Question) -> None:
    moved = traffic(asked)
    for wanted, rate in answer(asked).systems[0].required.items():
        if rate is not None and rate > 2.0:
            assert utilisation_at(asked, moved, rate) >= wanted - 1e-6
            assert utilisation_at(asked, moved, rate * 0.98) < wanted


@few
@given(questions())
def test_bytes_of_all_rounds_together_do_not_depend_on_the_number_of_fragments(asked: Question) -> None:
    halves = msgspec.structs.replace(asked.protocol, fragments=2 * asked.protocol.fragments)
    whole, split = (traffic(each).up * each.protocol.fragments for each in (asked, replace(asked, protocol=halves)))

    assert whole <= split <= whole + 2 * asked.protocol.fragments * 2000


@few
@given(st.integers(1, 64), st.integers(1, 10**6), st.floats(1e5, 1e10))
def test_goodput_is_a_share_and_more_learners_of_the_same_chips_never_lower_it(
    learners: int, chips: int, mtbi_s: float
) -> None:
    failures = Failures(mtbi_s=mtbi_s, slice_chips=1)
    few_large, many_small = (
        goodput(failures, 1, learners * chips, 0.0).atoll,
        goodput(failures, learners, chips, 0.0).atoll,
    )

    assert 0.0 < few_large <= many_small * (1 + ROUNDING) <= 1.0 + 2 * ROUNDING
