"""The planner: bytes are the production code's, rates and times add up, failures fit what is published, advice helps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from atoll.bus.claims import cut
from atoll.bus.interface import CHUNK_BYTES
from atoll.codecs import ENCODINGS, encode_frame
from atoll.errors import SettingsError
from atoll.plan.answer import answer, as_document
from atoll.plan.cautions import BLOB_BYTES_MAX
from atoll.plan.failures import Failures, elastic, goodput, rigid
from atoll.plan.links import ROUND_TRIPS, burst
from atoll.plan.memory import room
from atoll.quantities import as_bytes, as_count, as_rate, as_share, as_time, count, rate, rates
from atoll.plan.question import CODEC_DOWN, CODECS, Links, Prices, Question
from atoll.plan.systems import ring_bits
from atoll.plan.text import text
from atoll.plan.traffic import bits_per_number, contribution_bytes, traffic
from atoll.protocol.settings import ProtocolSettings

GIGA = 1e9


def question(rate_each_way: float = 10 * GIGA, **changed: Any) -> Question:  # noqa: ANN401  (fields of a question)
    """Return a plan that works, with some fields changed; protocol fields go to the protocol."""
    link = (rate_each_way,)
    fields = {name: changed.pop(name) for name in list(changed) if name in ProtocolSettings.__struct_fields__}
    asked = Question(1_000_000_000, 2.0, Links(link, link), protocol=ProtocolSettings(**fields))
    return replace(asked, **{"stream_bytes_max": 1 << 40, "shard_memory_bytes": 64e9, **changed})


@pytest.mark.parametrize("codec", sorted(ENCODINGS))
@pytest.mark.parametrize("elements", [1, 127, 128, 129, 100_001])
def test_a_contribution_has_the_bytes_of_the_production_frame(codec: str, elements: int) -> None:
    frame = encode_frame(np.random.default_rng(0).normal(size=elements).astype(np.float32), codec)

    assert contribution_bytes(elements, codec) == len(frame)


def test_four_bits_are_half_of_int8_and_its_scales() -> None:
    assert bits_per_number("int8") == 8 + 32 / 128
    assert bits_per_number("int4") == 4 + 32 / 128
    assert set(CODECS) == {*ENCODINGS, "int4"}


def test_chunks_are_those_that_the_bus_cuts() -> None:
    moved = traffic(question(parameters=100_000_000))
    frame = contribution_bytes(question(parameters=100_000_000).fragment_elements, CODEC_DOWN)

    assert moved.chunks_down == len(cut("a", memoryview(bytes(frame)), CHUNK_BYTES))


def test_the_hub_carries_every_learner_and_the_broker_the_shards_too() -> None:
    moved = traffic(question(learners=8, outer_momentum=0.9))

    assert (moved.hub_in, moved.hub_out) == (8 * moved.up, 8 * moved.down)
    assert moved.broker_in == moved.hub_in + moved.down + moved.state
    assert moved.broker_out == moved.hub_out + moved.shard_in
    assert moved.state == 4 * question().fragment_elements


def test_a_round_within_tau_steps_is_just_in_time_at_the_burst_rate() -> None:
    asked = question(overlap_steps=1)
    needed = burst(asked, traffic(asked))
    assert needed is not None
    region = answer(question(needed, overlap_steps=1)).regions[0]

    assert region.journey_s == pytest.approx(asked.hidden_s)
    assert region.utilisation == 1.0
    assert answer(question(needed * 0.99, overlap_steps=1)).regions[0].utilisation < 1.0


def test_with_much_overlap_the_burst_rate_is_the_mean_of_the_longer_leg() -> None:
    asked = question(overlap_steps=24)
    moved = traffic(asked)

    assert burst(asked, moved) == 8 * moved.down / asked.round_every_s


def test_latency_alone_can_be_too_long_for_any_bandwidth() -> None:
    far = question(step_s=0.01, links=Links((GIGA,), (GIGA,), rtt_s=1.0))
    found = answer(far)

    assert found.burst is None
    assert found.systems[0].required[0.99] is None
    assert "(-: no bandwidth" in text(found)


def test_averages_are_bytes_over_the_time_between_rounds() -> None:
    asked = question(interval_steps=48)
    found = answer(asked)

    assert asked.round_every_s == 4.0
    assert found.hub_in_average == 8 * found.traffic.hub_in / 4.0
    assert found.regions[0].down_average == 8 * found.traffic.down / 4.0


def test_the_hubs_link_is_divided_among_learners() -> None:
    region = answer(question(learners=4, links=Links((GIGA,), (GIGA,), hub_in=2 * GIGA, hub_out=1 * GIGA))).regions[0]

    assert (region.up_usable, region.down_usable) == (0.5 * GIGA, 0.25 * GIGA)
    assert region.bound_by == "the hub"


def test_loss_bounds_one_connection() -> None:
    """1.22 segments of 1460 bytes per round trip over the root of the loss."""
    links = Links((GIGA,), (GIGA,), rtt_s=0.1, loss=1e-4)

    assert links.connection_bits_per_s == pytest.approx(14.3e6, rel=0.01)
    assert answer(question(links=links)).regions[0].bound_by == "one connection"


def test_the_window_slows_a_round_and_not_the_link() -> None:
    near, far = (Links((GIGA,), (GIGA,), rtt_s=0.1, window_bytes=size) for size in (1 << 40, 1 << 20))
    free, held = answer(question(links=near)).regions[0], answer(question(links=far)).regions[0]

    moved = traffic(question())
    assert held.journey_s - free.journey_s == pytest.approx(8 * moved.up * (0.1 / (8 << 20) - 1 / GIGA))
    assert held.busy == free.busy


def test_what_overlap_hides_is_never_more_than_tau_steps() -> None:
    slow, fast = answer(question(0.3 * GIGA)).regions[0], answer(question(10 * GIGA)).regions[0]

    assert slow.hidden_s == 4.0 < slow.journey_s
    assert fast.hidden_s == fast.journey_s < 4.0
    assert fast.journey_s > ROUND_TRIPS * 0.05


PUBLISHED = {
    (1, 150_000): 88,
    (1, 1_200_000): 58,
    (2, 150_000): 94,
    (2, 1_200_000): 70,
    (4, 150_000): 96,
    (4, 1_200_000): 82,
    (8, 150_000): 98,
    (8, 1_200_000): 88,
    (16, 150_000): 99,
    (16, 1_200_000): 93,
}


@pytest.mark.parametrize(("learners", "chips"), sorted(PUBLISHED))
def test_goodput_is_within_four_points_of_every_published_cell(learners: int, chips: int) -> None:
    found = goodput(Failures(), learners, chips // learners, unmerged_s=0.0)

    assert 100 * found.atoll == pytest.approx(PUBLISHED[learners, chips], abs=4)


@pytest.mark.parametrize(("chips", "published"), [(150_000, 72), (1_200_000, 27)])
def test_a_rigid_job_is_within_four_points_too(chips: int, published: int) -> None:
    assert 100 * rigid(Failures(), chips) == pytest.approx(published, abs=4)


def test_one_learner_has_the_goodput_of_m_learners_with_m_times_the_chips() -> None:
    assert goodput(Failures(), 8, 150_000, 0.0).atoll == elastic(Failures(), 150_000)


def test_a_lost_learner_costs_its_absence_and_half_an_interval() -> None:
    """One in a hundred per hour, half an hour away, 240 s unmerged."""
    found = goodput(Failures(loss_per_hour=0.01, return_s=1800.0), 16, 1, unmerged_s=240.0)

    assert found.atoll == pytest.approx(1 / (1 + 0.01 * (1800 + 240) / 3600))
    assert found.synchronous_rigid == pytest.approx(1 / (1 + 16 * 0.01 * (1800 + 75) / 3600))


def test_nothing_fails_when_chips_never_do() -> None:
    found = goodput(Failures(mtbi_s=1e30), 8, 1000, 0.0)

    assert (found.atoll, found.synchronous_elastic, found.synchronous_rigid) == pytest.approx((1.0, 1.0, 1.0))


def test_time_and_cost_follow_from_pace() -> None:
    asked = question(tokens=10**12, step_tokens=10**6, chips=100, prices=Prices(2.0, 0.1), failures=Failures(1e30))
    atoll = answer(asked).systems[0]
    moved = traffic(asked)

    assert atoll.tokens_per_s == pytest.approx(8 * 1e6 / 2.0)
    assert atoll.time_s == pytest.approx(250_000)
    assert atoll.chip_hours == pytest.approx(800 * 250_000 / 3600)
    assert atoll.cost_egress == pytest.approx((moved.hub_in + moved.hub_out) * 125_000 / 1e9 * 0.1)
    assert atoll.cost == pytest.approx(2.0 * atoll.chip_hours + atoll.cost_egress)


def test_a_ring_sends_twice_the_model_but_for_its_own_part() -> None:
    assert ring_bits(question(learners=4)) == 2 * 3 / 4 * 16e9
    assert ring_bits(question(learners=1)) == 0.0


def test_a_shard_holds_values_and_momentum() -> None:
    plain, heavy = (
        room(asked, traffic(asked), 1.0) for asked in (question(), question(outer_momentum=0.9, outer_lr=0.7))
    )

    assert heavy.shard - plain.shard == pytest.approx(4e9 / 2 + 2 * 4e9 / 24, rel=1e-6)
    assert plain.states == 0.0 < heavy.states
    assert traffic(question(outer="optax:adam")).state == 2 * 4 * question().fragment_elements


def told_value(asked: Question, kind: str) -> str:
    """Return to what a caution says that something should be changed."""
    return next(caution.to for caution in answer(asked).cautions if caution.kind == kind)


TROUBLED: dict[str, tuple[Question, Callable[[Question], Question]]] = {
    "quorum above M": (question(quorum=9), lambda q: agreed(q, quorum=8)),
    "H below P": (question(interval_steps=12), lambda q: agreed(q, interval_steps=24)),
    "one learner": (question(learners=1), lambda q: replace(q, learners=2)),
    "codec not there": (question(codec_up="int4"), lambda q: agreed(q, codec_up="int8")),
    "does not fit the interval": (question(0.5 * GIGA), lambda q: agreed(q, interval_steps=33)),
    "not within the overlap": (question(0.4 * GIGA), lambda q: agreed(q, overlap_steps=3)),
    "bound by loss": (
        question(links=Links((10 * GIGA,), (10 * GIGA,), loss=0.01)),
        lambda q: replace(q, links=replace(q.links, loss=1e-11)),
    ),
    "control starves": (
        question(5e6, parameters=10**6),
        lambda q: replace(q, links=replace(q.links, up=(rate(told_value(q, "control starves").split(" or")[0], ""),))),
    ),
    "hub saturated": (
        question(links=Links((10 * GIGA,), (10 * GIGA,), hub_in=GIGA, hub_out=4 * GIGA)),
        lambda q: agreed(q, interval_steps=65),
    ),
    "fragment too large": (
        question(parameters=3 * BLOB_BYTES_MAX, fragments=4, shards=2),
        lambda q: agreed(q, fragments=13, interval_steps=24),
    ),
    "stream too small": (
        question(stream_bytes_max=1 << 30),
        lambda q: replace(q, stream_bytes_max=int(told_value(q, "stream too small"))),
    ),
    "synchronizer's memory": (question(shard_memory_bytes=3.5e9), lambda q: agreed(q, shards=5)),
    "goodput low": (
        question(chips=3_000_000, learners=8),
        lambda q: replace(q, chips=1_500_000, learners=16),
    ),
}


def agreed(asked: Question, **changed: Any) -> Question:  # noqa: ANN401  (fields of the protocol)
    """Return the question with another agreement."""
    return replace(asked, protocol=msgspec.structs.replace(asked.protocol, **changed))


def test_a_plan_that_works_is_not_warned_of() -> None:
    assert answer(question()).cautions == ()


@pytest.mark.parametrize("kind", sorted(TROUBLED))
def test_each_caution_is_told_and_following_it_helps(kind: str) -> None:
    trouble, cure = TROUBLED[kind]
    told = {caution.kind: caution for caution in answer(trouble).cautions}

    assert kind in told
    assert all((told[kind].what, told[kind].change, told[kind].to))
    assert kind not in {caution.kind for caution in answer(cure(trouble)).cautions}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("does not fit the interval", "--interval 33, or 666.7 Mbit/s each way"),
        ("not within the overlap", "--overlap 3, or more than 24 fragments"),
        ("hub saturated", "2.667 Gbit/s, or 2 learners, or --interval 65"),
        ("fragment too large", "13"),
        ("synchronizer's memory", "--shards 5"),
        ("quorum above M", "at most 8; 1 with grace is the default"),
    ],
)
def test_a_caution_says_to_which_value(kind: str, value: str) -> None:
    assert value in {caution.to for caution in answer(TROUBLED[kind][0]).cautions if caution.kind == kind}


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_s": 0.0},
        {"step_s": float("nan")},
        {"learners": 0},
        {"codec_up": "bf17"},
        {"codec_down": "zip"},
        {"fragments": 48, "interval_steps": 48, "parameters": 20},
        {"overlap_steps": 25},
        {"links": Links((1.0,), (1.0, 2.0))},
        {"links": Links((1.0,), (1.0,), loss=0.9)},
        {"failures": Failures(mtbi_s=0.0)},
        {"failures": Failures(slice_chips=0)},
        {"failures": Failures(downscale_s=-1.0)},
    ],
)
def test_what_makes_no_plan_is_refused_with_what_is_allowed(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as refused:
        answer(question(**wrong))

    assert refused.value.allowed is not None
    assert refused.value.todo is not None


def test_quantities_are_read_as_people_write_them() -> None:
    assert (count("12B", "x"), count("350M", "x"), count("1e9", "x"), count("2t", "x")) == (
        12 * 10**9,
        35 * 10**7,
        10**9,
        2 * 10**12,
    )
    assert rates("100Mbit,2.5Gbit/s,1Gbps,3g", "x") == (1e8, 2.5e9, 1e9, 3e9)


@pytest.mark.parametrize("wrong", ["", "fast", "100", "10MB", "-1Gbit", "0Gbit", "1 2 Gbit"])
def test_a_rate_without_its_unit_is_refused(wrong: str) -> None:
    with pytest.raises(SettingsError, match="--bandwidth"):
        rate(wrong, "--bandwidth")


def test_quantities_are_written_as_people_read_them() -> None:
    assert (as_count(12e9), as_bytes(1.5e9), as_rate(2.5e9), as_share(0.5)) == ("12B", "1.5 GB", "2.5 Gbit/s", "50.0 %")
    assert (as_time(90.0), as_time(1e6), as_time(3 * 365 * 86_400.0), as_rate(None)) == (
        "90 s",
        "11.6 days",
        "3 years",
        "-",
    )


def test_the_document_is_json_with_every_part() -> None:
    document = json.loads(json.dumps(as_document(answer(question(learners=1))), allow_nan=False))

    assert document["question"]["protocol"]["fragments"] == 24
    assert document["traffic"]["up"] == traffic(question(learners=1)).up
    assert {"regions", "systems", "assumptions", "cautions", "room", "speed_up"} <= document.keys()
