"""The protocol layer on a fleet: nobody waits, every token has one fate, and the chips do not notice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import SettingsError
from atoll_simulator.fleet import scavenging
from atoll_simulator.fleet.chance import Engine, stream
from atoll_simulator.fleet.chips import Chips
from atoll_simulator.fleet.parameters import Exchange, FleetParameters, changed
from atoll_simulator.fleet.rounds import FleetLearner, FleetLink, Rounds, StepWindow, rounds
from atoll_simulator.fleet.scavenging import Budget, by_elastic, join, scavenge, stall_for

SMALL = Exchange(fragments=6, interval_steps=6, parameters=1e9)
STORMY = FleetParameters(mtbi_days=0.3, slice_chips=4, downscale_s=6.0, upscale_s=4.0, admission_s=20.0, return_s=30.0)
CALM = changed(STORMY, mtbi_days=1e6)


@settings(max_examples=10, deadline=None)
@given(
    learners=st.integers(2, 5),
    mtbi_days=st.floats(0.05, 5.0),
    loss=st.sampled_from((0.0, 0.01, 0.3)),
    latency_s=st.sampled_from((0.0, 0.03, 2.5)),
    gbit_s=st.sampled_from((0.3, 10.0)),
    quorum=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_every_invariant_holds_and_every_token_has_one_fate(  # noqa: PLR0917
    learners: int, mtbi_days: float, loss: float, latency_s: float, gbit_s: float, quorum: int, seed: int
) -> None:
    """Whatever fails, gets lost or is slow: checked after every fact, and settled at the end."""
    fleet = changed(STORMY, mtbi_days=mtbi_days)
    exchange = Exchange(
        fragments=6, interval_steps=6, parameters=1e9, loss=loss, latency_s=latency_s, gbit_s=gbit_s, quorum=quorum
    )
    told = rounds(fleet, exchange, StepWindow(400, learners, 60), seed, watched=True)

    assert told.exact
    assert sum(told.fates.values()) == told.trained > 0
    assert told.fates["lost"] == 0
    assert told.waited_s == pytest.approx(0.0, abs=1e-6)
    assert max(told.contributors, default=0) <= learners


def test_a_learner_that_waits_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that begin late are time that learners waited, and no participation, though nothing else has changed."""
    step = FleetLearner._step

    def late(trainer: FleetLearner) -> None:
        trainer.world.engine.after(5.0, step, trainer)

    prompt = rounds(CALM, SMALL, StepWindow(400, 3, 120), 0)
    monkeypatch.setattr(FleetLearner, "_step", late)
    told = rounds(CALM, SMALL, StepWindow(400, 3, 120), 0)

    assert prompt.waited_s == pytest.approx(0.0, abs=1e-6)
    assert told.waited_s == pytest.approx(5.0 * told.steps, abs=3 * 5.0 + 1e-6)
    assert told.participation < 0.25 < prompt.participation


def test_learners_take_the_same_steps_over_any_link() -> None:
    """They wait for nobody: a link a thousand times slower changes what is merged, not one step."""
    fast = rounds(STORMY, SMALL, StepWindow(400, 3, 150), 0)
    slow = rounds(STORMY, changed(SMALL, gbit_s=0.01, loss=0.4), StepWindow(400, 3, 150), 0)

    assert fast.steps == slow.steps
    assert fast.chips == slow.chips
    assert fast.share("merged") > slow.share("merged")
    assert fast.waited_s == pytest.approx(0.0, abs=1e-6)
    assert slow.waited_s == pytest.approx(0.0, abs=1e-6)


def test_the_chips_do_not_notice_the_protocol() -> None:
    """The same seed has the same failures at the same moments with and without machines beside it."""
    told = rounds(STORMY, SMALL, StepWindow(400, 3, 200), 5)
    engine = Engine()
    alone = Chips(engine, STORMY, 400, 3, 5)
    engine.run(200.0)

    assert told.chips == alone.lived()
    assert told.chips.failures > 3


def test_what_is_trained_is_what_the_chips_left() -> None:
    """Capacity trained on is the goodput of the chips but for steps that a failure or the window cut short."""
    told = rounds(STORMY, SMALL, StepWindow(400, 4, 400), 1)

    assert told.chips.goodput < 0.97
    assert told.chips.goodput - 0.04 < told.stepped < told.chips.goodput + 0.01


