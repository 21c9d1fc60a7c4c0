"""Tests of a module are on one worker: xdist's own groups once stopped to hold them together, and nothing said so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.scheduling import SuitePart

CONFTEST = """
from support.scheduling import ModuleScheduling

def pytest_xdist_make_scheduler(config, log):
    return ModuleScheduling(config, log)
"""
MODULE = """
import pytest

@pytest.mark.parametrize("number", range(6))
def test_it(number):
    pass
"""


def test_a_module_is_on_one_worker_and_examples_are_on_any(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    names = ("test_one", "test_two", "test_examples")
    for name in names:
        (tmp_path / f"{name}.py").write_text(MODULE, encoding="utf-8")
    words = ["-v", "-p", "no:randomly", "--numprocesses", "2", "--dist", "loadscope", "--no-loadscope-reorder"]
    place = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    for variable in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"):
        place.pop(variable, None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "--rootdir", str(tmp_path), str(tmp_path)],
        env=place,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"\[(gw\d)\].* PASSED (test_\w+)\.py::", done.stdout)
    assert len(ran) == 6 * len(names)
    workers = {name: {worker for worker, module in ran if module == name} for name in names}
    assert {name: len(workers[name]) for name in names} == {"test_one": 1, "test_two": 1, "test_examples": 2}


def test_each_test_is_in_one_part() -> None:
    names = [f"tests/unit/test_it.py::test_{number}[{number}]" for number in range(400)]
    found = [sum(SuitePart(number, 4).has(name) for name in names) for number in range(1, 5)]

    assert sum(found) == len(names)
    assert min(found) > 60
