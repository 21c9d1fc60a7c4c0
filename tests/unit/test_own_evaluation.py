"""Numbers by a person's own function: what it gets, what it may return, how its mistakes are told, and where they go."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from atoll.archive.object_store import FolderArchive
from atoll.base.errors import AtollError, LayoutMismatch, SettingsError
from atoll.run.merged_model import MergedModel
from atoll.wire.events import event_of
from atoll_learner.evaluate import evaluate_once
from atoll_learner.evaluations import Evaluation, OwnEvaluation
from support.founded_run import FoundedRun, TurnedClock, run_record, say_lease

DEADLINE_S = 240.0
MODULE = """
import sys
import numpy as np

def like():
    return {"a": np.zeros((40, 3), np.float32), "b": np.zeros(9, np.float32)}

other = {"a": np.zeros((40, 3), np.float32)}
number = 3

def total(params):
    return np.float32(params["a"].sum())

def several(params):
    return {"rows": len(params["a"]), "last": params["b"][-1]}

def failing(params):
    return params["c"]

def words(params):
    return {"accuracy": "good"}

def nothing(params):
    return {}

def endless(params):
    return float("nan")

def an_array(params):
    return params["b"]

def leaving(params):
    sys.exit("no GPU here")

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__

def mute(params):
    raise Mute

def a_mute_value(params):
    return Mute()

def broken():
    raise RuntimeError("no such data")
"""
PARAMS = {"a": np.ones((40, 3), np.float32), "b": np.arange(9, dtype=np.float32)}
MERGED = MergedModel(PARAMS, 1, 2)


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the person's own in the working directory; each test has one of its own name."""
    name = f"own_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def said(function: str, like: str = "", merged: MergedModel = MERGED) -> dict[str, dict[str, float]]:
    values, average = OwnEvaluation(function, like).values(run_record("r"), merged)
    return {"values": values} | ({} if average is None else {"average": average})


def test_a_number_or_several_by_name(module: str) -> None:
    averaged = MergedModel(PARAMS, 1, 2, {"a": 2 * PARAMS["a"], "b": PARAMS["b"]})

    assert said(f"{module}:total") == {"values": {"value": 120.0}}
    assert said(f"{module}:several") == {"values": {"rows": 40.0, "last": 8.0}}
    assert said(f"{module}:total", merged=averaged) == {"values": {"value": 120.0}, "average": {"value": 240.0}}


def test_parameters_come_as_the_pytree_that_was_named(module: str) -> None:
    assert said(f"{module}:several", f"{module}:like") == {"values": {"rows": 40.0, "last": 8.0}}
    with pytest.raises(LayoutMismatch, match="this model is not the model of run"):
        said(f"{module}:several", f"{module}:other")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("total", "names nothing"),
        ("no_such_module:total", "No module named 'no_such_module'"),
        ("{}:totals", "names what its module has not"),
        ("{}:number", "names no function"),
    ],
)
def test_what_cannot_be_called_is_refused_at_once(module: str, function: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        OwnEvaluation(function.format(module))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("failing", "KeyError: 'c'"),
        ("words", "accuracy = 'good'"),
        ("nothing", "too many numbers or none"),
        ("endless", "value = nan"),
        ("an_array", "returned what is no number"),
        ("leaving", "SystemExit: no GPU here"),
        ("mute", "Mute: its words cannot be read"),
        ("a_mute_value", "a Mute"),
    ],
)
def test_a_function_that_fails_or_returns_no_number_is_named(module: str, function: str, words: str) -> None:
    with pytest.raises(AtollError, match=f"the function {module}:{function} ") as refused:
        said(f"{module}:{function}")

    assert words in str(refused.value)


BARE = """
import sys
from importlib.machinery import PathFinder

found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name.partition(".")[0] in ("jax", "flax") else found(name, *more)
from atoll.base.exits import run_guarded
from atoll.settings import load
from atoll_learner.evaluate import follow
from atoll_learner.evaluate import MeasuringPace
run_guarded(lambda: follow(load(None, ["run=r"], {}).settings, MeasuringPace(1.0), sys.argv[1]))
"""


def test_a_function_over_numpy_needs_no_jax(tmp_path: Path) -> None:
    """One was told to install all that the reference learner needs; here it gets as far as its own module."""
    done = subprocess.run(
        [sys.executable, "-c", BARE, "no_such_module_of_mine:f"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert done.returncode == 2, done.stderr
    assert "No module named 'no_such_module_of_mine'" in done.stderr
    assert "atoll[learner]" not in done.stderr


def test_the_count_of_tokens_goes_on_where_a_former_evaluator_ended(module: str, tmp_path: Path) -> None:
    """It is the shards' count: an evaluator that is started again knows it at once, and its event has the numbers."""

    async def scenario() -> list[dict[str, Any]]:
        run = FoundedRun(run_record("r"), FolderArchive(tmp_path / "archive"), TurnedClock())
        await run.found()
        for tokens in (500, 700):
            await say_lease(run, tokens)
            evaluation: Evaluation = OwnEvaluation(f"{module}:several", "")  # a new process's
            assert await evaluate_once(run.bus, run.record, evaluation)
        entries = await run.bus.replay(run.record.subjects.event("evaluated", "*"), after=0, limit=10)
        return [{k: msgspec.json.decode(v) for k, v in event_of(e.subject, e.data).fields.items()} for e in entries]

    events = asyncio.run(scenario())

    assert [event["run_tokens"] for event in events] == [500, 700]
    assert [event["values"]["rows"] for event in events] == [40.0, 40.0]


def test_a_run_that_cannot_be_read_is_passed_over_and_an_error_of_the_function_is_not(
    module: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        run = FoundedRun(run_record("r"), FolderArchive(tmp_path / "archive"), TurnedClock())
        assert not await evaluate_once(run.bus, run.record, OwnEvaluation(f"{module}:failing", ""))
        await run.found()
        with pytest.raises(AtollError, match="failed"):
            await evaluate_once(run.bus, run.record, OwnEvaluation(f"{module}:failing", ""))

    asyncio.run(scenario())
