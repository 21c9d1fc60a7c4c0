"""Sends each run's newest state to everybody who looks: one frame is made for all viewers, and nobody is waited for.

    PageScene ──every FRAME_S──► frame ──► Mailbox of each viewer ──► its connection

A mailbox has one place for each kind of frame, and a newer frame takes the place of an older one that was not fetched. So a
slow browser misses frames, and neither the monitor nor other viewers notice. At most `VIEWERS_MAX` look at a time. One that
fetches nothing for a minute is sent away (`BoundedConnection`): a frozen browser would hold its place for ever. Without
viewers no frame is made.

A scene that cannot be drawn is a mistake of ours, and what shows it may be a message of a peer. Its viewers then keep the last
frame; the log says why, and the other runs of the page, and the monitor, go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from atoll.base.clock import Clock
from atoll.base.logs import get
from atoll.report.page_data import comparison_rows
from atoll_monitor.dashboard.scenes import PageScene

log = get(__name__)

FRAME_S: Final = 1.0
CURVES_S: Final = 4.0
CURVES_SHARE: Final = 0.05
"""Of hundreds of learners curves and causes take half a second to make, so they come less often: the loop has other work."""
SLOW_S: Final = 0.25
VIEWERS_MAX: Final = 128
ASKED_S: Final = 10.0
"""For how long fates are kept current after a request for the numbers: a script that asks again soon gets them at once."""
FATES_WAIT_S: Final = 3.0
FATES_LOOK_S: Final = 0.1


@dataclass(slots=True, eq=False)
class Mailbox:
    """Frames that one viewer has not fetched yet, the newest of each kind; `missed` counts those that were replaced."""

    run: str
    missed: int = 0
    _frames: dict[str, bytes] = field(default_factory=dict)
    _fresh: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, kind: str, frame: bytes) -> None:
        """Leave a frame; never waits."""
        self.missed += kind in self._frames
        self._frames[kind] = frame
        self._fresh.set()

    async def take(self) -> bytes:
        """Return all that is there as server-sent events, as soon as there is something."""
        await self._fresh.wait()
        self._fresh.clear()
        frames, self._frames = self._frames, {}
        return b"".join(b"event: %b\ndata: %b\n\n" % (kind.encode(), frame) for kind, frame in frames.items())


class Feed:
    """The scenes of one server, and who looks at them."""

    def __init__(self, scenes: Mapping[str, PageScene], clock: Clock) -> None:
        """Show nothing yet; `run` does."""
        self.scenes = dict(scenes)
        self.stopped = asyncio.Event()
        self._clock = clock
        self._viewers: set[Mailbox] = set()
        self._newest: dict[str, tuple[float, dict[str, bytes]]] = {}
        self._failing: dict[str, str] = {}
        self._asked_s: float | None = None

    def __len__(self) -> int:
        """Return how many look."""
        return len(self._viewers)

    @property
    def is_looked_at(self) -> bool:
        """Return whether anybody looks, or asked for the numbers a short while ago."""
        asked_s = self._asked_s
        return len(self) > 0 or (asked_s is not None and self._clock.monotonic() - asked_s < ASKED_S)

    async def ask(self, run: str) -> None:
        """Count as a look at a run, and wait for what is only read for those who look; `FATES_WAIT_S` at most."""
        self._asked_s = self._clock.monotonic()
        until_s = self._asked_s + FATES_WAIT_S
        while self.scenes[run].lacks_fates and self._clock.monotonic() < until_s:  # noqa: ASYNC110  (a scene tells nobody)
            await asyncio.sleep(FATES_LOOK_S)

    @property
    def first(self) -> str:
        """Return the run that is shown to whoever names none."""
        return next(iter(self.scenes))

    def enter(self, run: str) -> Mailbox | None:
        """Return the mailbox of a new viewer of a run, with its first frames; None if there is no room."""
        if len(self._viewers) >= VIEWERS_MAX:
            log.warning("viewer.refused", run=run, viewers=len(self), todo="close pages that nobody looks at")
            return None
        mailbox = Mailbox(run)
        made_s, frames = self._newest.get(run, (-FRAME_S, {}))
        if self._clock.monotonic() - made_s >= FRAME_S or "curves" not in frames:
            with self._log_failures(run):
                frames = self._make_frames(run)
        for kind, frame in frames.items():
            mailbox.put(kind, frame)
        self._viewers.add(mailbox)
        log.info("viewer.came", run=run, viewers=len(self))
        return mailbox

    def leave(self, mailbox: Mailbox) -> None:
        """Forget a viewer."""
        self._viewers.discard(mailbox)
        log.info("viewer.left", run=mailbox.run, viewers=len(self), missed_frames=mailbox.missed)

    def _make_frames(self, run: str, *, curves: bool = True) -> dict[str, bytes]:
        """Make the frames of a run by kind, as JSON; many who come at once get the same ones."""
        scene = self.scenes[run]
        parts: dict[str, Any] = {"state": scene.state()}
        if curves:
            parts["curves"], parts["causes"] = scene.curves(), scene.causes()
            if len(self.scenes) > 1:
                parts["compared"] = comparison_rows(self._draw_all())
        frames = {kind: msgspec.json.encode(frame) for kind, frame in parts.items()}
        self._newest[run] = self._clock.monotonic(), frames
        return frames

    def _draw_all(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield state and curves of every run that can be drawn."""
        for run, scene in self.scenes.items():
            found = None
            with self._log_failures(run):
                found = scene.state(), scene.curves()
            if found is not None:
                yield found

    @contextmanager
    def _log_failures(self, run: str) -> Iterator[None]:
        """Draw a run; where that fails, log it once, and again when it fails in another way."""
        try:
            yield
        except Exception as error:  # a mistake in one scene ends no other
            if self._failing.get(run) != repr(error):
                self._failing[run] = repr(error)
                log.exception("scene.failed", run=run, todo="please report this; the run itself is not concerned")

    async def run(self) -> None:
        """Make frames until cancelled."""
        due_s = 0.0
        while True:
            await asyncio.sleep(FRAME_S)
            for run, scene in self.scenes.items():
                with self._log_failures(run):
                    scene.tick()
            began_s, size_bytes = self._clock.monotonic(), 0
            curves = began_s >= due_s
            for run in {mailbox.run for mailbox in self._viewers}:
                frames: dict[str, bytes] = {}
                with self._log_failures(run):
                    frames = self._make_frames(run, curves=curves)
                size_bytes += sum(map(len, frames.values()))
                for mailbox in [each for each in self._viewers if each.run == run]:
                    for kind, frame in frames.items():
                        mailbox.put(kind, frame)
            took_s = self._clock.monotonic() - began_s
            if took_s > SLOW_S:
                log.info("frames.slow", took_s=round(took_s, 3), size_bytes=size_bytes, viewers=len(self))
            if curves:
                due_s = began_s + max(CURVES_S, took_s / CURVES_SHARE)

    async def stop_with(self, stop: asyncio.Event) -> None:
        """End every viewer's stream when the server stops, so that it need not wait for them."""
        await stop.wait()
        self.stopped.set()
