"""A learner's claims cost others nothing: its step time sets nobody's pace, its last push opens no round, a cut merges nothing.

Facts are fed by hand to one shard; each fault once stopped, hurried or robbed the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import pytest

from atoll.base.parsing import parsed
from atoll.client.pushing import PUSH_PATIENCE_S
from atoll.protocol import events
from atoll.protocol.invariants import check_shard
from atoll.protocol.ledger import FragmentLedger
from atoll.protocol.pacing import FINISHING_S, grace_window
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard
from support.reference_machines import RoundModel
from support.shards import beat_of

STEP_S, STEPS = 0.05, 20
INTERVAL_S = STEP_S * STEPS


class LyingFleet:
    """A shard of two fragments on a clock of its own; honest learners answer every call, liars beat and do as they are told."""

    def __init__(self, honest: str, liars: str = "", **changes: object) -> None:
        base: dict[str, object] = {"fragments": 2, "shards": 1, "interval_steps": STEPS}
        self.shard = Shard(msgspec.convert(base | changes, ProtocolSettings).check(), 0, {0: 0, 1: 0})
        self.model = RoundModel(self.shard.settings, {0: 0, 1: 0})
        self.honest, self.liars = honest, liars
        self.lie_s, self.liars_step, self.liars_answer = STEP_S, True, False
        self.cut_off = False
        self.now_s = 0.0
        self.commits: list[tuple[float, events.Commit]] = []
        self.refused: list[events.Refuse] = []
        self._timers: dict[str, float] = {}
        self._pushes = 0
        self._beat_s = 0.5

    def run(self, for_s: float) -> int:
        """Let time pass, with heartbeats twice a second; return how many commits were made."""
        before, until_s = len(self.commits), self.now_s + for_s
        while True:
            name, due_s = min(self._timers.items(), key=lambda item: (item[1], item[0]), default=("", math.inf))
            at_s = max(self.now_s, min(due_s, self._beat_s))
            if at_s > until_s:
                break
            self.now_s = at_s
            if due_s <= at_s:
                del self._timers[name]
                self.tell(events.TimerFired(at_s=at_s, name=name))
            else:
                self._beat_s += 0.5
                for fact in () if self.cut_off else self._heartbeats():
                    self.tell(fact)
        self.now_s = until_s
        return len(self.commits) - before

    def _heartbeats(self) -> Iterator[events.Fact]:
        steps = round(self.now_s / STEP_S)
        for who in self.honest + self.liars:
            lies = who in self.liars
            shown = steps if self.liars_step or not lies else 1
            step_s = self.lie_s if lies else STEP_S
            yield beat_of(who, self.now_s, step_s=step_s, steps=shown, tokens=16 * steps)
        yield events.QueueDrained(at_s=self.now_s, proven=False)

    def push(
        self, who: str, fragment: int, *, final: bool = False, push: int = 0, base: int | None = None
    ) -> events.PushKey:
        """Let a contribution of somebody arrive, and be read if the shard wants to."""
        self._pushes += 1
        key = events.PushKey(who, 1, fragment, push or self._pushes)
        version = self.shard.slots[fragment].round.version if base is None else base
        arrived = events.ContributionArrived(
            at_s=self.now_s, key=key, base_version=version, tokens=320, steps=20, trained_tokens=1 << 30, final=final
        )
        if any(isinstance(action, events.Fetch) for action in self.tell(arrived)):
            self.tell(events.ContributionReady(at_s=self.now_s, key=key))
        return key

    def tell(self, fact: events.Fact) -> list[events.ShardCommand]:
        """Hand a fact over and do what the shard commands; a commit is durable at once."""
        actions = self.shard.handle(fact)
        self.model.see(fact, actions)
        check_shard(self.shard)
        for action in actions:
            if isinstance(action, events.ArmTimer):
                self._timers[action.name] = action.due_s
            elif isinstance(action, events.Refuse):
                self.refused.append(action)
            elif isinstance(action, events.PublishCall) and not self.cut_off:
                for who in self.honest + (self.liars if self.liars_answer else ""):
                    self.push(who, action.fragment)
            elif isinstance(action, events.Commit):
                self.commits.append((self.now_s, action))
                self.tell(events.Committed(at_s=self.now_s, fragment=action.fragment, version=action.base_version + 1))
        return actions


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("lie_s", [1e12, 1e-9])
@pytest.mark.parametrize(("honest", "liars"), [("ab", "xy"), ("abc", "xyz")])
def test_as_many_liars_as_honest_learners_neither_stop_nor_hurry_the_rounds(
    honest: str, liars: str, lie_s: float, *, steps: bool, answers: bool
) -> None:
    """They say that a step takes for ever or no time, count steps or none, contribute or do not; others' pace stays.

    Half of all contributors may hurry rounds by as much as their steps were never seen to allow (a factor of four).
    """
    fleet = LyingFleet(honest, liars)
    fleet.run(6.0)
    before = fleet.run(20.0)
    fleet.lie_s, fleet.liars_step, fleet.liars_answer = lie_s, steps, answers
    fleet.run(2.0)

    during = fleet.run(20.0)

    assert before == pytest.approx(40, abs=2)
    assert during >= 0.8 * before
    assert during <= (4.5 if answers and lie_s < STEP_S else 1.1) * before


@pytest.mark.parametrize("answers", [False, True])
def test_a_majority_of_liars_is_forgotten_once_it_is_silent(*, answers: bool) -> None:
    """They may stop a run while they last. Two intervals after they count as silent all rounds have their pace again."""
    fleet = LyingFleet("a", "xyz")
    fleet.liars_answer = answers
    fleet.run(6.0)
    before = fleet.run(10.0)
    fleet.lie_s, fleet.liars_step = 1e12, False
    fleet.run(60.0)
    fleet.liars, fleet.liars_answer = "", False
    fleet.run(fleet.shard.settings.silence_s + 2.0 * INTERVAL_S)

    assert fleet.run(10.0) >= 0.8 * before


def test_timers_are_armed_again_when_steps_become_shorter() -> None:
    """One learner alone said that its steps take long: its beat and its second call both come earlier."""
    fleet = LyingFleet("", "x", quorum=2)
    fleet.lie_s, fleet.liars_step = 8.0, False
    fleet.run(0.5)
    resting, called = fleet.shard.slots.values()
    assert resting.due_s == pytest.approx(0.5 + 80.0)
    called.due_s = fleet.now_s
    fleet.tell(events.TimerFired(at_s=fleet.now_s, name="due/1"))
    assert called.again_s == fleet._timers["due/1"] == 0.5 + 16.0

    fleet.honest, fleet.liars = "ab", ""
    fleet.tell(events.LearnerLeft(at_s=fleet.now_s, learner="x", incarnation=1))
    fleet.run(0.5)

    assert fleet.shard.step_s() == STEP_S
    assert resting.due_s == pytest.approx(1.0 + INTERVAL_S / 2.0)
    assert called.round.version == 1


def test_a_grace_window_is_shortened_when_steps_become_shorter() -> None:
    fleet = LyingFleet("", "x", grace_cap_steps=4.0, overlap_steps=8, silence_s=60.0)
    fleet.lie_s, fleet.liars_step = 4.0, False
    fleet.run(1.0)
    slot = fleet.shard.slots[0]
    fleet.tell(beat_of("slow", 1.0, step_s=4.0, tokens=1, steps=1))
    slot.due_s = fleet.now_s
    fleet.tell(events.TimerFired(at_s=fleet.now_s, name="due/0"))
    fleet.push("x", 0)
    granted_s = slot.round.grace_s
    assert granted_s > 8.0
    fleet.lie_s, fleet.liars_step = STEP_S, True
    for step in range(1, 8):
        fleet.tell(beat_of("slow", fleet.now_s, step_s=STEP_S, tokens=1, steps=20 * step))
        fleet.run(1.0)
        if fleet.commits:
            break

    assert fleet.commits[0][0] < 1.0 + granted_s / 2.0
    window = grace_window(fleet.shard.settings, STEP_S, 0.0, 0.0)
    assert fleet.commits[0][1].grace_s <= max(window.granted_s, 1.0)


# --- the last push --------------------------------------------------------------------------------------------------------


def test_a_last_push_opens_no_round() -> None:
    """A liar called every push its last: all rounds began at once, and everybody's interval was its own."""
    fleet = LyingFleet("ab", "x")
    fleet.run(6.0)
    before = fleet.run(10.0)
    during = 0
    for _ in range(100):
        during += fleet.run(0.1)
        for fragment in (0, 1):
            fleet.push("x", fragment, final=True)

    assert during == pytest.approx(before, abs=2)
    assert {refusal.reason for refusal in fleet.refused if refusal.key.learner == "x"} == {"after_final"}


