"""Keeps a `RunView` current from a bus: heartbeats and presences as they arrive, the event log from its beginning.

It believes heartbeats of members only (`atoll.run.member_roll`): anybody could make up the others.

It only reads. If the broker is away or the streams do not exist yet, it waits. A message that no correct peer sends is
counted and skipped. The event log is read by sequence number, so that each entry is applied once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, PeerMisbehaved
from atoll.base.logs import get
from atoll.bus.interface import Bus
from atoll.run.member_roll import MemberRoll, Strangers
from atoll.run.view import RunView
from atoll.wire.messages import Beat, Event, M, Presence, decode
from atoll.wire.subjects import Subjects

log = get(__name__)

POLL_S = 0.5
PAGE_ENTRIES = 1000


class Watch:
    """Reads one run into `view`."""

    def __init__(self, bus: Bus, run: str, view: RunView, clock: Clock) -> None:
        """Read nothing yet; `follow` does."""
        self.view = view
        self._bus = bus
        self._subjects = Subjects(run)
        self._clock = clock
        self._after = 0
        self._reading = asyncio.Lock()
        self._roll = MemberRoll(bus, self._subjects)
        self._strangers = Strangers[Beat]()

    async def follow(self) -> None:
        """Keep the view current until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear(self._subjects.beat("*"), Beat, self._on_beat))
            tasks.create_task(self._roll.keep_reading(self._on_roll))
            tasks.create_task(self._hear(self._subjects.presence("*"), Presence, self.view.on_presence))
            tasks.create_task(self._follow_events())

    async def catch_up(self) -> None:
        """Apply the new entries of the event log; raises what the bus raises."""
        async with self._reading:
            while True:
                entries = await self._bus.replay(self._subjects.event("*", "*"), after=self._after, limit=PAGE_ENTRIES)
                for entry in entries:
                    self._after = max(self._after, entry.sequence)
                    try:
                        self.view.on_event(decode(Event, entry.data))
                    except PeerMisbehaved:
                        self.view.unreadable += 1
                if len(entries) < PAGE_ENTRIES:
                    return

    def _on_beat(self, beat: Beat, at_s: float) -> None:
        """Show a member's heartbeat; a stranger's waits until the members were read."""
        if self._roll.admits(beat.learner, beat.incarnation):
            self.view.on_beat(beat, at_s)
        else:
            self._strangers.put(beat.learner, beat)
            self._roll.ask()

    def _on_roll(self, began_s: float) -> bool:
        taken = False
        for beat in self._strangers.before(began_s):
            if self._roll.admits(beat.learner, beat.incarnation):
                self.view.on_beat(beat, self._clock.monotonic())
                taken = True
        return taken

    async def _follow_events(self) -> None:
        while True:
            try:
                await self.catch_up()
            except AtollError as error:
                log.info("event_log.unreadable", reason=str(error))
            await asyncio.sleep(POLL_S)

    async def _hear(self, subject: str, kind: type[M], take: Callable[[M, float], None]) -> None:
        """Let the view `take` every core message on `subject`, with its time of arrival."""
        while True:
            try:
                feed = await self._bus.listen(subject)
                break
            except AtollError as error:
                log.info("core_messages.unheard", subject=subject, reason=str(error))
                await asyncio.sleep(POLL_S)
        async for core_message in feed:
            try:
                message = decode(kind, core_message.data)
            except PeerMisbehaved:
                self.view.unreadable += 1
            else:
                take(message, self._clock.monotonic())
