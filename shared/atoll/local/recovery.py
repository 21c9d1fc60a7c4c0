"""What `atoll up` does if the broker has lost the run of its folder: refuse, or rebuild it from the archive.

A run keeps an archive in `OUT/archive` unless `archive.url` names another place or `archive.every_s=0` turns it off. Before
anything trains, `up` compares the broker with `run.json` and the archive. If something is missing, training would start
from scratch under the old name, so `up` refuses. With `--resume` it rebuilds the run from the newest complete checkpoint.
It moves the store of our own broker aside first and never deletes it. Only a broker's *answer* shows a loss: a broker that
is slow, away or full has lost nothing, and the check ends with the broker's own error.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import replace
from pathlib import Path

from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.object_store import open_archive, resolved
from atoll.archive.rebuild import rebuild
from atoll.base.clock import Clock
from atoll.base.errors import ArchiveUnavailable, AtollError, EnvironmentFault, RunLost, RunReplaced
from atoll.base.wording import counted
from atoll.bus.open import open_bus
from atoll.bus.signed import signatures_of
from atoll.local.options import UpPlan
from atoll.local.run_probe import check_kept
from atoll.run.folder import RebuiltRecord, RunFolder
from atoll.run.record import read_run
from atoll.settings import bus_options
from atoll.wire.subjects import Subjects

LOOK_PATIENCE_S = 30.0


def archive_url(up: UpPlan) -> str:
    """Return where this run is archived, empty when it is not."""
    archive = up.settings.archive
    if not archive.every_s:
        return ""
    if not archive.url:
        return str((up.out / "archive").absolute())
    return resolved(archive.url)


async def find_loss(url: str, up: UpPlan) -> RunLost | RunReplaced | None:
    """Return what the broker at `url` has lost of the folder's run, None if nothing is missing.

    Raises:
        BrokerUnavailable: the broker did not answer within `LOOK_PATIENCE_S`, so its content is unknown.
        StorageFull: it has no room to answer.
    """
    if up.former is None:
        return None
    run = up.settings.run
    bus = await open_bus(url, run, name="up", options=replace(bus_options(up.settings), patience_s=LOOK_PATIENCE_S))
    try:
        if up.former.versions:
            await check_kept(bus, run, up.former.versions)
        elif _checkpoints(up) and not await _exists(url, up):
            return RunLost("the broker's store has lost this run", got="no run record")
    except (RunLost, RunReplaced) as loss:
        return loss
    finally:
        await bus.close()
    return None


def refuse(loss: RunLost | RunReplaced, up: UpPlan) -> RunLost | RunReplaced:
    """Return the loss as an error that names the way back, if there is one."""
    checkpoints = _checkpoints(up)
    if not checkpoints:
        return loss
    return RunLost(
        loss.what,
        got=loss.got,
        allowed=loss.allowed,
        todo=f"rebuild the run from its archive: atoll up --resume --out {up.out} (newest complete checkpoint: "
        f"{checkpoints[-1]} s after the founding, in {archive_url(up)}); or begin anew in another --out",
    )


def move_store_aside(folder: RunFolder) -> Path:
    """Make room for an empty broker store; return where the old one is now."""
    store = folder.path("nats")
    number = next(n for n in itertools.count(1) if not folder.path(f"nats-lost-{n}").exists())
    aside = store.rename(folder.path(f"nats-lost-{number}"))
    store.mkdir()
    return aside


async def rebuild_at(url: str, up: UpPlan, clock: Clock) -> RebuiltRecord:
    """Rebuild the run on the broker at `url`; return what was rebuilt and what was known before.

    Raises:
        CheckpointError: the archive holds no complete checkpoint that can be read.
        EnvironmentFault: the broker was given, not our own, and holds a damaged run.
    """
    run = up.settings.run
    bus = await open_bus(url, run, name="up", options=bus_options(up.settings))
    try:
        archive = CheckpointStore(open_archive(archive_url(up)), run, signatures_of(bus))
        outcome = await rebuild(
            bus,
            archive,
            clock,
            bytes_max=up.settings.broker.stream_bytes_max,
            own_outer=up.settings.protocol.outer,
        )
    finally:
        await bus.close()
    rebuilt = outcome.record.rebuilt
    if not outcome.rebuilt or rebuilt is None:
        raise EnvironmentFault(
            f"the broker holds a damaged run {run!r}, which is not ours to remove",
            todo="delete the run's streams there, then --resume again",
        )
    return RebuiltRecord(
        checkpoint=rebuilt.checkpoint,
        tokens=rebuilt.tokens,
        versions=rebuilt.versions,
        tokens_before=0 if up.former is None else up.former.tokens,
        versions_before=0 if up.former is None else up.former.versions,
        checkpoint_at_s=rebuilt.checkpoint_at_s,
        rebuilt_at_s=rebuilt.rebuilt_at_s,
    )


def told(rebuilt: RebuiltRecord) -> str:
    """Return one sentence: what was rebuilt, and what must be trained again."""
    again = max(0, rebuilt.tokens_before - rebuilt.tokens)
    return (
        f"rebuilt from checkpoint {rebuilt.checkpoint}: {counted(rebuilt.versions, 'commit')} and {rebuilt.tokens:,} tokens; "
        f"before the loss {counted(rebuilt.versions_before, 'commit')} and {rebuilt.tokens_before:,} tokens had been heard of, "
        f"so at least {again:,} tokens are trained again"
    )


def try_archive(up: UpPlan) -> str:
    """Write to the run's archive and remove that again; return why it cannot be done, or nothing.

    Raises:
        SettingsError: `archive.url` is no place for an archive.
    """
    url, path = archive_url(up), f"{up.settings.run}/writable-{secrets.token_hex(4)}"
    if not url:
        return ""
    try:
        archive = open_archive(url)
        archive.put(path, b"")
        archive.remove([path])
    except ArchiveUnavailable as error:
        return f"nothing can be kept in the archive ({error}); the shards will try again every {up.settings.archive.every_s} s"
    return ""


def unarchived(up: UpPlan) -> str:
    """Return one sentence if the run's archive holds no complete checkpoint of it, or nothing."""
    if not archive_url(up) or _checkpoints(up):
        return ""
    return (
        f"no complete checkpoint of this run is in its archive, {archive_url(up)}: "
        "if the broker's store is lost, so is the run"
    )


def _checkpoints(up: UpPlan) -> list[int]:
    """Return the complete checkpoints of the run's archive, oldest first; none if the archive cannot be read."""
    url = archive_url(up)
    if not url:
        return []
    try:
        return [
            checkpoint.number
            for checkpoint in CheckpointStore(open_archive(url), up.settings.run).checkpoints()
            if checkpoint.complete
        ]
    except AtollError:
        return []


async def _exists(url: str, up: UpPlan) -> bool:
    """Return whether the broker has a record of the run."""
    run = up.settings.run
    bus = await open_bus(url, run, name="up", options=replace(bus_options(up.settings), patience_s=LOOK_PATIENCE_S))
    try:
        return await read_run(bus, Subjects(run)) is not None
    finally:
        await bus.close()
