"""Checkpoints when something around them is wrong: clocks, other foundings, slow stores, records and manifests of others."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from atoll.archive import checkpoint_store
from atoll.archive.checkpoints import INCOMPLETE_MAX, founding
from atoll.archive.object_store import FolderArchive
from atoll.base.errors import CheckpointError
from atoll.wire.subjects import Subjects
from atoll_synchronizer import archivist
from support.founded_run import EVERY_S, SHARDS, BrokenObjectStore, FoundedRun, TurnedClock, run_record

AHEAD = 1000


@pytest.fixture
async def founded(tmp_path: Path, run: str) -> FoundedRun:
    founded = FoundedRun(run_record(run), FolderArchive(tmp_path / "archive"), TurnedClock())
    await founded.found()
    return founded


async def mark_with_clocks_apart(founded: FoundedRun, ahead: int, *, first: int = 0) -> None:
    """Let every shard make a checkpoint, the clock of shard 0 being so many checkpoints ahead."""
    for shard in sorted(range(SHARDS), key=lambda shard: shard != first):
        before_s = founded.clock.now_s
        founded.later(0 if shard else ahead)
        assert await founded.checkpoint(shard) == [True]
        founded.clock.now_s = before_s


def is_up_to_date(founded: FoundedRun) -> bool:
    """Return whether the newest complete checkpoint holds what the shards hold now."""
    archived = {piece.head.fragment: piece.head for manifest in founded.newest() for piece in manifest.pieces}
    held = {p: held.head for store in founded.stores.values() for p, held in store.holdings.items()}
    return {p: (head.version, head.digest, head.fragment_ledger) for p, head in archived.items()} == {
        p: (head.version, head.digest, head.fragment_ledger) for p, head in held.items()
    }


# --- clocks ---------------------------------------------------------------------------------------------------------


async def test_a_clock_that_was_ahead_for_a_while_costs_no_later_checkpoint(founded: FoundedRun) -> None:
    """All shards go on above its numbers: what is made later is newer, is kept, and is what a rebuilding takes."""
    for ahead in (0, AHEAD, AHEAD, AHEAD, 0, 0, 0, 0, 0):
        await founded.round()
        await mark_with_clocks_apart(founded, ahead)
        assert is_up_to_date(founded)
        founded.later()

    assert founded.newest()[0].number > AHEAD * EVERY_S


@pytest.mark.parametrize("first", range(SHARDS))
async def test_clocks_that_are_far_apart_still_make_complete_checkpoints(founded: FoundedRun, first: int) -> None:
    """The shard that is behind joins the checkpoint of the one that is ahead, at most one checkpoint late."""
    for _ in range(2 * INCOMPLETE_MAX):
        archived = {0: founded.stores[0].holdings[0].head, 1: founded.stores[1].holdings[1].head}
        await founded.round()
        await mark_with_clocks_apart(founded, AHEAD, first=first)
        founded.later()

    heads = {piece.head.fragment: piece.head.version for manifest in founded.newest() for piece in manifest.pieces}
    assert min(heads.values()) >= min(head.version for head in archived.values())


async def test_a_founding_that_sorts_later_crowds_nothing_out(
    founded: FoundedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its founder's clock was ahead of ours: our checkpoints stay, its checkpoints too, and it is said."""
    record = founded.record
    founded.record = msgspec.structs.replace(record, nonce="other", founded_at_s=record.founded_at_s + 1e6)
    for _ in range(2 * founded.keep):
        founded.archivists = {shard: founded.archivist(shard) for shard in range(SHARDS)}
        await founded.checkpoint()
        founded.later()
    theirs = {part.path for part in founded.checkpoint_store.parts()}
    founded.record = record
    founded.archivists = {shard: founded.archivist(shard) for shard in range(SHARDS)}
    for _ in range(2 * founded.keep):
        await founded.checkpoint()
        founded.later()
    parts = founded.checkpoint_store.parts()

    assert theirs <= {part.path for part in parts}
    ours = {part.number for part in parts if part.founding == founding(record)}
    assert len(ours) >= founded.keep
    assert "archive.foreign" in capsys.readouterr().err


