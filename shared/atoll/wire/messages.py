"""Message schemas, as bounded JSON, and the wire version that they have.

Every message is one frozen struct. `encode` and `decode` are the only way in and out. `decode` refuses wrong types, missing
fields, numbers and texts out of their bounds (`atoll.base.quantities`) and an unknown schema number, always as
`PeerMisbehaved`, so a driver never meets a message that it understands only in part. Times are seconds since the Unix epoch by
the sender's clock and are for people only; the protocol measures time by its own arrival stamps.

The `schema` of the run record is the version of the run: its founder chose it, and everybody writes it for as long as the run
lives. A process joins a run if it speaks that version, and refuses the record otherwise, before it writes anything. So a run is
upgraded process by process, in any order: each release speaks the version of the release before it (`SCHEMA_OLDEST`). A new
field with a default is no new version; a version is new when an old reader would misunderstand.

A message is JSON in one line, so a line break tells where it ends; in a locked run a signature follows
(`atoll.keys.signatures`). A bus replaces a message that it does not believe by the reason why.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Final, Literal, TypeVar, get_args

import msgspec

from atoll.base.errors import PeerMisbehaved, ProtocolMisuse, SettingsError
from atoll.base.parsing import exhausted_counter, fault_of, parsed
from atoll.base.quantities import (
    COUNTED,
    FRAGMENTS_MAX,
    LEARNERS_MAX,
    Count,
    Description,
    Digest,
    Epoch,
    Figure,
    Fingerprint,
    FragmentNumber,
    Incarnation,
    Moment,
    PeerId,
    PushNumber,
    RunTokens,
    Seconds,
    ShardNumber,
    SizeBytes,
    Steps,
    Text,
    TokenFragments,
    Tokens,
    Version,
    Word,
    WriterNonce,
)
from atoll.model.layout import FrozenLeaf, Layout
from atoll.protocol.data import DataLedger
from atoll.protocol.events import PushKey
from atoll.protocol.ledger import Ledger
from atoll.protocol.settings import KEYFRAME_VERSIONS_MAX, ProtocolSettings
from atoll.wire.blobs import BlobRef
from atoll.wire.limits import INLINE_BYTES_MAX
from atoll.wire.subjects import Subjects
from atoll.wire.traffic import NOTHING, LinkTraffic

SCHEMA: Final = 1
"""The version of all messages but the run record, and of one that names none: none has changed its meaning so far."""
SCHEMA_NEWEST: Final = 6
"""The newest version of a run record that it speaks, in which it founds runs."""
SCHEMA_OLDEST: Final = 6
"""The oldest version of a run record that it speaks."""
SIGNATURE: Final = b"\nsigned:"
"""Separates a message from its signature."""
_UNPROVEN: Final = b"unproven:"
DOCUMENT_BYTES_MAX: Final = 1 << 20
NORMS_MAX: Final = 1 << 16
BULK_MAX: Final = 63
DELTAS_MAX: Final = 2 * KEYFRAME_VERSIONS_MAX

LearnerState = Literal["joining", "training", "draining", "left"]
Norms = Annotated[tuple[float, ...], msgspec.Meta(max_length=NORMS_MAX)]
Addresses = Annotated[tuple[Text, ...], msgspec.Meta(max_length=BULK_MAX)]
Shards = Annotated[tuple[ShardNumber, ...], msgspec.Meta(max_length=FRAGMENTS_MAX)]

M = TypeVar("M", bound=msgspec.Struct)


class Rebuilt(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a rebuilt run: run checkpoint number `checkpoint` of the founding `source` (its run record's nonce).

    `generation` counts the rebuilds. `tokens` and `versions` (over all fragments) are the checkpoint's.
    """

    source: PeerId
    checkpoint: Count
    generation: Count
    tokens: RunTokens
    versions: Count
    checkpoint_at_s: Seconds
    rebuilt_at_s: Seconds


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The record that makes a run: its founder, or the process that rebuilds it, writes it; every joiner reads it.

    `nonce` tells foundings of one run id apart: messages of another founding are refused. `closing` says that the run's
    broker is about to end, so learners leave; it may go on later. `data_blocks` are those of its leased text, 0 for none.
    `frozen` are leaves that all islands hold and nobody sends. `bulk` are further brokers that keep fragments
    (`atoll.bus.spread`). `schema` says what all do (`atoll.wire.messages`).
    """

    run: PeerId
    founder: PeerId
    nonce: PeerId
    founded_at_s: Seconds
    layout: Layout
    protocol: ProtocolSettings
    model: Description = ""
    data: Text = ""
    data_blocks: Count = 0
    seed: int = 0
    frozen: tuple[FrozenLeaf, ...] = ()
    rebuilt: Rebuilt | None = None
    closing: bool = False
    bulk: Addresses = ()
    schema: int = SCHEMA_NEWEST

    def fault(self) -> str:
        """Return why no founder writes this record, or the empty string."""
        try:
            self.protocol.check()
        except SettingsError as error:
            return str(error)
        if len(self.layout.fragments) != self.protocol.fragments:
            return f"{len(self.layout.fragments)} fragments in the layout and {self.protocol.fragments} in the protocol"
        there, agreed = self.layout.value_fragments, self.protocol.value_fragments
        if there != agreed:
            return f"{there} fragments merged by value in the layout and {agreed} in the protocol"
        return self.layout.fault()

    @cached_property
    def subjects(self) -> Subjects:
        """Return the subjects of the run."""
        return Subjects(self.run)


class Included(msgspec.Struct, frozen=True, omit_defaults=True):
    """One contribution as a head lists it: the learner, the push, its base, its weight, its age, and below 1 its clip."""

    learner: PeerId
    incarnation: Incarnation
    push: PushNumber
    base_version: Version
    tokens: Tokens
    steps: Steps
    weight: float
    age: Count
    scale: float = 1.0


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Where the delta is that leads to `version` from the one before; its stem follows from version and nonce."""

    version: Version
    nonce: WriterNonce
    chunks: Count
    size_bytes: SizeBytes
    digest: Digest


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The record that makes version `version` of a fragment visible: the one commit point of a round.

    Its values are those of `keyframe`, at `key_version`, plus the `deltas` after it (`atoll.run.delta_chain`); `digest`
    is theirs. `state` is the outer-optimizer state that belongs to them, None for that in which a run begins; where the run
    derives it from the values (`atoll.merge.outer`), it is the state of the keyframe. `superseded` are frames that the
    head before this one named; they stay until the next commit, for readers that still read them. `cause_id` is what made its
    round end (`atoll.protocol.events`). Of `tokens_merged`, `tokens_counted` count towards the run's target. `fragment_ledger`
    says which contributions of the fragment have a fate. An owner may write the same version again with a newer ledger, and a
    new owner does so with its own epoch.
    """

    fragment: FragmentNumber
    version: Annotated[Version, COUNTED]
    epoch: Annotated[Epoch, COUNTED]
    nonce: WriterNonce
    layout: Fingerprint
    keyframe: BlobRef
    key_version: Version
    digest: Digest
    deltas: Annotated[tuple[Delta, ...], msgspec.Meta(max_length=DELTAS_MAX)] = ()
    state: BlobRef | None = None
    fragment_ledger: BlobRef | None = None
    included: Annotated[tuple[Included, ...], msgspec.Meta(max_length=LEARNERS_MAX)] = ()
    tokens_merged: RunTokens = 0
    tokens_counted: RunTokens = 0
    superseded: Annotated[tuple[BlobRef, ...], msgspec.Meta(max_length=DELTAS_MAX)] = ()
    cause_id: Text = ""
    schema: int = SCHEMA


class PushNotes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Notes of a learner on a push, for people: how long things took on its side. No rule of the protocol reads it.

    They are claims of the learner. Durations are by its own monotonic clock. Zeros stand for "not noted".

    Attributes:
        adopted_at_s: when the learner began its local interval on the base version, in seconds since the Unix epoch.
        step_s: the mean time of its recent inner steps.
        upload_s: from the beginning of the encoding until the last segment was stored at the broker, or until the attempt that
            sends a manifest with its frame.
        full_s: the part of that in which it waited because the broker had no room.
    """

    adopted_at_s: Moment = 0.0
    step_s: Seconds = 0.0
    upload_s: Seconds = 0.0
    full_s: Seconds = 0.0


