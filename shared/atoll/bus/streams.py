"""The streams that a run needs, as data, and the bounds of a message; every adapter keeps exactly these.

A bound takes no disk, and a stream that reaches it refuses new messages (discard new) where losing an old one would lose work.
Every stream has the same number of copies (`broker.replicas`): a run would stop with the node that holds the only copy of one.

A broker remembers the id of every message for the stream's window, and an id may have 60 kB. So what it remembers for a
permitted writer is the window times what a link carries, and every window is short (`DEDUP_S`). Nothing rests on it: a record
is written by compare-and-set, a chunk of a contribution is stored once and any other replaces its equal, a manifest is merged
once by its key, and readers of the event log skip what is stored twice (`atoll.wire.events`).

A learner may write below its name for any shard and fragment, since who makes keys knows no run. The owner of shard 0 narrows
the streams to those that there are (`Places`, `Bus.fit`), and the broker refuses all others.

The broker republishes what watchers need under `tap.`, as it was stored (ADR 50); chunks and leases have no tap. Heartbeats and
presences are core messages, so a further stream, in memory, keeps the last one of each sender for a moment (`live_plan`).
Without it only watchers miss something.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

from atoll.base.errors import ProtocolMisuse, QueueFull, RecordConflict, StorageFull
from atoll.wire.limits import CHUNK_BYTES, INFO_BYTES_MAX, INFO_HEADER, MESSAGE_BYTES_MAX, Buffer, Info
from atoll.wire.subjects import SUM, Subjects, matches

MIB, GIB = 1 << 20, 1 << 30
_COMPACT = json.JSONEncoder(separators=(",", ":"))
LENT_AGE_S = 600.0
DEDUP_S = 0.1
"""The shortest that a broker takes: with 60 kB an id, 100 MB/s of them are 10 MB."""
MANIFEST_BYTES = 32 << 10
"""Of a manifest with its frame, and of its headers; the norms of its slices come on top."""
NORM_BYTES = 32
HEADERS_BYTES = 1 << 14
"""Of a chunk."""
LIVE_AGE_S = 120.0
LIVE_BYTES = 8 * MIB
"""Of memory: the last heartbeat of 10,000 learners. A broker that limits its memory counts this bound, used or not."""
KEPT_AGE_S = 2 * 3600.0


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """One stream: `per_subject` bounds a subject's stored messages (0: none), `tap` is the subtree that it republishes.

    In a subject that has as many the oldest makes room for a new one, unless the stream `keeps_first`: then that is refused.
    An empty `tap` stands for all that the stream keeps. `message_bytes_max` bounds a message with its headers (0: the broker's
    own bound), and `consumers_max` its consumers (0: none); the copy of a region is a consumer that does not count. `copies`
    names another stream and one of its subjects, kept here too.
    """

    name: str
    subjects: tuple[str, ...]
    retention: Literal["limits", "workqueue"] = "limits"
    discard: Literal["old", "new"] = "new"
    per_subject: int = 0
    keeps_first: bool = False
    bytes_max: int = 256 * MIB
    age_max_s: float = 0.0
    dedup_s: float = DEDUP_S
    message_bytes_max: int = 0
    tap: str | None = None
    copies: tuple[str, str] | None = None
    storage: Literal["file", "memory"] = "file"
    append_only: bool = False
    replicas: int = 1
    consumers_max: int = 0


@dataclass(frozen=True, slots=True)
class Places:
    """Where a learner of a run may write: the shard of each fragment, and the most slices that a fragment has.

    `keeps_first` says whether whoever writes a chunk of a contribution first writes it for good.
    """

    shard_of: tuple[int, ...]
    slices_max: int
    keeps_first: bool = True

    def queues(self, run: str) -> tuple[str, ...]:
        """Return the filters of the manifests of each fragment, and of the farewells to each shard."""
        s = Subjects(run)
        manifests = (s.contribution(shard, fragment, "*") for fragment, shard in enumerate(self.shard_of))
        return (*manifests, *(s.farewell(shard, "*") for shard in sorted(set(self.shard_of))))

    def chunks(self, run: str) -> tuple[str, ...]:
        """Return the filters of the chunks of each fragment, of learners and of regions' sums."""
        p, fragments = Subjects(run).prefix, range(len(self.shard_of))
        return (
            *(f"{p}.up.c.*.{fragment}.*.*" for fragment in fragments),
            *(f"{p}.up.c.{SUM}.{fragment}.*.*.*" for fragment in fragments),
        )

    @property
    def manifest_bytes_max(self) -> int:
        """Return the bound of a queued message, in bytes."""
        return MANIFEST_BYTES + NORM_BYTES * self.slices_max


def fitted_plan(run: str, places: Places) -> tuple[StreamPlan, ...]:
    """Return the streams of `run`, narrowed to its places; bounds of bytes and copies are the founder's."""
    plans = {plan.name.rpartition("_")[2]: plan for plan in stream_plan(run)}
    plans["UPC"] = replace(plans["UPC"], subjects=places.chunks(run), keeps_first=places.keeps_first)
    plans["UPM"] = replace(plans["UPM"], subjects=places.queues(run), message_bytes_max=places.manifest_bytes_max)
    return tuple(plans.values())