def test_nothing_follows_a_last_push_also_before_an_heir() -> None:
    """By its number: an earlier push may come later. The ledger of the fragment says it to the next owner."""
    fleet = LyingFleet("a", "x", quorum=1)
    fleet.run(4.0)
    final = fleet.push("x", 0, final=True, push=700)
    second = fleet.push("x", 0, final=True, push=600)  # while the first is in hand
    fleet.push("x", 0, push=690)
    fleet.run(4.0)
    assert [refusal.key for refusal in fleet.refused] == [second]
    assert any(share.key == final for _, commit in fleet.commits for share in commit.shares)

    kept = fleet.shard.slots[0].fragment_ledger.freeze(fleet.shard.ledger)
    heir = Shard(fleet.shard.settings, 0, {0: 90, 1: 90}, fragment_ledgers={0: parsed(kept, FragmentLedger)})

    def arrives(push: int, *, final: bool, incarnation: int = 1, fragment: int = 0) -> list[str]:
        key = events.PushKey("x", incarnation, fragment, push)
        arrived = events.ContributionArrived(
            at_s=1.0, key=key, base_version=90, tokens=320, steps=20, trained_tokens=1 << 30, final=final
        )
        return [getattr(action, "reason", "") or type(action).__name__ for action in heir.handle(arrived)][:1]

    assert arrives(701, final=False) == arrives(650, final=True) == ["after_final"]
    assert arrives(699, final=False) == ["Fetch"]
    assert arrives(1, final=True, incarnation=2) == arrives(1, final=True, fragment=1) == ["Fetch"]


