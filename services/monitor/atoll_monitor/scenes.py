"""Scenes, as a feed shows runs: one while a monitor watches it, a saved one from its folder; and the fates of their tokens.

A live scene has the monitor's state, its history, its fates, and which alerts hold. A saved one has read its event log once, by
the same reductions: its moment is the end of that log, nobody is heard, so nothing is silent, no alert holds, and no link has a
pace.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from atoll.base.errors import AtollError
from atoll.base.logs import get
from atoll.base.wording import redact
from atoll.bus.open import open_bus
from atoll.protocol.ledger import Ledger, apportion, settle
from atoll.protocol.settings import ProtocolSettings
from atoll.report.page_data import NodeSeen, PageFacts, causes_of, curves_of, state_of
from atoll.run.history import History, TimeMark
from atoll.run.ledger import read_lives, total
from atoll.run.saved import EVENTS_FILE, SavedRun
from atoll.settings import Settings, bus_options
from atoll_monitor.alerts import RULES, AlertJudge, reading_of
from atoll_monitor.metrics import families
from atoll_monitor.monitored_run import MonitoredRun

log = get(__name__)

JUDGED_S: Final = 5.0
FATES_S: Final = 5.0
LOOK_S: Final = 0.5


class PageScene(Protocol):
    """A run as a feed shows it; each part in plain JSON values."""

    @property
    def lacks_fates(self) -> bool:
        """Return whether fates can be read, and have not been yet."""

    def tick(self) -> None:
        """Take what comes by itself; called about every second."""

    def state(self) -> dict[str, Any]:
        """Return the state of this moment (`state_of`)."""

    def curves(self) -> dict[str, Any]:
        """Return the curves until this moment (`curves_of`)."""

    def causes(self) -> dict[str, Any]:
        """Return what stands out and what was slow (`causes_of`)."""


@dataclass(slots=True)
class RunScene:
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

    def state(self) -> dict[str, Any]:
        """Return the state of this moment."""
        self._follow_view()
        return state_of(self.watched.view, self._facts())

    def curves(self) -> dict[str, Any]:
        """Return the curves until this moment."""
        self._follow_view()
        return curves_of(self.watched.view, self._facts())

    def causes(self) -> dict[str, Any]:
        """Return what stands out and what was slow, by the newest rounds."""
        self._follow_view()
        return causes_of(self.watched.view, self._facts())

    def _facts(self) -> PageFacts:
        watched, record = self.watched, self.watched.record
        return PageFacts(
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

    def _follow_nodes(self) -> None:
        """Mark the nodes of the broker that no longer answer, and those that answer again."""
        for address, node in self.watched.nodes.items():
            former = self._nodes.get(address)
            # A node that answered nobody yet has not been lost.
            if former is not None and former.answers is not node.answers and (former.name or node.answers):
                text = f"at {address} answers no more: the broker goes on at the others"
                text = text if not node.answers else f"at {address} answers again"
                self._mark(f"broker node {node.name or address}", away=not node.answers, text=text)
        self._nodes = dict(self.watched.nodes)

    def _mark(self, who: str, *, away: bool, text: str) -> None:
        group, kind = ("fault", "away") if away else ("recovery", "answers")
        self.watched.view.marks.append(TimeMark(self.watched.clock.wall(), group, kind, who, text))

    def _follow_view(self) -> None:
        """Forget a run whose place another one has taken: the monitor then has a new view."""
        if self._view is not self.watched.view:
            self._view, self.fates = self.watched.view, None


@dataclass(slots=True)
class SavedScene:
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
        founders = [
            name for name, one in self.history.learners.items() if any(life.founder for life in one.lives.values())
        ]
        self._facts = PageFacts(
            run=self.name or self.saved.run,
            now_s=0.0,
            wall_s=self.history.newest_s,
            agreement=self.saved.agreement,
            founder=founders[0] if founders else "",
            over=True,
            saved=True,
            clock="virtual" if self.saved.simulated else "wall",
            fates=closed_fates(self.history, self.saved.agreement),
            others=self.others,
            reached_by=f"--out {shlex.quote(str(self.saved.folder))}",
        )

    @property
    def lacks_fates(self) -> bool:
        """Return False: the event log has been read."""
        return False

    def tick(self) -> None:
        """Take nothing: nothing comes any more."""

    def state(self) -> dict[str, Any]:
        """Return the state at the end of the event log."""
        return state_of(self.history, self._facts)

    def curves(self) -> dict[str, Any]:
        """Return the curves to the end of the event log."""
        return curves_of(self.history, self._facts)

    def causes(self) -> dict[str, Any]:
        """Return what stood out and what was slow in the whole run."""
        return causes_of(self.history, self._facts)


def closed_fates(view: History, agreement: ProtocolSettings | None) -> dict[str, int] | None:
    """Return whole tokens by fate from the ledgers that shards wrote when they closed; None unless all shards did."""
    if agreement is None or len(view.ledgers) < agreement.shards:
        return None
    ledger = Ledger()
    for closed in view.ledgers.values():
        ledger.absorb(closed.ledger)
    return dict(apportion(settle(ledger, agreement.fragments).fates, agreement.fragments))


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
            record = scene.watched.record
            if record is not None:
                fragments = len(record.layout.fragments)
                sums = total(await read_lives(bus, record), fragments)
                scene.fates = dict(apportion(sums, fragments))
            await asyncio.sleep(FATES_S if record is not None else LOOK_S)
    finally:
        await bus.close()
