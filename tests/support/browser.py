"""The system's Chromium, without a window, for tests of pages; a test is skipped where there is none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from support.whole_runs import DEADLINE_S

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
AXE = Path(__file__).parent / "axe" / "axe.min.js"
WAIT_MS = 240_000
SCREENS = {"wide": (1440, 900), "phone": (390, 844)}
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
GRAVE = {"moderate", "serious", "critical"}


def program_or_skip() -> str:
    """Return the browser's program; skip the test where there is none."""
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(PROGRAMS)} is on the path (apt-get install chromium)")
    return program


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a browser that is closed afterwards."""
    program = program_or_skip()
    # Root has no sandbox in Chromium; the page is ours and loads nothing.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=flags)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def shown(*folders: Path) -> Iterator[str]:
    """Yield the address of `atoll dashboard` on some folders, for a browser: without one the test is skipped."""
    program_or_skip()  # before a page begins to serve that would be stopped at once
    command = [sys.executable, "-m", "atoll.cli", "dashboard", *map(str, folders), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().rsplit(": ", 1)[1].strip()
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 0


class WatchedPage:
    """A page, what went wrong on it, and every address that it asked for."""

    def __init__(
        self, browser: Browser, *, scheme: str = "light", screen: str = "wide", open_to_axe: bool = False
    ) -> None:
        """Open an empty page; `open_to_axe` lifts its policy, without which no foreign script could look at it."""
        width, height = SCREENS[screen]
        self.context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
            bypass_csp=open_to_axe,
        )
        self.context.set_default_timeout(WAIT_MS)
        self.page: Page = self.context.new_page()
        self.faults: list[str] = []
        self.asked: list[str] = []
        self.page.on(
            "console", lambda said: self.faults.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, url: str) -> Page:
        """Go to a dashboard and wait until it shows a run."""
        self.page.goto(url)
        self.page.wait_for_selector("html[data-shown]")
        return self.page

    def violations(self) -> list[str]:
        """Return what axe finds that is more than minor: rule, how bad, how often, and the first place."""
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found: dict[str, Any] = self.page.evaluate(
            "tags => axe.run(document, {runOnly: {type: 'tag', values: tags}, resultTypes: ['violations']})", TAGS
        )
        return [
            f"{each['id']} ({each['impact']}, {len(each['nodes'])}): {each['nodes'][0]['html'][:120]}"
            for each in found["violations"]
            if each["impact"] in GRAVE
        ]
