"""Events of the event log: one struct for each kind, which its writer fills and every reader takes, and who may write it.

A struct here is the whole declaration of an event: views, stories, metrics, taps, their schemas and the rights of identities
follow from it. An event lacks none of its fields and may have more. Every number, text and table has a bound, which is never
narrower than what the writer may honestly write: a shard writes down what learners claim, so a narrower bound would let a
learner make the event of a whole round unreadable. Sums over a round are `Total`, and times that a shard works out a `Figure`.

The event log is not signed (`atoll.bus.signed`). The subject of an event, `ev.<kind>.<who>`, is what a locked broker vouches
for, and its body is a claim. A reader takes an event through `event_of`, and only there:

* The body names the kind and the writer of its subject. If it names others, it is a forgery.
* A kind has few writers, and names tell most of them apart: `shard-<number>`, `evaluator`, everybody else.
* Its time is a claim as well, so the broker's clock, which dates every message that it stores, bounds it.

A kind that is not declared here is of a later release: it passes, and its reader skips it.

Known limitation: no name tells a learner from a synchronizer process, so where the broker is open a learner may write the
`hosted` of one. Readers refuse that of a known learner (`atoll.run.history`); a locked broker refuses that of every learner.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, TypeVar

import msgspec

from atoll.base.errors import PeerMisbehaved
from atoll.base.parsing import fault_of, parsed
from atoll.base.quantities import (
    FRAGMENTS_MAX,
    LEARNERS_MAX,
    NAME_CHARS_MAX,
    Count,
    Description,
    Epoch,
    Figure,
    FragmentNumber,
    Incarnation,
    Moment,
    PeerId,
    PushNumber,
    RunTokens,
    Seconds,
    SizeBytes,
    Steps,
    Text,
    TokenFragments,
    Tokens,
    Total,
    Version,
    Word,
)
from atoll.protocol.events import EventPart, RoundReasons, if_absent
from atoll.protocol.ledger import Ledger
from atoll.wire.messages import Beat, Event, LearnerState, Shards, decode
from atoll.wire.traffic import NOTHING, LinkTraffic

EventWriter = Literal["learner", "shard", "synchronizer", "evaluator"]
SHOWN_CHARS_MAX: Final = 120
REMEMBERED: Final = 16
SUBJECTS_MAX: Final = 4096
STORING_S_MAX: Final = 5.0
"""An event is stored within this time; one that waited for its broker longer is dated by when that came back."""
EVALUATOR: Final = "evaluator"
"""The name under which every evaluator writes."""
SUPERSEDED_MAX: Final = 0.2
"""A person is told if a larger share of what a learner trains is superseded. One whose intervals outlast its rounds stays well
below it."""
WORDS_MAX: Final = 256
"""How many reasons, or measured values, one event names."""
NOT_NOTED: Final = 0.0
"""What stands for a time that a learner did not note. It is the default of such a field itself, so it is not written."""

Amounts = Annotated[dict[Word, Count], msgspec.Meta(max_length=WORDS_MAX)]
Senders = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)], Count], msgspec.Meta(max_length=WORDS_MAX)
]
Durations = Annotated[dict[Word, Figure], msgspec.Meta(max_length=WORDS_MAX)]
Values = Annotated[dict[Text, Figure], msgspec.Meta(max_length=WORDS_MAX)]
Versions = Annotated[dict[FragmentNumber, Version], msgspec.Meta(max_length=FRAGMENTS_MAX)]

F = TypeVar("F", bound="EventFields")


class EventFields(EventPart, frozen=True, kw_only=True):
    """The fields of one kind of event."""

    kind: ClassVar[str]
    writer: ClassVar[EventWriter]


class Contributor(EventPart, frozen=True, kw_only=True, omit_defaults=True):
    """One contribution to a round, and what caused it. None and zeros stand for what a shard did not note.

    Attributes:
        shortened, unheard: where a run merges robustly, how many of its slices were shortened, or not heard.
        arrived_s: when its manifest arrived, in seconds after the round's first call; negative: before it.
        read_s: from its arrival until it was read and validated.
        loss: the learner's last known training loss when it sent it.
        bytes: the size of its frame; `inline`: its manifest carried it (`atoll.run.delta_chain`).
        adopted_at_s, step_s, upload_s, full_s: notes of its learner (`PushNotes`).
        staleness_weight: what it kept of its weight, 0..1.
        norm: its L2 norm as it came; `corrected_norm` after the correction of `corrected` of its slices.
        norm_max: the L2 norm that it was clipped to, if it was.
        aligned, aligned_with_others: its cosine with the merge, and with the other learners (`atoll.merge.robust`).
    """

    learner: PeerId
    incarnation: Incarnation
    push: PushNumber = if_absent(0)
    age: Count
    tokens: Tokens
    weight: Figure
    cause_id: Text = if_absent("")
    norm: Figure | None = if_absent(None)
    norm_max: Figure | None = if_absent(None)
    steps: Steps = if_absent(0)
    arrived_s: Figure | None = if_absent(None)
    read_s: Figure | None = if_absent(None)
    loss: Figure | None = if_absent(None)
    bytes: SizeBytes = if_absent(0)
    inline: bool = if_absent(False)
    adopted_at_s: Moment = if_absent(NOT_NOTED)
    step_s: Seconds = if_absent(NOT_NOTED)
    upload_s: Seconds = if_absent(NOT_NOTED)
    full_s: Seconds = if_absent(NOT_NOTED)
    staleness_weight: Figure | None = if_absent(None)
    aligned: Figure | None = if_absent(None)
    aligned_with_others: Figure | None = if_absent(None)
    corrected: Count = if_absent(0)
    corrected_norm: Figure | None = if_absent(None)
    shortened: Count = if_absent(0)
    unheard: Count = if_absent(0)


class RoundPhases(NamedTuple):
    """Lengths of the phases of a round, in their order, in seconds.

    called ──quorum_wait──► quorum ──grace──► decided ──queued──► merging ──merge──► merged ──commit──► visible
    """

    quorum_wait_s: float
    grace_s: float
    queued_s: float
    merge_s: float
    commit_s: float


class RoundEvent(EventFields, frozen=True, kw_only=True):
    """The fields of a `round` event: one commit, what made its round end, and why that took as long as it did.

    `hindered` are the seconds that the commit waited because the broker was "full" or "away"; the broker was `away_s` of the
    time before it.
    """

    kind = "round"
    writer = "shard"
    fragment: FragmentNumber
    version: Version
    contributors: Annotated[tuple[Contributor, ...], msgspec.Meta(max_length=LEARNERS_MAX)]
    tokens: Total = if_absent(0)
    bytes_up: Total = if_absent(0)
    bytes_down: Total = if_absent(0)
    quorum_wait_s: Figure = if_absent(0.0)
    grace_s: Figure = if_absent(0.0)
    waited_s: Figure = if_absent(0.0)
    queued_s: Figure = if_absent(0.0)
    merge_s: Figure = if_absent(0.0)
    commit_s: Figure = if_absent(0.0)
    away_s: Figure = if_absent(0.0)
    hindered: Durations = if_absent({})
    end: Text = if_absent("")
    live: Count = if_absent(0)
    parameters: Total = if_absent(0)
    cause_id: Text = if_absent("")
    why: RoundReasons | None = if_absent(None)
    run_tokens: RunTokens = if_absent(0)

    @property
    def took_s(self) -> float:
        """Return the seconds from its call until its head was visible."""
        return self.waited_s + self.queued_s + self.merge_s + self.commit_s

    @property
    def met_quorum(self) -> bool:
        """Return whether the round met its quorum, which is taken for granted where nothing tells why it ended."""
        return self.why is None or bool(self.why.met_by)

    @property
    def phases(self) -> RoundPhases:
        """Return how long each phase took; a round that never met its quorum waited for nothing else until its end.

        Its `quorum_wait_s` is 0, for there was no such moment.
        """
        waited_s = max(0.0, self.waited_s)
        quorum_wait_s = min(max(0.0, self.quorum_wait_s), waited_s) if self.met_quorum else waited_s
        return RoundPhases(
            quorum_wait_s,
            waited_s - quorum_wait_s,
            max(0.0, self.queued_s),
            max(0.0, self.merge_s),
            max(0.0, self.commit_s),
        )


class WaitingEvent(EventFields, frozen=True, kw_only=True):
    """The fields of a `waiting` event: a round that is to make `version` was called again `waited_s` after its call; why."""

    kind = "waiting"
    writer = "shard"
    fragment: FragmentNumber
    version: Version
    why: Description
    waited_s: Figure = if_absent(0.0)
    cause_id: Text = if_absent("")


class JoinedEvent(EventFields, frozen=True, kw_only=True):
    """The fields of a `joined` event: an incarnation trains; joining took `took_s`, starting before it `start_s`."""

    kind = "joined"
    writer = "learner"
    incarnation: Incarnation
    host: Text = if_absent("")
    pid: Count = if_absent(0)
    founder: bool = if_absent(False)
    versions_max: Version = if_absent(0)
    took_s: Figure = if_absent(0.0)
    start_s: Figure = if_absent(0.0)

    @property
    def began_before_s(self) -> float:
        """Return how long before this event its learner began to start, in seconds."""
        return self.took_s + self.start_s


class RecoveredEvent(EventFields, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a `recovered` event: where an incarnation's optimizer state came from (`checkpoint`, `peer`, `fresh`).

    `former` is the incarnation that wrote the checkpoint, `peer` the learner that lent the state, which was `age_tokens` old.
    """

    kind = "recovered"
    writer = "learner"
    source: Text
    incarnation: Incarnation
    former: Incarnation | None = if_absent(None)
    peer: PeerId | None = if_absent(None)
    steps: Steps | None = if_absent(None)
    age_tokens: RunTokens | None = if_absent(None)
    bytes: SizeBytes | None = if_absent(None)
    took_s: Seconds | None = if_absent(None)


