"""The record that makes a run, as every role reads it: what its processes agree on, and whether the run is over."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from atoll.base.errors import BrokerUnavailable, LayoutMismatch, PeerMisbehaved, RunReplaced, SettingsError
from atoll.base.logs import get
from atoll.bus.interface import Bus, Record
from atoll.codec import check_codecs
from atoll.model.layout import Layout, first_difference
from atoll.wire.messages import Lease, M, Member, RunRecord, decode
from atoll.wire.subjects import Subjects

log = get(__name__)

UNREAD_NAMED = 4


async def read_run(bus: Bus, subjects: Subjects) -> RunRecord | None:
    """Return the run record, or None if the run is not founded yet."""
    try:
        record = await bus.get_record(subjects.run_record)
    except RunReplaced:  # the broker has no streams of this run
        return None
    return None if record is None else decode(RunRecord, record.data)


async def founded_run(bus: Bus, run: str) -> RunRecord:
    """Return the record of the run that a person has named; raise `SettingsError` if it is not founded."""
    record = await read_run(bus, Subjects(run))
    if record is None:
        todo = "check --run and --broker; `atoll runs` lists what is there"
        raise SettingsError("nobody has founded this run", got=run, todo=todo)
    return record


async def the_run(bus: Bus, subjects: Subjects) -> RunRecord:
    """Return the record of a run that was founded.

    Raises:
        RunReplaced: it is gone.
    """
    run = await read_run(bus, subjects)
    if run is None:
        raise RunReplaced(
            f"run {subjects.run!r} is not on this broker any more",
            got="no run record",
            todo="was the broker's store lost? start the synchronizer shards with --restore, then the learners",
        )
    return run


async def check_run(bus: Bus, subjects: Subjects, layout: Layout, data: str) -> RunRecord:
    """Compare this learner's tensors and `data` fingerprint with the run record, and return the record.

    How the tensors are cut into fragments is the founder's choice.
    """
    run = await read_run(bus, subjects)
    if run is None:
        raise BrokerUnavailable("the run record vanished", todo="was the broker's store deleted? start a new run")
    check_known(run)
    if difference := first_difference(msgspec.structs.replace(run.layout, tensors=layout.tensors), run.layout):
        raise LayoutMismatch(
            f"this model is not the model of run {run.run!r}",
            got=difference,
            allowed=f"the layout {run.layout.fingerprint} founded by {run.founder}",
            todo="use the run's model and protocol settings, or another run id",
        )
    if data and run.data and data != run.data:
        raise LayoutMismatch(
            f"this data is not the data of run {run.run!r}",
            got=data,
            allowed=run.data,
            todo="copy the run's token shards here, or choose another run id",
        )
    return run


def check_known(run: RunRecord) -> RunRecord:
    """Return the record of a run whose frames this Atoll can read; raise `SettingsError` for any other."""
    try:
        check_codecs(run.protocol)
    except SettingsError as error:
        raise SettingsError(
            f"this Atoll does not know a codec of run {run.run!r}",
            got=error.got,
            allowed=error.allowed,
            todo="use the version of Atoll that the run was founded with",
        ) from error
    return run


@dataclass(frozen=True, slots=True)
class RecordedProgress:
    """What the leases of a run's shards say: the tokens trained, and whether all shards have closed their ledgers."""

    tokens: int
    over: bool


async def recorded_progress(bus: Bus, run: RunRecord) -> RecordedProgress:
    """Return how far a run is by its leases; once it is over, no shard hears a learner.

    A lease that cannot be read, or that is of another founding, says nothing.
    """
    target = run.protocol.tokens_target
    tokens, over = 0, target > 0
    for shard in range(run.protocol.shards):
        record = await bus.get_record(run.subjects.lease(shard))
        lease = None if record is None else readable(Lease, record)
        lease = lease if lease is not None and lease.run_nonce == run.nonce else None
        known = 0 if lease is None or lease.ledger is None else lease.ledger.known_tokens
        tokens = max(tokens, known)
        over = over and lease is not None and lease.closed and known >= target
    return RecordedProgress(tokens, over)


async def read_members(bus: Bus, subjects: Subjects) -> dict[str, Member | None]:
    """Return the member records by learner id; None for one that cannot be read, or that names another learner.

    Who has one of those is a member all the same: junk in a record must not take its learner out of the run.
    """
    members: dict[str, Member | None] = {}
    for record in await bus.get_records(subjects.member("*")):
        learner = record.subject.rpartition(".")[2]
        try:
            member: Member | None = decode(Member, record.data)
        except PeerMisbehaved:
            member = None
        members[learner] = member if member is not None and member.learner == learner else None
    if unread := [learner for learner, member in members.items() if member is None]:
        log.warning("members.undecodable", records=len(unread), first=unread[:UNREAD_NAMED])  # one line, however many
    return members


def readable(kind: type[M], record: Record) -> M | None:
    """Return a record as a `kind`; None, with a warning, for one that no process of ours has written."""
    try:
        return decode(kind, record.data)
    except PeerMisbehaved as error:
        log.warning("record.refused", subject=record.subject, reason=str(error))
        return None
