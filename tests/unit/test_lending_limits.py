"""How often a learner lends its state: a flood of requests costs it a few copies in two minutes, and no more."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from atoll.base.clock import SystemClock, this_process
from atoll.bus.interface import CoreMessage
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.membership import claim
from atoll.client.optimizer_state import LOANS_MAX, LOANS_S, StateLender, TrainingProgress
from atoll.wire.messages import Control, encode
from atoll_simulator.loop import VirtualLoop
from support.founded_run import run_record


async def flooded(run: str, for_s: float) -> int:
    """Ask for the state ten times a second, step ten times a second; return how often it was lent."""
    broker, record = MemoryBroker(), run_record(run)
    bus, asker = MemoryBus(run, broker), MemoryBus(run, broker)
    member = await claim(bus, record.subjects, "a", SystemClock())
    standing = TrainingProgress(steps=1000, tokens=1000, run_tokens=1000, healthy=True)
    lender = StateLender(bus, record, member, lambda: standing, this_process())
    await lender.start()
    lent = await asker.listen(f"{record.subjects.prefix}.answer.>")
    state, loop = {"m": np.ones(8, np.float32)}, asyncio.get_running_loop()
    until_s = loop.time() + for_s
    for number in range(1 << 20):
        if loop.time() >= until_s:
            break
        request = CoreMessage(
            record.subjects.control("a"),
            encode(Control(verb="share", sender=f"thief-{number}")),
            f"{record.subjects.prefix}.answer.{number}",
        )
        broker.core_message(request)
        await asyncio.sleep(0.1)
        lender.share(state, donated=False)
    answers = 0
    while await lent.next(0.01) is not None:
        answers += 1
    await lender.stop()
    return answers


def test_a_flood_of_requests_costs_a_few_copies(run: str) -> None:
    made: Any = VirtualLoop  # asyncio's class has methods that nothing here asks for
    loop = made()
    try:
        once = loop.run_until_complete(flooded(run, LOANS_S - 1.0))
        twice = loop.run_until_complete(flooded(run, 2.0 * LOANS_S - 1.0))
    finally:
        loop.close()

    assert (once, twice) == (LOANS_MAX, 2 * LOANS_MAX)
