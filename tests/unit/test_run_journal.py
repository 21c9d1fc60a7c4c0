"""What a session of `atoll up` says at its end of how the run goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.base.clock import SystemClock
from atoll.base.errors import AtollError, StorageFull
from atoll.local.journal import SAVE_S, Journal
from atoll.local.options import plan
from atoll.run.folder import RunFolder
from atoll.run.history import History
from support.events import event
from support.up_requests import up_request


def journal(out: Path, target: int, broker: str | None = None) -> Journal:
    up = plan(up_request(out=out, assignments=(f"protocol.tokens_target={target}",)), {})
    return Journal(replace(up, broker=broker), RunFolder(out), History(), SystemClock())


def fails_in_turn(session: Journal, monkeypatch: pytest.MonkeyPatch, error: AtollError) -> list[bool]:
    """Let all savings fail but the third one; return which of those to come do."""
    fails = [True, True, False, True]

    def save() -> None:
        if fails.pop(0):
            raise error

    monkeypatch.setattr(session, "save", save)
    return fails


def test_a_full_disk_is_told_once_each_time_that_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stage the run is in; the file is written every few seconds, and not at each look."""
    session, said = journal(tmp_path / "run", 1000), list[str]()
    full = fails_in_turn(session, monkeypatch, StorageFull("the disk is full", todo="free space"))
    session.look(said.append)
    assert len(full) == 4, "it is not time yet"
    for told in (1, 1, 1, 2):
        session._saved_s = -SAVE_S
        session.look(said.append)
        assert len(said) == told
    assert said[0].startswith("the disk is full")


def test_a_life_that_takes_no_step_proves_nothing(tmp_path: Path) -> None:
    """Joining takes longer than most crashes: only a step of the life that ended says that it was worth a restart."""
    session = journal(tmp_path / "run", 1000)
    view = session._view

    def lives(incarnation: int, steps: int) -> bool:
        view.on_event(event("joined", "learner-1", 0.0, incarnation=incarnation))
        view.on_event(event("left", "learner-1", 0.0, incarnation=incarnation, tokens=steps, steps=steps))
        return session.note_end("learner-1")

    assert [lives(1, 7), lives(2, 0), lives(3, 0), lives(4, 1)] == [True, False, False, True]
    assert not session.note_end("learner-1"), "the next life ended before it joined"
    assert session.note_end("shard-0")
