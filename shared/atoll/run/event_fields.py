"""The fields of each kind of event, as a reader of the event log takes them: an event lacks none of them, and may have more.

Every number, text and table here has a bound (`atoll.base.quantities`), for readers add up, print and draw what stands here.
A bound is never narrower than what the writer may honestly write. A shard writes down what learners claim in their manifests,
and what it works out from their heartbeats. If a bound here were narrower than theirs, a learner could make the event of a
whole round unreadable. So sums over a round are `Total`, and times that a shard works out are a `Figure`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

import msgspec

from atoll.base.errors import PeerMisbehaved
from atoll.base.parsing import fault_of, parsed
from atoll.base.quantities import (
    FRAGMENTS_MAX,
    LEARNERS_MAX,
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
from atoll.protocol.ledger import Ledger
from atoll.protocol.waits import RoundReasons
from atoll.wire.messages import Event, LearnerState, Shards
from atoll.wire.traffic import NOTHING, LinkTraffic

WORDS_MAX: Final = 256
"""How many reasons, or measured values, one event names."""
SUPERSEDED_MAX: Final = 0.2
"""A person is told if a larger share of what a learner trains is superseded. One whose intervals outlast its rounds stays well
below it."""
Amounts = Annotated[dict[Word, Count], msgspec.Meta(max_length=WORDS_MAX)]
Durations = Annotated[dict[Word, Figure], msgspec.Meta(max_length=WORDS_MAX)]
Values = Annotated[dict[Text, Figure], msgspec.Meta(max_length=WORDS_MAX)]
Versions = Annotated[dict[FragmentNumber, Version], msgspec.Meta(max_length=FRAGMENTS_MAX)]

F = TypeVar("F", bound=msgspec.Struct)


class Contributor(msgspec.Struct, frozen=True):
    """One contribution to a round, and what caused it. None and zeros stand for what a shard did not note.

    Attributes:
        shortened, unheard: where a run merges robustly, how many of its slices were shortened, or not heard.
        arrived_s: when its manifest arrived, in seconds after the round's first call; negative: before it.
        read_s: from its arrival until it was read and validated.
        loss: the learner's last known training loss when it sent it.
        bytes: the size of its frame; `inline`: its manifest carried it (`atoll.run.inline_frames`).
        adopted_at_s, step_s, upload_s, full_s: notes of its learner (`PushNotes`).
        staleness_weight: what it kept of its weight, 0..1.
        norm: its L2 norm as it came; `corrected_norm` after the correction of `corrected` of its slices.
        norm_max: the L2 norm that it was clipped to, if it was.
        aligned, aligned_with_others: its cosine with the merge, and with the other learners (`atoll.merge.alignment`).
    """

    learner: PeerId
    incarnation: Incarnation
    age: Count
    tokens: Tokens
    weight: Figure
    push: PushNumber = 0
    cause_id: Text = ""
    shortened: Count = 0
    unheard: Count = 0
    steps: Steps = 0
    arrived_s: Figure | None = None
    read_s: Figure | None = None
    loss: Figure | None = None
    bytes: SizeBytes = 0
    inline: bool = False
    adopted_at_s: Moment = 0.0
    step_s: Seconds = 0.0
    upload_s: Seconds = 0.0
    full_s: Seconds = 0.0
    staleness_weight: Figure | None = None
    norm: Figure | None = None
    corrected: Count = 0
    corrected_norm: Figure | None = None
    norm_max: Figure | None = None
    aligned: Figure | None = None
    aligned_with_others: Figure | None = None


class RoundView(msgspec.Struct, frozen=True):
    """The fields of a `round` event: one commit, what made its round end, and why that took as long as it did.

    `hindered` are the seconds that the commit waited because the broker was "full" or "away"; the broker was `away_s` of the
    time before it.
    """

    fragment: FragmentNumber
    version: Version
    contributors: Annotated[tuple[Contributor, ...], msgspec.Meta(max_length=LEARNERS_MAX)]
    tokens: Total = 0
    bytes_up: Total = 0
    bytes_down: Total = 0
    quorum_wait_s: Figure = 0.0
    grace_s: Figure = 0.0
    waited_s: Figure = 0.0
    merge_s: Figure = 0.0
    commit_s: Figure = 0.0
    end: Text = ""
    live: Count = 0
    run_tokens: RunTokens = 0
    parameters: Total = 0
    queued_s: Figure = 0.0
    cause_id: Text = ""
    why: RoundReasons | None = None
    hindered: Durations = msgspec.field(default_factory=dict)
    away_s: Figure = 0.0

    @property
    def took_s(self) -> float:
        """Return the seconds from its call until its head was visible."""
        return self.waited_s + self.queued_s + self.merge_s + self.commit_s


class WaitingEvent(msgspec.Struct, frozen=True):
    """The fields of a `waiting` event: a round that is to make `version` was called again `waited_s` after its call; why."""

    fragment: FragmentNumber
    version: Version
    why: Description
    cause_id: Text = ""
    waited_s: Figure = 0.0


class JoinedEvent(msgspec.Struct, frozen=True):
    """The fields of a `joined` event: an incarnation of a learner trains from now on.

    `took_s` is how long joining took, `start_s` how long its program had been starting before, where it tells that.
    """

    incarnation: Incarnation
    founder: bool = False
    versions_max: Version = 0
    took_s: Figure = 0.0
    start_s: Figure = 0.0

    @property
    def began_before_s(self) -> float:
        """Return how long before this event its learner began to start, in seconds."""
        return self.took_s + self.start_s


class RecoveredEvent(msgspec.Struct, frozen=True):
    """The fields of a `recovered` event: where an incarnation's optimizer state came from (`checkpoint`, `peer`, `fresh`)."""

    source: Text
    incarnation: Incarnation


