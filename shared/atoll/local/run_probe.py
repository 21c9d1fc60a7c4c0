"""Looks at a founded run from outside: whether its store still holds it and its model is written, its token target, its books.

The founder writes the run record once. Only the token target may change later, and only while none of the run's processes
runs, because they read the record when they start.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from atoll.base.errors import AtollError, BlobCorrupt, BlobGone, RunLost, RunReplaced
from atoll.base.parsing import parsed
from atoll.base.regular_files import DOCUMENT_BYTES_MAX, read_file
from atoll.bus.interface import Bus, Record
from atoll.protocol.ledger import Ledger
from atoll.report.write import BrokerFacts
from atoll.run.delta_chain import read_values
from atoll.run.folder import VALIDATION, RunFolder
from atoll.run.heads import read_heads
from atoll.run.ledger import read_ledger
from atoll.run.view import RunView
from atoll.story.history import HistoryView
from atoll.wire.messages import Head, RunRecord, decode, encode
from atoll.wire.subjects import Subjects


async def go_on(bus: Bus, run: str, target: int) -> bool:
    """Let a run go on to `target` (tokens, 0 for none): write that into its record; return whether the record changed.

    Raises:
        RecordConflict: another process wrote the record at this moment.
    """
    return await _change(bus, run, closing=False, target=target)


async def close_run(bus: Bus, run: str) -> bool:
    """Write into the record of a run that its broker is about to end; return whether the record changed. As `go_on`."""
    return await _change(bus, run, closing=True)


async def _change(bus: Bus, run: str, *, closing: bool, target: int | None = None) -> bool:
    """Write a run's record once more, by compare-and-set, if that changes it."""
    record = await _read(bus, run)
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
    found = await _read(bus, run)
    if found is None:
        raise _lost("no run record")
    record = decode(RunRecord, found.data)
    heads = await read_heads(bus, record)
    missing = [p for p in range(len(record.layout.fragments)) if p not in heads]
    if missing:
        raise _lost(f"no head of fragment {missing[0]}")
    _check_commits(heads, versions)
    for head in heads.values():
        try:
            await read_values(bus, record, head)
        except (BlobGone, BlobCorrupt) as error:
            raise _lost(f"fragment {head.fragment} version {head.version}: {error}") from error


def _check_commits(heads: Mapping[int, Head], versions: int) -> None:
    kept = sum(head.version for head in heads.values())
    if kept < versions:
        raise _lost(f"{kept} of {versions} commits")


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


def _lost(what: str) -> RunLost:
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


async def last_facts(bus: Bus, run: str, view: HistoryView) -> BrokerFacts:
    """Return what the report of a run reads from its broker, and the history of a `view` that has followed it to its end.

    There is nothing of it for a run that nobody founded.

    Raises:
        BrokerUnavailable: the broker did not answer.
    """
    record = await _read(bus, run)
    if record is None:
        return BrokerFacts()
    there = decode(RunRecord, record.data)
    return BrokerFacts(there.data, await kept_ledger(bus, run, view), view.history)


async def kept_ledger(bus: Bus, run: str, view: RunView) -> Ledger | None:
    """Return the ledger of a run from its heads and leases; None if all shards closed theirs, or if there is no run."""
    record = await _read(bus, run)
    if record is None:
        return None
    there = decode(RunRecord, record.data)
    if all(f"shard-{number}" in view.closed for number in range(there.protocol.shards)):
        return None
    return await read_ledger(bus, there)


async def _newest_heads(bus: Bus, run: str) -> dict[int, Head]:
    """Return the newest heads of a run by its id; none of a run that nobody founded."""
    record = await _read(bus, run)
    return {} if record is None else await read_heads(bus, decode(RunRecord, record.data))


async def _read(bus: Bus, run: str) -> Record | None:
    try:
        return await bus.get_record(Subjects(run).run_record)
    except RunReplaced:
        # JetStream has no such stream: the run was stopped before anybody founded it.
        return None
