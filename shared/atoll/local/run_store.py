"""The run as its broker's store holds it: check it, let it go on, close it, and rebuild it from its archive if it is lost.

The founder writes the run record once. Only the token target may change later, and only while none of the run's processes
runs, because they read the record when they start.

A run keeps an archive in `OUT/archive` unless `archive.url` names another place or `archive.every_s=0` turns it off. Before
anything trains, `up` compares the broker with `run.json` and the archive. If something is missing, training would silently
start from scratch, so `up` refuses; with `--resume` it moves the store of our own broker aside and rebuilds the run from the
newest complete checkpoint. Only a broker's *answer* shows a loss: one that is slow, away or full has lost nothing.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.object_store import open_archive, resolved
from atoll.archive.rebuild import rebuild
from atoll.base.clock import Clock
from atoll.base.errors import (
    ArchiveUnavailable,
    AtollError,
    BlobCorrupt,
    BlobGone,
    EnvironmentFault,
    RunLost,
    RunReplaced,
)
from atoll.base.files import DOCUMENT_BYTES_MAX, read_file
from atoll.base.parsing import parsed
from atoll.base.wording import counted
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.local.options import UpPlan
from atoll.report.collect import BrokerFacts
from atoll.run.delta_chain import read_values
from atoll.run.folder import VALIDATION, RebuiltRecord, RunFolder
from atoll.run.heads import read_heads
from atoll.run.history import History
from atoll.run.ledger import read_ledger
from atoll.run.record import read_run
from atoll.settings import bus_options
from atoll.wire.messages import Head, RunRecord, decode, encode
from atoll.wire.subjects import Subjects

LOOK_PATIENCE_S = 30.0


async def continue_run(bus: Bus, run: str, target: int) -> bool:
    """Let a run go on to `target` (tokens, 0 for none): write that into its record; return whether the record changed.

    Raises:
        RecordConflict: another process wrote the record at this moment.
    """
    return await _change_record(bus, run, closing=False, target=target)


async def close_run(bus: Bus, run: str) -> bool:
    """Write into the record of a run that its broker is about to end; return whether the record changed. As `continue_run`."""
    return await _change_record(bus, run, closing=True)


async def _change_record(bus: Bus, run: str, *, closing: bool, target: int | None = None) -> bool:
    try:
        record = await bus.get_record(Subjects(run).run_record)
    except RunReplaced:
        # JetStream has no such stream: the run was stopped before anybody founded it.
        return False
    if record is None:
        return False
    founded = decode(RunRecord, record.data)
    agreed = founded.protocol
    protocol = agreed if target is None else msgspec.structs.replace(agreed, tokens_target=target)
    changed = msgspec.structs.replace(founded, protocol=protocol, closing=closing)
    if changed == founded:
        return False
    await bus.put_record(record.subject, encode(changed), expected=record.revision, info={"run": run})
    return True


async def check_kept(bus: Bus, run: str, versions: int) -> None:
    """Check that the store still holds every head and frame of a run of which `versions` commits were seen.

    Raises:
        RunLost: something is gone. Training on would silently begin again.
        BrokerUnavailable: the broker did not answer, so its content is unknown.
    """
    record = await read_run(bus, Subjects(run))
    if record is None:
        raise _store_loss("no run record")
    heads = await read_heads(bus, record)
    missing = [p for p in range(len(record.layout.fragments)) if p not in heads]
    if missing:
        raise _store_loss(f"no head of fragment {missing[0]}")
    _check_commits(heads, versions)
    for head in heads.values():
        try:
            await read_values(bus, record, head)
        except (BlobGone, BlobCorrupt) as error:
            raise _store_loss(f"fragment {head.fragment} version {head.version}: {error}") from error


def _check_commits(heads: Mapping[int, Head], versions: int) -> None:
    kept = sum(head.version for head in heads.values())
    if kept < versions:
        raise _store_loss(f"{kept} of {versions} commits")


async def lost_commits(bus: Bus, run: str, versions: int) -> RunLost | None:
    """Return an error if the heads of a run that has just ended have fewer than the `versions` commits that were seen.

    Its store was put back meanwhile, or somebody has written old heads: the model is that of the heads. None if nobody can say.
    """
    try:
        _check_commits(await _newest_heads(bus, run), versions)
    except RunLost as lost:
        return lost
    except AtollError:
        return None
    return None


def _store_loss(what: str) -> RunLost:
    return RunLost(
        "the broker's store has lost a part of this run",
        got=what,
        allowed="every fragment's newest head with its frame",
        todo="restore the store from a copy, or begin anew in another --out, from the run's model.safetensors if you like "
        "(--set learner.initial_model=…)",
    )


class _ExportedModel(msgspec.Struct):
    """Which model `validation.json` is of."""

    versions_min: int
    versions_max: int
    token_fragments_merged: int


async def newest_is_exported(bus: Bus, run: str, folder: RunFolder) -> bool:
    """Return whether an export in the folder of a run, by its last file, is of the newest model; False if nobody can say."""
    try:
        exported = parsed(read_file(folder.path(VALIDATION), DOCUMENT_BYTES_MAX), _ExportedModel)
        heads = await _newest_heads(bus, run)
    except (OSError, msgspec.MsgspecError, AtollError):
        return False
    if not heads:
        return False
    versions, tokens = [head.version for head in heads.values()], sum(head.tokens_merged for head in heads.values())
    return exported == _ExportedModel(min(versions), max(versions), tokens)


async def last_facts(bus: Bus, run: str, view: History) -> BrokerFacts:
    """Return what the report of a run reads from its broker, and the history of a `view` that has followed it to its end.

    There is nothing of it for a run that nobody founded.

    Raises:
        BrokerUnavailable: the broker did not answer.
    """
    record = await read_run(bus, Subjects(run))
    if record is None:
        return BrokerFacts()
    closed = all(f"shard-{number}" in view.ledgers for number in range(record.protocol.shards))
    return BrokerFacts(record.data, None if closed else await read_ledger(bus, record), view)


async def _newest_heads(bus: Bus, run: str) -> dict[int, Head]:
    record = await read_run(bus, Subjects(run))
    return {} if record is None else await read_heads(bus, record)


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
        elif _checkpoints(up) and await read_run(bus, Subjects(run)) is None:
            return RunLost("the broker's store has lost this run", got="no run record")
    except (RunLost, RunReplaced) as loss:
        return loss
    finally:
        await bus.close()
    return None


def explain_loss(loss: RunLost | RunReplaced, up: UpPlan) -> RunLost | RunReplaced:
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
        archive = CheckpointStore(open_archive(archive_url(up)), run, bus.signatures)
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


def describe_rebuilt(rebuilt: RebuiltRecord) -> str:
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


def describe_unarchived(up: UpPlan) -> str:
    """Return one sentence if the run's archive holds no complete checkpoint of it, or nothing."""
    if not archive_url(up) or _checkpoints(up):
        return ""
    return (
        f"no complete checkpoint of this run is in its archive, {archive_url(up)}: "
        "if the broker's store is lost, so is the run"
    )


def _checkpoints(up: UpPlan) -> list[int]:
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
