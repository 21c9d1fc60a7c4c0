"""The live page over HTTP: its files, the newest state of each run as JSON, and the same as server-sent events.

    PageScene ──every FRAME_S──► frame ──► Mailbox of each viewer ──► its connection

A live scene has the monitor's state of a run, its fates, and which alerts hold. A saved one has read its event log once: its
moment is the end of that log, nobody is heard, so nothing is silent, no alert holds, and no link has a pace.

One frame is made for all viewers of a run, and nobody is waited for. A mailbox has one place for each kind of frame, where a
newer one replaces what was not fetched, so only a slow browser misses frames. At most `VIEWERS_MAX` look at a time. One that
fetches nothing for a minute is sent away (`BoundedConnection`). Without viewers no frame is made.

A scene that cannot be drawn is a mistake of ours, and what shows it may be a message of a peer. Its viewers then keep the last
frame; the log says why, and the other runs of the page, and the monitor, go on. The page loads nothing from elsewhere and runs
no script of anybody else (`POLICY`), so a name that a peer has chosen stays text.
"""

from __future__ import annotations

import asyncio
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, redact
from atoll.base.logs import get
from atoll.bus.open import open_bus
from atoll.protocol.ledger import apportion, settle
from atoll.protocol.settings import ProtocolSettings
from atoll.report.page_data import NodeSeen, PageFacts, causes_of, comparison_rows, curves_of, state_of
from atoll.report.write import STATIC
from atoll.run.folder import EVENTS_FILE, SavedRun
from atoll.run.history import History, TimeMark
from atoll.run.ledger import read_lives, total
from atoll.settings import Settings, bus_options
from atoll_monitor.alerts import RULES, AlertJudge, reading_of
from atoll_monitor.http_server import AnswerHeaders
from atoll_monitor.metrics import families
from atoll_monitor.monitored_run import MonitoredRun

log = get(__name__)

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
RETRY_S: Final = 5
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
FATES_S: Final = 5.0
JUDGED_S: Final = 5.0
LOOK_S: Final = 0.5


class PageScene(ABC):
    """A run as a feed shows it; each part in plain JSON values."""

    @property
    def lacks_fates(self) -> bool:
        """Return whether fates can be read, and have not been yet."""
        return False

    @abstractmethod
    def look(self) -> tuple[History, PageFacts]:
        """Return what is known of the run, and the facts of this moment; of a saved one, of the end of its event log."""

    def tick(self) -> None:  # noqa: B027  (nothing comes to a saved run)
        """Take what comes by itself; called about every second."""

    def state(self) -> dict[str, Any]:
        """Return the state of this moment."""
        return state_of(*self.look())

    def curves(self) -> dict[str, Any]:
        """Return the curves until this moment."""
        return curves_of(*self.look())

    def causes(self) -> dict[str, Any]:
        """Return what stands out and what was slow, by the rounds that are kept."""
        return causes_of(*self.look())


