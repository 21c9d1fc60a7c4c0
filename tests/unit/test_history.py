"""What was measured before is kept, found again, and shown beside what is measured now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib import harness, publish
from benchmarks.lib.harness import Figure


def document(value: float, commit: str = "a" * 40, machine: str = "m") -> dict[str, Any]:
    figure = {"name": "speed", "value": value, "unit": "MB/s", "goal": "", "holds": None, "how": "once"}
    return {"machine": machine, "commit": commit, "atoll": "0", "seed": 0, "figures": [figure]}


def test_a_line_is_added_and_the_same_measurement_takes_its_place(tmp_path: Path) -> None:
    """Oldest first; another commit or another machine is another measurement."""
    path = tmp_path / "docs" / "history.jsonl"
    for value, commit, machine in (
        (1.0, "a" * 40, "m"),
        (2.0, "b" * 40, "m"),
        (3.0, "a" * 40, "m"),
        (4.0, "b" * 40, "n"),
    ):
        harness.add_history("bench", document(value, commit, machine), path)
    assert [line["figures"]["speed"][0] for line in harness.history_lines(path)] == [3.0, 2.0, 4.0]


def test_the_last_one_of_a_machine_is_what_one_compares_with(tmp_path: Path) -> None:
    """Not what this very commit has published, nor what another machine or target has."""
    path = tmp_path / "history.jsonl"
    assert harness.before("bench", "m", "c" * 40, path) == {}
    for value, commit, machine in ((1.0, "a" * 40, "m"), (2.0, "b" * 40, "m"), (9.0, "c" * 40, "n")):
        harness.add_history("bench", document(value, commit, machine), path)
    assert harness.before("bench", "m", "c" * 40, path) == {"speed": 2.0}
    assert harness.before("bench", "m", "b" * 40, path) == {"speed": 1.0}
    assert harness.before("other", "m", "c" * 40, path) == {}


def test_who_measures_sees_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Published once, measured again at another commit, ten per cent slower."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(harness, "machine", lambda: "m")
    monkeypatch.setattr(harness, "commit", lambda: "b" * 40)
    publish.publish("bench-x", document(100.0), publish.FOLDER)
    assert harness.write("bench-x", 0, [Figure("speed", 90.0, "MB/s", "", None, "once")]) == 0
    assert "-10.0%" in capsys.readouterr().out
    assert json.loads(Path("build/results/bench-x.json").read_text(encoding="utf-8"))["figures"][0]["value"] == 90.0


def test_the_history_of_this_repository_is_whole() -> None:
    """Every line is one; every page of figures was measured at a commit that is in it."""
    lines = harness.history_lines(Path(__file__).parents[2] / harness.HISTORY)
    keys = [(line["target"], line["commit"], line["machine"]) for line in lines]
    assert len(set(keys)) == len(keys)
    told = {target for target, _, _ in keys}
    for page in (Path(__file__).parents[2] / publish.FOLDER).glob("bench*.md"):
        assert page.stem in told
