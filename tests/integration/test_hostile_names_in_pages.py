"""Names and reasons that are HTML, in a real browser: on a run's page and in its report they are text, and nothing runs.

Readers of the event log believe no such name (`atoll.wire.events`). The page has a defence of its own all the same, so here
its scene gives it what they would have kept away.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect

from atoll.base.clock import SystemClock
from atoll.protocol.events import PushKey
from atoll.report.collect import BrokerFacts, collect
from atoll.report.write import page_frames, page_with
from atoll.run.folder import RunFile
from atoll.run.history import History
from atoll_monitor.dashboard import Feed, RunScene
from atoll_monitor.http_server import allowed_hosts, application, listening_socket, serve
from atoll_monitor.monitored_run import MonitoredRun
from atoll_monitor.process import routes_of
from support.browser import WAIT_MS, WatchedPage, chromium
from support.events import event
from support.founded_run import run_record
from support.watched_runs import beat

pytestmark = [pytest.mark.second_tier]

DEADLINE_S = 60.0
HOSTILE = (
    "<img src=x onerror=window.taken=1>",
    "<script>window.taken=1</script>",
    "\"'><svg onload=window.taken=1>",
    "</script><script>window.taken=1</script>",
    "javascript:window.taken=1",
    "${window.taken=1}",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


NAMES = tuple(f"learner-{number}" for number in range(len(HOSTILE)))
"""What each of these texts stands for in the run."""


def hostile(told: Any) -> Any:  # noqa: ANN401  (JSON)
    if isinstance(told, dict):
        return {hostile(name): hostile(value) for name, value in told.items()}
    if isinstance(told, list | tuple):
        return [hostile(value) for value in told]
    return HOSTILE[NAMES.index(told)] if told in NAMES else told


class HostileScene(RunScene):
    """A run whose learners, shards and reasons are HTML."""

    def state(self) -> dict[str, Any]:
        return cast("dict[str, Any]", hostile(json.loads(msgspec.json.encode(super().state()))))

    def curves(self) -> dict[str, Any]:
        return cast("dict[str, Any]", hostile(json.loads(msgspec.json.encode(super().curves()))))


def run_of_names() -> MonitoredRun:
    """Return a run of these learners, each of whom has done everything that the page shows."""
    clock = SystemClock()
    watched = MonitoredRun("r", clock)
    watched.record, watched.answered_s = run_record("r"), clock.monotonic()
    wall_s, view = clock.wall(), watched.view
    for number, text in enumerate(NAMES):
        view.on_event(event("joined", text, wall_s + number, incarnation=1, host=text, pid=1))
        view.on_event(event("serving", text, wall_s + number, epoch=1, versions={"0": 0}, host=text, pid=1))
        view.on_beat(beat(text), clock.monotonic())
        sample = {"incarnation": 1, "step": 10, "tokens": 100, "step_s": 0.5, "loss": 2.0, "lag_versions": 1}
        view.on_event(event("sample", text, wall_s + number, **sample))
        view.on_event(event("quarantined", text, wall_s + number, learner=text, incarnation=1, offences=3, reason=text))
        view.on_event(
            event("refused", text, wall_s + number, refusals=[{**PushKey(text, 1, 0, 1)._asdict(), "reason": text}])
        )
        view.on_event(event("validation", text, wall_s + number, run_tokens=100 * number, bits_per_byte=3.5))
        share = {"learner": text, "incarnation": 1, "age": 0, "tokens": 50, "weight": 0.5}
        fields = {"fragment": 0, "version": number + 1, "contributors": [share], "end": text, "waited_s": 1.0}
        view.on_event(event("round", text, wall_s + number, **fields))
        view.on_event(event("left", text, wall_s + number, incarnation=1, tokens=1, steps=1))
    return watched


@contextmanager
def served(watched: MonitoredRun, name: str) -> Iterator[str]:
    """Yield the address of a monitor, in a loop of its own, that shows a run under a name."""
    listening = listening_socket("127.0.0.1", 0)
    ready, ends = threading.Event(), list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()

    async def run() -> None:
        stop = asyncio.Event()
        ends.append((asyncio.get_running_loop(), stop))
        ready.set()
        feed = Feed({name: HostileScene(watched, name, (name, HOSTILE[0]))}, watched.clock)
        making = asyncio.create_task(feed.run())
        app = application(routes_of(watched, feed), allowed_hosts(listening))
        await asyncio.gather(serve(app, listening, stop), feed.stop_with(stop))
        making.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(DEADLINE_S)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        loop, stop = ends[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(DEADLINE_S)


def is_text(page: Page) -> None:
    assert page.evaluate("window.taken") is None
    assert page.locator("img[src=x], [onerror], [onload], a[href^='javascript:']").count() == 0


def test_the_page_of_a_run_shows_names_as_text(browser: Browser) -> None:
    with served(run_of_names(), HOSTILE[2]) as url:
        seen = WatchedPage(browser)
        page = seen.open(url)
        for text in HOSTILE:
            expect(page.locator("#learners tbody")).to_contain_text(text, timeout=WAIT_MS)
            expect(page.locator("#quarantine")).to_contain_text(text, timeout=WAIT_MS)
        for summary in page.locator("summary:visible").all():
            summary.click()
        for chart in page.locator(".plot:visible").all():
            chart.hover()
            chart.press("End")
        is_text(page)

    assert [each for each in seen.asked if not each.startswith(url)] == []
    assert [each for each in seen.faults if "ERR_" not in each] == [], "the policy had nothing to stop"


def test_the_report_of_a_run_shows_names_as_text(browser: Browser, tmp_path: Path) -> None:
    settings = {"protocol.fragments": 1, "protocol.shards": 1, HOSTILE[0]: HOSTILE[1], "seed": 0}
    run = RunFile(run=NAMES[0], learners=1, settings=settings, broker="embedded")
    view = run_of_names().view
    (tmp_path / "sample.txt").write_text("".join(HOSTILE), encoding="utf-8")
    report = collect(view, run, BrokerFacts(HOSTILE[1]), validation={})
    frames = page_frames(report, view, run, History(), tmp_path)
    file = tmp_path / "report.html"
    file.write_text(page_with(hostile(json.loads(msgspec.json.encode(frames)))), encoding="utf-8")
    seen = WatchedPage(browser)
    page = seen.open(file.as_uri())
    for text in HOSTILE:
        expect(page.locator("#learners tbody")).to_contain_text(text)
        expect(page.locator("#lives tbody")).to_contain_text(text)
        expect(page.locator("#sample")).to_contain_text(text)
    expect(page.locator("#settings")).to_contain_text(HOSTILE[0])
    is_text(page)
    assert seen.asked == [file.as_uri()]
    assert seen.faults == []