@dataclass
class RunScene(PageScene):
    """A run that is shown under `name`; `others` are the names of all runs of this page.

    `reached_by` are the options of a command that is to read this run, `broker` is its broker's address. It begins anew when
    the run is founded anew.
    """

    watched: MonitoredRun
    name: str = ""
    others: tuple[str, ...] = ()
    reached_by: str = ""
    broker: str = ""
    fates: dict[str, int] | None = None
    judge: AlertJudge = field(default_factory=lambda: AlertJudge(RULES))
    _view: object = None
    _away: bool = False
    _nodes: dict[str, NodeSeen] = field(default_factory=dict)
    _judged_s: float | None = None

    def __post_init__(self) -> None:
        self._view = self.watched.view

    @property
    def lacks_fates(self) -> bool:
        """Return whether the run is founded, its broker answers, and nobody has read its ledger yet."""
        self._follow_view()
        return self.fates is None and self.watched.record is not None and self.watched.connected

    def tick(self) -> None:
        """Take what comes by itself: heartbeats, whether the broker and its nodes answer, what the metrics say of alerts."""
        self._follow_view()
        watched, now_s = self.watched, self.watched.clock.monotonic()
        watched.view.sample_heartbeats()
        away = watched.answered_s is not None and not watched.connected
        if away is not self._away:
            self._away = away
            self._mark("broker", away=away, text="does not answer the monitor" if away else "answers again")
        self._follow_nodes()
        if self._judged_s is None or now_s - self._judged_s >= JUDGED_S:
            self._judged_s = now_s
            self.judge.take(reading_of(families(watched), watched.clock.wall()))

    def look(self) -> tuple[History, PageFacts]:
        """Return what the monitor knows of the run, and the facts of this moment."""
        self._follow_view()
        watched, record = self.watched, self.watched.record
        facts = PageFacts(
            run=self.name or watched.run,
            now_s=watched.clock.monotonic(),
            wall_s=watched.clock.wall(),
            agreement=None if record is None else record.protocol,
            founder="" if record is None else record.founder,
            founded_at_s=None if record is None else record.founded_at_s,
            answered=watched.connected,
            over=watched.over,
            listens_since_s=watched.began_s,
            fates=self.fates,
            others=self.others,
            region_of=watched.region_of,
            nodes=watched.nodes,
            alerts=self.judge.holding,
            reached_by=self.reached_by,
            broker=redact(self.broker),
        )
        return watched.view, facts

    def _follow_nodes(self) -> None:
        for address, node in self.watched.nodes.items():
            former = self._nodes.get(address)
            # A node that answered nobody yet has not been lost.
            if former is not None and former.answers is not node.answers and (former.name or node.answers):
                how = "answers again" if node.answers else "answers no more: the broker goes on at the others"
                self._mark(f"broker node {node.name or address}", away=not node.answers, text=f"at {address} {how}")
        self._nodes = dict(self.watched.nodes)

    def _mark(self, who: str, *, away: bool, text: str) -> None:
        group, kind = ("fault", "away") if away else ("recovery", "answers")
        self.watched.view.marks.append(TimeMark(self.watched.clock.wall(), group, kind, who, text))

    def _follow_view(self) -> None:
        """Forget a run whose place another one has taken: the monitor then has a new view."""
        if self._view is not self.watched.view:
            self._view, self.fates = self.watched.view, None


@dataclass
class SavedScene(PageScene):
    """A saved run that is shown under `name`; `others` are the names of all runs of this page.

    Raises:
        SettingsError: its event log cannot be read.
    """

    saved: SavedRun
    name: str = ""
    others: tuple[str, ...] = ()
    history: History = field(default_factory=History)
    _facts: PageFacts = field(init=False)

    def __post_init__(self) -> None:
        self.history.read_file(self.saved.folder / EVENTS_FILE)
        learners = self.history.learners.items()
        founders = (name for name, one in learners if any(life.founder for life in one.lives.values()))
        self._facts = PageFacts(
            run=self.name or self.saved.run,
            now_s=0.0,
            wall_s=self.history.newest_s,
            agreement=self.saved.agreement,
            founder=next(founders, ""),
            over=True,
            saved=True,
            clock="virtual" if self.saved.simulated else "wall",
            fates=closed_fates(self.history, self.saved.agreement),
            others=self.others,
            reached_by=f"--out {shlex.quote(str(self.saved.folder))}",
        )

    def look(self) -> tuple[History, PageFacts]:
        """Return its history, and the facts of the end of its event log."""
        return self.history, self._facts


def closed_fates(view: History, agreement: ProtocolSettings | None) -> dict[str, int] | None:
    """Return whole tokens by fate from the ledgers that shards wrote when they closed; None unless all shards did."""
    if agreement is None or len(view.ledgers) < agreement.shards:
        return None
    return dict(apportion(settle(view.closed_ledger(), agreement.fragments).fates, agreement.fragments))