class LeftEvent(EventFields, frozen=True, kw_only=True):
    """The fields of a `left` event: a learner has left with everything durable, and what it had trained."""

    kind = "left"
    writer = "learner"
    incarnation: Incarnation
    tokens: Tokens
    steps: Steps


class RefusedContribution(EventPart, frozen=True, kw_only=True, omit_defaults=True):
    """One contribution that was refused; `norm` and `norm_max` are its length (L2) and the one allowed, 0 if not measured."""

    learner: PeerId
    incarnation: Incarnation
    fragment: FragmentNumber
    push: PushNumber
    reason: Word
    cause_id: Text = if_absent("")
    base_version: Version | None = if_absent(None)
    upload_s: Seconds = if_absent(NOT_NOTED)
    norm: Figure = if_absent(NOT_NOTED)
    norm_max: Figure = if_absent(NOT_NOTED)


class RefusedEvent(EventFields, frozen=True, kw_only=True):
    """The fields of a `refused` event: contributions that were refused at about one time."""

    kind = "refused"
    writer = "shard"
    refusals: tuple[RefusedContribution, ...]


class ServingEvent(EventFields, frozen=True, kw_only=True):
    """The fields of a `serving` event: a process has become the owner of a shard, whose fragments had these versions."""

    kind = "serving"
    writer = "shard"
    epoch: Epoch
    versions: Versions
    took_s: Figure = if_absent(0.0)
    host: Text = if_absent("")
    pid: Count = if_absent(0)


