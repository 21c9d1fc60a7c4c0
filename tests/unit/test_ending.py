"""How a run ends: what of every learner's last steps is in the global values, apart and together.

Each learner moves along an axis of its own, one unit per step. So a coordinate of the global values says how many steps of
that learner are in them, and by which factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from atoll.bus.streams import stream_plan
from atoll.codec import Encoded
from atoll.merge.fold import FragmentFold, slice_norms
from atoll.model.layout import FragmentSlice
from atoll.protocol import events, invariants
from atoll.protocol.island import Island
from atoll.protocol.round import PLACES, FragmentRound, Offer
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard
from support.protocol_world import LearnerIncarnation, ProtocolWorld

Vector = npt.NDArray[np.float32]
NAMES = ("a", "b", "c", "d")
STEPS = 5


class Numbers(ProtocolWorld):
    """The world of the machines with one fragment of numbers in it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.versions: list[Vector] = [np.zeros(len(NAMES), np.float32)]
        self.now: dict[str, Vector] = {}
        self.anchor: dict[str, Vector] = {}
        self.sent: dict[str, Vector] = {}
        self.pushed: dict[events.PushKey, Vector] = {}
        self.fold: FragmentFold | None = None

    def join(self, name: str) -> None:
        super().join(name)
        self.now[name] = self.anchor[name] = self.versions[-1]

    def step(self, name: str, tokens: int = 10) -> None:
        axis = np.zeros(len(NAMES), np.float32)
        axis[NAMES.index(name)] = 1.0
        self.now[name] = self.now[name] + axis
        super().step(name, tokens)

    def _tell(self, life: LearnerIncarnation, fact: events.Fact) -> None:
        super()._tell(life, fact)
        if isinstance(fact, events.Adopted):
            name, values = life.name, self.versions[fact.version]
            carried = self.now[name] - self.sent.get(name, self.anchor[name])
            kept = self.settings.adoption == "carry" and not fact.overwritten
            self.now[name] = values + carried if kept else values
            self.anchor[name] = values
            self.sent.pop(name, None)

    def _do_for(self, life: LearnerIncarnation, action: events.Command) -> None:
        if isinstance(action, events.Push):
            name = life.name
            origin = self.sent[name] if action.onward else self.anchor[name]
            self.pushed[events.PushKey(name, life.incarnation, 0, action.push)] = origin - self.now[name]
            self.sent[name] = self.now[name]
        super()._do_for(life, action)

    def _do(self, action: events.Command) -> None:
        if isinstance(action, events.Fold):
            size = len(NAMES)
            interval = FragmentSlice("w", 0, size, 0, size, direct=False)
            self.fold = self.fold or FragmentFold((interval,), "mean")
            pushed = Encoded.exact(self.pushed[action.key])
            self.fold.add(pushed, slice_norms((interval,), pushed), action.weight, action.staleness_weight)
        super()._do(action)

    def _execute(self, action: events.Command) -> None:
        if isinstance(action, events.Commit):
            assert self.fold is not None
            self.versions.append(self.versions[-1] - self.fold.result().pseudo_gradient)
            self.fold = None
        super()._execute(action)


def world(ending: str, **changes: Any) -> Numbers:  # noqa: ANN401  (settings of any type)
    """Return four learners that have trained some steps and were heard, at their run's target."""
    target = len(NAMES) * STEPS * 10
    asked = {"fragments": 1, "shards": 1, "interval_steps": 8, "ending": ending, "tokens_target": target} | changes
    made = Numbers(msgspec.convert(asked, ProtocolSettings).check())
    for name in NAMES:
        made.join(name)
        for _ in range(STEPS):
            made.step(name)
    for name in NAMES:
        made.beat(name)
    return made


def rest(made: Numbers) -> Vector:
    settlement = made.heal()
    assert settlement.exact, settlement.errors
    return made.versions[-1]


@pytest.mark.parametrize("ending", ["apart", "together"])
def test_learners_that_leave_one_after_the_other_are_merged_as_one_round(ending: str) -> None:
    """No last push opens a round: each would be one of its own, the first in full, the others late and damped."""
    made = world(ending)
    for name in NAMES:
        made.drain(name)
        made._tell_shard(made.last_beats[name, 1])
    while made.queue:
        made.deliver()
        made.read()
        made.commit()

    np.testing.assert_allclose(rest(made), [1.25] * 4, rtol=1e-6)


@pytest.mark.parametrize("adoption", ["overwrite", "carry"])
@pytest.mark.parametrize(("ending", "after_push"), [("apart", 0.0), ("together", 1.0)])
def test_what_was_trained_after_the_last_push_is_in_the_model(ending: str, after_push: float, adoption: str) -> None:
    """One learner leaves first; the others answer the call, train one step more, and leave before they hear of its head."""
    made = world(ending, adoption=adoption, silence_s=60.0)
    made.drain("a")
    made.deliver()
    made.read()
    made.tick(8.0)
    while made.core_messages:
        made.core_message()
    for name in NAMES[1:]:
        made.step(name)
        made.drain(name)

    others = STEPS / 4 + after_push / 3
    np.testing.assert_allclose(rest(made), [STEPS / 4, others, others, others], rtol=1e-6)