def stream_plan(run: str, bytes_max: int = 8 * GIB, replicas: int = 1) -> tuple[StreamPlan, ...]:
    """Return the streams of `run`, with so many copies each; `bytes_max` bounds those that hold tensors, each."""
    p, hours = Subjects(run).prefix, 3600.0
    plans = (
        StreamPlan(
            f"atoll_{run}_UPC",
            (f"{p}.up.c.>",),
            per_subject=1,
            keeps_first=True,
            bytes_max=bytes_max,
            age_max_s=2 * hours,
            message_bytes_max=CHUNK_BYTES + HEADERS_BYTES,
        ),
        StreamPlan(
            f"atoll_{run}_UPM", (f"{p}.up.m.>",), retention="workqueue", per_subject=2, keeps_first=True, tap="up.m"
        ),
        StreamPlan(
            f"atoll_{run}_GL",
            (f"{p}.gl.>",),
            per_subject=1,
            bytes_max=bytes_max,
            tap="gl.head",
            consumers_max=1,
        ),
        StreamPlan(f"atoll_{run}_ST", (f"{p}.st.>",), per_subject=1, bytes_max=bytes_max),
        StreamPlan(f"atoll_{run}_MB", (f"{p}.mb.>",), per_subject=1, tap="mb.learner"),
        StreamPlan(
            f"atoll_{run}_PS", (f"{p}.ps.>",), per_subject=1, bytes_max=min(GIB, bytes_max), age_max_s=LENT_AGE_S
        ),
        StreamPlan(
            f"atoll_{run}_EV",
            (f"{p}.ev.>",),
            discard="old",
            bytes_max=GIB,
            age_max_s=30 * 24 * hours,
            tap="ev",
            append_only=True,
        ),
    )
    return tuple(replace(plan, replicas=replicas) for plan in plans)


def live_plan(run: str, replicas: int = 1) -> StreamPlan:
    """Return the stream of what was heard last of each process; the run record passes through it, for its tap.

    The stream of records cannot have two taps, and one subtree holds no chunk.
    """
    s = Subjects(run)
    return StreamPlan(
        f"atoll_{run}_LV",
        (s.beat("*"), s.presence("*")),
        discard="old",
        per_subject=1,
        bytes_max=LIVE_BYTES,
        age_max_s=LIVE_AGE_S,
        tap="",
        copies=(f"atoll_{run}_GL", s.run_record),
        storage="memory",
        replicas=replicas,
    )


def outbox_plan(run: str, domain: str, bytes_max: int = 8 * GIB) -> StreamPlan:
    """Return the stream at the leaf of a region that keeps what it could not send yet; nothing in it ages."""
    return StreamPlan(f"atoll_{run}_OUT", (f"{Subjects(run).outbox(domain)}.>",), bytes_max=bytes_max)


def kept_plan(run: str, domain: str, bytes_max: int = 8 * GIB) -> StreamPlan:
    """Return the stream at the leaf of a region that keeps the chunks of contributions which the region folds itself."""
    subjects = (f"{Subjects(run).kept(domain)}.>",)
    return StreamPlan(
        f"atoll_{run}_KEEP", subjects, discard="old", per_subject=1, bytes_max=bytes_max, age_max_s=KEPT_AGE_S
    )


def stream_of(plans: tuple[StreamPlan, ...], subject_filter: str) -> StreamPlan:
    """Return the stream that keeps everything under `subject_filter`; `ProtocolMisuse` if there is none."""
    for plan in plans:
        if any(matches(kept, subject_filter) for kept in plan.subjects):
            return plan
    raise ProtocolMisuse(
        "no stream keeps this subject",
        got=subject_filter,
        allowed=", ".join(kept for plan in plans for kept in plan.subjects),
    )


def record_conflict(subject: str, revision: int, expected: int | None) -> RecordConflict:
    """Return the error for a record that has another revision than its writer expected."""
    return RecordConflict(
        "someone else wrote the record first",
        got=f"revision {revision} of {subject}",
        allowed=f"revision {expected}",
        todo="read it again and decide anew",
    )


def queue_full(subject: str, bound: str) -> QueueFull:
    """Return the error for a subject that has all the messages that it takes."""
    return QueueFull("the queue holds its bound for this subject", got=subject, allowed=bound)


def no_room(got: str) -> StorageFull:
    """Return the error for a stream that can take no more bytes."""
    todo = "raise stream_bytes_max, free the disk, or let consumers catch up"
    return StorageFull("the stream has no room", got=got, todo=todo)


def check_size(subject: str, data: Buffer) -> None:
    """Refuse a message that is so large that the broker would close the connection."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise ProtocolMisuse(
            "a message is too large",
            got=f"{len(data)} bytes on {subject}",
            allowed=f"up to {MESSAGE_BYTES_MAX}",
            todo="store it with put_blob and send where it lies",
        )


def info_header(info: Info | None) -> dict[str, str]:
    """Return the header that shows `info` on taps, as compact JSON on one line; none without `info`."""
    if info is None:
        return {}
    text = _COMPACT.encode(dict(info))
    if len(text) > INFO_BYTES_MAX:
        raise ProtocolMisuse("info is too large", got=len(text), allowed=f"up to {INFO_BYTES_MAX} bytes")
    return {INFO_HEADER: text}
