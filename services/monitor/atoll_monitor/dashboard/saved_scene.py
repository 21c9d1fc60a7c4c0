"""A saved run as the page knows it: its event log, read once, by the same reductions as that of a run that goes on.

Its moment is the end of its event log. Nobody is heard, so nothing is silent, no alert holds, and no link has a pace.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

from atoll.run.saved import SavedRun
from atoll.run.view import RunView
from atoll.story.history import History
from atoll_monitor.dashboard.fates import closed_fates
from atoll_monitor.dashboard.page_causes import causes_of
from atoll_monitor.dashboard.page_curves import curves_of
from atoll_monitor.dashboard.page_facts import PageFacts
from atoll_monitor.dashboard.page_state import state_of


@dataclass(slots=True)
class SavedScene:
    """A saved run that is shown under `name`; `others` are the names of all runs of this page.

    Raises:
        SettingsError: its event log cannot be read.
    """

    saved: SavedRun
    name: str = ""
    others: tuple[str, ...] = ()
    view: RunView = field(default_factory=RunView)
    history: History = field(default_factory=History)
    _facts: PageFacts = field(init=False)

    def __post_init__(self) -> None:
        """Read the event log."""
        for event in self.saved.events():
            if event is None:
                self.view.unreadable += 1
            else:
                self.view.on_event(event)
                self.history.on_event(event)
        founders = [
            name for name, one in self.view.learners.items() if any(life.founder for life in one.lives.values())
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
            fates=closed_fates(self.view, self.saved.agreement),
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
        return state_of(self.view, self.history.timeline, self._facts)

    def curves(self) -> dict[str, Any]:
        """Return the curves to the end of the event log."""
        return curves_of(self.view, self.history, self._facts)

    def causes(self) -> dict[str, Any]:
        """Return what stood out and what was slow in the whole run."""
        return causes_of(self.history, self._facts)
