"""A contribution to an open round looks at as few learners as it can (`FragmentRound.goes_on`), and nothing else changes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from atoll.protocol import events
from atoll.protocol.round import FragmentRound
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard

LEARNERS = [f"l{number}" for number in range(6)]


@dataclass
class RandomFleet:
    """Facts for a shard, drawn from a seed; what the shard commands decides on some of them."""

    dice: random.Random
    now_s: float = 0.0
    pushes: dict[tuple[str, int], int] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 0})
    waiting: list[events.Fact] = field(default_factory=list)
    timers: dict[str, float] = field(default_factory=dict)
    facts: list[events.Fact] = field(default_factory=list)

    def next(self) -> events.Fact:
        self.now_s += self.dice.choice((0.01, 0.1, 0.4))
        due = [name for name, due_s in self.timers.items() if due_s <= self.now_s]
        if due:
            del self.timers[due[0]]
            return events.TimerFired(at_s=self.now_s, name=due[0])
        if self.waiting and self.dice.random() < 0.7:
            return self.waiting.pop(self.dice.randrange(len(self.waiting)))
        learner, fragment = self.dice.choice(LEARNERS), self.dice.choice((0, 1))
        draw = self.dice.random()
        if draw < 0.5:
            steps = int(10 * self.now_s)
            told = {
                "step_s": 0.1,
                "steps": steps,
                "tokens": 10 * steps,
                "pushed": 0,
                "superseded": 0,
                "refused_local": 0,
            }
            return events.LearnerBeat(at_s=self.now_s, learner=learner, incarnation=1, training=True, **told)  # type: ignore[arg-type]
        if draw < 0.52:
            return events.LearnerLeft(at_s=self.now_s, learner=learner, incarnation=1)
        number = self.pushes[learner, fragment] = self.pushes.get((learner, fragment), 0) + 1
        base = max(0, self.versions[fragment] - self.dice.choice((0, 0, 0, 1)))
        key = events.PushKey(learner, 1, fragment, number)
        return events.ContributionArrived(
            at_s=self.now_s, key=key, base_version=base, tokens=10, steps=1, trained_tokens=10
        )

    def heed(self, actions: list[events.ShardCommand]) -> None:
        for action in actions:
            if isinstance(action, events.ArmTimer):
                self.timers[action.name] = action.due_s
            elif isinstance(action, events.Fetch):
                self.waiting.append(events.ContributionReady(at_s=self.now_s, key=action.key, norm=1.0, base_norm=1.0))
            elif isinstance(action, events.Commit):
                version = self.versions[action.fragment] = action.base_version + 1
                self.waiting.append(events.Committed(at_s=self.now_s, fragment=action.fragment, version=version))


def shard_of(quorum: int) -> Shard:
    settings = ProtocolSettings(fragments=2, shards=1, quorum=quorum, interval_steps=4, silence_s=1.0)
    return Shard(settings.check(), 0, {0: 0, 1: 0})


@pytest.mark.parametrize("quorum", [1, 3, 6])
@pytest.mark.parametrize("seed", range(4))
def test_an_open_round_commands_the_same_by_fewer_looks(
    quorum: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, shard = RandomFleet(random.Random(seed)), shard_of(quorum)
    commanded = []
    for _ in range(600):
        fact = fleet.next()
        fleet.facts.append(fact)
        actions = shard.handle(fact)
        fleet.heed(actions)
        commanded.append(actions)

    monkeypatch.setattr(FragmentRound, "goes_on", lambda *_: False)
    thorough = shard_of(quorum)

    assert [thorough.handle(fact) for fact in fleet.facts] == commanded
    assert sum(isinstance(action, events.Commit) for actions in commanded for action in actions) > 2
    assert any(isinstance(action, events.PublishCall) for actions in commanded for action in actions)
