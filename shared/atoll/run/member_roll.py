"""The members of a run as their records say, and which of their totals a reader believes: only members count.

Anybody who reaches the broker can send under any id. A member wrote a record before it sent anything, so what comes under an id
without one is a *stranger's*, and is dropped. A member may be newer than what we read last: a stranger's message waits until
the records were read once more after it had arrived. Records are read at most every `READ_S`, however many strangers there are;
of heartbeats the newest of each of `STRANGERS_MAX` ids waits.

A shard judges a learner's totals by what it has heard of that life before (`atoll.protocol.claims`). A reader that only shows a
run has its founding: no life can have taken more steps since then than the run allows. It drops a report beyond that whole, and
counts it as a message that no correct peer sends. A farewell always ends its life; its totals are cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from atoll.base.errors import BusError, EnvironmentFault, PeerMisbehaved
from atoll.base.logs import get
from atoll.base.quantities import INCARNATION_MAX
from atoll.bus.interface import Bus
from atoll.protocol.claims import Claim, claim_fault, cut_claim, lived_since_s, steps_possible
from atoll.run.record import read_members
from atoll.wire.events import LeftEvent, SampleEvent, fields_of
from atoll.wire.messages import Beat, Event, RunRecord
from atoll.wire.subjects import Subjects, is_token

READ_S: Final = 0.5
READ_S_MAX: Final = 4.0
STRANGERS_MAX: Final = 1 << 14

log = get(__name__)

IMPOSSIBLE_CLAIM: Final = "a claim that cannot be"
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
        """Return for how long an incarnation can have lasted: since the last reading without it; None if the first had it."""
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
        known = {learner: member for learner, member in members.items() if member is not None}
        self._newest = {
            learner: known[learner].incarnation if learner in known else INCARNATION_MAX for learner in members
        }
        self._over = {learner: member.incarnation - (not member.left) for learner, member in known.items()}
        self._regions = {learner: member.region for learner, member in known.items() if is_token(member.region)}
        if before_s is not None:
            new = {learner: number for learner, number in self._newest.items() if number != before.get(learner)}
            self._before_s |= {learner: (number, before_s) for learner, number in new.items()}
        self._read_s = began_s

    async def keep_reading(self, on_read: Callable[[float], bool]) -> None:
        """Read whenever it was asked for; less often while `on_read`, told when one began, finds it of no use."""
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


def claim_of(beat: Beat) -> Claim:
    """Return the totals in a heartbeat."""
    return Claim(beat.step, beat.tokens, beat.pushed, beat.superseded, beat.refused_local)


def with_claim(beat: Beat, claim: Claim) -> Beat:
    """Return a heartbeat with other totals."""
    return msgspec.structs.replace(
        beat,
        step=claim.steps,
        tokens=claim.tokens,
        pushed=claim.pushed,
        superseded=claim.superseded,
        refused_local=claim.refused_local,
    )


class ReportJudge:
    """Believes of a run's learners what can be since its founding, by the wall clock at each message's arrival or storage."""

    def __init__(self, run: RunRecord) -> None:
        self._run = run

    def beat(self, beat: Beat, wall_s: float) -> Beat:
        """Return a heartbeat that arrived at `wall_s`, a farewell with totals that can be.

        Raises:
            PeerMisbehaved: its totals cannot be.
        """
        claim, steps_max = claim_of(beat), self._steps_max(wall_s)
        fault = claim_fault(self._run.protocol, claim, steps_max)
        if fault and beat.state == "left":
            return with_claim(beat, cut_claim(self._run.protocol, claim, steps_max))
        if fault:
            raise PeerMisbehaved(IMPOSSIBLE_CLAIM, got=fault)
        return beat

    def event(self, event: Event) -> Event:
        """Return an entry of the event log, a farewell with totals that can be; raise `PeerMisbehaved` as `beat`."""
        if event.kind == "sample":
            told = fields_of(event, SampleEvent)
            claim = Claim(told.step, told.tokens, 0, told.superseded)
            if fault := claim_fault(self._run.protocol, claim, self._steps_max(event.at_s)):
                raise PeerMisbehaved(IMPOSSIBLE_CLAIM, got=fault)
        elif event.kind == "left":
            left = fields_of(event, LeftEvent)
            now = cut_claim(self._run.protocol, Claim(left.steps, left.tokens, 0), self._steps_max(event.at_s))
            if (now.steps, now.tokens) != (left.steps, left.tokens):
                return msgspec.structs.replace(event, fields={**event.fields, "steps": now.steps, "tokens": now.tokens})
        return event

    def _steps_max(self, wall_s: float) -> float:
        return steps_possible(self._run.protocol, lived_since_s(self._run.founded_at_s, wall_s))