def test_a_learner_that_dies_at_the_end_is_waited_for_until_it_counts_as_silent() -> None:
    made = world("together", silence_s=5.0)
    made.tick(6.0)
    made.beat("a")
    for name in NAMES[1:]:
        made.drain(name)
    made.die("a")
    for _ in range(8):
        made.deliver()
        made.read()
    assert made.commits == []

    np.testing.assert_allclose(rest(made), [0.0, 5 / 3, 5 / 3, 5 / 3], rtol=1e-6)


def test_an_heir_at_the_end_listens_before_it_believes_that_nobody_else_is_there() -> None:
    made = world("together", silence_s=5.0)
    made.shard = Shard(made.settings, 0, {0: 0})
    for name in NAMES:
        made.drain(name)
    for _ in range(2):
        made.deliver()
        made.read()
    assert made.commits == []

    np.testing.assert_allclose(rest(made), [1.25] * 4, rtol=1e-6)


def test_one_learner_that_leaves_a_running_fleet_neither_hurries_nor_holds_anybody() -> None:
    made = world("together", tokens_target=0, grace_gamma=0.0, silence_s=60.0)
    made.drain("a")
    made.deliver()
    made.read()
    made.tick(7.9)
    assert made.commits == []
    made.tick(0.2)

    assert [commit.end for commit in made.commits] == ["grace over"]
    assert rest(made)[0] == STEPS


def test_the_rest_waits_for_its_push_and_is_on_the_version_that_this_one_makes() -> None:
    for known, base in ((0, 1), (3, 3)):
        settings = ProtocolSettings(fragments=1, interval_steps=8, shards=1, ending="together")
        island = Island(settings, {0: 0})
        island.handle(events.StepDone(at_s=0.0, tokens=10))
        interval = island.intervals[0]
        first = island._push(0, interval, "", final=False)
        island.handle(events.StepDone(at_s=1.0, tokens=10))
        interval.known = known
        assert island.handle(events.DrainOrdered(at_s=2.0)) == []

        (push,) = island.handle(events.PushSettled(at_s=3.0, fragment=0, push=first.push))

        assert isinstance(push, events.Push)
        assert (push.push, push.base_version, push.tokens, push.steps) == (2, base, 10, 1)
        assert push.final
        assert push.onward
        assert not first.onward


def test_a_contribution_of_the_future_is_refused_unless_it_is_somebodys_last() -> None:
    """By one version, at the end of a run that ends together; never otherwise."""
    for ending, final, base, refused in (
        ("together", True, 1, ""),
        ("together", True, 2, "future_base"),
        ("together", False, 1, "future_base"),
        ("apart", True, 1, "future_base"),
    ):
        settings = msgspec.convert({"ending": ending}, ProtocolSettings)
        offer = Offer(events.PushKey("a", 1, 0, 2), base, 10, 1, final)
        assert FragmentRound(0, 0, settings).refusal(offer) == refused


def leaving(version: int) -> Callable[[int, int], list[events.Commit]]:
    """Return what lets the only learner, which is leaving, contribute to a shard with a quorum of two."""
    settings = ProtocolSettings(fragments=1, interval_steps=8, shards=1, ending="together", quorum=2)
    shard = Shard(settings, 0, {0: version})
    for at_s in map(float, range(11)):
        shard.handle(events.LearnerBeat(at_s=at_s, learner="a", incarnation=1, training=False, step_s=1.0, tokens=10))

    def contribute(push: int, base: int) -> list[events.Commit]:
        key = events.PushKey("a", 1, 0, push)
        arrived = events.ContributionArrived(
            at_s=10.0,
            key=key,
            base_version=base,
            tokens=10,
            steps=1,
            trained_tokens=10 * key.push,
            final=base == version,
        )
        actions = [*shard.handle(arrived), *shard.handle(events.ContributionReady(at_s=10.0, key=key))]
        invariants.check_shard(shard)
        return [action for action in actions if isinstance(action, events.Commit)]

    return contribute


def test_at_the_end_no_quorum_is_needed() -> None:
    """It guards a running fleet; the last learner's last push is merged while it is still there."""
    contribute = leaving(version=1)

    (commit,) = contribute(1, 1)

    assert (commit.end, len(commit.shares)) == ("all answered", 1)


def test_who_fills_its_places_in_the_queue_is_not_waited_for() -> None:
    """Late contributions hold them until a commit, so its answer cannot come: the round ends without it."""
    contribute = leaving(version=1)

    assert contribute(1, 0) == []
    (commit,) = contribute(2, 0)

    assert (commit.end, len(commit.shares)) == ("all answered", 2)
    assert next(plan.per_subject for plan in stream_plan("run") if plan.retention == "workqueue") == PLACES
