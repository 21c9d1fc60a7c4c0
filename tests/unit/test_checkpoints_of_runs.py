"""Marks when something around them is wrong: clocks, other foundings, slow stores, records and manifests of others."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from atoll.archive import checkpoint_store
from atoll.archive.checkpoints import INCOMPLETE_MAX, founding, next_mark_s
from atoll.archive.object_store import FolderArchive
from atoll.wire.subjects import Subjects
from atoll_synchronizer import archivist
from support.founded_run import EVERY_S, SHARDS, BrokenVault, FoundedRun, TurnedClock, run_record

AHEAD = 1000


@pytest.fixture
async def reef(tmp_path: Path, run: str) -> FoundedRun:
    """A founded run that archives to a folder."""
    reef = FoundedRun(run_record(run), FolderArchive(tmp_path / "archive"), TurnedClock())
    await reef.found()
    return reef


async def mark_with_clocks_apart(reef: FoundedRun, ahead: int, *, first: int = 0) -> None:
    """Let every shard make a mark, the clock of shard 0 being so many marks ahead."""
    for shard in sorted(range(SHARDS), key=lambda shard: shard != first):
        before_s = reef.clock.now_s
        reef.later(0 if shard else ahead)
        assert await reef.mark(shard) == [True]
        reef.clock.now_s = before_s


def is_up_to_date(reef: FoundedRun) -> bool:
    """Return whether the newest complete mark holds what the shards hold now."""
    archived = {piece.head.fragment: piece.head for manifest in reef.newest() for piece in manifest.pieces}
    return archived == {p: held.head for store in reef.stores.values() for p, held in store.holdings.items()}


# --- clocks ---------------------------------------------------------------------------------------------------------


async def test_a_clock_that_was_ahead_for_a_while_costs_no_later_mark(reef: FoundedRun) -> None:
    """All shards go on above its numbers: what is made later is newer, is kept, and is what a rebuilding takes."""
    for ahead in (0, AHEAD, AHEAD, AHEAD, 0, 0, 0, 0, 0):
        await reef.round()
        await mark_with_clocks_apart(reef, ahead)
        assert is_up_to_date(reef)
        reef.later()

    assert reef.newest()[0].mark > AHEAD * EVERY_S


@pytest.mark.parametrize("first", range(SHARDS))
async def test_clocks_that_are_far_apart_still_make_complete_marks(reef: FoundedRun, first: int) -> None:
    """The shard that is behind joins the mark of the one that is ahead, at most one mark late."""
    for _ in range(2 * INCOMPLETE_MAX):
        archived = {0: reef.stores[0].holdings[0].head, 1: reef.stores[1].holdings[1].head}
        await reef.round()
        await mark_with_clocks_apart(reef, AHEAD, first=first)
        reef.later()

    heads = {piece.head.fragment: piece.head.version for manifest in reef.newest() for piece in manifest.pieces}
    assert min(heads.values()) >= min(head.version for head in archived.values())


def test_a_clock_before_the_founding_makes_nobody_sleep_longer() -> None:
    """The next mark is never further away than the schedule."""
    record = run_record("r")
    for now_s in (0.0, record.founded_at_s, record.founded_at_s + 3.5):
        assert now_s < next_mark_s(record, now_s, EVERY_S) <= now_s + EVERY_S


async def test_a_founding_that_sorts_later_crowds_nothing_out(
    reef: FoundedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its founder's clock was ahead of ours: our marks stay, its marks too, and it is said."""
    record = reef.record
    reef.record = msgspec.structs.replace(record, nonce="other", founded_at_s=record.founded_at_s + 1e6)
    for _ in range(2 * reef.keep):
        reef.archivists = {shard: reef.archivist(shard) for shard in range(SHARDS)}
        await reef.mark()
        reef.later()
    theirs = {part.path for part in reef.shelf.parts()}
    reef.record = record
    reef.archivists = {shard: reef.archivist(shard) for shard in range(SHARDS)}
    for _ in range(2 * reef.keep):
        await reef.mark()
        reef.later()
    parts = reef.shelf.parts()

    assert theirs <= {part.path for part in parts}
    ours = {part.mark for part in parts if part.founding == founding(record)}
    assert len(ours) >= reef.keep
    assert "archive.foreign" in capsys.readouterr().out