NO_NOTES = PushNotes()


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of one pushed pseudo-gradient; published after all its chunks are acknowledged.

    One that carries its `frame` has no chunks; `blob` says size and digest all the same (`atoll.run.delta_chain`).
    `tokens` and `steps` are since its learner adopted `base_version` (Sec. 3.2 of arXiv 2604.21428: c_tokens, c_steps).
    `norms` are the per-slice L2 norms of the pseudo-gradient, a claim the synchronizer verifies while decoding.
    `final` says that its learner leaves after it. `trained_tokens` is the learner's total when it took the snapshot.
    `run_nonce` is that of the run record by which its learner joined. `notes` are for people.
    """

    learner: PeerId
    incarnation: Incarnation
    fragment: FragmentNumber
    push: PushNumber
    base_version: Version
    tokens: Tokens
    steps: Steps
    trained_tokens: Tokens
    loss: Figure | None
    norms: Norms
    layout: Fingerprint
    run_nonce: PeerId
    blob: BlobRef
    final: bool = False
    cause_id: Text = ""
    sent_at_s: Moment = 0.0
    notes: PushNotes = NO_NOTES
    frame: Annotated[bytes, msgspec.Meta(max_length=INLINE_BYTES_MAX)] = b""
    schema: int = SCHEMA

    @property
    def key(self) -> PushKey:
        """Return the key by which shards, regions and replays know the contribution."""
        return PushKey(self.learner, self.incarnation, self.fragment, self.push)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """The synchronizer's request for `fragment` on base `version`; `run_tokens` drives schedules by tokens."""

    fragment: FragmentNumber
    version: Version
    attempt: Count
    run_tokens: RunTokens
    schema: int = SCHEMA


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The fate of a contribution, sent to its learner.

    `norm` and `norm_max` are its length (L2) and the one allowed, if that decided it; one that is clipped will be merged.
    """

    learner: PeerId
    incarnation: Incarnation
    fragment: FragmentNumber
    push: PushNumber
    fate: Literal["merged", "merged_late", "refused", "clipped"]
    reason: Word = ""
    norm: Figure = 0.0
    norm_max: Figure = 0.0
    schema: int = SCHEMA


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """A learner's heartbeat. Token-fragments are tokens counted once per fragment (docs/explanation/protocol.md)."""

    learner: PeerId
    incarnation: Incarnation
    run_nonce: PeerId
    state: LearnerState
    at_s: Moment
    step: Steps
    step_s: Seconds
    tokens: Tokens
    tokens_per_s: Figure
    loss: Figure | None
    pushed: TokenFragments
    superseded: TokenFragments
    refused_local: TokenFragments = 0
    overhead: Figure = 0.0
    lag_versions: Count = 0
    moved: LinkTraffic = NOTHING
    run_tokens: RunTokens = 0
    schema: int = SCHEMA


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """The present incarnation of a learner id, its version of Atoll (`software`), and the `region` that folds what it sends."""

    learner: PeerId
    incarnation: Annotated[Incarnation, COUNTED]
    nonce: PeerId
    host: Text
    pid: Count
    claimed_at_s: Seconds
    left: bool = False
    region: Text = ""
    software: Text = ""
    schema: int = SCHEMA


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The tenure of a shard's owner and what it knows of the learners.

    `released`: the host `to`, or any host, may take it. `closed`: the ledger is closed for good, because the run has
    reached its target and everything is settled. `epoch_max`: no tenure until now had a higher epoch; where a lease was lost,
    that may be more than `epoch`. `run_nonce` is the founding of its owner: where a broker lost its store, a process of the
    former founding may write its lease into the new one, and what its ledger says is of other incarnations.
    """

    shard: ShardNumber
    epoch: Annotated[Epoch, COUNTED]
    nonce: PeerId
    host: Text
    pid: Count
    run_nonce: PeerId
    epoch_max: Annotated[Epoch, COUNTED] = 0
    ledger: Ledger | None = None
    released: bool = False
    closed: bool = False
    to: Text = ""
    schema: int = SCHEMA


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """A synchronizer process's shards, owned and wanted (`atoll.protocol.ownership`); `software` as in `Member`."""

    name: PeerId
    host: Text
    pid: Count
    wants: Shards
    owns: Shards
    leaving: bool = False
    moved: LinkTraffic = NOTHING
    software: Text = ""
    schema: int = SCHEMA


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """A question, or a hint: `drain` says that the run record is `closing`.

    The live holder of an id answers `identify`. Learners that could lend their state answer `lend`, and the chosen one
    answers `share` (`StateOffer`).
    """

    verb: Literal["drain", "identify", "lend", "share"]
    sender: Text = ""
    schema: int = SCHEMA


class StateOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A learner's inner-optimizer state for another one: only an offer without a blob, the state itself with one."""

    learner: PeerId
    incarnation: Incarnation
    run_nonce: PeerId
    steps: Steps
    tokens: Tokens
    run_tokens: RunTokens
    blob: BlobRef | None = None
    schema: int = SCHEMA


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the event log; `fields` depends on `kind` (docs/explanation/protocol.md). See `atoll.wire.events`."""

    kind: Word
    who: PeerId
    at_s: Moment
    fields: dict[str, msgspec.Raw]
    schema: int = SCHEMA


RECORDS: Final = (RunRecord, Head, Member, Lease, DataLedger)
"""The kinds of messages that are records."""


def encode(message: msgspec.Struct) -> bytes:
    """Return `message` as compact JSON; raise `ProtocolMisuse` for a record that `decode` does not take.

    A record that no process can read is worse than no record: everybody waits for it, and no restart helps.
    """
    data = msgspec.json.encode(message)
    if len(data) > DOCUMENT_BYTES_MAX:
        raise ProtocolMisuse(
            f"a {type(message).__name__} is too large to be read again",
            got=f"{len(data)} bytes",
            allowed=f"{DOCUMENT_BYTES_MAX} bytes",
            todo="nothing was written; please report this with the number of learners and shards of the run",
        )
    if isinstance(message, RECORDS):
        try:
            _decode_struct(type(message), data)
        except PeerMisbehaved as error:
            raise ProtocolMisuse(
                f"a {type(message).__name__} that no process could read",
                got=error.got,
                allowed=error.allowed,
                todo="nothing was written; please report this",
            ) from error
    return data


def decode(kind: type[M], data: bytes) -> M:
    """Return `data` as a `kind`; raise `PeerMisbehaved` for anything that is not exactly that. A signature is taken off.

    A record whose counters have too little room left is none either: nobody could write the next one.
    """
    message = _decode_struct(kind, data)
    if isinstance(message, RECORDS) and (fault := exhausted_counter(message)):
        raise PeerMisbehaved(f"a {kind.__name__} after which there is none", got=fault)
    return message


def _decode_struct(kind: type[M], data: bytes) -> M:
    data = without_signature(kind.__name__, data)
    if len(data) > DOCUMENT_BYTES_MAX:
        raise PeerMisbehaved(f"a {kind.__name__} is too large", got=f"{len(data)} bytes", allowed=DOCUMENT_BYTES_MAX)
    try:
        message = parsed(data, kind)
    except msgspec.MsgspecError as error:
        raise PeerMisbehaved(f"not a {kind.__name__}", got=fault_of(error)) from error
    check_spoken(kind.__name__, getattr(message, "schema", SCHEMA))
    if isinstance(message, RunRecord | DataLedger) and (fault := message.fault()):
        raise PeerMisbehaved(f"a {kind.__name__} that nobody of ours writes", got=fault)
    return message


def spoken_versions() -> str:
    """Return the versions of the runs that it can join, for people."""
    return f"{SCHEMA_NEWEST}" if SCHEMA_OLDEST == SCHEMA_NEWEST else f"{SCHEMA_OLDEST} to {SCHEMA_NEWEST}"


def oldest_of(kind: str) -> int:
    """Return the oldest version that it speaks of a kind of message."""
    return SCHEMA_OLDEST if kind == "RunRecord" else SCHEMA


def check_spoken(kind: str, schema: int) -> None:
    """Raise `PeerMisbehaved` if a message is of a version that this process does not speak."""
    oldest = oldest_of(kind)
    if not oldest <= schema <= SCHEMA_NEWEST:
        newer = schema > SCHEMA_NEWEST
        raise PeerMisbehaved(
            f"a {kind} of a wire version that this Atoll does not speak",
            got=schema,
            allowed=f"{oldest} to {SCHEMA_NEWEST}",
            todo="upgrade this process" if newer else "upgrade who wrote it, or found the run anew",
        )


def unproven(why: str) -> bytes:
    """Return what stands in place of a message that is not believed."""
    return _UNPROVEN + why.encode()


def is_unproven(data: bytes) -> bool:
    """Return whether this stands in place of a message that is not believed: nobody is known to have sent that."""
    return data.startswith(_UNPROVEN)


def without_signature(kind: str, data: bytes) -> bytes:
    """Return a message without its signature; raise `PeerMisbehaved` with the reason why it is not believed."""
    if is_unproven(data):
        why = data.removeprefix(_UNPROVEN).decode(errors="replace")
        raise PeerMisbehaved(f"a {kind} that is not believed", got=why)
    return data.rpartition(SIGNATURE)[0] if SIGNATURE in data else data


# Questions of a shard to a region, and their answers: the messages of pre-merge (`atoll.merge.partial`).
#
#     read   a manifest   ─►  its norm, or why it cannot be used      the region reads the chunks from its own broker
#     fold   keys, weights ─► where their sum is, and its lengths     the one vector that leaves the region
#     drop   keys                                                     they are settled: nobody will read them again (no answer)
#
# The first two are asked again until they are `done`: a region that is still at work says so after a second, so a slow one and
# a dead one look different. They give the same answer each time, and a region keeps nothing that it could not read again.
#
# A region with a leaf also has a keeper, which holds the chunks. Shards tell it in a word to `send` those of a stem to the hub,
# and it answers `+` and how many there are, or `SENDING` after a second; or to `drop` them.

CHUNKS_GONE: Final = "chunks_gone"
"""The reason of who does not find the chunks of a contribution where it looks."""
SENDING: Final = b"-sending"
NOTHING_KEPT: Final = b"+0"
KeeperVerb = Literal["send", "drop"]


class WeighedPush(msgspec.Struct, frozen=True, array_like=True):
    """One contribution of a sum, and its token weight (`atoll.protocol.round.token_weight`)."""

    learner: PeerId
    incarnation: Incarnation
    push: PushNumber
    weight: float


Pushes = Annotated[tuple[WeighedPush, ...], msgspec.Meta(max_length=LEARNERS_MAX)]
Lengths = Annotated[tuple[tuple[float, float, float], ...], msgspec.Meta(max_length=NORMS_MAX)]
Places = Annotated[tuple[Count, ...], msgspec.Meta(max_length=LEARNERS_MAX)]


class RegionAsk(msgspec.Struct, frozen=True, kw_only=True):
    """A shard's request: to `read` a manifest's contribution, to `fold` `pushes` of one fragment and base, or to `drop` some.

    `version` is the version that they are merged into, and `state` its outer state, where the run corrects by its momentum.
    Where the run derives its state from the values (`atoll.merge.outer.derivable`), the region follows the fragment itself.
    """

    verb: Literal["read", "fold", "drop"]
    run_nonce: PeerId
    manifest: Contribution | None = None
    fragment: FragmentNumber = 0
    base_version: Version = 0
    pushes: Pushes = ()
    state: BlobRef | None = None
    version: Version = 0
    schema: int = SCHEMA


class RegionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A region's answer; one that is not `done` is at work.

    A contribution that was read has a `norm`, or a `reason` why it cannot be used. A sum is the frame at `blob`, with the unit,
    mean length and share of directions of each slice (`atoll.merge.fold.SliceLength`). `missing` are the places of pushes that
    the region has not read, or has read too long ago.
    """

    done: bool
    reason: Word = ""
    norm: float = 0.0
    missing: Places = ()
    blob: BlobRef | None = None
    lengths: Lengths = ()
    schema: int = SCHEMA


def keeper_word(verb: KeeperVerb, stem: str) -> bytes:
    """Return what a shard tells a region's keeper of the chunks of a contribution."""
    return f"{verb} {stem}".encode()


def heard_by_keeper(word: bytes) -> tuple[KeeperVerb, str]:
    """Return the verb and the stem of a shard's word; raise `PeerMisbehaved` for anything else."""
    verb, _, stem = word.decode("ascii", "replace").partition(" ")
    for known in get_args(KeeperVerb):
        if verb == known:
            return known, stem
    raise PeerMisbehaved("no word for a keeper", got=word[:80], allowed="send STEM, or drop STEM")