def test_undisturbed_rounds_have_everybody() -> None:
    """With the quorum at M no commit has fewer; one fragment leaves about every H/P steps."""
    fleet = changed(CALM, learner_cv=0.0, slice_cv=0.0)
    told = rounds(fleet, changed(SMALL, quorum=3, loss=0.0), StepWindow(400, 3, 120), 0, watched=True)

    assert set(told.contributors) == {3}
    assert told.commits == pytest.approx(120, abs=12)
    assert told.participation == pytest.approx(1.0, abs=0.02)
    assert told.share("refused:") == 0.0
    assert told.share("merged") > 0.5


def test_a_stalled_learner_is_left_out_and_comes_back() -> None:
    """Rounds go on with the others; what it had is merged late or afresh, and it adopts what it missed."""
    world = Rounds(CALM, SMALL, 0, watched=True)
    for name in "abc":
        world.add(name, 1.0, 4).begin()
    world.engine.run(30.0)
    world.trainers[0].stall()
    before, lag = world.versions(), world.trainers[0].island.lag_versions
    world.engine.run(60.0)
    assert all(now > before[p] for p, now in world.versions().items())
    assert world.trainers[0].island.lag_versions == lag <= 1  # it has heard of nothing since

    world.trainers[0].go_on(4)
    world.engine.run(70.0)
    behind = [world.versions()[p] - interval.anchor for p, interval in world.trainers[0].island.intervals.items()]
    assert max(behind) <= 1
    assert world.trainers[0].stalled_s == pytest.approx(30.0)
    assert world.settle().exact


@pytest.mark.parametrize("copy", [0.0, 5.0, 40.0])
def test_a_newcomer_costs_the_others_nothing(copy: float) -> None:
    """However long its copy takes; it steps when that is there, and a commit has it within an interval or two."""
    (row,) = join(CALM, SMALL, 3, [copy], 0)

    assert row.others_lost_steps == 0.0
    assert row.stepping_steps == pytest.approx(copy)
    assert row.merged_steps is not None
    assert copy < row.merged_steps < copy + 2 * SMALL.interval_steps
    assert row.exact


# --- links ------------------------------------------------------------------------------------------------------------


def test_what_is_large_waits_in_line_and_what_is_small_passes() -> None:
    """Two gigabytes over 8 Gbit/s take a second each, one after the other; a question takes the latency."""
    engine = Engine()
    link = FleetLink(engine, Exchange(gbit_s=8.0, latency_s=0.25, loss=0.0), stream(0, "link"))
    came: list[tuple[str, float]] = []
    link.send(1e9, lambda: came.append(("first", engine.now_s)))
    link.send(1e9, lambda: came.append(("second", engine.now_s)))
    link.ask(lambda: came.append(("question", engine.now_s)))
    link.core_message(lambda: came.append(("at-most-once message", engine.now_s)))
    engine.run(10.0)

    assert came == [("question", 0.25), ("at-most-once message", 0.25), ("first", 1.25), ("second", 2.25)]
    assert link.sent_bytes() == 2e9


def test_what_waits_in_line_was_not_sent() -> None:
    """Half a message is half its bytes; one that is lost is sent twice, and nothing in the pause between."""
    engine = Engine()
    link = FleetLink(engine, Exchange(gbit_s=8.0, latency_s=0.0, loss=0.0), stream(0, "link"))
    link.send(1e9, lambda: None)
    link.send(1e9, lambda: None)
    sent = []
    for until_s in (0.5, 1.5, 3.0):
        engine.run(until_s)
        sent.append(link.sent_bytes())
    lossy = FleetLink(engine, Exchange(gbit_s=8.0, latency_s=0.0, loss=0.9, retry_s=10.0), stream(0, "link"))
    lossy.send(1e9, lambda: None)
    engine.run(9.0)

    assert sent == pytest.approx([0.5e9, 1.5e9, 2e9])
    assert lossy.lost > 0
    assert lossy.sent_bytes() == pytest.approx(1e9)
    engine.run(1e6)
    assert lossy.sent_bytes() == pytest.approx((1 + lossy.lost) * 1e9)


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_no_learner_sends_more_than_its_link_carries(loss: float) -> None:
    told = rounds(CALM, Exchange(gbit_s=0.1, loss=loss), StepWindow(6400, 4, 300), 0)

    assert 0.05 < told.up_gbit_s <= 0.1


