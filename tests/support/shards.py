"""A shard's machine whose ledgers become durable at once."""

from __future__ import annotations

from atoll.protocol.events import Command, Fact, Keep, Kept
from atoll.protocol.shard import Shard


def told(shard: Shard, fact: Fact) -> list[Command]:
    """Tell the shard a fact, and that each ledger is kept that it asks for; return all its commands."""
    actions = shard.handle(fact)
    for action in actions:  # the list grows while it is read
        if isinstance(action, Keep):
            actions.extend(shard.handle(Kept(at_s=fact.at_s, fragment=action.fragment)))
    return actions
