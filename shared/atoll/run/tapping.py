"""Reads a run as it happens, and what was before: for `atoll tap`, and for whoever wants a run's messages in Python.

What happens now is on the taps (`atoll.run.taps`). What was before comes from two places, because nothing keeps taps:

* the **event log** has every event of the last 30 days, in order and with numbers;
* of the **run, heads, members, heartbeats and presences** the broker keeps the last of each subject. So a reader that begins
  with the past begins with how things stand (`standing`).

Contributions of the past are in neither: a shard removes a manifest when its round is committed, and the `round` event says
what became of it.

A reader that began with the past takes events from the log to the end, by their numbers, and taps of events only tell it that
there is news. So no event is lost or told twice, also if the connection breaks or the reader is slow. Other messages are lost
where the reader is slower than the run: the feed has a bound, and drops the oldest. Memory does not grow with the length of
the log or of the run: the log is read in pages.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from atoll.base.clock import Clock, unix_s
from atoll.base.errors import BrokerUnavailable, BusError, PeerMisbehaved, RunReplaced
from atoll.base.quantities import MOMENT_MAX
from atoll.bus.interface import STORED_AT, Bus, CoreMessage, StoredEvent, Subscription
from atoll.run.taps import NUMBER_LEN_MAX, Selection, TapKind, body_of, json_object, kind_of
from atoll.wire.event_log import event_of
from atoll.wire.limits import INFO_HEADER
from atoll.wire.subjects import Subjects, matches

PAGE_EVENTS: Final = 256
FEED_LEN_MAX: Final = 4096
POLL_S: Final = 0.5
LOOK_S: Final = 2.0
"""Between two looks into the event log without a word of news: a tap may be lost."""
WRITTEN: Final = ("at_s", "claimed_at_s", "founded_at_s")
"""Fields that say when a message was written; a head and a presence have none."""
STANDING: Final = ("run", "member", "head", "beat", "presence")
"""Kinds of which the broker keeps the last, in the order in which they are told."""


@dataclass(frozen=True, slots=True)
class Tapped:
    """One message: when it was stored, its subject below the tap, and what it says.

    `at_s` is the broker's time of what was heard, and of what was read the writer's, 0 if that says none.
    `sequence` is its number in its stream. A message that was not heard but read is `stored`. `body` is its JSON, None if the
    taps have no bodies, or if it is not what its kind should be: then `fault` says why.
    """

    at_s: float
    kind: str
    subject: str
    sequence: int
    info: dict[str, Any]
    body: dict[str, Any] | None = None
    fault: str = ""
    stored: bool = False

    def line(self, *, bodies: bool) -> dict[str, Any]:
        """Return it as the JSON object that `atoll tap` prints."""
        told = {"at_s": round(self.at_s, 3), "kind": self.kind, "subject": self.subject, "sequence": self.sequence}
        more = {"stored": True} if self.stored else {}
        content = ({"body": self.body} | ({"fault": self.fault} if self.fault else {})) if bodies else {}
        return {**told, **more, "info": self.info, **content}


class Tapping:
    """Reads one run for one reader: `listen`, then iterate over `messages`."""

    def __init__(self, bus: Bus, run: str, clock: Clock, selection: Selection, *, tail: str = ">") -> None:
        """Hear nothing yet. `tail` is a filter of subjects below the tap, beside what the selection says."""
        self.bodiless = 0
        self._feed: Subscription
        self._bus = bus
        self._subjects = Subjects(run)
        self._clock = clock
        self._selection = selection
        self._tail = tail
        self._after = 0

    async def listen(self) -> None:
        """Hear the taps from now on; `messages` tells what was heard."""
        self._feed = await self._bus.listen(self._subjects.tap(self._wanted()), len_max=FEED_LEN_MAX)

    async def messages(self, since_s: float | None, *, follow: bool = True) -> AsyncIterator[Tapped | None]:
        """Yield what is wanted, and None at least every `POLL_S` while there is nothing.

        Args:
            since_s: begin with how things stand, and with the events since then (seconds since the epoch, by the clocks of
                those who wrote them); None: only what happens from now on.
            follow: go on with what happens; otherwise end with the newest event.
        """
        if since_s is not None:
            async for told in self.standing():
                yield told
            self._after = await self._before(since_s)
            async for told in self._events():
                yield told
        looked_s = self._clock.monotonic()
        while follow:
            core_message = await self._feed.next(POLL_S)
            is_event = core_message is not None and core_message.subject.startswith(self._subjects.tap("ev."))
            if since_s is not None and (is_event or self._clock.monotonic() - looked_s > LOOK_S):
                # The next look brings what an absent broker could not say.
                with contextlib.suppress(BusError, BrokerUnavailable):
                    async for told in self._events():
                        yield told
                looked_s = self._clock.monotonic()
            from_log = is_event and since_s is not None
            yield None if core_message is None or from_log else self._heard(core_message)

    async def standing(self) -> AsyncIterator[Tapped]:
        """Yield the last message of every subject of which the broker keeps one, as far as wanted."""
        for tap in (tap for name in STANDING for tap in self._selection.taps if tap.kind == name):
            try:
                records = await self._bus.get_records(f"{self._subjects.prefix}.{tap.pattern}")
            except RunReplaced:  # a run of old keeps no heartbeats, one that is not founded nothing
                continue
            for record in records:
                tail = record.subject.removeprefix(f"{self._subjects.prefix}.")
                if told := self._told(tap, tail, record.data, record.revision):
                    yield told

    def _wanted(self) -> str:
        """Return the narrowest filter of subjects that covers what is wanted."""
        wanted = self._selection.taps
        return wanted[0].pattern if self._tail == ">" and len(wanted) == 1 else self._tail

    def _heard(self, core_message: CoreMessage) -> Tapped | None:
        """Return what a tap says, None if it is not wanted."""
        tail = core_message.subject.removeprefix(self._subjects.tap(""))
        tap = kind_of(tail)
        if tap is None:
            return None
        self.bodiless += not core_message.data
        headers = core_message.headers
        sequence = headers.get("Nats-Sequence", "")
        return self._told(
            tap,
            tail,
            core_message.data,
            int(sequence) if sequence.isdecimal() and len(sequence) <= NUMBER_LEN_MAX else 0,
            at_s=unix_s(headers.get(STORED_AT, "")) or self._clock.wall(),
            info=_info(headers.get(INFO_HEADER, "")),
        )

    def _told(
        self,
        tap: TapKind,
        tail: str,
        data: bytes,
        sequence: int,
        *,
        at_s: float | None = None,
        info: dict[str, Any] | None = None,
    ) -> Tapped | None:
        """Return a message as it is told, None if it is not wanted. What was heard has a time, what was read has none."""
        if not matches(self._tail, tail):
            return None
        body, fault = None, ""
        if data:
            try:
                body = body_of(tap, tail, data)
            except PeerMisbehaved as error:
                fault = f"{error.what}: {error.got}"
        shown = info or {}
        if not self._selection.takes(tap, tail, shown if body is None else body):
            return None
        written_s = _written_s(body or {})
        stored = at_s is None
        return Tapped(written_s if at_s is None else at_s, tap.kind, tail, sequence, shown, body, fault, stored)

    # --- the event log ------------------------------------------------------------------------------------------------

    async def _events(self) -> AsyncIterator[Tapped]:
        """Yield the wanted events after the last one that was read, to the end of the log."""
        wanted = self._selection.taps
        kind = wanted[0].kind if len(wanted) == 1 and wanted[0].fields is not None else "*"
        if not any(tap.fields for tap in wanted):
            return
        while True:
            page = await self._page(kind, self._after, PAGE_EVENTS)
            for entry in page:
                self._after = max(self._after, entry.sequence)
                tail = entry.subject.removeprefix(f"{self._subjects.prefix}.")
                tap = kind_of(tail)
                if tap is not None and (told := self._told(tap, tail, entry.data, entry.sequence)):
                    yield told
            if len(page) < PAGE_EVENTS:
                return

    async def _before(self, since_s: float) -> int:
        """Return a number in the event log after which the events since then begin.

        The log has no index of times, but its times grow with its numbers. So halving finds the place, with at most twice
        as many requests as the log's length has bits. It is the broker's time: no writer can lead the search astray.
        """
        first = await self._written(0)
        if first is None or first[1] >= since_s:
            return 0
        low, step = first[0], 1
        while (found := await self._written(low + step)) is not None and found[1] < since_s:
            low, step = found[0], 2 * step
        high = low + step
        while low < high:
            middle = (low + high) // 2
            found = await self._written(middle)
            if found is None or found[1] >= since_s:
                high = middle
            else:
                low = found[0]
        return low

    async def _written(self, after: int) -> tuple[int, float] | None:
        """Return number and time of the first event after a number, by the writer's clock only if the broker says no time."""
        while found := await self._page("*", after, 1):
            after, stored_s = found[0].sequence, found[0].stored_s
            if stored_s is not None:
                return after, stored_s
            with contextlib.suppress(PeerMisbehaved):
                return after, event_of(found[0].subject, found[0].data).at_s
        return None

    async def _page(self, kind: str, after: int, limit: int) -> list[StoredEvent]:
        """Return the next events; none while nobody has founded the run."""
        try:
            return await self._bus.replay(self._subjects.event(kind, "*"), after=after, limit=limit)
        except RunReplaced:
            return []


def _written_s(body: Mapping[str, Any]) -> float:
    """Return when a message says that it was written, 0 if it does not; a field that is none of its kind may hold anything."""
    told = (body.get(name) for name in WRITTEN)
    return next((float(one) for one in told if isinstance(one, int | float) and 0.0 <= one <= MOMENT_MAX), 0.0)


def _info(text: str) -> dict[str, Any]:
    """Return the writer's `info` of a message; empty if it is missing or unreadable."""
    try:
        return json_object(text or "{}")
    except msgspec.MsgspecError:
        return {}
