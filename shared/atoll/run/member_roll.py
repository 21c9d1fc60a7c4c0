"""The members of a run as their records say: only they count.

Anybody who reaches the broker can send a heartbeat or a manifest under any id. A member has a record, which it wrote before
it sent anything. So what comes under an id without a record is a *stranger's*: it costs a look into a set, and is dropped.

A member may be newer than what we read last. So a stranger's message waits until the records were read once more after it
had arrived, and counts then if its sender has a record. Records are read at most every `READ_S`, however many strangers
there are; of heartbeats the newest of each of `STRANGERS_MAX` ids waits, and later ones of other ids are dropped.

A life that an earlier reading did not find began after that reading. So its reader knows, by its own clock, for how long it can
have lasted (`lived_s`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from atoll.base.errors import BusError, EnvironmentFault
from atoll.base.logs import get
from atoll.base.quantities import INCARNATION_MAX
from atoll.bus.interface import Bus
from atoll.run.record import read_members
from atoll.wire.subjects import Subjects, is_token

READ_S: Final = 0.5
READ_S_MAX: Final = 4.0
STRANGERS_MAX: Final = 1 << 14

log = get(__name__)

T = TypeVar("T")


class MemberRoll:
    """The newest incarnation of every learner that has a member record."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._subjects = subjects
        self._newest: dict[str, int] = {}
        self._over: dict[str, int] = {}
        self._regions: dict[str, str] = {}
        self._read_s: float | None = None
        self._before_s: dict[str, tuple[int, float]] = {}  # a reading without this incarnation, the last of them
        self._wanted = asyncio.Event()

    def __contains__(self, learner: str) -> bool:
        return learner in self._newest

    def admits(self, learner: str, incarnation: int) -> bool:
        """Return whether an incarnation is the member's present one, or a former one."""
        return incarnation <= self._newest.get(learner, -1)

    def is_over(self, learner: str, incarnation: int) -> bool:
        """Return whether a record says that an incarnation has left, or that a later one has taken its place."""
        return incarnation <= self._over.get(learner, -1)

    def lived_s(self, learner: str, incarnation: int) -> float | None:
        """Return for how long an incarnation can have lasted; None if it was there when the records were read first."""
        newest, before_s = self._before_s.get(learner, (-1, 0.0))
        return asyncio.get_running_loop().time() - before_s if newest == incarnation else None

    def region_of(self, learner: str) -> str:
        """Return the region whose synchronizer folds what a learner sends, empty if its record names none."""
        return self._regions.get(learner, "")

    def ask(self) -> None:
        """Have the records read soon."""
        self._wanted.set()

    async def read(self) -> None:
        """Read the records; one that cannot be read may be of any incarnation. Raises what the bus raises."""
        began_s = asyncio.get_running_loop().time()
        members = await read_members(self._bus, self._subjects)
        before, before_s = self._newest, self._read_s
        self._newest = {
            learner: INCARNATION_MAX if member is None else member.incarnation for learner, member in members.items()
        }
        self._over = {
            learner: member.incarnation if member.left else member.incarnation - 1
            for learner, member in members.items()
            if member is not None
        }
        self._regions = {
            learner: member.region
            for learner, member in members.items()
            if member is not None and is_token(member.region)
        }
        if before_s is not None:
            new = {learner: number for learner, number in self._newest.items() if number != before.get(learner)}
            self._before_s |= {learner: (number, before_s) for learner, number in new.items()}
        self._read_s = began_s

    async def keep_reading(self, on_read: Callable[[float], bool]) -> None:
        """Read whenever it was asked for, and call `on_read` with the moment before the reading began.

        It says whether the reading was of use. While it is not, we read less and less often.
        """
        clock, pause_s = asyncio.get_running_loop().time, READ_S
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            began_s = clock()
            try:
                await self.read()
            except (BusError, EnvironmentFault) as error:  # also of a broker that has lost this run
                log.warning("members.unreadable", reason=str(error))
                self._wanted.set()
            else:
                pause_s = READ_S if on_read(began_s) else min(READ_S_MAX, 2.0 * pause_s)
            await asyncio.sleep(pause_s)


class Strangers(Generic[T]):
    """Messages whose senders have no record yet, by a key of each, with the time of their arrival; bounded."""

    def __init__(self, most: int = STRANGERS_MAX) -> None:
        self._most = most
        self._waiting: dict[object, tuple[float, T]] = {}
        self.room = asyncio.Event()
        self.room.set()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, key: object, message: T) -> bool:
        """Let a message wait in place of an earlier one of its key; return False where there is no room."""
        if key not in self._waiting and len(self._waiting) >= self._most:
            return False
        self._waiting[key] = asyncio.get_running_loop().time(), message
        if len(self._waiting) >= self._most:
            self.room.clear()
        return True

    def before(self, at_s: float) -> list[T]:
        """Take out the messages that had arrived by then."""
        due = [key for key, (arrived_s, _) in self._waiting.items() if arrived_s <= at_s]
        messages = [self._waiting.pop(key)[1] for key in due]
        if len(self._waiting) < self._most:
            self.room.set()
        return messages
