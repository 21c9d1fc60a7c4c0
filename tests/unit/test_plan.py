"""The planner: bytes are the production code's, rates and times add up, failures fit what is published, advice helps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from atoll.base.errors import SettingsError
from atoll.base.wording import count, rate, rates
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.traffic import ring_bits
from atoll_simulator.planner import failures, timeline, utilisation
from atoll_simulator.planner.answer import answer, as_document, text
from atoll_simulator.planner.failures import Failures, elastic, goodput, rigid, spares
from atoll_simulator.planner.links import (
    MERGING,
    ROUND_TRIP,
    ROUND_TRIPS,
    TOGETHER,
    WINDOW,
    burst,
    cause_remedy,
    describe_cause,
)
from atoll_simulator.planner.question import PlanLinks, Prices, Question
from atoll_simulator.planner.timeline import COMPUTE, LINK, GraphStep, GraphWork, Stream, ends
from atoll_simulator.planner.traffic import room, traffic

GIGA = 1e9
WHOLE = {"codec_up": "bf16", "codec_down": "f32"}
"""Plans are those of whole versions, unless they say something else."""


def question(rate_each_way: float = 10 * GIGA, **changed: Any) -> Question:  # noqa: ANN401  (fields of a question)
    """Return a plan that works, with some fields changed; protocol fields go to the protocol."""
    link = (rate_each_way,)
    fields = {name: changed.pop(name) for name in list(changed) if name in ProtocolSettings.__struct_fields__}
    asked = Question(1_000_000_000, 2.0, PlanLinks(link, link), protocol=ProtocolSettings(**(WHOLE | fields)))
    return replace(asked, **{"stream_bytes_max": 1 << 40, "shard_memory_bytes": 64e9, **changed})


def test_the_hub_carries_every_learner_and_the_broker_the_shards_too() -> None:
    moved = traffic(question(learners=8, outer_momentum=0.9))

    assert (moved.hub_in, moved.hub_out) == (8 * moved.up, 8 * moved.down)
    assert moved.broker_in == moved.hub_in + moved.down + moved.state
    assert moved.broker_out == moved.hub_out + moved.shard_in
    assert moved.state == 4 * question().fragment_elements


def test_regions_that_add_up_stand_in_the_place_of_learners() -> None:
    """The hub's traffic grows with regions; a sum is as large as a contribution, but for manifests and four bits."""
    alone, added = traffic(question(learners=2)), traffic(question(learners=8, per_region=4))
    assert added.hub_out == pytest.approx(alone.hub_out, rel=1e-4)
    assert added.hub_in == pytest.approx(alone.hub_in, rel=1e-4)
    four_bits = question(learners=8, per_region=4, codec_up="int4")
    assert traffic(four_bits).up == pytest.approx(added.up, rel=1e-4)
    assert "2 regions" in text(answer(replace(four_bits, links=PlanLinks((1e7,), (1e7,), hub_in=1e6))))
    assert "their sum (bf16)" in text(answer(four_bits))
    with pytest.raises(SettingsError, match="--per-region"):
        answer(question(learners=8, per_region=9))


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
    far = question(step_s=0.01, links=PlanLinks((GIGA,), (GIGA,), rtt_s=1.0))
    found = answer(far)

    assert found.burst is None
    assert found.systems[0].required[0.99] is None
    assert "(-: no bandwidth" in text(found)
    assert found.late == found.systems[0].limit == "the round trips of 1000 ms alone are too long"
    assert "a ring of 8 takes 7 round trips of 1000 ms" in found.systems[2].limit


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"step_s": 0.5, "links": PlanLinks((100 * GIGA,), (100 * GIGA,), rtt_s=0.2)}, WINDOW),
        (
            {"step_s": 0.2, "links": PlanLinks((100 * GIGA,), (100 * GIGA,), rtt_s=0.2, window_bytes=1 << 40)},
            ROUND_TRIP,
        ),
        ({"step_s": 0.5, "links": PlanLinks((100 * GIGA,), (100 * GIGA,), merge_s=2.0, window_bytes=1 << 40)}, MERGING),
        ({"step_s": 0.5, "links": PlanLinks((100 * GIGA,), (100 * GIGA,), merge_s=2.0, rtt_s=0.5)}, TOGETHER),
    ],
    ids=["the window", "round trips", "merging", "together"],
)
def test_a_round_that_no_link_shortens_is_told_with_its_cause_and_its_remedy(
    changed: dict[str, Any], cause: str
) -> None:
    asked = question(**changed)
    late = next(each for each in answer(asked).cautions if each.kind == "not within the overlap")

    assert describe_cause(asked, cause) in late.what
    assert late.change == cause_remedy(cause)