class JunkEvent(EventFields, frozen=True, kw_only=True):
    """The fields of a `junk` event: what a shard dropped since the last one, by reason and, as far as told, by sender.

    Where messages are signed, one that nobody signed is only known to have come on the subjects of a learner.
    """

    kind = "junk"
    writer = "shard"
    messages: Count = if_absent(0)
    reasons: Amounts
    senders: Senders = if_absent({})
    unsigned_on_subjects_of: Senders = if_absent({})


class FilledEvent(EventFields, frozen=True, kw_only=True):
    """The fields of a `filled` event: on whose subjects more than a share was stored, by whomever, and how much was removed."""

    kind = "filled"
    writer = "shard"
    subjects_of: PeerId
    removed: Count


class QuarantinedEvent(EventFields, frozen=True, kw_only=True):
    """The fields of a `quarantined` event: the isolated learner, its number of offences, and the last offence."""

    kind = "quarantined"
    writer = "shard"
    learner: PeerId
    incarnation: Incarnation
    offences: Count
    reason: Text


class LedgerEvent(EventFields, frozen=True, kw_only=True):
    """The fields of a `ledger` event: a shard's closing ledger; a large one comes in parts."""

    kind = "ledger"
    writer = "shard"
    ledger: Ledger
    part: Count = if_absent(0)
    reason: Text = if_absent("")
    commits: Count = if_absent(0)


