"""Facts, in the past tense, go into the machines; commands, imperatives whose order a driver keeps, come out: no tensors.

Every message and every command names its cause (`cause_id`) by an id, so what is visible can be traced back:

    due/3 ──► call/3/17/1 ──► push/a/1/3/5 ──► commit/3/18 ──► head/3/18 ──► adopted by each learner

`due/<fragment>` and `grace/<fragment>` are timers, `call/<fragment>/<version>/<attempt>` asks for a fragment on a version,
`push/<learner>/<incarnation>/<fragment>/<push>` is a contribution, `commit/<fragment>/<version>` and
`head/<fragment>/<version>` make a version. `beat/<learner>/<incarnation>` is a heartbeat and `bye/<learner>/<incarnation>` a
farewell; `queue` is a look at a shard's queue, and `drain` the order to finish.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal, NamedTuple, TypeVar, dataclass_transform

import msgspec

from atoll.base.quantities import Count, Figure, PeerId, Text, Version

T = TypeVar("T")


class PushKey(NamedTuple):
    """The identity of a contribution, unique for ever."""

    learner: str
    incarnation: int
    fragment: int
    push: int


def id_of(kind: Literal["call", "push", "commit", "head", "beat", "bye"], *parts: str | int) -> str:
    """Return the id of what has parts; the list of ids above names those of each kind."""
    return "/".join([kind, *map(str, parts)])


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened at `at_s` (monotonic, seconds); `cause_id` is for log lines (`id_of`)."""

    at_s: float
    cause_id: str = ""


# --- facts for a shard -------------------------------------------------------------------------------------------


class LearnerBeat(Fact, frozen=True, kw_only=True):
    """A learner reported: step time (seconds), steps, totals in tokens and token-fragments."""

    learner: str
    incarnation: int
    training: bool
    step_s: float
    tokens: int
    pushed: int = 0
    superseded: int = 0
    refused_local: int = 0
    steps: int = 0


class LearnerLeft(Fact, frozen=True, kw_only=True):
    """A learner said goodbye after its last push."""

    learner: str
    incarnation: int


class ContributionArrived(Fact, frozen=True, kw_only=True):
    """A manifest was delivered to us; its chunks are not read yet. One is `absurd` that claims more than time allows."""

    key: PushKey
    base_version: int
    tokens: int
    steps: int
    trained_tokens: int
    final: bool = False
    absurd: bool = False


class ContributionReady(Fact, frozen=True, kw_only=True):
    """It is decoded, finite, within bounds, perhaps as part of a sum (`atoll.merge.partial`): all `others` in it are, too.

    `norm` is its L2 norm (0: not measured), `base_norm` the global fragment's. A sum's are of one base, final all or none.
    """

    key: PushKey
    norm: float = 0.0
    base_norm: float = 0.0
    others: tuple[tuple[PushKey, float], ...] = ()


class ContributionSpoiled(Fact, frozen=True, kw_only=True):
    """Its pseudo-gradient cannot be used, for `reason`."""

    key: PushKey
    reason: str


class TimerFired(Fact, frozen=True, kw_only=True):
    """A timer that was armed under `name` came due."""

    name: str


class Committed(Fact, frozen=True, kw_only=True):
    """Version `version` of `fragment` is durable and visible."""

    fragment: int
    version: int


class Kept(Fact, frozen=True, kw_only=True):
    """The ledger of `fragment` that `Keep` asked for is durable."""

    fragment: int


class CommitRefused(Fact, frozen=True, kw_only=True):
    """Another process wrote the head: this shard is not the owner any more."""

    fragment: int
    reason: str


class QueueDrained(Fact, frozen=True, kw_only=True):
    """The broker answered for the queue. `proven`: nothing is queued or unsettled. By all leases the run has `run_tokens`.

    `turns`: how often all that was queued at one moment has been settled since (`Consumer.turns`).
    """

    proven: bool = True
    run_tokens: int = 0
    turns: int = 0


class DrainOrdered(Fact, frozen=True, kw_only=True):
    """The process was told to finish: merge what is there, then stop."""


# --- facts for an island -----------------------------------------------------------------------------------------


class StepDone(Fact, frozen=True, kw_only=True):
    """An inner step over `tokens` tokens ended; its parameters are the new snapshot."""

    tokens: int


class CallHeard(Fact, frozen=True, kw_only=True):
    """A shard asks for `fragment` on base `version`."""

    fragment: int
    version: int
    attempt: int


class HeadHeard(Fact, frozen=True, kw_only=True):
    """Version `version` of `fragment` is visible: a message says so, or, `proven`, a record that we read."""

    fragment: int
    version: int
    proven: bool = False


class FragmentFetched(Fact, frozen=True, kw_only=True):
    """The frame of that version is in host memory and waits for the next step boundary."""

    fragment: int
    version: int


class NothingNewer(Fact, frozen=True, kw_only=True):
    """By its record, the newest version of `fragment` is the one that we hold or wait to adopt."""

    fragment: int


class FetchFailed(Fact, frozen=True, kw_only=True):
    """The frame could not be read (it was superseded, or the broker is away)."""

    fragment: int
    version: int
    reason: str


