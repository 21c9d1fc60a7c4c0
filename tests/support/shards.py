"""A shard's machine whose ledgers become durable at once, and whose broker answers."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.protocol import events
from atoll.protocol.invariants import ShardWatch, check_shard
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard

ANSWERS_S = 1.0


def told(shard: Shard, fact: events.Fact) -> list[events.Command]:
    """Tell the shard a fact, and that each ledger is kept that it asks for; return all its commands.

    Until the moment of the fact the broker has answered for the queue, every second.
    """
    actions = [*answered(shard, fact.at_s), *shard.handle(fact)]
    for action in actions:  # the list grows while it is read
        if isinstance(action, events.Keep):
            actions.extend(shard.handle(events.Kept(at_s=fact.at_s, fragment=action.fragment)))
    return actions


def answered(shard: Shard, until_s: float) -> list[events.Command]:
    """Let the broker answer for the queue until just before a moment; return the commands that this leads to."""
    actions: list[events.Command] = []
    while (sign_s := shard.connected.sign_s) is not None and sign_s + ANSWERS_S < until_s:
        actions += shard.handle(events.QueueDrained(at_s=sign_s + ANSWERS_S, proven=False))
    return actions


def beat_of(learner: str, at_s: float, **more: Any) -> events.LearnerBeat:  # noqa: ANN401  (fields of a heartbeat)
    """Return the heartbeat of a learner that trains and steps once in a second unless `more` says otherwise."""
    said = {"incarnation": 1, "training": True, "step_s": 1.0, "tokens": 100} | more
    return events.LearnerBeat(at_s=at_s, learner=learner, **said)


class ShardDesk:
    """A shard with a watch on it, driven by hand; what must hold of it is checked after each fact."""

    def __init__(self, **changes: object) -> None:
        """Start at version 0 with nobody there, with one fragment unless `changes` say otherwise."""
        base: dict[str, object] = {"fragments": 1, "interval_steps": 8, "shards": 1}
        settings = msgspec.convert(base | changes, ProtocolSettings).check()
        self.shard = Shard(settings, 0, dict.fromkeys(range(settings.fragments), 0))
        self.watch = ShardWatch()
        self.done: list[events.Command] = []

    def tell(self, *facts: events.Fact) -> list[events.Command]:
        """Tell facts, and that each ledger is kept; return the commands."""
        commands: list[events.Command] = []
        for fact in facts:
            actions = told(self.shard, fact)
            self.watch.see(actions)
            check_shard(self.shard)
            commands += actions
        self.done += commands
        return commands

    def beat(self, learner: str, at_s: float = 0.0, incarnation: int = 1, **more: Any) -> list[events.Command]:  # noqa: ANN401
        """Let a learner be heard (see `beat_of`)."""
        return self.tell(beat_of(learner, at_s, incarnation=incarnation, **more))

    def arrive(self, key: events.PushKey, at_s: float, base: int = 0, **more: Any) -> list[events.Command]:  # noqa: ANN401
        """Let a contribution arrive, to be read."""
        tokens = more.pop("tokens", 80)
        said = {"steps": 8, "trained_tokens": max(100, key.push * tokens)} | more
        return self.tell(events.ContributionArrived(at_s=at_s, key=key, base_version=base, tokens=tokens, **said))

    def ready(self, key: events.PushKey, at_s: float, **more: Any) -> list[events.Command]:  # noqa: ANN401
        return self.tell(events.ContributionReady(at_s=at_s, key=key, **more))

    def fire(self, timer: str, at_s: float) -> list[events.Command]:
        """Let a timer of fragment 0 fire: `due` or `grace`."""
        return self.tell(events.TimerFired(at_s=at_s, name=f"{timer}/0"))