class SampleEvent(EventFields, frozen=True, kw_only=True):
    """The fields of a `sample` event: what a curve needs of a learner's heartbeat (`Beat` in `atoll.wire.messages`)."""

    kind = "sample"
    writer = "learner"
    incarnation: Incarnation
    state: LearnerState = if_absent("training")
    step: Steps
    step_s: Seconds = if_absent(0.0)
    tokens: Tokens
    tokens_per_s: Figure = if_absent(0.0)
    loss: Figure | None = if_absent(None)
    overhead: Figure = if_absent(0.0)
    lag_versions: Count = if_absent(0)
    superseded: TokenFragments = if_absent(0)
    moved: LinkTraffic = if_absent(NOTHING)


class MovedEvent(EventFields, frozen=True, kw_only=True):
    """The fields of a `moved` event: the traffic of a learner's incarnation."""

    kind = "moved"
    writer = "learner"
    role: Literal["learner"]
    incarnation: Incarnation = if_absent(0)
    moved: LinkTraffic


class HostedEvent(EventFields, frozen=True, kw_only=True):
    """The fields of a `hosted` event: the traffic of a synchronizer process that has served `shards`, and its presence now."""

    kind = "hosted"
    writer = "synchronizer"
    shards: Shards = if_absent(())
    moved: LinkTraffic
    owns: Shards = if_absent(())
    wants: Shards = if_absent(())


