"""A saved run: its folder alone tells it, to stories and to the page alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.base.errors import SettingsError
from atoll.cli.main import build
from atoll.cli.reading import recording_of
from atoll.run.folder import EVENTS_FILE, saved_run
from atoll_monitor.dashboard import SavedScene

BEGAN_S = 5000.0


def lines() -> list[dict[str, Any]]:
    """Return the event log of two learners; b steps at a third of a's speed. One line is damaged."""
    told: list[tuple[str, str, float, dict[str, Any]]] = [
        (f"learner-{who}", "joined", 0.5, {"incarnation": 1, "founder": who == "a", "took_s": 0.5}) for who in "ab"
    ]
    told.append(("shard-0", "serving", 1.0, {"epoch": 1, "versions": {"0": 0}, "host": "h", "pid": 7}))
    for version in range(1, 7):
        shares = [
            {"learner": f"learner-{who}", "incarnation": 1, "age": 0, "tokens": 50, "weight": 0.5, "step_s": step_s}
            for who, step_s in (("a", 0.1), ("b", 0.3))
        ]
        fields = {"fragment": 0, "version": version, "contributors": shares, "run_tokens": 100 * version}
        told.append(("shard-0", "round", 2.0 + version, fields | {"waited_s": 0.5, "merge_s": 0.1, "parameters": 4}))
        sample = {"incarnation": 1, "step": 10 * version, "tokens": 50 * version, "step_s": 0.1, "loss": 4.0}
        told.append(("learner-a", "sample", 2.5 + version, sample))
    told.append(("evaluator", "validation", 8.5, {"run_tokens": 600, "bits_per_byte": 3.25}))
    told += [(f"learner-{who}", "left", 9.0, {"incarnation": 1, "tokens": 300, "steps": 60}) for who in "ab"]
    return [
        {
            "subject": f"atoll.sim.ev.{kind}.{who}",
            "event": {"kind": kind, "who": who, "at_s": BEGAN_S + at_s, "fields": fields, "schema": 1},
        }
        for who, kind, at_s, fields in sorted(told, key=lambda each: each[2])
    ]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "a run"
    folder.mkdir()
    written = [json.dumps(line) for line in lines()]
    (folder / EVENTS_FILE).write_text("\n".join([*written, "{damaged"]), encoding="utf-8")
    settings = {"protocol.fragments": 1, "protocol.shards": 1, "protocol.tokens_target": 600}
    file = {"run": "sim", "learners": 2, "settings": settings, "broker": "simulated"}
    (folder / "run.json").write_text(json.dumps(file), encoding="utf-8")
    return folder


def scene_of(folder: Path, name: str = "sim", others: tuple[str, ...] = ("sim",)) -> SavedScene:
    saved = saved_run(folder)
    assert saved is not None
    return SavedScene(saved, name, others)


def test_a_saved_run_is_shown_as_it_was(out: Path) -> None:
    """State, curves and causes by the reductions of a live run, at the end of its event log; a damaged line is skipped."""
    scene = scene_of(out)
    state, curves, causes = (json.loads(json.dumps(made())) for made in (scene.state, scene.curves, scene.causes))

    assert (state["status"], state["saved"], state["clock"]) == ("over", True, "virtual")
    assert (state["at_s"], state["tokens"], state["target"], state["commits"]) == (8.5, 600, 600, 6)
    assert (state["founder"], state["bits_per_byte"], state["alerts"]) == ("learner-a", 3.25, [])
    assert [one["state"] for one in state["learners"]] == ["left", "left"]
    assert not [mark for mark in state["marks"] if mark["group"] == "fault"]
    assert curves["merged"]["bits_per_byte"] == [3.25]
    assert [each["learner"] for each in curves["losses"]] == ["learner-a", "learner-b"]
    assert [(each["cause"], each["who"]) for each in causes["findings"]] == [("slow learner", "learner-b")]
    assert causes["findings"][0]["command"] == f"atoll why behind learner-b --out '{out}'"
    assert scene.history.unreadable == 1


def test_an_event_log_alone_is_enough_to_be_shown_and_told(out: Path) -> None:
    """Without its run.json a run has the name of its folder; only what needs its agreement says that it is missing."""
    (out / "run.json").unlink()
    state = scene_of(out).state()
    asked = CliRunner().invoke(build(), ["why", "--out", str(out)])

    saved = saved_run(out)
    assert saved is not None
    assert (saved.run, saved.agreement, saved.simulated) == ("a run", None, False)
    assert (state["status"], state["fragments"], state["commits"]) == ("over", 1, 6)
    assert "slow learner, learner-b" in asked.output
    with pytest.raises(SettingsError, match=r"without run\.json"):
        recording_of("what-if", out, None, None)


def test_a_folder_without_an_event_log_is_no_saved_run(tmp_path: Path, out: Path) -> None:
    """A run of `atoll up` has its event log in its broker; of a simulated one that lost it the file is named."""
    file = json.loads((out / "run.json").read_text(encoding="utf-8"))
    (out / "run.json").write_text(json.dumps(file | {"broker": "embedded"}), encoding="utf-8")
    with_a_broker = saved_run(out)
    (out / "run.json").write_text(json.dumps(file), encoding="utf-8")
    (out / EVENTS_FILE).unlink()

    assert (with_a_broker, saved_run(tmp_path)) == (None, None)
    with pytest.raises(SettingsError, match=EVENTS_FILE):
        scene_of(out)
