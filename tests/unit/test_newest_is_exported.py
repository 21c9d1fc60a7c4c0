"""`atoll up` believes the last file of an export only if it is of the newest model: somebody else may have asked for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from atoll.archive.object_store import FolderArchive
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.local.run_store import lost_commits, newest_is_exported
from atoll.run.folder import RunFolder
from atoll.run.merged_model import read_merged
from atoll.settings import load
from atoll_learner.process import LearnerWork, prepare_work
from atoll_learner.run_export import Measured, write_measured
from support.founded_run import FRAGMENTS, FoundedRun, TurnedClock, run_record
from support.short_shards import short_shards


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> LearnerWork:
    """Return what an export must know of the text that it was measured on."""
    shards = short_shards(tmp_path_factory.mktemp("text"))
    return prepare_work(load(None, (f"data.dir={shards}", "model.size=1", "model.context=32")).settings)


async def export(run: FoundedRun, folder: RunFolder, work: LearnerWork) -> None:
    merged = await read_merged(run.bus, run.record)
    write_measured(work, folder.out, merged, Measured(8.0, 2.0, None), time.monotonic())


async def test_an_export_is_the_newest_until_any_fragment_goes_on(tmp_path: Path, work: LearnerWork) -> None:
    """Also a fragment whose version lies between the others', so that neither bound of the versions tells of it."""
    run = FoundedRun(run_record("r"), FolderArchive(tmp_path / "archive"), TurnedClock())
    await run.found()
    for fragment in range(FRAGMENTS):
        for _ in range((0, 1, 1, 3)[fragment]):
            await run.commit(fragment)
    with RunFolder(tmp_path / "run") as folder:
        assert not await newest_is_exported(run.bus, "r", folder), "nothing is there"
        await export(run, folder, work)
        assert await newest_is_exported(run.bus, "r", folder)
        await run.commit(1)
        assert not await newest_is_exported(run.bus, "r", folder)
        await export(run, folder, work)
        assert await newest_is_exported(run.bus, "r", folder)


async def test_a_run_that_the_broker_does_not_have_has_no_export(tmp_path: Path, work: LearnerWork) -> None:
    run = FoundedRun(run_record("r"), FolderArchive(tmp_path / "archive"), TurnedClock())
    await run.found()
    with RunFolder(tmp_path / "run") as folder:
        await export(run, folder, work)
        assert not await newest_is_exported(MemoryBus("r", MemoryBroker()), "r", folder)


async def test_heads_that_went_back_are_told(tmp_path: Path) -> None:
    """More commits were seen than the heads have: somebody wrote old ones again, or the store was put back."""
    run = FoundedRun(run_record("r"), FolderArchive(tmp_path / "archive"), TurnedClock())
    await run.found()
    await run.round()

    assert await lost_commits(run.bus, "r", FRAGMENTS) is None
    assert "4 of 5 commits" in str(await lost_commits(run.bus, "r", FRAGMENTS + 1))
    assert await lost_commits(MemoryBus("r", MemoryBroker()), "r", 0) is None, "nothing was lost where nothing was seen"
