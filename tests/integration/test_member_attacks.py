"""A permitted learner sends what the door allows; nothing of the others is refused for it, and they get where they aim at."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from atoll.protocol.ledger import settle
from atoll.run.record import read_run
from atoll.wire.subjects import Subjects
from support.links import unique_run
from support.member_attacks import MEMBER_ATTACKS, Attacker, MemberAttack, honest_refusals
from support.memory_world import MEAN, MemoryWorld, settings

HONEST = ("a", "b", "c")


@pytest.mark.parametrize(
    "attack",
    [pytest.param(each, id=each.name, marks=[] if each.final else pytest.mark.second_tier) for each in MEMBER_ATTACKS],
)
def test_nothing_honest_is_refused_for_what_a_member_sends(attack: MemberAttack) -> None:
    """Three honest learners and one that lies, at the rules that hold by default."""
    protocol = settings(**MEAN, outlier_ratio=10.0, tokens_target=12_000)
    world = MemoryWorld(unique_run(), protocol)
    over: list[str] = []

    async def lie() -> dict[str, int]:
        bus = await world.bus()
        record = None
        while record is None:
            record = await read_run(bus, Subjects(world.run))
        attacker = await Attacker.join(bus, record, "mallory")
        for _ in range(30):
            await attacker.play(attack)
        over.append("attacked")
        return await honest_refusals(bus, record, {"mallory"})

    refused: list[dict[str, int]] = []
    world.go(
        *(partial(world.train, name, 1.0) for name in HONEST),
        lambda: refused.append(world.home.submit(lie()).result(120.0)),
    )
    ledger = world.ledger()
    world.home.stop()

    assert over
    assert refused == [{}]
    honest = {name: account for name, account in ledger.accounts.items() if not name.startswith("mallory")}
    assert all(set(account.refused) <= {"stale"} for account in honest.values())
    assert all(account.merged + account.merged_late > 0 for account in honest.values())
    assert not [error for error in settle(ledger, protocol.fragments).errors if "mallory" not in error]
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(world.final["a"]))
