"""Dumps of the last facts: written when something of ours fails or somebody asks, bounded, and never in the way."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from atoll.base import fact_dumps
from atoll.base.errors import BrokerUnavailable, ProtocolMisuse, RecordConflict, SettingsError
from atoll.protocol.events import Command, StepDone
from atoll.protocol.island import Island
from atoll.protocol.recorder import FactRecorder, Replay, freeze
from atoll.protocol.settings import ProtocolSettings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where dumps go, of the machines of one test: those that others have left would push its dumps out of the folder."""
    monkeypatch.setattr(fact_dumps, "_recorders", weakref.WeakSet())
    fact_dumps.policy.folder = tmp_path / "dumps"
    yield tmp_path / "dumps"
    fact_dumps.policy.folder = None


def recorder(name: str) -> FactRecorder[Command]:
    made = FactRecorder(name, Island(ProtocolSettings(), {0: 0}))
    fact_dumps.keep(made)
    return made


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (ProtocolMisuse("a bug"), True),
        (KeyError("a bug"), True),
        (BrokerUnavailable("away"), False),
        (RecordConflict("deposed"), False),
        (SettingsError("wrong"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_only_a_bug_of_ours_is_dumped(folder: Path, error: BaseException, ours: bool) -> None:  # noqa: FBT001
    fact_dumps.dump_if_our_bug(error, recorder("one"))

    assert len(list(folder.glob("facts-one-*.jsonl"))) == int(ours)


def test_a_signal_dumps_every_machine_of_the_process(folder: Path) -> None:
    """SIGUSR1; a machine that is gone is not among them."""
    kept, gone = recorder("kept"), recorder("gone")
    del gone
    before = signal.getsignal(signal.SIGUSR1)
    try:
        fact_dumps.dump_on_signal()
        signal.raise_signal(signal.SIGUSR1)  # `os.kill` may let another thread take it, and so take its time
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert kept.name == "kept"
    assert list(folder.glob("facts-kept-*.jsonl"))
    assert not list(folder.glob("facts-gone-*.jsonl"))
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_the_oldest_dumps_go(folder: Path) -> None:
    one = recorder("one")
    paths = [fact_dumps.dump(one, f"the {n}th time") for n in range(fact_dumps.FILES_MAX + 5)]
    there = set(folder.iterdir())

    assert len(there) == fact_dumps.FILES_MAX
    assert paths[-1] in there
    assert paths[0] not in there


def test_a_folder_that_cannot_be_written_harms_nothing(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "dumps").write_text("a file, no folder")

    assert fact_dumps.dump(recorder("one"), "something failed") is None
    assert folder.is_file()


@pytest.mark.usefixtures("folder")
def test_a_dump_that_is_too_long_ends_with_a_whole_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fact_dumps, "DUMP_BYTES_MAX", 20)

    class Talker:
        name = "talker"

        def lines(self, why: str) -> Iterator[bytes]:
            while True:
                yield why.encode()

    path = fact_dumps.dump(Talker(), "123456789")

    assert path is not None
    assert path.read_bytes() == b"123456789\n123456789\n"


def test_a_dump_that_does_not_fit_leaves_nothing_and_room_is_made_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a full folder the oldest dumps go first; a half-written one would only take the room that is missing."""
    monkeypatch.setattr(fact_dumps, "FILES_MAX", 2)
    made = [fact_dumps.dump(recorder("a"), "asked") for _ in range(2)]

    def full(path: Path, lines: Iterator[bytes]) -> None:
        del lines
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fact_dumps, "_write", full)

    assert fact_dumps.dump(recorder("a"), "asked") is None
    assert list(folder.iterdir()) == [made[1]]


def test_odd_values_in_facts_are_dumped_all_the_same(folder: Path) -> None:
    """A NumPy number as what it is, so that it replays; anything else as its text."""
    one = recorder("odd")
    one.handle(StepDone(at_s=1.0, tokens=np.int64(5)))  # type: ignore[arg-type]
    one.handle(StepDone(at_s=np.float64(2.0), tokens=3))
    path = fact_dumps.dump(one, "asked")
    assert path is not None
    replay = Replay(path.read_bytes().splitlines())
    for _ in replay.play():
        pass

    assert isinstance(replay.machine, Island)
    assert replay.machine.tokens == 8
    one.machine.steps = object()  # type: ignore[union-attr]
    assert b"object object" in freeze(one.machine)
    assert list(folder.iterdir()) == [path]