# --- alone ----------------------------------------------------------------------------------------------------------------


def cut(fleet: LyingFleet, for_s: float) -> None:
    """Cut the shard off from its broker, which it does not know."""
    fleet.cut_off = True
    fleet.run(for_s)
    fleet.cut_off = False


@pytest.mark.parametrize("for_s", [3.0, 10.0, 45.0])
def test_a_shard_that_alone_was_cut_off_merges_nothing_below_its_quorum(for_s: float) -> None:
    """Of three learners one has answered; the others were silent for the shard, and it alone was away."""
    fleet = LyingFleet("abc", quorum=3)
    fleet.run(6.5)
    fleet.honest = "a"
    made = len(fleet.commits)
    fleet.run(0.95 * INTERVAL_S)  # called, and one has answered
    assert any(slot.round.shares for slot in fleet.shard.slots.values())
    calls = [slot.round.attempt for slot in fleet.shard.slots.values()]

    cut(fleet, for_s)

    assert len(fleet.commits) == made
    assert [slot.round.attempt - before for slot, before in zip(fleet.shard.slots.values(), calls, strict=True)] <= [
        6
    ] * 2
    assert fleet.shard.live() == fleet.shard.present() == set("abc")
    fleet.honest = "abc"
    fleet.run(3.0 * INTERVAL_S)
    later = [commit for _, commit in fleet.commits[made:]]
    assert later
    assert all(len({share.key.learner for share in commit.shares}) == 3 for commit in later)


def test_learners_that_are_gone_are_missed_by_a_shard_that_was_connected() -> None:
    """As before: what one has answered is merged once the others have been silent for as long as was agreed."""
    fleet = LyingFleet("abc", quorum=3)
    fleet.run(6.5)
    fleet.honest = "a"
    fleet.run(0.95 * INTERVAL_S)
    fleet.honest = ""

    fleet.run(fleet.shard.settings.silence_s + 1.0)

    assert fleet.commits[-1][1].end == "nobody left"


