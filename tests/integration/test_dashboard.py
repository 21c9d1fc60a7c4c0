"""The page in a real browser: beside a run of four learners, while processes are killed, after the run's end, for everybody."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from support.browser import WAIT_MS, WatchedPage, chromium, shown
from support.whole_runs import DEADLINE_S, UNHURRIED, finish, processes_of, start

pytestmark = [pytest.mark.connected, pytest.mark.second_tier]

PANELS = (
    *("merged", "losses", "speed", "goodput", "lag", "overhead", "learners", "rounds", "map", "links", "fates"),
    *("marks", "quarantine"),
)
POLL_S = 0.1
PICTURES = os.environ.get("PICTURES", "")
"""Where screenshots are kept, for people who look at them."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def url_of(out: Path) -> str:
    """Return where `atoll up --dashboard` serves the page of a run."""
    file = out / "logs" / "dashboard.url"
    deadline_s = time.monotonic() + DEADLINE_S
    while not file.exists():
        assert time.monotonic() < deadline_s, "no page is served"
        time.sleep(POLL_S)
    return file.read_text(encoding="utf-8")


def kill(out: Path, program: bytes, named: bytes) -> None:
    for pid in processes_of(out):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if program in command and named in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError(f"no {program!r} with {named!r} runs")


def keep(page: Page, name: str) -> None:
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)


def mark(page: Page, who: str, kind: str) -> None:
    rows = page.locator("#marks tbody tr").filter(has_text=who).filter(has_text=kind)
    expect(rows.first).to_be_visible(timeout=WAIT_MS)


def number(text: str) -> float:
    return float(re.findall(r"[\d.]+", text.replace(",", ""))[0])


def test_a_run_of_four_is_seen_live_with_its_faults_and_after_its_end(
    run_dir: Path, corpus: Path, browser: Browser
) -> None:
    """Every panel fills; a killed learner and a killed shard are marked with their return; the same is there afterwards."""
    process = start(run_dir, corpus, "--learners", "4", "--tokens", "0", "--dashboard", *UNHURRIED)
    url = url_of(run_dir)
    seen = WatchedPage(browser)
    page = seen.open(url)
    for panel in PANELS:
        expect(page.locator(f"#{panel} .empty")).to_have_count(0, timeout=WAIT_MS)
    expect(page.locator("#status")).to_contain_text("training")
    expect(page.locator("#map tbody tr")).to_have_count(4, timeout=WAIT_MS)
    expect(page.locator("#map td.lagnone")).to_have_count(0, timeout=WAIT_MS)
    expect(page.locator("#learners tbody tr").filter(has_text="training")).to_have_count(4, timeout=WAIT_MS)
    expect(page.locator("#losses .keys button")).to_have_count(4)
    keep(page, "live-light")

    commits = page.locator(".tile", has_text="commits").locator(".value")
    before = number(commits.inner_text())
    expect(commits).not_to_have_text(commits.inner_text(), timeout=WAIT_MS)
    assert number(commits.inner_text()) > before

    kill(run_dir, b"atoll_learner", b"ATOLL_LEARNER__ID=learner-2")
    kill(run_dir, b"atoll_synchronizer", b"ATOLL_SYNCHRONIZER__SHARD=0")
    mark(page, "learner-2", "fault")
    mark(page, "shard-0", "fault")
    mark(page, "shard-0", "recovery")
    mark(page, "learner-2", "recovery")
    expect(page.locator("#speed .keys")).to_contain_text("recovery", timeout=WAIT_MS)
    keep(page, "faults-light")
    for name, scheme, screen in (("faults-dark", "dark", "wide"), ("faults-phone", "light", "phone")):
        keep(WatchedPage(browser, scheme=scheme, screen=screen).open(url), name)

    process.send_signal(signal.SIGINT)
    expect(page.locator("#banner")).to_contain_text("has ended", timeout=WAIT_MS)
    assert f"dashboard: {url}" in finish(process)
    assert [each for each in seen.asked if not each.startswith(url)] == [], "it asks nobody else"
    # The connection of a monitor that has left is refused, which the browser itself writes to the console.
    assert [each for each in seen.faults if "ERR_" not in each] == []

    with shown(run_dir) as address:
        later = WatchedPage(browser).open(address)
        expect(later.locator("#status")).to_contain_text("over", timeout=WAIT_MS)
        mark(later, "learner-2", "recovery")
        mark(later, "shard-0", "recovery")
        for panel in PANELS:
            expect(later.locator(f"#{panel} .empty")).to_have_count(0, timeout=WAIT_MS)
        keep(later, "over-light")


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, Path]:
    """Two short runs that are over; paced, so that charts over time have several points on a fast machine."""
    folder = tmp_path_factory.mktemp("runs")
    outs = folder / "one", folder / "other"
    for seed, out in enumerate(outs):
        finish(start(out, corpus, "--learners", "2", "--tokens", "40000", "--seed", str(seed), *UNHURRIED))
    return outs


