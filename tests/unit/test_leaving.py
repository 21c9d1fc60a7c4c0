"""Leaving in good order: what others need goes first, and no checkpoint, however slow, holds it up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from atoll.base.errors import BrokerUnavailable
from atoll.client.checkpoints import CheckpointNote, Checkpoints
from atoll.client.join import IslandHandle
from atoll.settings import load
from atoll_learner.checkpoints import KEEP_SHARE, RETURN_SHARE, Keeper, leave
from atoll_learner.feed import LeasedFeed

STATE = {"mu": np.ones(3, np.float32)}


class SlowDisk(Checkpoints):
    """Checkpoints whose writes begin and end when the test says so."""

    def __init__(self, folder: Path, life: CheckpointNote, told: list[str]) -> None:
        super().__init__(folder, life)
        self.told = told
        self.may_end = threading.Event()

    def _write(self, number: int, arrays: Any, note: CheckpointNote, copied_s: float) -> None:  # noqa: ANN401
        del number, arrays, copied_s
        assert self.may_end.wait(60.0)
        self.told.append(f"checkpoint of step {note.steps}")


class LeavingScene:
    """A learner that has trained and is about to leave; `told` is what happened, in order."""

    def __init__(self, folder: Path) -> None:
        """Keep checkpoints at every step, and have one under way for ever."""
        self.told: list[str] = []
        self.pushing_s = 0.0
        self.broker_away = self.disk_returns = False
        machine = SimpleNamespace(intervals={0: SimpleNamespace(anchor=7)})
        run = SimpleNamespace(run="r", nonce="n", model="m", layout=SimpleNamespace(fingerprint="f"), rebuilt=None)
        self.island = SimpleNamespace(
            session=SimpleNamespace(driver=SimpleNamespace(machine=machine, failure=None)),
            run=run,
            incarnation=1,
            run_tokens=10,
            close=self.close_island,
        )
        self.feed = SimpleNamespace(close=self.close_feed, cursor={})
        settings = load(None, [f"learner.checkpoint_dir={folder}"], {}).settings
        self.keeper = Keeper(settings, cast("IslandHandle", self.island), 5)
        assert self.keeper.checkpoints is not None
        self.disk = SlowDisk(folder, self.keeper._life, self.told)
        self.keeper.checkpoints = self.disk

    def close_feed(self, within_s: float) -> bool:
        self.told.append("data")
        return within_s > 0.0

    def close_island(self, within_s: float) -> None:
        self.told.append("goodbye")
        self.pushing_s = within_s
        if self.disk_returns:
            self.disk.may_end.set()
            self.disk.finish(240.0)
        if self.broker_away:
            raise BrokerUnavailable("the last pushes are not durable")

    def leave(self, bound_s: float) -> None:
        leave(cast("IslandHandle", self.island), cast("LeasedFeed", self.feed), self.keeper, STATE, bound_s)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[LeavingScene]:
    """A life of two steps with the checkpoint of the first under way."""
    scene = LeavingScene(tmp_path)
    scene.keeper.keep(STATE, {})
    scene.keeper._begin(scene.disk, STATE, {})
    scene.keeper.keep(STATE, {})
    assert scene.disk.busy
    yield scene
    scene.disk.may_end.set()
    assert scene.disk.finish(240.0)


def test_a_checkpoint_that_never_ends_does_not_hold_up_the_goodbye(scene: LeavingScene) -> None:
    """Pushes have nearly the whole bound although the disk does not answer; the bound holds for all together."""
    bound_s = 4.0
    began_s = time.monotonic()
    scene.leave(bound_s)

    assert time.monotonic() - began_s < 240.0
    assert scene.told == ["data", "goodbye"]
    assert scene.pushing_s > bound_s * (1 - 1 / KEEP_SHARE - 1 / RETURN_SHARE)


def test_the_last_checkpoint_is_kept_once_the_goodbye_is_said(scene: LeavingScene) -> None:
    """When the one under way is written in time the last one follows, with the step it left at."""
    scene.disk_returns = True
    scene.leave(30.0)

    assert scene.told == ["data", "goodbye", "checkpoint of step 1", "checkpoint of step 2"]


def test_a_broker_that_is_away_costs_the_pushes_and_not_the_checkpoint(scene: LeavingScene) -> None:
    scene.disk_returns = scene.broker_away = True
    with pytest.raises(BrokerUnavailable, match="not durable"):
        scene.leave(30.0)

    assert scene.told[-1] == "checkpoint of step 2"
    assert scene.pushing_s <= 30.0 * (1 - 1 / KEEP_SHARE)