def test_who_lends_its_state_sends_it_over_its_own_line() -> None:
    """Lenders take turns; the second copy from one lender waits for the first, and so do its contributions."""
    world = Rounds(CALM, changed(SMALL, loss=0.0, gbit_s=10.0), 0)
    lenders = [world.add(name, 1.0, 4) for name in "ab"]
    for lender in lenders:
        lender.begin()
    newcomers = [world.add(f"newcomer-{number}", 1.0, 4) for number in range(4)]
    for newcomer in newcomers:
        newcomer.join()
    world.engine.run(60.0)
    moments_s = 8.0 * 8e9 / 10e9

    # Two gigabytes of parameters come over the newcomer's own line beside the moments.
    assert sorted(one.joined_s for one in newcomers) == pytest.approx([8.03, 8.03, 12.83, 12.83], abs=0.01)
    assert all(lender.up.sent_bytes() >= 2 * moments_s * 10e9 / 8.0 for lender in lenders)
    assert world.settle().exact


def test_core_messages_are_lost_and_messages_are_late() -> None:
    """Of what is lost a message comes again after a pause, an at-most-once message never."""
    engine = Engine()
    link = FleetLink(engine, Exchange(latency_s=0.0, loss=0.5, retry_s=1.0), stream(0, "link"))
    core_messages: list[float] = []
    asked: list[float] = []
    for _ in range(400):
        link.core_message(lambda: core_messages.append(engine.now_s))
        link.ask(lambda: asked.append(engine.now_s))
    engine.run(1e4)

    assert 150 < len(core_messages) < 250
    assert set(core_messages) == {0.0}
    assert len(asked) == 400
    assert sum(asked) / 400 == pytest.approx(1.0, abs=0.25)  # one pause on average, at a loss of one half


# --- scavenging ---------------------------------------------------------------------------------------------------------


def test_help_that_comes_and_goes_saves_what_it_could() -> None:
    """Within 2 % of 0.5 + 0.5/(1 + x) over a fast link, with exact ledgers."""
    quick = Exchange(fragments=6, interval_steps=6, parameters=1e8)
    rows = scavenge(CALM, quick, Budget(learners=2, steps=300), (0.5, 3.0), 0)

    assert [row.joins for row in rows] == [1, 6]
    assert 0.0 < rows[0].join_s < rows[1].join_s < 3.0
    for row in rows:
        assert row.learners == pytest.approx(row.ideal, rel=0.02)
        assert row.exact
        assert row.merged > 0.5


def test_help_comes_in_waves() -> None:
    quick = Exchange(fragments=6, interval_steps=6, parameters=1e8)
    (row,) = scavenge(CALM, quick, Budget(learners=2, steps=300, waves=3), (1.0,), 0)

    assert row.joins == 6
    assert row.learners == pytest.approx(0.75, rel=0.03)


@given(extra=st.floats(0.05, 5.0), stall_s=st.floats(0.0, 500.0), waves=st.integers(1, 9))
def test_an_elastic_job_pays_for_every_change_of_size(extra: float, stall_s: float, waves: int) -> None:
    """The closed form plus two stalls per wave; the stall that yields a time is found again from it."""
    plan = Budget(steps=1000, waves=waves, stall_s=stall_s)
    took = by_elastic(plan, extra, 1.0) / 1000.0

    assert took == pytest.approx(scavenging.ideal(extra) + 2 * waves * stall_s / 1000.0)
    assert stall_for(extra, took, plan) == pytest.approx(stall_s / 1000.0, abs=1e-6)
    assert by_elastic(plan, 0.0, 1.0) == pytest.approx(1000.0)


@pytest.mark.parametrize("extra", [0.3, -1.0, float("nan"), 1e9])
def test_help_is_whole_learners(extra: float) -> None:
    with pytest.raises(SettingsError, match="whole number of learners"):
        Budget(learners=4).check([extra])


def test_extras_are_read_as_per_cents() -> None:
    assert scavenging.extras_in("0,25, 300") == (0.0, 0.25, 3.0)
    with pytest.raises(SettingsError):
        scavenging.extras_in("a lot")