def test_the_hubs_link_is_divided_among_learners() -> None:
    region = answer(question(learners=4, links=PlanLinks((GIGA,), (GIGA,), hub_in=2 * GIGA, hub_out=1 * GIGA))).regions[
        0
    ]

    assert (region.up_usable, region.down_usable) == (0.5 * GIGA, 0.25 * GIGA)
    assert region.bound_by == "the hub"


def test_loss_bounds_one_connection() -> None:
    """1.22 segments of 1460 bytes per round trip over the root of the loss."""
    links = PlanLinks((GIGA,), (GIGA,), rtt_s=0.1, loss=1e-4)

    assert links.connection_bits_per_s == pytest.approx(14.3e6, rel=0.01)
    assert answer(question(links=links)).regions[0].bound_by == "one connection"


def test_the_window_slows_a_round_and_not_the_link() -> None:
    near, far = (PlanLinks((GIGA,), (GIGA,), rtt_s=0.1, window_bytes=size) for size in (1 << 40, 1 << 20))
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
    assert 100 * goodput(Failures(), 1, chips, 0.0).synchronous_rigid == pytest.approx(published, abs=4)


@pytest.mark.parametrize("chips", [8, 64, 512, 4096, 32_768])
def test_a_rigid_job_pays_for_its_spares(chips: int) -> None:
    found = goodput(Failures(), 8, chips // 8, 0.0)

    assert found.synchronous_rigid < found.synchronous_elastic <= found.atoll


@pytest.mark.parametrize(("learners", "chips"), [(8, 1), (1, 64), (8, 64), (8, 512), (8, 300_000)])
def test_no_other_number_of_spares_leaves_more(learners: int, chips: int) -> None:
    """Tried one by one, each with the chance that so many are there; none at all is one of them."""
    broken = replace(Failures(), slice_chips=min(64, chips))
    of = learners * chips // broken.slice_chips
    shares = [failures._weigh_spares(broken, held, of).share for held in range(min(of, 400))]
    found = spares(Failures(), learners, chips)

    assert found.share == pytest.approx(max(shares), rel=1e-4)
    assert 0 <= found.slices < found.of == of


def test_the_chance_of_few_failures_is_the_same_by_its_sum_and_by_the_normal_law() -> None:
    mean = failures.POISSON_MEAN_MAX

    for most in (450, 500, 540):
        assert failures._poisson_cdf(most, mean) == pytest.approx(
            failures._poisson_cdf(most, mean * (1 + 1e-9)), abs=0.01
        )


def test_one_learner_has_the_goodput_of_m_learners_with_m_times_the_chips() -> None:
    assert goodput(Failures(), 8, 150_000, 0.0).atoll == elastic(Failures(), 150_000)


def test_a_lost_learner_costs_its_absence_and_half_an_interval() -> None:
    """One in a hundred per hour, half an hour away, 240 s unmerged."""
    found = goodput(Failures(loss_per_hour=0.01, return_s=1800.0), 16, 1, unmerged_s=240.0)

    assert found.atoll == pytest.approx(1 / (1 + 0.01 * (1800 + 240) / 3600))


def test_a_rigid_job_of_homes_runs_while_all_are_there() -> None:
    """500 homes, each there 1/1.005 of the time: all of them for 8.26 %, less 75 s for each loss and a second of replay."""
    found = goodput(Failures(loss_per_hour=0.01, return_s=1800.0), 500, 1, unmerged_s=0.0)
    loses_s = 500 * 0.01 / 3600

    assert found.synchronous_rigid == pytest.approx((1 / 1.005) ** 500 / (1 + loses_s * (75.0 + 0.5)), rel=1e-3)
    assert found.synchronous_rigid == pytest.approx(0.074, abs=0.002)


def test_kept_progress_that_is_old_is_done_again() -> None:
    """As often lost as kept: 1 / (e - 1) of the time between losses is kept."""
    broken = Failures(mtbi_s=1000.0, restart_s=0.0, checkpoint_s=1000.0)

    assert rigid(broken, 1) == pytest.approx(1 / (math.e - 1))
    assert rigid(replace(broken, checkpoint_s=0.0), 1) == 1.0


def test_time_and_cost_follow_from_pace() -> None:
    asked = question(
        tokens=10**12,
        step_tokens=10**6,
        chips=100,
        prices=Prices(2.0, 0.1),
        failures=Failures(8.64e10),
        adoption="carry",
    )
    atoll = answer(asked).systems[0]
    moved = traffic(asked)

    assert atoll.tokens_per_s == pytest.approx(8 * 1e6 / 2.0, rel=1e-4)
    assert atoll.time_s == pytest.approx(250_000, rel=1e-4)
    assert atoll.chip_hours == pytest.approx(800 * 250_000 / 3600, rel=1e-4)
    assert atoll.cost_egress == pytest.approx((moved.hub_in + moved.hub_out) * 125_000 / 1e9 * 0.1)
    assert atoll.cost == pytest.approx(2.0 * atoll.chip_hours + atoll.cost_egress)


def test_a_ring_sends_twice_the_model_but_for_its_own_part() -> None:
    assert ring_bits(4, 1_000_000_000, 16.0) == 2 * 3 / 4 * 16e9
    assert ring_bits(1, 1_000_000_000, 16.0) == 0.0


def test_a_shard_holds_values_and_momentum() -> None:
    plain, heavy = (
        room(asked, traffic(asked), 1.0) for asked in (question(correction="none", outer_momentum=0.0), question())
    )

    assert heavy.shard - plain.shard == pytest.approx(4e9 / 2 + 4e9 / 24, rel=1e-6)
    assert plain.states == 0.0 < heavy.states
    assert traffic(question(outer="optax:adam")).state == 2 * 4 * question().fragment_elements


def test_a_plan_that_works_is_not_warned_of() -> None:
    found = answer(question())

    assert found.cautions == ()
    assert found.works
    assert found.speed_up is not None


@pytest.mark.parametrize(
    "asked",
    [question(0.5 * GIGA), question(quorum=9), question(links=PlanLinks((10 * GIGA,), (10 * GIGA,), hub_in=GIGA))],
    ids=["a link too slow", "a quorum that is never met", "a hub too slow"],
)
def test_no_speed_up_is_claimed_for_a_plan_that_cannot_work(asked: Question) -> None:
    found = answer(asked)

    assert not found.works
    assert found.speed_up is None
    assert as_document(found)["speed_up"] is None
    assert "times as fast" not in text(found)
    assert "This plan cannot work as it is" in text(found)


def test_a_quorum_that_is_never_met_trains_for_nothing_for_ever() -> None:
    atoll = answer(question(quorum=9, tokens=10**12, prices=Prices(1.0, 0.0))).systems[0]

    assert (atoll.merged, atoll.tokens_per_s, atoll.cost_egress) == (0.0, 0.0, 0.0)
    assert atoll.time_s == atoll.cost == float("inf")


def test_what_is_superseded_is_no_pace_and_is_paid_for() -> None:
    """A round of 1.1 s beside steps of 2 s, and a step more: 1.6 of 24 steps; less of a link, less of the pace."""
    wide, narrow = (answer(question(rate, tokens=10**12, prices=Prices(0.0, 0.1))).systems[0] for rate in (1e13, GIGA))
    trips_s = ROUND_TRIPS * 0.05 + 8 * traffic(question()).up * 0.05 / (8 * (8 << 20))

    assert wide.merged == pytest.approx(1 - (trips_s / 2.0 + 1) / 24, abs=1e-4)
    assert narrow.merged < wide.merged
    assert narrow.tokens_per_s == pytest.approx(wide.tokens_per_s * narrow.merged / wide.merged)
    assert narrow.cost_egress == pytest.approx(wide.cost_egress * wide.merged / narrow.merged)


def test_a_larger_quorum_waits_for_slower_links_and_for_who_stands_still() -> None:
    rates = (10 * GIGA, 10 * GIGA, 10 * GIGA, GIGA)
    links = PlanLinks(rates, rates, window_bytes=1 << 40)
    steady, failing = Failures(mtbi_s=8.64e10), Failures()
    slow = [
        answer(question(learners=4, links=links, failures=steady, quorum=quorum, grace_gamma=0.0)) for quorum in (1, 4)
    ]
    still = [answer(question(learners=4, chips=300_000, failures=failing, quorum=quorum)) for quorum in (1, 3, 4)]

    assert slow[0].systems[0].merged - slow[1].systems[0].merged > 0.01
    assert [found.regions[0].merged for found in still] == sorted(
        (found.regions[0].merged for found in still), reverse=True
    )
    assert still[0].systems[0].merged - still[2].systems[0].merged > 0.02


def test_one_slow_region_slows_the_others_only_when_the_quorum_needs_it() -> None:
    rates = (10 * GIGA, 10 * GIGA, 0.2 * GIGA)
    one, all_of_them = (answer(question(learners=3, links=PlanLinks(rates, rates), quorum=quorum)) for quorum in (1, 3))

    assert one.regions[0].interval == 24 < one.regions[2].interval
    assert all_of_them.regions[0].interval == all_of_them.regions[2].interval


def test_data_parallel_goes_over_the_same_links() -> None:
    lossy = PlanLinks((10 * GIGA,), (10 * GIGA,), loss=0.01)
    narrow = PlanLinks((lossy.connection_bits_per_s,), (lossy.connection_bits_per_s,))
    hub = PlanLinks((10 * GIGA,), (10 * GIGA,), hub_in=8 * GIGA, hub_out=8 * GIGA)

    for bound, plain in ((lossy, narrow), (hub, PlanLinks((GIGA,), (GIGA,)))):
        ours, theirs = (answer(question(learners=8, links=each)).systems[2].utilisation for each in (bound, plain))
        assert ours == pytest.approx(theirs)


def test_a_lost_learner_loses_half_of_the_interval_that_is_reached() -> None:
    broken = Failures(loss_per_hour=1.0, return_s=0.0)
    found = answer(question(0.25 * GIGA, failures=broken))
    reached = found.regions[0].interval

    assert reached > 60
    assert found.systems[0].goodput == pytest.approx(1 / (1 + reached * 2.0 / 2 / 3600))


def test_a_machine_that_stands_still_sends_nothing() -> None:
    """Bytes go with steps: the same tokens are the same bytes, however often something fails."""
    priced: dict[str, Any] = {"tokens": 10**12, "prices": Prices(0.0, 0.1), "chips": 4096}
    calm, broken = (answer(question(**priced, failures=each)) for each in (Failures(8.64e10), Failures(864_000.0)))

    assert broken.systems[2].goodput < 0.6 * calm.systems[2].goodput
    for ours, theirs in zip(calm.systems, broken.systems, strict=True):
        assert ours.cost_egress == pytest.approx(theirs.cost_egress)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_s": 0.0},
        {"step_s": float("nan")},
        {"codec_down": "zip"},
        {"fragments": 48, "interval_steps": 48, "parameters": 20},
        {"links": PlanLinks((1.0,), (1.0, 2.0))},
        {"links": PlanLinks((1.0,), (1.0,), loss=0.9)},
        {"failures": Failures(slice_chips=0)},
        {"failures": Failures(downscale_s=-1.0)},
        {"failures": Failures(loss_per_hour=1e308)},
        {"failures": Failures(mtbi_s=1e-320)},
        {"failures": Failures(mtbi_s=float("inf"))},
        {"failures": Failures(return_s=float("nan"))},
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


@pytest.mark.parametrize(
    "wrong", ["", "fast", "100", "10MB", "2GBps", "2GBPS", "-1Gbit", "0Gbit", "1 2 Gbit", "1e30Gbit"]
)
def test_a_rate_without_its_unit_is_refused(wrong: str) -> None:
    with pytest.raises(SettingsError, match="--bandwidth"):
        rate(wrong, "--bandwidth")


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
    assert timeline.streaming(1.0, Stream(1, 10, 2, 5.0)) == pytest.approx(10 / 13)


def test_nobody_waits_and_the_interval_grows() -> None:
    """A fragment of two seconds where one is due every second: 48 steps; a long journey: as long as it is."""
    assert utilisation.interval_reached(1.0, Stream(24, 24, 2, 2.0)) == 48
    assert utilisation.interval_reached(1.0, Stream(24, 24, 2, 0.5, 99.5)) == 100
    assert utilisation.interval_reached(1.0, Stream(24, 24, 2, 0.5)) == 24


def test_no_bandwidth_is_enough_where_latency_is_the_loss() -> None:
    assert utilisation.required_rate(lambda _: 0.4, 0.5) is None
    assert utilisation.required_rate(lambda rate: min(1.0, rate / 1e9), 0.5) == pytest.approx(5e8)
