"""The record that makes a run, as every role reads it: what its processes agree on, and whether the run is over."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from atoll.base.errors import BrokerUnavailable, DataError, LayoutMismatch, PeerMisbehaved, RunReplaced, SettingsError
from atoll.base.logs import get
from atoll.base.wording import few
from atoll.bus.interface import Bus, Record
from atoll.codec import check_codecs
from atoll.model.layout import FrozenLeaf, TensorSpec, first_difference
from atoll.wire.messages import Lease, M, Member, RunRecord, decode
from atoll.wire.subjects import Subjects

log = get(__name__)

UNREAD_NAMED = 4
RULES_NAMED = 4


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


async def check_run(bus: Bus, offer: RunRecord) -> RunRecord:
    """Return the record of the run that `offer` would found, once its tensors, frozen leaves and data are found to be the same.

    How the tensors are cut into fragments is the founder's choice.
    """
    run, data = await read_run(bus, offer.subjects), offer.data
    if run is None:
        raise BrokerUnavailable("the run record vanished", todo="was the broker's store deleted? start a new run")
    check_known(run)
    _check_what_travels(run, offer)
    check_tensors(run, offer.layout.tensors, "use the run's model, or another run id")
    check_frozen(run, offer.frozen)
    rules = [(one.name, run.layout.rule_of(one.name), offer.layout.rule_of(one.name)) for one in offer.layout.tensors]
    if other := [f"{name} = {theirs} of the run, not {ours}" for name, theirs, ours in rules if theirs != ours]:
        log.warning(
            "rules.ignored",
            leaves=few(other, RULES_NAMED, "; "),
            why="the founder's rules of leaves hold for the whole run",
            todo="give the founder's `merge` (JoinOptions)",
            run=run.run,
        )
    if data and run.data and data != run.data:
        raise LayoutMismatch(
            f"this data is not the data of run {run.run!r}",
            got=data,
            allowed=run.data,
            todo="copy the run's token shards here, or choose another run id",
        )
    if offer.data_blocks and run.data_blocks and offer.data_blocks != run.data_blocks:
        raise DataError(
            "the run leases other blocks than this text has",
            got=f"{offer.data_blocks} blocks",
            allowed=f"{run.data_blocks}, those of its founder {run.founder}",
            todo="prepare the text with the same --block-tokens",
        )
    return run


def _check_what_travels(run: RunRecord, offer: RunRecord) -> None:
    """Raise `LayoutMismatch` if the rules of leaves seem to differ: some leaves travel on one side only, the others are equal.

    The record does not know what the founder keeps local, so a leaf that is not merged there may also not be there at all.
    """
    theirs, ours = ({tensor.name: tensor for tensor in each.layout.tensors} for each in (run, offer))
    shared = theirs.keys() & ours.keys()
    if theirs.keys() == ours.keys() or not shared or any(theirs[name] != ours[name] for name in shared):
        return
    frozen_there, frozen_here = ({leaf.name for leaf in each.frozen} for each in (run, offer))
    differences = [
        f"{name!r} is merged here, and {'frozen' if name in frozen_there else 'local or missing'} in the run"
        for name in ours
        if name not in shared
    ] + [
        f"{name!r} is {'frozen' if name in frozen_here else 'local or missing'} here, and merged in the run"
        for name in theirs
        if name not in shared
    ]
    raise LayoutMismatch(
        f"this island merges other leaves than run {run.run!r}",
        got=few(differences, RULES_NAMED, "; "),
        allowed=f"the rules of leaves, and the model, of its founder {run.founder}",
        todo="give the same JoinOptions.merge as the founder; if a leaf is missing, use the run's model, or another run id",
    )


def check_tensors(run: RunRecord, tensors: tuple[TensorSpec, ...], todo: str) -> None:
    """Raise `LayoutMismatch` unless these tensors have the names, shapes and dtypes of the run's model."""
    if difference := first_difference(msgspec.structs.replace(run.layout, tensors=tensors), run.layout):
        raise LayoutMismatch(
            f"this model is not the model of run {run.run!r}",
            got=difference,
            allowed=f"the layout {run.layout.fingerprint} founded by {run.founder}",
            todo=todo,
        )


def check_frozen(run: RunRecord, ours: tuple[FrozenLeaf, ...]) -> None:
    """Raise `LayoutMismatch` unless the frozen leaves are those of the run, with the same values."""
    known, held = ({leaf.name: leaf.digest for leaf in leaves} for leaves in (run.frozen, ours))
    for name in {**known, **held}:
        if known.get(name) == held.get(name):
            continue
        got = "not frozen here" if name not in held else "other values here" if name in known else "frozen here"
        raise LayoutMismatch(
            f"the leaf {name!r} is not as run {run.run!r} has it",
            got=got,
            allowed="frozen, with the founder's values" if name in known else "not frozen",
            todo="begin from the founder's values of it, with the founder's rules (`JoinOptions.merge`)",
        )


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
    """Progress by the leases of a run's shards: the tokens merged, and whether all shards have closed their ledgers."""

    tokens: int
    over: bool


async def read_lease(bus: Bus, run: RunRecord, shard: int) -> Lease | None:
    """Return the lease of a shard; None if there is none, or one that cannot be read or is of another founding."""
    record = await bus.get_record(run.subjects.lease(shard))
    lease = None if record is None else readable(Lease, record)
    return lease if lease is not None and lease.run_nonce == run.nonce else None


async def recorded_progress(bus: Bus, run: RunRecord) -> RecordedProgress:
    """Return how far a run is by its leases; once it is over, no shard hears a learner."""
    target = run.protocol.tokens_target
    tokens, over = 0, target > 0
    for shard in range(run.protocol.shards):
        lease = await read_lease(bus, run, shard)
        known = 0 if lease is None or lease.ledger is None else lease.ledger.run_tokens
        tokens = max(tokens, known)
        over = over and lease is not None and lease.closed and known >= target
    return RecordedProgress(tokens, over)


async def read_members(bus: Bus, subjects: Subjects) -> dict[str, Member | None]:
    """Return the member records by learner id; None for one that cannot be read, or that names another learner.

    A learner that has one of those is a member all the same: junk in a record must not take its learner out of the run.
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
