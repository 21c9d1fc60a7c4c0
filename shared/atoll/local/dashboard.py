"""The page of a run that `atoll up --dashboard` serves beside it: a monitor process, its address said once, and a browser.

The monitor writes its address to a file when it serves. It reads with a reader's key, and the run does not need it: if it
fails, `up` says so and goes on.
"""

from __future__ import annotations

from atoll.base.regular_files import read_text
from atoll.local.browser import open_page
from atoll.local.console import RunConsole
from atoll.local.processes import ProcessGroup
from atoll.local.services import DASHBOARD, Services


class DashboardPage:
    """The page of one session."""

    def __init__(self, services: Services, fleet: ProcessGroup, face: RunConsole) -> None:
        """Serve nothing yet."""
        self._services = services
        self._fleet = fleet
        self._face = face
        self._awaited = False

    def start(self) -> None:
        """Start the monitor, if the run is to have a page."""
        if not self._services.wants_page:
            return
        self._services.page_url.unlink(missing_ok=True)
        self._fleet.start(self._services.dashboard())
        self._awaited = True

    def look(self) -> None:
        """Say where the page is and open it, once it is there."""
        if not self._awaited:
            return
        try:
            url = read_text(self._services.page_url)
        except OSError:
            # A monitor that has left told why by its exit, which `up` reports.
            self._awaited = bool(self._fleet.alive([DASHBOARD]))
            return
        self._awaited = False
        opened = open_page(url)
        self._face.say(f"dashboard: {url}{' (opened in the browser)' if opened else ''}")
