"""What `atoll up` calls a loss: what a broker answers, never that it does not."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.archive.object_store import FolderArchive
from atoll.base.errors import AtollError, BlobGone, BrokerUnavailable, RunLost, RunReplaced, SettingsError, StorageFull
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.local import run_store
from atoll.local.options import UpPlan, plan
from atoll.run.folder import RunFile
from atoll.wire.blobs import Download, Portion
from support.founded_run import FRAGMENTS, FoundedRun, TurnedClock, run_record
from support.up_requests import up_request


class SilentBus(MemoryBus):
    """A bus on which every read of a blob ends with one error."""

    error: AtollError

    async def pieces(self, _download: Download) -> AsyncGenerator[Portion]:
        raise self.error
        yield []


def continued(out: Path, run: str, versions: int) -> UpPlan:
    made = plan(up_request(out=out, locked=False, assignments=(f"run={run}", "protocol.tokens_target=1000")), {})
    return replace(made, former=RunFile(run=run, learners=1, settings={}, broker="embedded", versions=versions))


async def loss(up: UpPlan, bus: MemoryBus, patch: pytest.MonkeyPatch) -> RunLost | RunReplaced | None:
    """Return what `atoll up` finds lost on a bus."""

    async def opened(*_args: object, **_options: object) -> MemoryBus:
        return bus

    patch.setattr(run_store, "open_bus", opened)
    return await run_store.find_loss("nats://127.0.0.1:1", up)


@pytest.mark.parametrize("error", [BrokerUnavailable("the broker does not answer"), StorageFull("no room")])
async def test_a_broker_that_does_not_answer_has_lost_nothing(
    error: AtollError, tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is slow or full; to call that a loss would let `--resume` put an older checkpoint in a healthy run's place."""
    founded = FoundedRun(run_record(run), FolderArchive(tmp_path / "archive"), TurnedClock())
    await founded.found()
    await founded.round()
    bus = SilentBus(run, founded.broker)
    bus.error = error

    with pytest.raises(type(error)):
        await loss(continued(tmp_path / "out", run, FRAGMENTS), bus, monkeypatch)


@pytest.mark.parametrize("error", [BlobGone("no chunks"), RunReplaced("no such stream")])
async def test_what_a_broker_answers_is_a_loss(
    error: AtollError, tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    founded = FoundedRun(run_record(run), FolderArchive(tmp_path / "archive"), TurnedClock())
    await founded.found()
    await founded.round()
    deaf, up = SilentBus(run, founded.broker), continued(tmp_path / "out", run, FRAGMENTS)
    deaf.error = error

    assert await loss(up, founded.bus, monkeypatch) is None
    assert await loss(up, deaf, monkeypatch) is not None
    assert isinstance(await loss(up, MemoryBus(run, MemoryBroker()), monkeypatch), RunLost)


async def test_an_archive_that_keeps_nothing_is_told_at_the_beginning_and_at_the_end(tmp_path: Path, run: str) -> None:
    """Else the first to learn of it would be who needs it."""

    def planned(*assignments: str) -> UpPlan:
        return plan(up_request(out=tmp_path / "out", locked=False, assignments=(f"run={run}", *assignments)), {})

    (tmp_path / "file").touch()
    works, off = planned(f"archive.url={tmp_path / 'archive'}"), planned("archive.every_s=0")
    broken = planned(f"archive.url={tmp_path / 'file' / 'x'}")
    founded = FoundedRun(run_record(run), FolderArchive(tmp_path / "archive"), TurnedClock())
    await founded.found()
    await founded.round()

    assert "nothing can be kept in the archive" in run_store.try_archive(broken)
    assert run_store.try_archive(works) == run_store.try_archive(off) == run_store.describe_unarchived(off) == ""
    assert "no complete checkpoint of this run" in run_store.describe_unarchived(works)
    assert "no complete checkpoint of this run" in run_store.describe_unarchived(broken)
    assert all(await founded.checkpoint())
    assert run_store.describe_unarchived(works) == ""
    with pytest.raises(SettingsError, match="no place for an archive"):
        run_store.try_archive(planned("archive.url=http://x"))
