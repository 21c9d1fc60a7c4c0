"""The record that makes a run, as every role reads it: what its processes agree on, and whether the run is over."""

from __future__ import annotations

from atoll.base.errors import BrokerUnavailable, LayoutMismatch, RunReplaced, SettingsError
from atoll.bus.interface import Bus
from atoll.codec import check_codecs
from atoll.model.layout import Layout, first_difference
from atoll.wire.messages import Lease, RunRecord, decode
from atoll.wire.subjects import Subjects


async def read_run(bus: Bus, subjects: Subjects) -> RunRecord | None:
    """Return the run record, or None if the run is not founded yet."""
    record = await bus.get_record(subjects.run_record)
    return None if record is None else decode(RunRecord, record.data)


async def founded_run(bus: Bus, run: str) -> RunRecord:
    """Return the record of the run that a person has named; raise `SettingsError` if it is not founded."""
    record = await read_run(bus, Subjects(run))
    if record is None:
        raise SettingsError("nobody has founded this run", got=run, todo="check --run and --broker")
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
    """Compare this learner's `layout` and `data` fingerprint with the run record, and return the record."""
    run = await read_run(bus, subjects)
    if run is None:
        raise BrokerUnavailable("the run record vanished", todo="was the broker's store deleted? start a new run")
    check_known(run)
    if run.layout.fingerprint != layout.fingerprint:
        raise LayoutMismatch(
            f"this model is not the model of run {run.run!r}",
            got=first_difference(layout, run.layout),
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


async def is_over(bus: Bus, run: RunRecord) -> bool:
    """Return whether every shard has closed its ledger at the run's token target: no shard hears a learner then."""
    target = run.protocol.tokens_target
    if not target:
        return False
    for shard in range(run.protocol.shards):
        record = await bus.get_record(run.subjects.lease(shard))
        lease = None if record is None else decode(Lease, record.data)
        if lease is None or not lease.closed or lease.ledger is None or lease.ledger.known_tokens < target:
            return False
    return True
