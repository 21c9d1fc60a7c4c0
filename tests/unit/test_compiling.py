"""Learners of one machine compile in turns, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atoll.base.user_cache import turn
from atoll_learner.model import init_params
from atoll_learner.model_settings import model_settings
from atoll_learner.train import CompiledAhead, init_optimizer, make_step, step_arguments
from atoll_learner.train_settings import TrainSettings, train_settings

HOLDER = """
import sys, time
from pathlib import Path
from atoll.base.user_cache import turn
with turn(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(600)
"""


def test_a_turn_is_had_by_one_and_given_back(tmp_path: Path) -> None:
    """While it is held others run out of patience and go on without it; afterwards it can be had again."""
    with turn(tmp_path) as first:
        with turn(tmp_path, patience_s=0.0) as second:
            assert not second
        assert first
    with turn(tmp_path, patience_s=0.0) as third:
        assert third


def test_a_killed_holder_gives_its_turn_back(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "mine\n"
    with turn(tmp_path, patience_s=0.0) as had:
        assert not had
    holder.send_signal(signal.SIGKILL)
    holder.wait(240)
    holder.stdout.close()
    with turn(tmp_path, patience_s=30.0) as had:
        assert had


@pytest.mark.parametrize("train", [{"batch": 2}, {"batch": 2, "accumulation": 2, "optimizer": "adamw"}])
def test_a_step_that_was_compiled_ahead_is_the_step(train: dict[str, object], tmp_path: Path) -> None:
    """It takes what a training loop gives it, and returns what the jitted function returns, to the bit."""
    model = model_settings({"layers": 1, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "context": 16}, vocab=64)
    told: TrainSettings = train_settings(train, model=model)
    params, step = init_params(model, 0), make_step(model, told)
    ahead = CompiledAhead(step, step_arguments(told, params), tmp_path)
    shape = (2, 17) if told.accumulation == 1 else (2, 2, 17)
    batch = np.random.default_rng(0).integers(0, 64, shape).astype(np.int32)

    first = step(params, init_optimizer(told, params), batch, 1e-3)
    then = step(*first[:2], batch, 2e-3)
    compiled = ahead.result()
    state = jax.tree.map(np.asarray, init_optimizer(told, params))  # as a checkpoint gives it
    got = compiled(*compiled(params, state, batch, 1e-3)[:2], batch, 2e-3)

    assert all((got[0][name] == then[0][name]).all() for name in params)
    assert float(got[2]) == float(then[2])


def test_what_cannot_be_compiled_says_so_where_the_step_is_wanted() -> None:
    ahead = CompiledAhead(jax.jit(lambda x: jnp.reshape(x, (3,))), (np.zeros(2, np.float32),), None)

    with pytest.raises(TypeError, match="reshape"):
        ahead.result()


def folder_for(place: Path) -> None:
    place.mkdir()


def link_for(place: Path) -> None:
    place.with_name("precious").write_text("precious", encoding="utf-8")
    place.symlink_to(place.with_name("precious"))


def removed(place: Path) -> None:
    place.parent.rmdir()


@pytest.mark.parametrize("spoil", [folder_for, link_for, removed])
def test_a_turn_that_cannot_be_had_is_done_without(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """The cache is a help; who cannot lock compiles out of turn, and nothing is written through a link."""
    (tmp_path / "cache").mkdir()
    spoil(tmp_path / "cache" / ".turn")

    with turn(tmp_path / "cache", patience_s=0.0) as had:
        assert not had

    precious = tmp_path / "cache" / "precious"
    assert not precious.exists() or precious.read_text(encoding="utf-8") == "precious"


def test_a_pipe_in_the_place_of_a_turn_delays_nobody(tmp_path: Path) -> None:
    """Opening one waits for its other end, for ever."""
    os.mkfifo(tmp_path / ".turn")

    with turn(tmp_path, patience_s=0.0) as had:
        assert isinstance(had, bool)
