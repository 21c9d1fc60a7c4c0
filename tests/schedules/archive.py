"""An object store in memory, which may be away, and the thread in which an archivist uses it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TypeVar

from atoll.archive.object_store import Name
from atoll.base.errors import ArchiveUnavailable, CheckpointError
from atoll_simulator.loop import WALL_S
from schedules.processes import ProcessLoop

T = TypeVar("T")

THREAD_S = 0.03


class MemoryArchive:
    """Objects by path."""

    def __init__(self, loop: ProcessLoop, dice: random.Random) -> None:
        self.where = "memory"
        self.away = False
        self._loop = loop
        self._dice = dice
        self._objects: dict[str, tuple[bytes, float]] = {}

    def time(self) -> float:
        """Return the wall time, for those that judge the age of objects."""
        return WALL_S + self._loop.now_s

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do the work of a thread, which takes a while."""
        await asyncio.sleep(self._dice.random() * THREAD_S)
        return work()

    def _here(self) -> None:
        if self.away:
            raise ArchiveUnavailable("the archive is away")

    def put(self, path: str, data: bytes) -> None:
        self._here()
        self._objects[path] = (bytes(data), self.time())

    def get(self, path: str, size_bytes_max: int) -> bytes:
        self._here()
        if path not in self._objects or len(self._objects[path][0]) > size_bytes_max:
            raise CheckpointError("no such object", got=path)
        return self._objects[path][0]

    def names(self, prefix: str) -> list[Name]:
        self._here()
        return [
            Name(path, len(data), at_s)
            for path, (data, at_s) in sorted(self._objects.items())
            if path.startswith(f"{prefix}/")
        ]

    def remove(self, paths: list[str]) -> None:
        self._here()
        for path in paths:
            self._objects.pop(path, None)