def test_a_learner_that_is_there_and_does_not_train_yet_is_waited_for() -> None:
    fleet = LyingFleet("", quorum=2)
    for at_s, training in ((0.0, True), (0.5, False)):
        fleet.tell(beat_of("b", at_s, training=training, step_s=STEP_S, tokens=1, steps=1))
    fleet.push("a", 0)
    fleet.tell(events.LearnerLeft(at_s=1.0, learner="a", incarnation=1))
    assert fleet.commits == []

    fleet.tell(events.LearnerLeft(at_s=1.5, learner="b", incarnation=1))

    assert [commit.end for _, commit in fleet.commits] == ["nobody left"]


def test_an_heir_that_hears_a_farewell_first_is_not_alone() -> None:
    """It left while nobody served: the others have beaten into the void, and are heard soon, if they are there."""
    fleet = LyingFleet("", quorum=2)
    fleet.push("a", 0, final=True)
    fleet.tell(beat_of("a", 0.0, training=False, step_s=STEP_S, tokens=1, steps=1))
    fleet.tell(events.LearnerLeft(at_s=0.0, learner="a", incarnation=1))
    assert fleet.commits == []

    fleet.run(fleet.shard.settings.silence_s + 1.0)

    assert [commit.end for _, commit in fleet.commits] == ["nobody left"]


def test_learners_that_end_are_not_waited_for_by_the_round_that_their_last_pushes_wait_for() -> None:
    """Both places of each are filled with late pushes: what is last finds room only behind a commit. Once it hung for ever."""
    fleet = LyingFleet("ab", age_max=4)
    fleet.run(6.0)
    fleet.honest = ""
    version = fleet.shard.slots[0].round.version
    for who in "abab":
        fleet.push(who, 0, base=version - 1)
    before = len(fleet.commits)

    for who in "ab":
        fleet.tell(beat_of(who, fleet.now_s, training=False, step_s=0.0, tokens=1 << 20))

    assert [commit.end for _, commit in fleet.commits[before:]] == ["nobody left"]


def test_one_that_has_ended_and_sends_nothing_more_is_waited_for_within_a_bound() -> None:
    """It beats for ever: what another has sent is merged without it, before that one gives its own last pushes up."""
    fleet = LyingFleet("a", age_max=4)
    fleet.run(6.0)
    fleet.honest = ""
    before = len(fleet.commits)
    fleet.push("a", 0, final=True)
    for second in range(2 * int(FINISHING_S)):
        fleet.now_s += 1.0
        for who in "ba":
            fleet.tell(beat_of(who, fleet.now_s, training=second == 0 and who == "b", step_s=0.0, tokens=0))
        if len(fleet.commits) > before:
            break

    assert FINISHING_S < second <= FINISHING_S + 2.0 < PUSH_PATIENCE_S


def test_a_drain_does_not_wait_for_silence() -> None:
    """Who drains a run that nobody is in has what is folded merged at once."""
    fleet = LyingFleet("", quorum=2)
    fleet.push("a", 0)
    assert fleet.commits == []

    fleet.tell(events.DrainOrdered(at_s=0.1))

    assert [commit.end for _, commit in fleet.commits] == ["nobody left"]


def test_an_outage_enters_no_average() -> None:
    fleet = LyingFleet("abc", quorum=3)
    fleet.run(8.0)
    fleet.honest = "ab"
    fleet.run(0.95 * INTERVAL_S)
    cut(fleet, 30.0)
    fleet.honest = "abc"
    fleet.run(4.0)

    assert fleet.shard.quorum.value is not None
    assert fleet.shard.quorum.value < 3.0
    assert fleet.shard.sync.value is not None
    assert fleet.shard.sync.value < 0.1


@pytest.mark.parametrize("per_step", [1.0, 0.0])
def test_an_outage_enters_no_pace(per_step: float) -> None:
    """Learners train on meanwhile or wait for data: their steps are no slower and no faster after it."""
    fleet, steps = LyingFleet(""), 0

    def beats(for_s: float) -> None:
        nonlocal steps
        for _ in range(round(for_s)):
            fleet.now_s, steps = fleet.now_s + 1.0, steps + round(1.0 / STEP_S)
            for who in "ab":
                fleet.tell(beat_of(who, fleet.now_s, step_s=STEP_S, tokens=steps, steps=steps))
            assert fleet.shard.step_s() == STEP_S

    for away_s in (3.0, 12.0, 30.0):
        beats(8.0)
        fleet.now_s += away_s
        steps += round(per_step * away_s / STEP_S)
    beats(8.0)
