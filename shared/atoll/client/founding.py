"""How a run comes to be, and how a learner finds its way into one that exists.

There is no initialisation step. The first learner to arrive writes the run record by compare-and-set (layout, protocol
settings, seed, fingerprint of the data), then version 0 of every fragment from its own parameters. Everyone else,
including the runner-up of that race, reads the record, checks that its own model has the same layout, and adopts the
heads. If a founder dies before the heads are complete, another with the same layout completes them after a time-out:
heads are created with revision 0, so a head that exists is never replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atoll.bus.interface import Bus, Record
from atoll.wire.blobs import Upload
from atoll.wire.subjects import Subjects
from atoll.run.delta_chain import digest_of_values, keyframe_of, newest_bytes, read_values
from atoll.base.clock import Clock
from atoll.base.errors import BlobCorrupt, BlobGone, BrokerUnavailable, LayoutMismatch, PeerMisbehaved, RecordConflict, RunReplaced
from atoll.base.identity import Identity, this_process
from atoll.client.device_encoding import Placed
from atoll.model.layout import Layout, first_difference
from atoll.base.logs import get
from atoll.wire.messages import Head, Lease, RunRecord, decode, encode

Vector = npt.NDArray[np.float32]

log = get(__name__)

FOUNDER_PATIENCE_S = 30.0
POLL_S = 0.2
READ_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class GlobalFragment:
    """A global fragment in host memory: `values` is flat float32 in layout order; `placed` are the same on a device, too."""

    fragment: int
    version: int
    values: Vector
    placed: Placed | None = None


async def found_or_join(bus: Bus, subjects: Subjects, offer: RunRecord) -> tuple[RunRecord, bool]:
    """Write `offer` as the run record, or return the one that is there; the flag says whether we are the founder.

    Raises:
        LayoutMismatch: the run exists with another model or other data.
    """
    try:
        await bus.put_record(subjects.run_record, encode(offer), expected=0, info={"run": offer.run})
    except RecordConflict:
        return await check_run(bus, subjects, offer.layout, offer.data), False
    return offer, True


async def read_run(bus: Bus, subjects: Subjects) -> RunRecord | None:
    """Return the run record, or None while nobody has founded the run."""
    record = await bus.get_record(subjects.run_record)
    return None if record is None else decode(RunRecord, record.data)


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
    """Return the run record after comparing this learner's `layout` and `data` fingerprint with it."""
    run = await read_run(bus, subjects)
    if run is None:
        raise BrokerUnavailable("the run record vanished", todo="was the broker's store deleted? start a new run")
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


async def publish_origin(
    bus: Bus, subjects: Subjects, run: RunRecord, values: Mapping[int, Vector], identity: Identity | None = None
) -> None:
    """Make version 0 of every fragment visible, wherever no head exists yet.

    Raises:
        BrokerUnavailable: the run is being rebuilt from an archive; a fresh value in a trained run's place would ruin it.
    """
    if run.rebuilt is not None:
        raise BrokerUnavailable(
            f"run {run.run!r} is being rebuilt from its archive and is not complete yet",
            got=f"mark {run.rebuilt.mark} of founding {run.rebuilt.source}",
            todo="start every synchronizer shard with --restore, then the learners",
        )
    identity = identity or this_process()
    for fragment in values:
        nonce, vector = identity.nonce(4), await asyncio.to_thread(values.__getitem__, fragment)
        keyframe = await bus.put_blob(subjects.global_stem(fragment, 0, nonce), Upload(keyframe_of(vector)))
        bus.stats.frame_bytes_up += keyframe.size_bytes
        head = Head(
            fragment=fragment,
            version=0,
            epoch=0,
            nonce=nonce,
            layout=run.layout.fingerprint,
            keyframe=keyframe,
            key_version=0,
            digest=await asyncio.to_thread(digest_of_values, vector),
        )
        try:
            await bus.put_record(subjects.head(fragment), encode(head), expected=0, info=head_info(head))
        except RecordConflict:
            await bus.purge(f"{keyframe.stem}.*")


