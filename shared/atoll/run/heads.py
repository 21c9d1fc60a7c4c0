"""Heads, and the global fragments that they name.

A head is the record that makes a version of a fragment visible. A reader accepts it only if it belongs to the subject
it was read from and to the layout of the run.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

from atoll.base import spans
from atoll.base.clock import Clock
from atoll.base.errors import BlobCorrupt, BlobGone, PeerMisbehaved, RunWentBack
from atoll.base.large_arrays import Vector
from atoll.base.logs import get
from atoll.bus.interface import Bus, Record
from atoll.run.delta_chain import read_values
from atoll.wire.messages import Head, RunRecord, decode

log = get(__name__)

FOUNDER_PATIENCE_S = 30.0
FOUNDER_BYTES_PER_S = 1 << 20
"""A founder that sends more slowly counts as gone."""
FLOAT_BYTES = 4
NONCE_BYTES = 6
POLL_S = 0.2
READ_ATTEMPTS = 8
"""A reader begins so often, because a commit may replace what it reads."""


@dataclass(frozen=True, slots=True)
class GlobalFragment:
    """A global fragment in host memory; `values` is flat float32 in layout order, `tokens` what its head counts."""

    fragment: int
    version: int
    values: Vector
    tokens: int = 0


def founder_patience_s(run: RunRecord) -> float:
    """Return how long a founder that lives may take from one head to the next, its largest fragment on its way."""
    return FOUNDER_PATIENCE_S + max(run.layout.fragment_sizes(), default=0) * FLOAT_BYTES / FOUNDER_BYTES_PER_S


def head_nonce(epoch: int, fragment_ledger: bytes) -> str:
    """Return what tells the chunks of a commit from those of another owner: its tenure, and a digest of the ledger it writes.

    A repeated attempt gets the same one.
    """
    return f"{epoch}.{hashlib.blake2b(fragment_ledger, digest_size=NONCE_BYTES).hexdigest()}"


async def wait_for_heads(bus: Bus, run: RunRecord, clock: Clock) -> dict[int, Head] | None:
    """Return the heads of all fragments, or None if for the founder's patience no further one has appeared.

    Completing a run whose founder lives, only slowly, would mix two models.
    """
    known, since_s, patience_s = 0, clock.monotonic(), founder_patience_s(run)
    while True:
        heads = await read_heads(bus, run)
        if len(heads) == len(run.layout.fragments):
            return heads
        if len(heads) > known:
            known, since_s = len(heads), clock.monotonic()
        if clock.monotonic() - since_s > patience_s:
            return None
        await asyncio.sleep(POLL_S)


async def read_heads(bus: Bus, run: RunRecord) -> dict[int, Head]:
    """Return the newest head of every fragment that has one; records that do not fit the run's layout are skipped."""
    heads: dict[int, Head] = {}
    for record in await bus.get_records(run.subjects.head("*")):
        try:
            head = _head_in(record, run)
        except PeerMisbehaved as error:
            log.warning("head.refused", subject=record.subject, reason=str(error))
        else:
            heads[head.fragment] = head
    return heads


async def read_head(bus: Bus, run: RunRecord, fragment: int) -> Head | None:
    """Return a fragment's newest head from the stream's leader; raise `PeerMisbehaved` if it does not fit the run."""
    record = await bus.get_record(run.subjects.head(fragment))
    return None if record is None else _head_in(record, run)


def went_back(run: RunRecord, fragment: int, got: int | None, had: int) -> RunWentBack:
    """Return the error of a process that has had version `had` of a fragment, of which the broker has only version `got`."""
    return RunWentBack(
        f"the broker's store went back: it is older than what this process has had of run {run.run!r}",
        got=f"fragment {fragment} at {'no version' if got is None else f'version {got}'}",
        allowed=f"version {had} or later",
        todo="stop the run's processes, empty the broker's store and rebuild the run from its archive "
        "(atoll synchronizer --restore); without an archive end it (atoll runs remove) and begin a new one",
    )


async def fetch_newest(bus: Bus, run: RunRecord, held: GlobalFragment, *, again: bool = False) -> GlobalFragment | None:
    """Return the newest visible version of the fragment of `held`; None where that is `held` itself, unless `again`.

    Raises:
        BlobGone: the head is gone; or as `read_head` and `fetch_frame`.
    """
    head = await read_head(bus, run, held.fragment)
    if head is None:
        raise BlobGone("the head is gone", got=held.fragment)
    if head.version == held.version and not again:
        return None
    with spans.span(f"fetch fragment {head.fragment}", version=head.version, held=held.version):
        return await fetch_frame(bus, run, head, held)


async def fetch_frame(bus: Bus, run: RunRecord, head: Head, held: GlobalFragment | None = None) -> GlobalFragment:
    """Return the frame of `head`, or of a newer head if that one was superseded during the read.

    If the caller has `held` the fragment at an earlier version, and only deltas were added since, only those are read.

    Raises:
        BlobGone: the frame vanished faster than it could be read, several times; or the head is older than `held`, as after a
            rebuild of the run.
    """
    return (await fetch_frame_and_head(bus, run, head, held))[1]


async def fetch_frame_and_head(
    bus: Bus, run: RunRecord, head: Head, held: GlobalFragment | None = None
) -> tuple[Head, GlobalFragment]:
    """Return what `fetch_frame` does, and the head that it is of."""
    known = None if held is None else (held.version, held.values)
    for _ in range(READ_ATTEMPTS):
        if held is not None and head.version < held.version:
            raise BlobGone("the head is older than what we hold", got=head.version, allowed=held.version)
        try:
            values = await read_values(bus, run, head, known)
        except (BlobGone, BlobCorrupt):
            newer = await read_head(bus, run, head.fragment)
            if newer is None:
                break
            head = newer
        else:
            bus.stats.parameters_down += values.size
            return head, GlobalFragment(head.fragment, head.version, values, head.tokens_counted)
    raise BlobGone(
        f"fragment {head.fragment} cannot be read", got=head.keyframe.stem, todo="is a writer purging too early?"
    )


def _head_in(record: Record, run: RunRecord) -> Head:
    head = decode(Head, record.data)
    if record.subject != run.subjects.head(head.fragment) or head.fragment >= len(run.layout.fragments):
        raise PeerMisbehaved("a head of another fragment", got=f"fragment {head.fragment} in {record.subject}")
    if head.layout != run.layout.fingerprint:
        raise PeerMisbehaved("a head of another layout", got=head.layout, allowed=run.layout.fingerprint)
    return head


def head_info(head: Head) -> dict[str, str | int | float | bool]:
    """Return what taps show of a head; `bytes` is what a learner reads that holds the version before."""
    newest = head.deltas[-1] if head.deltas else head.keyframe
    return {
        "fragment": head.fragment,
        "version": head.version,
        "contributors": len(head.included),
        "tokens": sum(share.tokens for share in head.included),
        "bytes": newest.size_bytes,
        "epoch": head.epoch,
        "cause_id": head.cause_id,
    }
