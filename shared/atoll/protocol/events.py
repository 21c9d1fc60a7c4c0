"""Facts, in the past tense, go into the machines; commands, imperatives whose order a driver keeps, come out: no tensors."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from atoll.protocol.waits import RoundNeeds, RoundReasons


class PushKey(NamedTuple):
    """The identity of a contribution, unique for ever."""

    learner: str
    incarnation: int
    fragment: int
    push: int


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened at `at_s` (monotonic, seconds); `cause_id` is for log lines (`atoll.protocol.waits`)."""

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