class Adopted(Fact, frozen=True, kw_only=True):
    """A learner adopted `version`; `overwritten`: it kept nothing. A `Push` in answer is on the old anchor."""

    fragment: int
    version: int
    overwritten: bool = False


class SnapshotKept(Fact, frozen=True, kw_only=True):
    """The snapshot of a push that said `keep` is in host memory: progress can be carried on from it."""

    fragment: int
    push: int


class PushSettled(Fact, frozen=True, kw_only=True):
    """A push is durable (`reason` empty), or was given up before it was sent, for `reason`."""

    fragment: int
    push: int
    reason: str = ""


class PushRefused(Fact, frozen=True, kw_only=True):
    """The shard refused a push of ours, for `reason`."""

    fragment: int
    push: int
    reason: str


# --- why a round waited ------------------------------------------------------------------------------------------

# The shard notes why a round waits, at each of the four places where it can. The note travels with the commit (`Commit.why`)
# into the log line of the round, into its event, and from there to `atoll why`; `atoll.run.decisions` has the sentences:
#
#     version v visible ──rests──► called ──waits──► quorum of K met ──grace──► end ──► merged, stored, v + 1 visible
#                         │                  │                          │
#                   `opened`, `late_s`   `unanswered`, `met_by`    `grace`, `missing`

NAMED_MAX: Final = 12

Opened = Literal["first", "due", "last_push", "never"]


class Names(msgspec.Struct, frozen=True, omit_defaults=True):
    """Some learners: the first `NAMED_MAX` of them by name, and how many there are."""

    names: Annotated[tuple[PeerId, ...], msgspec.Meta(max_length=NAMED_MAX)] = ()
    count: Count = 0

    @classmethod
    def of(cls, learners: Iterable[str]) -> Names:
        """Return these learners, bounded, because a round of thousands is written down as well."""
        ordered = sorted(learners)
        return cls(tuple(ordered[:NAMED_MAX]), len(ordered)) if ordered else NOBODY


def if_absent(value: T) -> T:
    """Declare what a reader takes for a field that an event lacks. A writer fills it all the same, and mypy says where not."""
    found: T = msgspec.field(default=value)
    return found


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field, if_absent))
class EventPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an event; a type checker demands every field of it of a writer."""


class Opening(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a round came to be called.

    Attributes:
        opened: "first": its first beat came; "due": its beat came; "last_push": the last push of a learner that leaves opened
            it; "never": it was not called.
        rested_s: from the moment its version was visible here, or the shard began, to the first call.
        late_s: how long after its beat it was called.
        behind_commit: whether its version was visible only after the beat.
        interval_steps, step_s: the interval is H steps of this length.
        cause_id: what caused the first call.
    """

    opened: Opened = "never"
    rested_s: Figure = 0.0
    late_s: Figure = 0.0
    behind_commit: bool = False
    interval_steps: Count = 0
    step_s: Figure = 0.0
    cause_id: Text = ""


NOBODY: Final = Names()
NEVER_CALLED: Final = Opening()


class GraceWindow(msgspec.Struct, frozen=True):
    """The time that a round may wait after its quorum, and the terms of Eq. 3 that say so, all in seconds.

    `bound` names the term that decided: "none" (no slack is left), "slack" (gamma times the slack) or "cap".
    """

    granted_s: Figure
    bound: Literal["none", "slack", "cap"]
    step_s: Figure
    quorum_s: Figure
    sync_s: Figure
    overlap_s: Figure
    slack_s: Figure
    cap_s: Figure


class RoundNeeds(msgspec.Struct, frozen=True):
    """The need of a round that is called again: `contributed` of `quorum` are there, and of `live` some are `unanswered`."""

    quorum: int
    contributed: int
    unanswered: Names
    live: int


class RoundReasons(EventPart, frozen=True, kw_only=True, omit_defaults=True):
    """Why one round took as long as it did.

    Attributes:
        version: the version that it began with; it made the next one.
        opening: how it came to be called.
        calls: how often it was called.
        quorum: K, how many learners had to contribute.
        quorum_wait_s: from the first call to the quorum.
        unanswered: live learners that had not answered when it was called again for the last time.
        met_by: the id of the contribution that met the quorum; empty when it was never met.
        grace: the window that Eq. 3 granted, with its terms; None without a quorum.
        grace_waited_s: how long it really waited after the quorum.
        end: why it ended ("all answered", "grace over", "nobody left").
        missing: live learners that had not answered at the end.
        reading: contributions that had arrived and were still being read then.
        together: whether it waited without a bound, because the run ends together.
    """

    version: Version
    opening: Opening = if_absent(NEVER_CALLED)
    calls: Count = if_absent(0)
    quorum: Count = if_absent(1)
    quorum_wait_s: Figure = if_absent(0.0)
    unanswered: Names = if_absent(NOBODY)
    met_by: Text = if_absent("")
    grace: GraceWindow | None = if_absent(None)
    grace_waited_s: Figure = if_absent(0.0)
    end: Text = if_absent("")
    missing: Names = if_absent(NOBODY)
    reading: Count = if_absent(0)
    together: bool = if_absent(False)