async def poll_fates(scene: RunScene, settings: Settings, wanted: Callable[[], bool]) -> None:
    """Keep `scene.fates` current while they are `wanted`, over a connection that lasts as long; nobody else pays for it.

    Fates that cannot be read now keep their last value.
    """
    while True:
        if wanted():
            try:
                await _read_while(wanted, scene, settings)
            except AtollError as error:
                log.info("fates.unknown", reason=str(error))
                await asyncio.sleep(FATES_S)
        await asyncio.sleep(LOOK_S)


async def _read_while(wanted: Callable[[], bool], scene: RunScene, settings: Settings) -> None:
    bus = await open_bus(settings.broker.url, settings.run, name="monitor-fates", options=bus_options(settings))
    try:
        while wanted():
            if (record := scene.watched.record) is not None:
                fragments = len(record.layout.fragments)
                scene.fates = dict(apportion(total(await read_lives(bus, record), fragments), fragments))
            await asyncio.sleep(FATES_S if record is not None else LOOK_S)
    finally:
        await bus.close()


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
        self.scenes = dict(scenes)
        self.stopped = asyncio.Event()
        self._clock = clock
        self._viewers: set[Mailbox] = set()
        self._newest: dict[str, tuple[float, dict[str, bytes]]] = {}
        self._failing: dict[str, str] = {}
        self._asked_s: float | None = None

    def __len__(self) -> int:
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
        for run, scene in self.scenes.items():
            found = None
            with self._log_failures(run):
                found = scene.state(), scene.curves()
            if found is not None:
                yield found

    @contextmanager
    def _log_failures(self, run: str) -> Iterator[None]:
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


class FrameStream:
    """Server-sent events from one mailbox, until the server stops or the connection ends: its viewer left, or stalled."""

    def __init__(self, feed: Feed, mailbox: Mailbox) -> None:
        self._feed = feed
        self._mailbox = mailbox

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send frames as the viewer fetches them."""
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        ends = [asyncio.ensure_future(self._left(receive)), asyncio.ensure_future(self._feed.stopped.wait())]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send(b"retry: %d\n\n" % (1000 * RETRY_S), send)
            while not any(end.done() for end in ends):
                taking = asyncio.ensure_future(self._mailbox.take())
                await asyncio.wait({taking, *ends}, return_when=asyncio.FIRST_COMPLETED)
                if not taking.done():
                    taking.cancel()
                    break
                await self._send(taking.result(), send)
            if self._feed.stopped.is_set():
                await self._send(b"event: end\ndata: {}\n\n", send)
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._feed.leave(self._mailbox)
            for end in ends:
                end.cancel()

    async def _send(self, data: bytes, send: Send) -> None:
        # Sending waits while the viewer's connection is full, until `BoundedConnection` closes it; what is made meanwhile
        # replaces itself in the mailbox.
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


def page_routes(feed: Feed) -> list[BaseRoute]:
    """Return the routes of the page; they answer everything that no route before them does."""

    async def page(_: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})

    async def data(request: Request) -> Response:
        run = request.query_params.get("run", feed.first)
        if run not in feed.scenes:
            return _unknown(feed, run)
        await feed.ask(run)
        scene = feed.scenes[run]
        parts = {"state": scene.state(), "curves": scene.curves(), "causes": scene.causes()}
        return JSONResponse(parts, headers={"Cache-Control": "no-store"})

    async def events(request: Request) -> Response | FrameStream:
        run = request.query_params.get("run", feed.first)
        if run not in feed.scenes:
            return _unknown(feed, run)
        mailbox = feed.enter(run)
        if mailbox is None:
            text, later = "too many look at this monitor: close some pages\n", {"Retry-After": str(RETRY_S)}
            return PlainTextResponse(text, status_code=503, headers=later)
        return FrameStream(feed, mailbox)

    routes: list[BaseRoute] = [
        Route("/", page),
        Route("/data.json", data),
        Route("/events", events),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return [Mount("/", routes=routes, middleware=[Middleware(AnswerHeaders, HEADERS)])]


def _unknown(feed: Feed, run: str) -> Response:
    known = ", ".join(feed.scenes)
    return PlainTextResponse(f"no run {run!r} is shown here; there are: {known}\n", status_code=404)
