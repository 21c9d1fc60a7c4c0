"""A cause is planted in a run, and the run's page names it and its culprit, without a command being asked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from atoll.run.folder import saved_run
from atoll_monitor.dashboard import SavedScene
from support.browser import WAIT_MS, WatchedPage, chromium, shown
from support.planted_runs import BY_KIND, PLANTS, Plant, planted
from support.simulated_runs import Simulate

pytestmark = [pytest.mark.second_tier]


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    return {}


def simulated(simulate: Simulate, folders: dict[str, Path], kind: str) -> Path:
    """Return the folder of a run with a planted cause, simulated once."""
    if kind not in folders:
        folders[kind] = planted(simulate, BY_KIND[kind])
    return folders[kind]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.kind)
def test_the_page_names_the_cause_and_the_culprit(plant: Plant, simulate: Simulate, folders: dict[str, Path]) -> None:
    out = simulated(simulate, folders, plant.kind)
    saved = saved_run(out)
    assert saved is not None
    scene = SavedScene(saved)
    causes, state = scene.causes(), scene.state()
    found = causes["findings"][0]

    assert (found["cause"], found["who"]) == (plant.kind, plant.who)
    assert found["command"].startswith("atoll ")
    assert found["command"].endswith(f"--out {out}")
    assert 0.0 <= found["from_s"] <= (found["until_s"] or state["at_s"]) <= state["at_s"]


def test_a_person_reads_the_cause_on_the_page(simulate: Simulate, folders: dict[str, Path]) -> None:
    """A slow link and a lost shard, each on the page of its run; both are compared on one page."""
    outs = [simulated(simulate, folders, kind) for kind in ("slow link", "shard without owner")]
    with shown(*outs) as address, chromium() as browser:
        seen = WatchedPage(browser)
        page = seen.open(address)
        expect(page.locator("#causes li strong").first).to_have_text("slow link: learner-3", timeout=WAIT_MS)
        expect(page.locator("#causes code").first).to_have_text(f"atoll why behind learner-3 --out {outs[0]}")
        expect(page.locator("#causes .when").first).to_have_text(re.compile(r"^\d:\d\d\.\d to \d:\d\d\.\d|^since \d"))
        expect(page.locator("#slow tbody tr").first).to_be_visible()
        expect(page.locator("#alerts")).to_contain_text("nothing holds now")
        expect(page.locator("#status")).to_contain_text("of virtual time")
        expect(page.locator("#compare tbody tr").filter(has_text="over")).to_have_count(2, timeout=WAIT_MS)

        page.locator("#runs").select_option(index=1)
        expect(page.locator("#causes li strong").first).to_have_text("shard without owner: shard-0", timeout=WAIT_MS)
        expect(page.locator("#speed .keys")).to_contain_text("fault")

    assert seen.faults == []


@pytest.mark.parametrize("screen", ["wide", "phone"])
def test_the_report_opens_from_a_disk(screen: str, simulate: Simulate, folders: dict[str, Path]) -> None:
    """One file that asks for nothing: the page of the run, with its figures, lives, settings and text, for everybody."""
    out = simulated(simulate, folders, "slow link")
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    address = (out / "report.html").as_uri()
    with chromium() as browser:
        seen = WatchedPage(browser, screen=screen, open_to_axe=True)
        page = seen.open(address)
        expect(page.locator("#causes li strong").first).to_have_text("slow link: learner-3")
        expect(page.locator("#causes code").first).to_have_text(f"atoll why behind learner-3 --out {out}")
        expect(page.locator("#status")).to_contain_text("over")
        expect(page.locator("#figures tbody tr").first).to_contain_text(f"{report['tokens_trained']:,}")
        expect(page.locator("#lives tbody tr")).to_have_count(len(report["learners"]))
        expect(page.locator("#settings tbody tr")).to_have_count(len(report["settings"]))
        for chart in ("merged", "losses", "speed", "participation", "bytes"):
            expect(page.locator(f"#{chart} canvas")).to_be_visible()
        assert seen.violations() == []

        strict = WatchedPage(browser)
        strict.open(address)

    assert strict.asked == [address]
    assert strict.faults == []
