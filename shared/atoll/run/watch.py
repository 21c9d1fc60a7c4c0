"""Keeps a `History` current from a bus: heartbeats and presences as they arrive, the event log from its beginning.

It believes heartbeats of members only, and of each learner what can be since the founding (`atoll.run.member_roll`), so
heartbeats count once the event log was read. A message counts only on the subject of who it is of. One that no correct peer
sends is counted and skipped, and the log names its writer once. It only reads, and waits for a broker or streams that are not
there. The event log is read by sequence number, so each entry is applied once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, PeerMisbehaved, on_one_line
from atoll.base.logs import get
from atoll.bus.interface import PAGE_EVENTS, Bus
from atoll.run.history import NAME_CHARS_MAX, History
from atoll.run.member_roll import MemberRoll, ReportJudge, Strangers
from atoll.run.record import read_run
from atoll.wire.messages import Beat, M, Presence, decode
from atoll.wire.subjects import Subjects

log = get(__name__)

POLL_S = 0.5


class Watch:
    """Reads one run into `view`."""

    def __init__(self, bus: Bus, run: str, view: History, clock: Clock) -> None:
        self.view = view
        self._bus = bus
        self._subjects = Subjects(run)
        self._clock = clock
        self._after = 0
        self._reading = asyncio.Lock()
        self.answered_s: float | None = None
        """When the broker last gave all entries of the event log, by the clock of the view's arrivals."""
        self._roll = MemberRoll(bus, self._subjects)
        self._strangers = Strangers[Beat]()
        self._judge: ReportJudge | None = None
        self._named: set[str] = set()

    def region_of(self, learner: str) -> str:
        """Return the region whose synchronizer folds what a learner sends, as far as known; empty for none."""
        return self._roll.region_of(learner)

    def read_up_to(self) -> int:
        """Return the number in the event log of the newest entry that the view has; 0 before the first."""
        return self._after

    async def follow(self) -> None:
        """Keep the view current until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear(self._subjects.beat, Beat, lambda beat: beat.learner, self._on_beat))
            tasks.create_task(self._roll.keep_reading(self._on_roll))
            tasks.create_task(
                self._hear(self._subjects.presence, Presence, lambda heard: heard.name, self.view.on_presence)
            )
            tasks.create_task(self._follow_events())

    async def catch_up(self) -> None:
        """Apply the new entries of the event log; raises what the bus raises."""
        async with self._reading:
            self._judge = self._judge or await self._judge_of_run()
            while True:
                entries = await self._bus.replay(self._subjects.event("*", "*"), after=self._after, limit=PAGE_EVENTS)
                for entry in entries:
                    self._after = max(self._after, entry.sequence)
                    judge = None if self._judge is None else self._judge.event
                    self.view.take(entry.subject, entry.data, entry.stored_s, judge)
                self._name_strange()
                if len(entries) < PAGE_EVENTS:
                    self.answered_s = self._clock.monotonic()
                    return

    async def _judge_of_run(self) -> ReportJudge | None:
        """Return who judges reports, None without a record that can be read: then whoever watches is told so elsewhere."""
        try:
            run = await read_run(self._bus, self._subjects)
        except PeerMisbehaved:
            return None
        return None if run is None else ReportJudge(run)

    def _on_beat(self, beat: Beat, at_s: float) -> None:
        """Show a member's heartbeat; a stranger's waits until the members were read. None was sent after it arrived."""
        beat = msgspec.structs.replace(beat, at_s=min(beat.at_s, self._clock.wall()))
        if self._roll.admits(beat.learner, beat.incarnation):
            self._show(beat, at_s)
        else:
            self._strangers.put(beat.learner, beat)
            self._roll.ask()

    def _on_roll(self, began_s: float) -> bool:
        taken = False
        for beat in self._strangers.before(began_s):
            if self._roll.admits(beat.learner, beat.incarnation):
                self._show(beat, self._clock.monotonic())
                taken = True
        return taken

    def _show(self, beat: Beat, at_s: float) -> None:
        if self.answered_s is None:
            return
        try:
            self.view.on_beat(beat if self._judge is None else self._judge.beat(beat, self._clock.wall()), at_s)
        except PeerMisbehaved as error:
            self._refuse(self._subjects.beat(beat.learner), error)
            self._name_strange()

    async def _follow_events(self) -> None:
        logged = ""
        while True:
            try:
                await self.catch_up()
                logged = ""
            except AtollError as error:
                if str(error) != logged:  # before a run is founded, there is none to read, and each look says so
                    logged = str(error)
                    log.info("event_log.unreadable" if self._after else "event_log.awaited", reason=error.what)
            await asyncio.sleep(POLL_S)

    async def _hear(
        self,
        subject_of: Callable[[str], str],
        kind: type[M],
        sender_of: Callable[[M], str],
        take: Callable[[M, float], None],
    ) -> None:
        """Let the view `take` every core message of a kind that is on its sender's own subject, with its time of arrival."""
        while True:
            try:
                feed = await self._bus.listen(subject_of("*"))
                break
            except AtollError as error:
                log.info("core_messages.unheard", subject=subject_of("*"), reason=str(error))
                await asyncio.sleep(POLL_S)
        try:
            async for core_message in feed:
                try:
                    message = decode(kind, core_message.data)
                    check_own(kind.__name__, core_message.subject, subject_of(sender_of(message)))
                except PeerMisbehaved as error:
                    self._refuse(core_message.subject, error)
                    self._name_strange()
                else:
                    take(message, self._clock.monotonic())
        finally:
            await feed.close()

    def _refuse(self, subject: str, error: PeerMisbehaved) -> None:
        self.view.refuse(subject.rpartition(".")[2][:NAME_CHARS_MAX], error)

    def _name_strange(self) -> None:
        """Log each writer of unreadable messages once; the view counts them all, and bounds how many it names."""
        for writer in self.view.strange.keys() - self._named:
            self._named.add(writer)
            told = self.view.strange[writer]
            log.warning("messages.refused", writer=writer, messages=told.count, reason=on_one_line(told.reason))


def check_own(kind: str, subject: str, own: str) -> None:
    """Raise `PeerMisbehaved` if a message did not come on the subject of who it says that it is of."""
    if subject != own:
        raise PeerMisbehaved(f"a {kind} in the name of another", got=own, allowed=subject)
