"""One run as the page knows it while a monitor watches it: the monitor's state, its history, its fates, and which alerts hold.

A scene is what a feed shows of a run (`PageScene`). There are two kinds: this one, and a saved run (`saved_scene`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from atoll.base.redacting import redacted
from atoll.run.timeline import Timeline, TimeMark
from atoll.story.history import History, notes
from atoll.wire.messages import Event
from atoll_monitor.alert_rules import RULES
from atoll_monitor.alerts import AlertJudge, reading_of
from atoll_monitor.dashboard.page_causes import causes_of
from atoll_monitor.dashboard.page_curves import curves_of
from atoll_monitor.dashboard.page_facts import PageFacts
from atoll_monitor.dashboard.page_state import state_of
from atoll_monitor.metrics import families
from atoll_monitor.watched import NodeSeen, Watched

JUDGED_S: Final = 5.0
HISTORY_ROUNDS: Final = 320
"""The rounds of which causes are found: with those of the view as many as a monitor kept before it looked for causes."""
HISTORY_SAMPLES: Final = 512


class PageScene(Protocol):
    """What a feed shows of a run; each part in plain JSON values."""

    @property
    def lacks_fates(self) -> bool:
        """Return whether fates can be read, and have not been yet."""

    def tick(self) -> None:
        """Take what comes by itself; called about every second."""

    def state(self) -> dict[str, Any]:
        """Return the state of this moment (`page_state`)."""

    def curves(self) -> dict[str, Any]:
        """Return the curves until this moment (`page_curves`)."""

    def causes(self) -> dict[str, Any]:
        """Return what stands out and what was slow (`page_causes`)."""


def _history() -> History:
    return History(rounds=deque(maxlen=HISTORY_ROUNDS), samples=notes(HISTORY_SAMPLES))


@dataclass(slots=True)
class RunScene:
    """A run that is shown under `name`; `others` are the names of all runs of this page.

    `reached_by` are the options of a command that is to read this run, `broker` is its broker's address. It begins anew when
    the run is founded anew.
    """

    watched: Watched
    name: str = ""
    others: tuple[str, ...] = ()
    reached_by: str = ""
    broker: str = ""
    history: History = field(default_factory=_history)
    fates: dict[str, int] | None = None
    judge: AlertJudge = field(default_factory=lambda: AlertJudge(RULES))
    _view: object = None
    _away: bool = False
    _nodes: dict[str, NodeSeen] = field(default_factory=dict)
    _judged_s: float | None = None

    def __post_init__(self) -> None:
        """Have the event log told."""
        self._view = self.watched.view
        self.watched.view.observers.append(self._on_event)

    @property
    def timeline(self) -> Timeline:
        """Return what happened when."""
        return self.history.timeline

    @property
    def lacks_fates(self) -> bool:
        """Return whether the run is founded, its broker answers, and nobody has read its ledger yet."""
        self._follow_view()
        return self.fates is None and self.watched.record is not None and self.watched.connected

    def tick(self) -> None:
        """Take what comes by itself: heartbeats, whether the broker and its nodes answer, what the metrics say of alerts."""
        self._follow_view()
        watched, now_s = self.watched, self.watched.clock.monotonic()
        self.timeline.on_heartbeats(iter(watched.view.learners.values()))
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
        return state_of(self.watched.view, self.timeline, self._facts())

    def curves(self) -> dict[str, Any]:
        """Return the curves until this moment."""
        self._follow_view()
        return curves_of(self.watched.view, self.history, self._facts())

    def causes(self) -> dict[str, Any]:
        """Return what stands out and what was slow, by the newest rounds."""
        self._follow_view()
        return causes_of(self.history, self._facts())

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
            broker=redacted(self.broker),
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
        self.timeline.marks.append(TimeMark(self.watched.clock.wall(), group, kind, who, text))

    def _on_event(self, event: Event) -> None:
        self._follow_view()
        self.history.on_event(event)

    def _follow_view(self) -> None:
        """Forget a run whose place another one has taken: the monitor then has a new view."""
        if self._view is not self.watched.view:
            self._view, self.history, self.fates = self.watched.view, _history(), None
