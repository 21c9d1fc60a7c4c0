"""A shard's machine whose ledgers become durable at once, and whose broker answers."""

from __future__ import annotations

from atoll.protocol.events import Command, Fact, Keep, Kept, QueueDrained
from atoll.protocol.shard import Shard

ANSWERS_S = 1.0


def told(shard: Shard, fact: Fact) -> list[Command]:
    """Tell the shard a fact, and that each ledger is kept that it asks for; return all its commands.

    Until the moment of the fact the broker has answered for the queue, every second.
    """
    actions = [*answered(shard, fact.at_s), *shard.handle(fact)]
    for action in actions:  # the list grows while it is read
        if isinstance(action, Keep):
            actions.extend(shard.handle(Kept(at_s=fact.at_s, fragment=action.fragment)))
    return actions


def answered(shard: Shard, until_s: float) -> list[Command]:
    """Let the broker answer for the queue until just before a moment; return the commands that this leads to."""
    actions: list[Command] = []
    while (sign_s := shard.connected.sign_s) is not None and sign_s + ANSWERS_S < until_s:
        actions += shard.handle(QueueDrained(at_s=sign_s + ANSWERS_S, proven=False))
    return actions