async def wait_for_heads(bus: Bus, subjects: Subjects, run: RunRecord, clock: Clock) -> dict[int, Head] | None:
    """Return the heads of all fragments, or None when they stay incomplete for the founder's patience."""
    deadline_s = clock.monotonic() + FOUNDER_PATIENCE_S
    while True:
        heads = await read_heads(bus, subjects, run.layout)
        if len(heads) == len(run.layout.fragments):
            return heads
        if clock.monotonic() > deadline_s:
            return None
        await asyncio.sleep(POLL_S)


async def read_heads(bus: Bus, subjects: Subjects, layout: Layout) -> dict[int, Head]:
    """Return the newest head of every fragment that has one; a record that fits no fragment of `layout` is passed over."""
    heads: dict[int, Head] = {}
    for record in await bus.get_records(subjects.head("*")):
        try:
            head = _head_in(record, subjects, layout)
        except PeerMisbehaved as error:
            log.warning("head.refused", subject=record.subject, reason=str(error))
        else:
            heads[head.fragment] = head
    return heads


async def read_head(bus: Bus, subjects: Subjects, layout: Layout, fragment: int) -> Head | None:
    """Return the newest head of one fragment as its leader has it; raise `PeerMisbehaved` when it fits none of `layout`."""
    record = await bus.get_record(subjects.head(fragment))
    return None if record is None else _head_in(record, subjects, layout)


def _head_in(record: Record, subjects: Subjects, layout: Layout) -> Head:
    """Return the head that a record holds, which must be that of its own subject and of this layout."""
    head = decode(Head, record.data)
    if record.subject != subjects.head(head.fragment) or head.fragment >= len(layout.fragments):
        raise PeerMisbehaved("a head of another fragment", got=f"fragment {head.fragment} in {record.subject}")
    if head.layout != layout.fingerprint:
        raise PeerMisbehaved("a head of another layout", got=head.layout, allowed=layout.fingerprint)
    return head


async def is_over(bus: Bus, subjects: Subjects, run: RunRecord) -> bool:
    """Return whether every shard has closed its books at the run's token target: nobody would hear a learner any more."""
    target = run.protocol.tokens_target
    if not target:
        return False
    for shard in range(run.protocol.shards):
        record = await bus.get_record(subjects.lease(shard))
        lease = None if record is None else decode(Lease, record.data)
        if lease is None or not lease.closed or lease.ledger is None or lease.ledger.known_tokens < target:
            return False
    return True


async def fetch_frame(bus: Bus, run: RunRecord, head: Head, held: GlobalFragment | None = None) -> GlobalFragment:
    """Return the frame of `head`, or of a newer head when that one was superseded while it was being read.

    What is `held` of the fragment already saves reading it whole, where only deltas have been added since.

    Raises:
        BlobGone: the frame vanished faster than it could be read, several times.
    """
    known = None if held is None else (held.version, held.values)
    for _ in range(READ_ATTEMPTS):
        try:
            values = await read_values(bus, run, head, known)
        except (BlobGone, BlobCorrupt):
            newer = await read_head(bus, Subjects(run.run), run.layout, head.fragment)
            if newer is None:
                break
            head = newer
        else:
            bus.stats.parameters_down += values.size
            return GlobalFragment(head.fragment, head.version, values)
    raise BlobGone(
        f"fragment {head.fragment} cannot be read", got=head.keyframe.stem, todo="is a writer purging too early?"
    )


def head_info(head: Head) -> dict[str, str | int | float | bool]:
    """Return what taps show of a head."""
    return {
        "fragment": head.fragment,
        "version": head.version,
        "contributors": len(head.included),
        "tokens": sum(share.tokens for share in head.included),
        "bytes": newest_bytes(head),
        "epoch": head.epoch,
    }
