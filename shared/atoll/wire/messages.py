"""Message schemas, version 1, as bounded JSON.

Every message is one frozen struct. `encode` and `decode` are the only way in and out. `decode` refuses wrong types,
missing fields, oversized text and an unknown schema number, always as `PeerMisbehaved`, so a driver never meets a
message that it understands only in part. `encode` refuses what `decode` would find too large. Times are seconds since
the Unix epoch by the sender's clock and are for people only; the protocol measures time by its own arrival stamps.

A contribution's tokens are those its learner trained on since it adopted `base_version` of the fragment (Sec. 3.2 of
arXiv 2604.21428: c_tokens, c_steps).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Final, TypeVar

import msgspec

from atoll.base.errors import PeerMisbehaved, ProtocolMisuse
from atoll.base.parsing import parsed
from atoll.model.layout import Layout
from atoll.protocol.ledger import Ledger
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.blobs import BlobRef
from atoll.wire.subjects import Subjects
from atoll.wire.traffic import NOTHING, LinkTraffic

SCHEMA: Final = 1
MESSAGE_BYTES_MAX: Final = 1 << 20
COUNT_MAX: Final = 1 << 53
NAME_CHARS_MAX: Final = 256
SHOWN_CHARS_MAX: Final = 120
NORMS_MAX: Final = 1 << 16

# A peer's claims stay within exact arithmetic: counts are exact as doubles, and so are sums of squares.
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]

M = TypeVar("M", bound=msgspec.Struct)


class Rebuilt(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a rebuilt run: run checkpoint number `checkpoint` of the founding `source` (its run record's nonce).

    `generation` counts how often the run was rebuilt. `tokens` and `versions` (over all fragments) are the
    checkpoint's.
    """

    source: str
    checkpoint: int
    generation: int
    tokens: int
    versions: int
    checkpoint_at_s: float
    rebuilt_at_s: float


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The record that makes a run: its founder, or the process that rebuilds it, writes it; every joiner reads it.

    `nonce` tells foundings of one run id apart: messages of another founding are refused.
    """

    run: str
    founder: str
    nonce: str
    founded_at_s: float
    layout: Layout
    protocol: ProtocolSettings
    model: str = ""
    data: str = ""
    seed: int = 0
    rebuilt: Rebuilt | None = None
    schema: int = SCHEMA

    @cached_property
    def subjects(self) -> Subjects:
        """Return the subjects of the run."""
        return Subjects(self.run)


class Included(msgspec.Struct, frozen=True):
    """One contribution as a head lists it: the learner, the push, its base, its weight and its age."""

    learner: str
    incarnation: int
    push: int
    base_version: int
    tokens: int
    steps: int
    weight: float
    age: int


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Where the delta is that leads to `version` from the one before; its stem follows from version and nonce."""

    version: Count
    nonce: Name
    chunks: Count
    size_bytes: Count
    digest: Name


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The record that makes version `version` of a fragment visible: the one commit point of a round.

    Its values are those of `keyframe`, at `key_version`, plus the `deltas` after it (`atoll.run.delta_chain`); `digest`
    is theirs. `state` is the outer-optimizer state that belongs to them. `superseded` are frames that the head before
    this one named; they stay until the next commit, for readers that still read them. `cause_id` is what made its round
    end (`atoll.protocol.reasons`). `fragment_ledger` says which contributions of the fragment have a fate. An owner may
    write the same version again with a newer ledger, and a new owner does so with its own epoch.
    """

    fragment: Count
    version: Count
    epoch: Count
    nonce: str
    layout: str
    keyframe: BlobRef
    key_version: Count
    digest: str
    deltas: tuple[Delta, ...] = ()
    state: BlobRef | None = None
    fragment_ledger: BlobRef | None = None
    included: tuple[Included, ...] = ()
    tokens_merged: int = 0
    superseded: tuple[BlobRef, ...] = ()
    cause_id: Name = ""
    schema: int = SCHEMA


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of one pushed pseudo-gradient; published after all its chunks are acknowledged.

    `norms` are the per-slice L2 norms of the pseudo-gradient, a claim the synchronizer verifies while decoding.
    `final` says that its learner leaves after it. `trained_tokens` is the learner's total when it took the snapshot.
    `run_nonce` is that of the run record by which its learner joined.
    """

    learner: Name
    incarnation: Count
    fragment: Count
    push: Count
    base_version: Count
    tokens: Count
    steps: Count
    trained_tokens: Count
    loss: float | None
    norms: Annotated[tuple[float, ...], msgspec.Meta(max_length=NORMS_MAX)]
    layout: Name
    run_nonce: Name
    blob: BlobRef
    final: bool = False
    cause_id: Name = ""
    sent_at_s: float = 0.0
    schema: int = SCHEMA


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """The synchronizer's request for `fragment` on base `version`; `run_tokens` drives schedules by tokens."""

    fragment: Count
    version: Count
    attempt: Count
    run_tokens: Count
    schema: int = SCHEMA


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The fate of a contribution, sent to its learner: `fate` is merged, merged_late or refused."""

    learner: Name
    incarnation: Count
    fragment: Count
    push: Count
    fate: Name
    reason: str = ""
    schema: int = SCHEMA


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """A learner's heartbeat. Token-fragments are tokens counted once per fragment (docs/explanation/protocol.md)."""

    learner: Name
    incarnation: Count
    run_nonce: Name
    state: Name
    at_s: float
    step: Count
    step_s: Seconds
    tokens: Count
    tokens_per_s: float
    loss: float | None
    pushed: Count
    superseded: Count
    refused_local: Count = 0
    overhead: float = 0.0
    lag_versions: Count = 0
    moved: LinkTraffic = NOTHING
    run_tokens: Count = 0
    schema: int = SCHEMA


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """The present incarnation of a learner id."""

    learner: str
    incarnation: int
    nonce: str
    host: str
    pid: int
    claimed_at_s: float
    left: bool = False
    schema: int = SCHEMA


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The tenure of a shard's owner and what it knows of the learners.

    `released`: the host `to`, or any host, may take it. `closed`: the ledger is closed for good, because the run has
    reached its target and everything is settled.
    """

    shard: int
    epoch: int
    nonce: str
    host: str
    pid: int
    ledger: Ledger | None = None
    released: bool = False
    closed: bool = False
    to: str = ""
    schema: int = SCHEMA


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """A synchronizer process's shards: those it owns and those it is a candidate for (`atoll.protocol.balance`)."""

    name: Name
    host: Name
    pid: int
    wants: Annotated[tuple[Count, ...], msgspec.Meta(max_length=NORMS_MAX)]
    owns: Annotated[tuple[Count, ...], msgspec.Meta(max_length=NORMS_MAX)]
    leaving: bool = False
    moved: LinkTraffic = NOTHING
    schema: int = SCHEMA


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """A command or a question: `drain`, `identify`, or one of two for a learner that needs an optimizer's state.

    The live holder of an id answers `identify`. Learners that could lend their state answer `lend`, and the chosen one
    answers `share` (`StateOffer`).
    """

    verb: str
    sender: str = ""
    schema: int = SCHEMA


class StateOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A learner's inner-optimizer state for another one: only an offer without a blob, the state itself with one."""

    learner: Name
    incarnation: Count
    run_nonce: Name
    steps: Count
    tokens: Count
    run_tokens: Count
    blob: BlobRef | None = None
    schema: int = SCHEMA


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the event log; `fields` depends on `kind` (docs/explanation/protocol.md lists them)."""

    kind: str
    who: str
    at_s: float
    fields: dict[str, msgspec.Raw]
    schema: int = SCHEMA


def encode(message: msgspec.Struct) -> bytes:
    """Return `message` as compact JSON.

    Raises:
        ProtocolMisuse: it is larger than `decode` takes. A record that no process can read is worse than no record.
    """
    data = msgspec.json.encode(message)
    if len(data) > MESSAGE_BYTES_MAX:
        raise ProtocolMisuse(
            f"a {type(message).__name__} is too large to be read again",
            got=f"{len(data)} bytes",
            allowed=f"{MESSAGE_BYTES_MAX} bytes",
            todo="nothing was written; please report this with the number of learners and shards of the run",
        )
    return data


def decode(kind: type[M], data: bytes) -> M:
    """Return `data` as a `kind`; raise `PeerMisbehaved` for anything that is not exactly that."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise PeerMisbehaved(f"a {kind.__name__} is too large", got=f"{len(data)} bytes", allowed=MESSAGE_BYTES_MAX)
    try:
        message = parsed(data, kind)
    except msgspec.MsgspecError as error:
        raise PeerMisbehaved(f"not a {kind.__name__}", got=str(error)) from error
    schema = getattr(message, "schema", SCHEMA)
    if schema != SCHEMA:
        raise PeerMisbehaved(
            f"a {kind.__name__} of another schema", got=schema, allowed=SCHEMA, todo="run the same Atoll everywhere"
        )
    return message


def event_info(kind: str, fields: Mapping[str, object]) -> dict[str, str | int | float | bool]:
    """Return what taps show of an event: its kind, its numbers and short texts, and of lists how long they are."""
    counted = {name: len(value) if isinstance(value, list | tuple) else value for name, value in fields.items()}
    shown = {name: value for name, value in counted.items() if isinstance(value, int | float | str)}
    return {"kind": kind, **{name: value for name, value in shown.items() if len(str(value)) <= SHOWN_CHARS_MAX}}


def event(kind: str, who: str, at_s: float, **fields: object) -> Event:
    """Return an event with the given fields, encoded."""
    return Event(
        kind=kind, who=who, at_s=at_s, fields={k: msgspec.Raw(msgspec.json.encode(v)) for k, v in fields.items()}
    )