def test_two_runs_are_laid_over_each_other(two_runs: tuple[Path, Path], browser: Browser) -> None:
    """A row for each in the table, a line for each in both charts; the picker changes the run that the page shows."""
    with shown(*two_runs) as address:
        seen = WatchedPage(browser)
        page = seen.open(address)
        expect(page.locator("#compare tbody tr").filter(has_text="over")).to_have_count(2, timeout=WAIT_MS)
        expect(page.locator("#compare .keys").first.locator("button")).to_have_count(2, timeout=WAIT_MS)
        names = page.locator("#runs option").all_inner_texts()
        page.locator("#runs").select_option(names[1])
        expect(page.locator("#run")).to_have_text(names[1], timeout=WAIT_MS)
        keep(page, "compared-light")

    assert len(set(names)) == 2
    assert [each for each in seen.faults if "ERR_" not in each] == []


@pytest.mark.parametrize(("scheme", "screen"), [("light", "wide"), ("dark", "wide"), ("light", "phone")])
def test_it_is_for_everybody(two_runs: tuple[Path, Path], browser: Browser, scheme: str, screen: str) -> None:
    """Axe finds nothing that is more than minor, with tables unfolded; nothing is wider than the screen."""
    with shown(*two_runs) as address:
        seen = WatchedPage(browser, scheme=scheme, screen=screen, open_to_axe=True)
        page = seen.open(address)
        expect(page.locator("#compare tbody tr")).to_have_count(2, timeout=WAIT_MS)
        for summary in page.locator("summary:visible").all():
            summary.click()
        found = seen.violations()
        width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")

    assert found == []
    assert width[0] <= width[1]


def test_axe_would_speak(browser: Browser) -> None:
    """A picture without words and grey on grey are found."""
    seen = WatchedPage(browser, open_to_axe=True)
    seen.page.set_content('<main><img src="data:,"><p style="color:#aaa;background:#bbb">pale</p></main>')

    assert {each.split()[0] for each in seen.violations()} >= {"image-alt", "color-contrast"}


def test_the_keyboard_reads_charts_rounds_and_map(two_runs: tuple[Path, Path], browser: Browser) -> None:
    """Arrow keys say values in words beside each picture, and a skip link leads past the head."""
    with shown(two_runs[0]) as address:
        page = WatchedPage(browser).open(address)
        expect(page.locator("#map td").first).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()

        page.locator("#speed .plot").focus()
        page.keyboard.press("End")
        expect(page.locator("#speed .readout")).to_contain_text("all learners")
        first = page.locator("#speed .readout").inner_text()
        page.keyboard.press("Home")
        expect(page.locator("#speed .readout")).not_to_have_text(first)

        page.locator("#rounds svg.lanes").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#rounds .readout")).to_contain_text("Quorum after")

        page.locator("#map td[tabindex='0']").focus()
        page.keyboard.press("ArrowDown")
        expect(page.locator("#map .readout")).to_contain_text("fragment 1")
        expect(page.locator("#map tbody tr:nth-child(2) td").first).to_be_focused()

        page.locator("#losses .keys button").first.press("Enter")
        expect(page.locator("#losses .keys button").first).to_have_attribute("aria-pressed", "false")


def test_colours_are_chosen_and_kept(two_runs: tuple[Path, Path], browser: Browser) -> None:
    """A dark page on a light system, also after a reload; a second dashboard finds a port of its own."""
    with shown(two_runs[0]) as address, shown(two_runs[1]) as other:
        assert other != address
        page = WatchedPage(browser).open(address)
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.locator("#theme").select_option("dark")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.reload()
        page.wait_for_selector("html[data-shown]")

        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark != light
        expect(page.locator("#theme")).to_have_value("dark")