class ValidationEvent(EventFields, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a `validation` event: bits per byte of the merged model (`average`: of the averaged values).

    `run_tokens` and `token_fragments_merged` are those of the model when it was read: to measure it may take long (`took_s`).
    """

    kind = "validation"
    writer = "evaluator"
    run_tokens: RunTokens
    bits_per_byte: Figure
    average: Figure | None = if_absent(None)
    versions_min: Version | None = if_absent(None)
    versions_max: Version | None = if_absent(None)
    token_fragments_merged: TokenFragments | None = if_absent(None)
    took_s: Figure | None = if_absent(None)


class EvaluatedEvent(EventFields, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of an `evaluated` event: what a function of a person's own measured, of the averaged values, too."""

    kind = "evaluated"
    writer = "evaluator"
    run_tokens: RunTokens
    values: Values
    average: Values | None = if_absent(None)
    versions_min: Version | None = if_absent(None)
    versions_max: Version | None = if_absent(None)
    took_s: Figure | None = if_absent(None)


EVENTS: Final[dict[str, type[EventFields]]] = {
    fields.kind: fields
    for fields in (
        RoundEvent,
        WaitingEvent,
        RefusedEvent,
        JunkEvent,
        FilledEvent,
        QuarantinedEvent,
        ServingEvent,
        JoinedEvent,
        RecoveredEvent,
        LeftEvent,
        MovedEvent,
        HostedEvent,
        SampleEvent,
        ValidationEvent,
        EvaluatedEvent,
        LedgerEvent,
    )
}
"""Every kind of event that a process of ours writes."""

_SHARD_NAME: Final = re.compile(r"shard-(0|[1-9][0-9]{0,3})")


def kinds_of(writer: EventWriter) -> tuple[str, ...]:
    """Return the kinds of event that such a process writes."""
    return tuple(kind for kind, fields in EVENTS.items() if fields.writer == writer)


def writers_named(name: str) -> frozenset[EventWriter]:
    """Return which processes write under a name; nobody has the name of a shard that no run can have."""
    if name.startswith("shard-"):
        numbered = _SHARD_NAME.fullmatch(name)
        return frozenset({"shard"} if numbered is not None and int(numbered[1]) < FRAGMENTS_MAX else ())
    return frozenset({"evaluator"} if name == EVALUATOR else {"learner", "synchronizer"})


def event_of(subject: str, data: bytes, stored_s: float | None = None) -> Event:
    """Return the event in `data`, stored or heard on `subject`, also that of a tap; raise `PeerMisbehaved` for a forgery.

    Its `at_s` is what `stored_s` bears out, the broker's time of storage: not after it, and at most `STORING_S_MAX` before.
    """
    log, kind, who = ["", "", "", *subject.split(".")][-3:]
    if log != "ev":
        raise PeerMisbehaved("an event that is not in the event log", got=subject, allowed="ev.<kind>.<who>")
    event = decode(Event, data)
    if (event.kind, event.who) != (kind, who):
        raise PeerMisbehaved(
            "an event in the name of another", got=f"{event.kind} of {event.who}", allowed=f"{kind} of {who}"
        )
    fields = EVENTS.get(kind)
    if fields is not None and fields.writer not in writers_named(who):
        allowed = f"{'the' if fields.writer == 'evaluator' else 'a'} {fields.writer}"
        raise PeerMisbehaved("an event that its writer does not write", got=f"{kind} of {who}", allowed=allowed)
    if stored_s is None:
        return event
    return msgspec.structs.replace(event, at_s=min(stored_s, max(event.at_s, stored_s - STORING_S_MAX)))


class Repeats:
    """Recent events of a reader, so that it takes an event once although it was stored twice.

    A writer that heard no answer stores its event again, with the same bytes, and no broker remembers ids for long.
    """

    def __init__(self) -> None:
        self._newest: dict[str, deque[bytes]] = {}

    def repeats(self, subject: str, data: bytes) -> bool:
        """Return whether the same was read on this subject among its last `REMEMBERED` events, and remember it."""
        newest = self._newest.pop(subject, None) or deque(maxlen=REMEMBERED)
        while len(self._newest) >= SUBJECTS_MAX:
            del self._newest[next(iter(self._newest))]
        self._newest[subject] = newest
        digest = hashlib.blake2b(data, digest_size=8).digest()
        if digest in newest:
            return True
        newest.append(digest)
        return False


def event_info(fields: EventFields) -> dict[str, str | int | float | bool]:
    """Return what taps show of an event: its kind, its numbers and short texts, and of lists how long they are."""
    written = msgspec.structs.asdict(fields)
    counted = {name: len(value) if isinstance(value, list | tuple) else value for name, value in written.items()}
    shown = {name: value for name, value in counted.items() if isinstance(value, int | float | str)}
    return {"kind": fields.kind, **{name: value for name, value in shown.items() if len(str(value)) <= SHOWN_CHARS_MAX}}


def log_entry(fields: EventFields, who: str, at_s: float) -> Event:
    """Return the line of the event log that `who` writes at `at_s` (seconds since the epoch)."""
    written = parsed(msgspec.json.encode(fields), dict[str, msgspec.Raw])
    return Event(kind=fields.kind, who=who, at_s=at_s, fields=written)


def sample_of(beat: Beat) -> SampleEvent:
    """Return a heartbeat as the event log has it; floats keep as many digits as a curve shows."""
    return SampleEvent(
        incarnation=beat.incarnation,
        state=beat.state,
        step=beat.step,
        step_s=round(beat.step_s, 6),
        tokens=beat.tokens,
        tokens_per_s=round(beat.tokens_per_s, 3),
        loss=None if beat.loss is None else round(beat.loss, 6),
        overhead=round(beat.overhead, 6),
        lag_versions=beat.lag_versions,
        superseded=beat.superseded,
        moved=beat.moved,
    )


def fields_of(event: Event, kind: type[F]) -> F:
    """Return the fields of `event` as `kind`; raise `PeerMisbehaved` if they are not."""
    try:
        return parsed(msgspec.json.encode(event.fields), kind)
    except msgspec.MsgspecError as error:
        raise PeerMisbehaved(f"not the fields of a {event.kind}", got=fault_of(error)) from error
