"""A profile: the steps of a jitted loop on JAX's clock, and the island's spans beside them on the same."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from atoll.base import spans
from atoll_learner.profiling import ISLAND_PID, SETTLED_STEPS, StepProfiler

NEAR_US = 20_000.0


def profiled(folder: Path, steps: int, loops: int) -> list[dict[str, Any]]:
    work = jax.jit(lambda x: (x @ x).sum())
    square = jnp.ones((64, 64))
    profiler = StepProfiler(folder, steps, "a-1")

    def push() -> None:
        with spans.span("push fragment 0", base=3):
            time.sleep(0.002)

    for number in range(loops):
        with profiler.step(number):
            pusher = threading.Thread(target=push)
            pusher.start()
            work(square).block_until_ready()
            spans.instant("fragment 0 adopted", version=number)
            pusher.join()
    profiler.end()
    trace = json.loads(gzip.decompress((folder / "a-1.json.gz").read_bytes()))
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def test_steps_of_xla_and_spans_of_the_island_lie_over_each_other(tmp_path: Path) -> None:
    """As many steps as were asked for, after those that settle; a step of the island begins where JAX's begins."""
    events = profiled(tmp_path, 3, SETTLED_STEPS + 5)
    ours = [event for event in events if event.get("pid") == ISLAND_PID and event.get("name") == "step"]
    begins = {event["args"]["number"]: event["ts"] for event in ours if event["ph"] == "b"}
    jax_steps = {int(event["args"]["step_num"]): event for event in events if "step_num" in event.get("args", {})}

    assert sorted(begins) == sorted(jax_steps) == [SETTLED_STEPS + number for number in range(3)]
    assert all(abs(begins[number] - jax_steps[number]["ts"]) < NEAR_US for number in begins)
    assert sum(event.get("name") == "push fragment 0" for event in events) == 6, "a beginning and an end of each"
    marks = [event["args"] for event in events if event.get("ph") == "i" and event["pid"] == ISLAND_PID]
    assert marks == [{"version": SETTLED_STEPS + number} for number in range(3)]


def test_a_learner_that_leaves_early_keeps_what_there_is(tmp_path: Path) -> None:
    events = profiled(tmp_path, 100, SETTLED_STEPS + 2)

    assert sum("step_num" in event.get("args", {}) for event in events) == 2
    assert spans.policy.log is None


def test_a_profile_that_cannot_be_written_ends_no_learner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, square = tmp_path / "profile", jnp.ones((64, 64))
    profiler = StepProfiler(folder, 3, "a-1")
    for number in range(SETTLED_STEPS + 5):
        if number == SETTLED_STEPS + 1:
            shutil.rmtree(folder)
            folder.touch()
        with profiler.step(number):
            (square @ square).block_until_ready()
    profiler.end()

    folder.unlink()
    with contextlib.suppress(RuntimeError):  # some releases of JAX keep the session that could not be written
        jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
    assert "profile.unwritten" in capsys.readouterr().err
    assert spans.policy.log is None
