"""What is installed: the product alone, and a command line that answers where nothing but the core is there."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"atoll", "atoll_learner", "atoll_synchronizer", "atoll_simulator", "atoll_monitor"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    out = tmp_path_factory.mktemp("dist")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(out), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_the_product_alone(wheel: set[str]) -> None:
    """No tests, no benchmarks, no schedules and no baselines; every module and the schema of reports."""
    places = {name.split("/")[0] for name in wheel}
    sources = [*(ROOT / "shared").rglob("*.py"), *(ROOT / "services").rglob("*.py")]
    wanted = {"/".join(path.relative_to(ROOT).parts[1 if "shared" in path.parts else 2 :]) for path in sources}

    assert {place for place in places if not place.endswith(".dist-info")} == PACKAGES
    assert {name for name in wheel if name.endswith(".py")} == wanted
    assert not [name for name in wheel if {"tests", "schedules", "baselines", "benchmarks"} & set(name.split("/"))]
    assert {"atoll/report/report.schema.json", "atoll/bus/hub.conf"} <= wheel
    page = "atoll/report/static"
    assert {f"{page}/index.html", f"{page}/vendor/uPlot.esm.js", f"{page}/vendor/uPlot-LICENSE.txt"} <= wheel
    assert {f"{package}/py.typed" for package in PACKAGES} <= wheel