async def test_a_shard_whose_marks_are_never_complete_says_so(
    reef: FoundedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also which shard is missing; one mark that is late is nothing to speak of."""
    await reef.mark()
    reef.later()
    await reef.mark(0)
    assert "archive.incomplete" not in capsys.readouterr().out
    for _ in range(INCOMPLETE_MAX):
        reef.later()
        await reef.mark(0)

    said = capsys.readouterr().out
    assert "archive.incomplete" in said
    assert "missing=[1]" in said


# --- stores that hang -----------------------------------------------------------------------------------------------


@dataclass
class HungVault(BrokenVault):
    """Another vault on which writing hangs until the test lets go."""

    hanging: threading.Event = field(default_factory=threading.Event)
    release_pages: threading.Event = field(default_factory=threading.Event)

    def put(self, path: str, data: bytes) -> None:
        """Hang, then write."""
        self.hanging.set()
        self.release_pages.wait()
        super().put(path, data)


async def test_a_last_mark_that_takes_too_long_is_counted_and_said(
    reef: FoundedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shard that finishes does not leave without its newest state in silence."""
    monkeypatch.setattr(archivist, "LAST_MARK_S", 0.05)
    vault = HungVault(reef.vault)
    last = reef.archivist(0, vault)
    try:
        await last.close(reef.bus, reef.stores[0], reef.told, finished=True)
    finally:
        vault.release_pages.set()

    assert (last.marks, last.failures) == (0, 1)
    assert "archive.checkpoint_failed" in capsys.readouterr().out


async def test_a_last_mark_is_given_more_time_the_larger_it_is(
    reef: FoundedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound that is too short for a small shard is none for one that takes long to write."""
    monkeypatch.setattr(archivist, "LAST_MARK_S", 0.0)
    monkeypatch.setattr(archivist, "SLOW_BYTES_PER_S", 1.0)
    last = reef.archivist(0)
    await last.close(reef.bus, reef.stores[0], reef.told, finished=True)

    assert (last.marks, last.failures) == (1, 0)


async def test_a_store_that_hangs_keeps_no_process_from_ending(reef: FoundedRun) -> None:
    """What hangs is a daemon thread: the interpreter does not wait for it."""
    vault = HungVault(reef.vault)
    marking = asyncio.create_task(reef.archivist(0, vault).mark(reef.bus, reef.stores[0], lambda: reef.told))
    try:
        assert await asyncio.to_thread(vault.hanging.wait, 20.0)
        hung = [thread for thread in threading.enumerate() if thread.name.startswith("archive")]
        assert [thread.daemon for thread in hung] == [True]
    finally:
        vault.release_pages.set()
    assert await marking


# --- what others wrote ----------------------------------------------------------------------------------------------


async def test_records_that_nobody_can_read_cost_no_mark(reef: FoundedRun) -> None:
    """One bad member record, or data ledger, is passed over; everything else is archived."""
    subjects = Subjects(reef.run)
    await reef.bus.put_record(subjects.member("zz"), b"{}", expected=0)
    data = await reef.bus.get_record(subjects.data)
    assert data is not None
    await reef.bus.put_record(subjects.data, b"{", expected=data.revision)

    assert await reef.mark() == [True, True]
    for manifest in reef.newest():
        assert [member.learner for member in manifest.members] == ["a"]
        assert manifest.data is None


async def test_objects_of_a_manifest_that_we_cannot_read_are_kept(
    reef: FoundedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be of another version of Atoll, which can: neither sweeping nor retiring takes anything from it."""
    await reef.round()
    await reef.mark()
    theirs = reef.shelf.objects(0)
    for name in reef.vault.names(f"{reef.run}/shard-0"):
        os.utime(Path(reef.vault.where) / name.path, (1, 1))
    monkeypatch.setattr(checkpoint_store, "SCHEMA", 99)
    reef.archivists = {shard: reef.archivist(shard) for shard in range(SHARDS)}
    await reef.round()
    reef.later()
    await reef.mark()

    assert theirs <= reef.shelf.objects(0)
    assert "archive.manifest_unreadable" in capsys.readouterr().out


async def test_a_manifest_that_nobody_could_read_is_not_written(
    reef: FoundedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stand there as a mark; instead the mark has failed."""
    monkeypatch.setattr(checkpoint_store, "MANIFEST_BYTES_MAX", 100)

    assert await reef.mark() == [False, False]
    assert reef.shelf.parts() == []


# --- shards that come back ------------------------------------------------------------------------------------------


async def test_a_final_mark_lapses_when_its_shard_is_opened_again(reef: FoundedRun) -> None:
    """It was drained, goes on, and cannot archive: later marks of the others are not complete with its old state."""
    await reef.round()
    await reef.mark(0)
    await reef.mark(1, final=True)
    reef.later()
    await reef.mark(0)
    drained = reef.newest()
    await reef.serve(1, epoch=2)
    full = BrokenVault(reef.vault, fails_at=2)
    await reef.round()
    reef.later()
    await reef.mark(0)
    failed = await reef.archivist(1, full).mark(reef.bus, reef.stores[1], lambda: reef.told)
    lapsed = reef.newest()
    await reef.mark(1)
    mended = reef.newest()

    assert not failed
    assert [manifest.mark for manifest in drained] == [EVERY_S, 0]
    assert [manifest.mark for manifest in lapsed] == [EVERY_S, 0]
    assert [(manifest.mark, manifest.epoch) for manifest in mended] == [(2 * EVERY_S, 1), (2 * EVERY_S, 2)]