# --- commands of a shard -----------------------------------------------------------------------------------------


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Something to do."""

    cause_id: str = ""


class ArmTimer(Command, frozen=True, kw_only=True):
    """Tell me `TimerFired(name)` at `due_s`; arming the same name again moves it."""

    name: str
    due_s: float


class PublishCall(Command, frozen=True, kw_only=True):
    """Ask all learners for `fragment` on base `version`; from the second attempt on the round `needs` something."""

    fragment: int
    version: int
    attempt: int
    run_tokens: int
    needs: RoundNeeds | None = None


class Fetch(Command, frozen=True, kw_only=True):
    """Read, decode and validate a contribution, `apart` from any sum; keep it until `Fold` or `Acknowledge`."""

    key: PushKey
    apart: bool = False


class Fold(Command, frozen=True, kw_only=True):
    """Add a ready contribution to its fragment's round with `weight` and its staleness weight (0..1); then free its memory.

    It counts as `scale` (0..1) times itself: below 1 it is clipped. `norm` is its L2 norm as it came, for people.
    """

    key: PushKey
    weight: float
    staleness_weight: float
    age: int
    scale: float = 1.0
    norm: float = 0.0


class Unfold(Command, frozen=True, kw_only=True):
    """Drop what is folded into this fragment's round: all its contributions are refused."""

    fragment: int


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One included contribution, as the head will list it, and what caused it; `credit` is what counts of its tokens."""

    key: PushKey
    base_version: int
    tokens: int
    steps: int
    weight: float
    age: int
    credit: int
    scale: float = 1.0
    cause_id: str = ""


class Commit(Command, frozen=True, kw_only=True):
    """Finish the merge, take the outer step, make `base_version + 1` durable, then visible, with its ledger; `why` so late."""

    fragment: int
    base_version: int
    shares: tuple[Share, ...]
    called_s: float
    quorum_s: float
    grace_s: float
    end: str
    live: int
    fragment_ledger: bytes = b""
    why: RoundReasons | None = None


class Keep(Command, frozen=True, kw_only=True):
    """Make this fragment ledger durable without a new version; it is the ledger of the moment of the command."""

    fragment: int
    fragment_ledger: bytes


class Refuse(Command, frozen=True, kw_only=True):
    """A contribution is refused whole: forget its tensors and tell its learner. It is acknowledged when that is durable."""

    key: PushKey
    reason: str
    norms: tuple[float, float] | None = None  # its length (L2) and the longest allowed, if it was refused for that


class Dismiss(Command, frozen=True, kw_only=True):
    """The farewell of this incarnation is in the ledger of `fragment`: remove it from the queue."""

    learner: str
    incarnation: int
    fragment: int


class Acknowledge(Command, frozen=True, kw_only=True):
    """Its fate is durable: remove the manifest from the queue and forget the chunks."""

    key: PushKey
    fate: str
    reason: str = ""


class Isolate(Command, frozen=True, kw_only=True):
    """This incarnation is in quarantine from now on: announce it."""

    learner: str
    incarnation: int
    offences: int
    reason: str


class Finish(Command, frozen=True, kw_only=True):
    """The run is complete for this shard; `reason` says why."""

    reason: str


class StandDown(Command, frozen=True, kw_only=True):
    """Stop at once and write nothing more; `reason` says why."""

    reason: str


LaneCommand = Fold | Unfold | Commit | Keep | Acknowledge | Dismiss
"""What is to be done in the order of the decisions, fragment by fragment."""
ShardCommand = ArmTimer | PublishCall | Fetch | LaneCommand | Refuse | Isolate | Finish | StandDown
"""What a shard may command: its driver has an answer to each, and mypy says which it lacks."""


class TakeLease(Command, frozen=True, kw_only=True):
    """Write the lease with `epoch` if its revision still is `revision`."""

    revision: int
    epoch: int


class RenewLease(Command, frozen=True, kw_only=True):
    """Write our lease once more if its revision still is `revision`."""

    revision: int


# --- commands of an island ---------------------------------------------------------------------------------------


class Push(Command, frozen=True, kw_only=True):
    """Encode and send the pseudo-gradient at the last completed step, from the anchor or (`onward`) from the former push.

    `keep` its snapshot until the next adoption: progress is carried, or pushed onward, from there.
    """

    fragment: int
    push: int
    base_version: int
    tokens: int
    steps: int
    trained_tokens: int
    final: bool = False
    onward: bool = False
    keep: bool = False


class FetchFragment(Command, frozen=True, kw_only=True):
    """Read the newest frame of `fragment`, perhaps `version`; `again`: also if it is the one that we hold."""

    fragment: int
    version: int
    again: bool = False


class Adopt(Command, frozen=True, kw_only=True):
    """Adopt the fetched `version` at this step boundary: by the run's rule, or `overwrite`, as nothing is worth keeping.

    The rule carries progress from the snapshot of push number `since`, 0 for the anchor.
    """

    fragment: int
    version: int
    overwrite: bool = False
    since: int = 0


class Leave(Command, frozen=True, kw_only=True):
    """Everything is pushed: say goodbye and stop."""
