"""What commits leave behind is gone in the end, but not just when everybody reads what is new."""

from __future__ import annotations

import asyncio

from atoll.base.errors import StorageFull
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.wire.subjects import Subjects
from atoll_synchronizer.garbage_collector import LYING_S, GarbageCollector
from support.clocks import in_virtual_time
from support.links import unique_run


class Floor(MemoryBus):
    """A bus that refuses to remove anything, so many times."""

    refusals = 0

    def __init__(self, run: str) -> None:
        super().__init__(run, MemoryBroker())
        self.subjects = Subjects(run)

    async def purge(self, subject_filter: str, *, keep: int = 0) -> int:
        if self.refusals:
            self.refusals -= 1
            raise StorageFull("no room")
        return await super().purge(subject_filter, keep=keep)

    async def put(self, fragment: int, version: int) -> str:
        ref = await self.put_blob(self.subjects.global_stem(fragment, version, "1.n"), b"x")
        return f"{ref.stem}.*"

    async def lying(self) -> int:
        return len(await self.get_records(f"{self.subjects.prefix}.gl.c.>"))


@in_virtual_time
async def test_what_is_left_is_removed_when_it_is_due() -> None:
    bus = Floor(unique_run())
    garbage = GarbageCollector(bus)
    sweeping = asyncio.create_task(garbage.keep_sweeping())
    await asyncio.sleep(0.4 * LYING_S)
    garbage.leave(0, await bus.put(0, 1))
    await asyncio.sleep(0.4 * LYING_S)
    garbage.leave(0, await bus.put(0, 2))
    found = []
    for _ in range(4):
        await asyncio.sleep(0.39 * LYING_S)
        found.append(await bus.lying())
    assert found == [2, 1, 0, 0]
    sweeping.cancel()


@in_virtual_time
async def test_the_next_commit_of_a_fragment_removes_what_lies_there() -> None:
    bus = Floor(unique_run())
    garbage = GarbageCollector(bus)
    garbage.leave(0, await bus.put(0, 1), await bus.put(0, 2))
    garbage.leave(1, await bus.put(1, 1))
    await garbage.sweep(0, await bus.put(0, 3))
    assert await bus.lying() == 1
    await garbage.sweep()
    assert await bus.lying() == 0


@in_virtual_time
async def test_what_cannot_be_removed_waits_for_the_next_time() -> None:
    bus = Floor(unique_run())
    garbage = GarbageCollector(bus)
    bus.refusals = 1
    await garbage.remove(await bus.put(0, 1), await bus.put(0, 2))
    assert await bus.lying() == 2
    await garbage.remove(await bus.put(0, 3))
    assert await bus.lying() == 2
    await garbage.sweep()
    assert await bus.lying() == 0
