"""The page of a run while nodes of its broker are killed, each of three in turn: it goes on and says which node is away."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from support.browser import WAIT_MS, WatchedPage, chromium
from support.monitored_run import SteadyRun, monitoring

pytestmark = [pytest.mark.connected, pytest.mark.cluster_faults]

NODES = 3


def test_the_page_goes_on_and_names_the_node_that_is_away(tmp_path: Path) -> None:
    """One of the three is the one that the monitor was connected to, one leads the run's streams: the page moves on after each.

    While a node is away it is a row of its own and a mark, and the head of the page says that one of three is missing.
    """
    with (
        SteadyRun(tmp_path, NODES) as run,
        monitoring(tmp_path, run.run, run.broker.url, run.reader) as monitor,
        chromium() as browser,
    ):
        seen = WatchedPage(browser)
        page = seen.open(monitor.url)
        commits = page.locator(".tile", has_text="commits").locator(".value")
        nodes = page.locator("#learners tbody tr").filter(has_text="broker node")
        away = nodes.filter(has_text="away")
        expect(nodes.filter(has_text="answers")).to_have_count(NODES, timeout=WAIT_MS)
        expect(commits).to_have_text(re.compile(r"[1-9]"), timeout=WAIT_MS)
        for server in run.broker.servers:
            server.kill()
            expect(away).to_have_count(1, timeout=WAIT_MS)
            expect(away).to_contain_text(urlsplit(server.url).netloc, timeout=WAIT_MS)
            expect(page.locator("#status")).to_contain_text(f"1 of {NODES} broker nodes away", timeout=WAIT_MS)
            before = commits.inner_text()
            expect(commits).not_to_have_text(before, timeout=WAIT_MS)
            expect(page.locator("#status")).to_contain_text("training", timeout=WAIT_MS)
            server.start()
            expect(nodes.filter(has_text="answers")).to_have_count(NODES, timeout=WAIT_MS)
        marks = page.locator("#marks tbody tr").filter(has_text="broker node")
        expect(marks.filter(has_text="fault")).to_have_count(NODES, timeout=WAIT_MS)
        expect(marks.filter(has_text="recovery")).to_have_count(NODES, timeout=WAIT_MS)
        expect(page.locator("#status")).not_to_contain_text("away")
        expect(page.locator("#banner")).to_be_hidden()

    assert seen.faults == []
