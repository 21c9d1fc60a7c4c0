"""A shard's machine whose ledgers become durable at once."""

from __future__ import annotations

from atoll.protocol.events import Action, Event, Keep, Kept
from atoll.protocol.shard import Shard


def told(shard: Shard, fact: Event) -> list[Action]:
    """Tell the shard a fact, and that each ledger is kept that it asks for; return all its commands."""
    actions = shard.handle(fact)
    for action in actions:  # the list grows while it is read
        if isinstance(action, Keep):
            actions.extend(shard.handle(Kept(at_s=fact.at_s, fragment=action.fragment)))
    return actions