async def test_a_shard_whose_marks_are_never_complete_says_so(
    founded: FoundedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    await founded.checkpoint()
    founded.later()
    await founded.checkpoint(0)
    assert "archive.incomplete" not in capsys.readouterr().err
    for _ in range(INCOMPLETE_MAX):
        founded.later()
        await founded.checkpoint(0)

    said = capsys.readouterr().err
    assert "archive.incomplete" in said
    assert "missing=[1]" in said


# --- stores that hang -----------------------------------------------------------------------------------------------


@dataclass
class HungObjectStore(BrokenObjectStore):
    """Another archive store on which writing hangs until the test lets go."""

    hanging: threading.Event = field(default_factory=threading.Event)
    release_pages: threading.Event = field(default_factory=threading.Event)

    def put(self, path: str, data: bytes) -> None:
        self.hanging.set()
        assert self.release_pages.wait(60.0)
        super().put(path, data)


async def test_a_last_mark_that_takes_too_long_is_counted_and_said(
    founded: FoundedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(archivist, "LAST_MARK_S", 0.05)
    object_store = HungObjectStore(founded.object_store)
    last = founded.archivist(0, object_store)
    try:
        await last.close(founded.bus, founded.stores[0], founded.told, finished=True)
    finally:
        object_store.release_pages.set()

    assert (last.checkpoints, last.failures) == (0, 1)
    assert "archive.checkpoint_failed" in capsys.readouterr().err


async def test_a_store_that_hangs_keeps_no_process_from_ending(founded: FoundedRun) -> None:
    object_store = HungObjectStore(founded.object_store)
    marking = asyncio.create_task(
        founded.archivist(0, object_store).checkpoint(founded.bus, founded.stores[0], lambda: founded.told)
    )
    try:
        assert await asyncio.to_thread(object_store.hanging.wait, 20.0)
        hung = [thread for thread in threading.enumerate() if thread.name.startswith("archive")]
        assert hung
        assert all(thread.daemon for thread in hung)  # one of an earlier test may be about to end
    finally:
        object_store.release_pages.set()
    assert await marking


# --- what others wrote ----------------------------------------------------------------------------------------------


async def test_a_manifest_that_was_changed_is_not_believed(founded: FoundedRun) -> None:
    """It says the run's outer rate, among much else: one digit of it would change the run that is rebuilt."""
    await founded.checkpoint()
    store = founded.checkpoint_store
    part = store.checkpoints()[-1].parts[0]
    data = founded.object_store.get(part.path, 1 << 26)
    changed = data.replace(b'"outer_lr":', b'"outer_lr":1')
    assert changed != data
    founded.object_store.put(part.path, changed)

    with pytest.raises(CheckpointError, match="damaged"):
        store.read(part)


async def test_records_that_nobody_can_read_cost_no_checkpoint(founded: FoundedRun) -> None:
    """One bad member record, or data ledger, is passed over; everything else is archived."""
    subjects = Subjects(founded.run)
    await founded.bus.put_record(subjects.member("zz"), b"{}", expected=0)
    data = await founded.bus.get_record(subjects.data)
    assert data is not None
    await founded.bus.put_record(subjects.data, b"{", expected=data.revision)

    assert await founded.checkpoint() == [True, True]
    for manifest in founded.newest():
        assert [member.learner for member in manifest.members] == ["a"]
        assert manifest.data is None


async def test_objects_of_a_manifest_that_we_cannot_read_are_kept(
    founded: FoundedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be of another version of Atoll, which can: neither sweeping nor retiring takes anything from it."""
    await founded.round()
    await founded.checkpoint()
    theirs = founded.checkpoint_store.objects(0)
    for name in founded.object_store.names(f"{founded.run}/shard-0"):
        os.utime(Path(founded.object_store.where) / name.path, (1, 1))
    monkeypatch.setattr(checkpoint_store, "SCHEMA", 99)
    founded.archivists = {shard: founded.archivist(shard) for shard in range(SHARDS)}
    await founded.round()
    founded.later()
    await founded.checkpoint()

    assert theirs <= founded.checkpoint_store.objects(0)
    assert "archive.manifest_unreadable" in capsys.readouterr().err


async def test_a_manifest_that_nobody_could_read_is_not_written(
    founded: FoundedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stand there as a checkpoint; instead the checkpoint has failed."""
    monkeypatch.setattr(checkpoint_store, "MANIFEST_BYTES_MAX", 100)

    assert await founded.checkpoint() == [False, False]
    assert founded.checkpoint_store.parts() == []


# --- shards that come back ------------------------------------------------------------------------------------------


async def test_a_final_mark_lapses_when_its_shard_is_opened_again(founded: FoundedRun) -> None:
    """It was drained, goes on, and cannot archive: later checkpoints of the others are not complete with its old state."""
    await founded.round()
    await founded.checkpoint(0)
    await founded.checkpoint(1, final=True)
    founded.later()
    await founded.checkpoint(0)
    drained = founded.newest()
    await founded.serve(1, epoch=2)
    full = BrokenObjectStore(founded.object_store, fails_at=2)
    await founded.round()
    founded.later()
    await founded.checkpoint(0)
    failed = await founded.archivist(1, full).checkpoint(founded.bus, founded.stores[1], lambda: founded.told)
    lapsed = founded.newest()
    await founded.checkpoint(1)
    mended = founded.newest()

    assert not failed
    assert [manifest.number for manifest in drained] == [EVERY_S, 0]
    assert [manifest.number for manifest in lapsed] == [EVERY_S, 0]
    assert [(manifest.number, manifest.epoch) for manifest in mended] == [(2 * EVERY_S, 1), (2 * EVERY_S, 2)]