class LeftEvent(msgspec.Struct, frozen=True):
    """The fields of a `left` event: a learner has left with everything durable, and what it had trained."""

    incarnation: Incarnation
    tokens: Tokens
    steps: Steps


class RefusedContribution(msgspec.Struct, frozen=True):
    """One contribution that was refused; push 0: the event does not say which.

    `norm` is the length (L2) of one that was refused for its length, and `norm_max` what was allowed; 0: it was not measured.
    """

    reason: Word
    learner: PeerId = ""
    incarnation: Incarnation = 0
    fragment: FragmentNumber = 0
    push: PushNumber = 0
    cause_id: Text = ""
    base_version: Version | None = None
    upload_s: Seconds = 0.0
    norm: Figure = 0.0
    norm_max: Figure = 0.0


class RefusedEvent(msgspec.Struct, frozen=True):
    """The fields of a `refused` event: contributions that were refused at about one time."""

    refusals: tuple[RefusedContribution, ...]


class ServingEvent(msgspec.Struct, frozen=True):
    """The fields of a `serving` event: a process has become the owner of a shard, whose fragments had these versions."""

    epoch: Epoch
    versions: Versions
    took_s: Figure = 0.0
    host: Text = ""
    pid: Count = 0


class JunkEvent(msgspec.Struct, frozen=True):
    """The fields of a `junk` event: what a shard dropped since the last one, by reason."""

    reasons: Amounts


class FilledEvent(msgspec.Struct, frozen=True):
    """The fields of a `filled` event: on whose subjects more than a share was stored, and how many messages were removed.

    Nobody signs chunks: it may have stored them itself, or the broker of a region.
    """

    subjects_of: PeerId
    removed: Count


class QuarantineEvent(msgspec.Struct, frozen=True):
    """The fields of a `quarantined` event: the isolated learner, its number of offences, and the last offence."""

    learner: PeerId
    incarnation: Incarnation
    offences: Count
    reason: Text


class ClosedEvent(msgspec.Struct, frozen=True):
    """The fields of a `ledger` event: a shard's closing ledger; a large one comes in parts."""

    ledger: Ledger
    part: Count = 0
    commits: Count = 0
    reason: Text = ""


class SampleEvent(msgspec.Struct, frozen=True):
    """The fields of a `sample` event: what a curve needs of a learner's heartbeat (`Beat` in `atoll.wire.messages`).

    `superseded` counts token-fragments.
    """

    incarnation: Incarnation
    step: Steps
    tokens: Tokens
    state: LearnerState = "training"
    step_s: Seconds = 0.0
    tokens_per_s: Figure = 0.0
    loss: Figure | None = None
    overhead: Figure = 0.0
    lag_versions: Count = 0
    superseded: TokenFragments = 0
    moved: LinkTraffic = NOTHING


class ReportedTotals(msgspec.Struct, frozen=True):
    """The fields of a `moved` event: the traffic of a learner's incarnation."""

    role: Literal["learner"]
    moved: LinkTraffic
    incarnation: Incarnation = 0


class HostedEvent(msgspec.Struct, frozen=True):
    """The fields of a `hosted` event: the traffic of a synchronizer process that has served `shards`.

    It is also the sample of its presence: the shards that it owns and wants at that moment.
    """

    moved: LinkTraffic
    shards: Shards = ()
    owns: Shards = ()
    wants: Shards = ()


class ValidationEvent(msgspec.Struct, frozen=True):
    """The fields of a `validation` event: bits per byte of the merged model (`average`: of the averaged values).

    `run_tokens` and `token_fragments_merged` are those of the model when it was read: to measure it may take long.
    """

    run_tokens: RunTokens
    bits_per_byte: Figure
    versions_min: Version = 0
    versions_max: Version = 0
    average: Figure | None = None
    token_fragments_merged: TokenFragments | None = None


class EvaluatedEvent(msgspec.Struct, frozen=True):
    """The fields of an `evaluated` event: what a function of a person's own measured, of the averaged values, too."""

    run_tokens: RunTokens
    values: Values
    average: Values | None = None
    versions_min: Version = 0
    versions_max: Version = 0


EVENT_FIELDS: Final[dict[str, type[msgspec.Struct]]] = {
    "round": RoundView,
    "waiting": WaitingEvent,
    "refused": RefusedEvent,
    "junk": JunkEvent,
    "filled": FilledEvent,
    "quarantined": QuarantineEvent,
    "serving": ServingEvent,
    "joined": JoinedEvent,
    "recovered": RecoveredEvent,
    "left": LeftEvent,
    "moved": ReportedTotals,
    "hosted": HostedEvent,
    "sample": SampleEvent,
    "validation": ValidationEvent,
    "evaluated": EvaluatedEvent,
    "ledger": ClosedEvent,
}
"""The fields of every kind of event that a process of ours writes."""


def fields_of(event: Event, kind: type[F]) -> F:
    """Return the fields of `event` as `kind`; raise `PeerMisbehaved` if they are not."""
    try:
        return parsed(msgspec.json.encode(event.fields), kind)
    except msgspec.MsgspecError as error:
        raise PeerMisbehaved(f"not the fields of a {event.kind}", got=fault_of(error)) from error
