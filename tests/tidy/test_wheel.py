"""What is installed: the product alone, and a command line that answers where nothing but the core is there."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"atoll", "atoll_learner", "atoll_synchronizer", "atoll_simulator", "atoll_monitor"}

# What the extras bring: an environment with the core alone has none of it.
EXTRAS = ("jax", "jaxlib", "flax", "optax", "orbax", "numba", "tokenizers", "pyarrow")
BARE = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))  # an import of any of them fails
from atoll.cli.main import main
sys.argv[0] = "atoll"
main()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    out = tmp_path_factory.mktemp("dist")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(out), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def bare(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BARE, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


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


@pytest.mark.parametrize("words", [("--help",), ("config",), ("up", "--help"), ("tap", "--help"), ("sim", "--help")])
def test_the_command_line_answers_without_any_extra(words: tuple[str, ...]) -> None:
    done = bare(*words)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_verb_that_needs_an_extra_names_it(tmp_path: Path) -> None:
    done = bare("data", "prepare", str(tmp_path / "a.parquet"), "--out", str(tmp_path / "out"))

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
