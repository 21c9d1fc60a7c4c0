"""The history of a run: the one fold of its event log, and of the heartbeats that are heard meanwhile.

    heartbeats, presences ─────────────────► `on_beat`, `on_presence` ─┐
    the broker's event log, `events.jsonl` ─► `take` ──► `on_event`   ─┴─► `History` ◄── stories, metrics, reports

`on_event` takes entries of the event log, each once and in order. Nothing here reads a clock: arrival times (seconds of any
clock that never goes back) are arguments, and the times of events are seconds since the epoch by their writer's clock, as far
as the broker's clock bears it out. Unknown kinds of event are skipped, malformed entries counted.

A run may last for months, so everything is bounded: beyond a bound the oldest entry is forgotten, of learners' events that of
the learner that wrote most. Sums stand beside the lists, and saturate. Only the table of learners does not forget: on an open
broker anybody invents names, and what is said under a name beyond `LEARNERS_KEPT` is counted and passed over.

**Goodput** from heartbeats is the share of learner-seconds spent stepping. A learner id is *present* from its first heartbeat
of this session until it says that it left; a gap between two incarnations is presence without stepping, so faults show.

**Faults and recoveries** are *marks*. No event says that a process died: a learner was *lost* if a newer incarnation joins and
the former never left, at the last sign of it; a shard if a later tenure begins and the former owner wrote no closing ledger.
What is silent at this moment is judged by a reader, which has a clock (`atoll.run.process_views`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import singledispatchmethod
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from atoll.base.errors import PeerMisbehaved
from atoll.base.fair_queue import FairQueue
from atoll.base.quantities import COUNT_MAX, LEARNERS_MAX, MOMENT_MAX, RUN_TOKENS_MAX, TOTAL_MAX, at_most
from atoll.base.wording import as_time
from atoll.bus.interface import PAGE_EVENTS, Bus
from atoll.protocol.events import id_of
from atoll.protocol.ledger import Ledger, add_part
from atoll.run.decisions import describe_isolation
from atoll.run.folder import saved_events
from atoll.run.process_views import HostView, LearnerLife, LearnerView, Noted, Sample
from atoll.wire.events import (
    EVENTS,
    Contributor,
    EventFields,
    FilledEvent,
    HostedEvent,
    JoinedEvent,
    JunkEvent,
    LedgerEvent,
    LeftEvent,
    MovedEvent,
    QuarantinedEvent,
    RefusedContribution,
    RefusedEvent,
    Repeats,
    RoundEvent,
    SampleEvent,
    ServingEvent,
    ValidationEvent,
    WaitingEvent,
    event_of,
    fields_of,
    sample_of,
)
from atoll.wire.messages import Beat, Event, Presence
from atoll.wire.subjects import Subjects
from atoll.wire.traffic import NOTHING

NAMES_KEPT: Final = 256
OTHER: Final = "other"
"""What names beyond the bound of a count are counted under: whoever writes the event log chooses them."""
FORMER: Final = ""
"""The name for the bytes of synchronizer processes that are forgotten."""
ROUNDS_MAX: Final = 100_000
VALIDATIONS_MAX: Final = 10_000
LIVES_MAX: Final = 10_000
HOSTS_MAX: Final = 1_000
FRAGMENTS_KEPT: Final = 1 << 16
LEARNERS_KEPT: Final = 2 * LEARNERS_MAX
NOTES_MAX: Final = 20_000
WRITERS_MAX: Final = 20_000
MARKS_MAX: Final = 400
CELLS_MAX: Final = 1 << 16
RECENT_MAX: Final = 256
RECENT_S: Final = 2.0
NAME_CHARS_MAX: Final = 64
PAUSE_S: Final = 60.0
"""Learners and synchronizers write at least twice as often while one of them runs (`TOLD_EVERY_S`)."""
AGE_LOOKED_AT: Final = 64
"""An adoption is looked for in so many rounds after it: a contribution is hardly ever later."""
F = TypeVar("F")


class LearnerNamed(Protocol):
    """Fields of what a shard says of a learner."""

    @property
    def learner(self) -> str:
        """Return its name."""


N = TypeVar("N", bound=LearnerNamed)


def notes(len_max: int = NOTES_MAX) -> FairQueue[Noted[F]]:
    """Return an empty list of events; beyond its bound the writer of most of them loses its oldest one."""
    return FairQueue(len_max, lambda note: note.who)


def _notes_of_learners() -> FairQueue[Noted[N]]:
    return FairQueue(NOTES_MAX, lambda note: note.fields.learner)


@dataclass(frozen=True, slots=True)
class RoundLine:
    """A commit, the shard that made it, and when its version was visible, by the shard's clock; its durations tell the rest."""

    at_s: float
    shard: str
    round: RoundEvent

    @property
    def ended_s(self) -> float:
        """Return when the round ended, and waited for nobody any more."""
        return self.at_s - self.round.commit_s - self.round.merge_s - self.round.queued_s

    @property
    def called_s(self) -> float:
        """Return when the round was called."""
        return self.ended_s - self.round.waited_s

    @property
    def quorum_s(self) -> float:
        """Return when the round met its quorum."""
        return self.called_s + self.round.phases.quorum_wait_s


def base_of(line: RoundLine, share: Contributor) -> int:
    """Return the version that a contribution to this round is on."""
    return line.round.version - 1 - share.age


def push_id(line: RoundLine, share: Contributor) -> str:
    """Return the id of a contribution."""
    return id_of("push", share.learner, share.incarnation, line.round.fragment, share.push)


@dataclass(frozen=True, slots=True)
class ServedTenure:
    """The time of one owner of a shard; `former_s` is the last sign of the former, `closed` whether it closed its ledger."""

    shard: str
    from_s: float
    fields: ServingEvent
    former_s: float | None
    closed: bool


@dataclass(frozen=True, slots=True)
class TimeMark:
    """Something that happened to one process: `group` is "fault", "recovery" or "change"."""

    at_s: float
    group: str
    kind: str
    who: str
    text: str


@dataclass(frozen=True, slots=True)
class LastContribution:
    """The newest contribution of a learner to a fragment that was merged: into which version, how many versions late."""

    version: int
    age: int
    tokens: int
    weight: float
    at_s: float

    @property
    def base(self) -> int:
        """Return the version that it was made on."""
        return self.version - 1 - self.age


@dataclass(slots=True)
class LifeSigns:
    """The incarnation of a learner that joined last: the last event or heartbeat of its own, and whether it left."""

    incarnation: int
    last_s: float
    left: bool = False


@dataclass(slots=True)
class Unreadable:
    """Messages of one writer that no correct peer sends: how many, and what was wrong with the newest."""

    count: int = 0
    reason: str = ""


@dataclass(slots=True)
class FragmentView:
    """A fragment's newest commit, and its parameters."""

    version: int
    contributors: int
    live: int
    grace_s: float
    parameters: int = 0


def count(counts: Counter[str], name: str, more: int, names_max: int = NAMES_KEPT) -> None:
    """Add to the count of a name; those beyond the bound are counted together."""
    if name not in counts and len(counts) >= names_max:
        name = OTHER
    counts[name] = at_most(COUNT_MAX, counts[name] + more)


@dataclass(slots=True)
class Clips:
    """Of one learner, how many contributions were clipped; when the newest was (wall time), its length and that allowed."""

    count: int = 0
    at_s: float = 0.0
    norm: float = 0.0
    norm_max: float = 0.0


@dataclass(slots=True)
class RoundSums:
    """Commits by shard, rounds by their ends, contributions, how many were late, and by learner those judged or clipped."""

    commits: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    contributions: int = 0
    late: int = 0
    shortened: Counter[str] = field(default_factory=Counter)
    unheard: Counter[str] = field(default_factory=Counter)
    clipped: dict[str, Clips] = field(default_factory=dict)

    def add(self, shard: str, line: RoundEvent, at_s: float) -> None:
        """Take one round that was made at `at_s` (wall time)."""
        count(self.commits, shard, 1, LEARNERS_MAX)
        count(self.ends, line.end, 1)
        self.contributions = at_most(COUNT_MAX, self.contributions + len(line.contributors))
        for share in line.contributors:
            self.late = at_most(COUNT_MAX, self.late + (share.age > 0))
            if share.shortened:
                count(self.shortened, share.learner, share.shortened, LEARNERS_MAX)
            if share.unheard:
                count(self.unheard, share.learner, share.unheard, LEARNERS_MAX)
            if share.norm_max is not None:
                name = share.learner if len(self.clipped) < LEARNERS_MAX or share.learner in self.clipped else OTHER
                clips = self.clipped.setdefault(name, Clips())
                clips.count = at_most(COUNT_MAX, clips.count + 1)
                clips.at_s, clips.norm, clips.norm_max = at_s, share.norm or 0.0, share.norm_max


@dataclass(frozen=True, slots=True)
class RunClock:
    """Clock that turns seconds since the epoch into words; `began_s` is when the run began, `virtual` that it was simulated."""

    began_s: float
    virtual: bool = False

    def at(self, at_s: float) -> str:
        """Return a moment for a person."""
        run_s = f"{at_s - self.began_s:.3f} s"
        return run_s if self.virtual else f"{run_s} ({_date(at_s).isoformat(sep=' ', timespec='milliseconds')})"

    def span(self, from_s: float, until_s: float | None) -> str:
        """Return a stretch of time for a person; `until_s` None: it lasted to the end of the event log."""
        end = "the end of the event log" if until_s is None else f"{until_s - self.began_s:.1f} s"
        run_s, since = f"from {from_s - self.began_s:.1f} s to {end}", _date(from_s)
        if self.virtual:
            return run_s
        if until_s is None:
            return f"{run_s} (since {since:%Y-%m-%d %H:%M:%S} UTC)"
        until = _date(until_s)
        form = "%H:%M:%S" if until.date() == since.date() else "%Y-%m-%d %H:%M:%S"
        return f"{run_s} ({since:%Y-%m-%d %H:%M:%S} to {until.strftime(form)} UTC)"


def _date(at_s: float) -> datetime:
    # A difference of claims may be a time that no calendar has: the nearest that it has.
    return datetime.fromtimestamp(min(max(at_s, 0.0), MOMENT_MAX), UTC)


@dataclass
class History:
    """The state of a run as far as heard, and the newest events of each kind in order; sums and counts are over the whole run.

    Attributes:
        fragments: the newest commit of each; `open_rounds` are those of fragments that were called again.
        merged: the names of all learners of which a contribution was merged.
        sighted: the shards whose owner has written other things than rounds: a sample of its presence, or why a round waits.
        ledgers: the newest closing ledger of each shard; `closed` are the shards that nobody has served since.
        marks: faults, recoveries and changes; `faults` counts all of these.
        last_contributions: by fragment and learner.
        recent: samples of heartbeats, by learner, finer than those of the event log.
        signs: by learner, of the incarnation that joined last.
        began_s, newest_s: of the first and the newest event; `last_s` by writer, of a shard also by its owner's presence.
        pauses: times in which nobody wrote anything until a process began anew: the whole run was stopped.
        run_tokens: the tokens merged in the fragment that is the furthest.
        unreadable: messages that no correct peer sends; `strange` has them by writer.
        passed_over: messages of learners for which there was no room.
        virtual: whether the run was simulated.
    """

    rounds: deque[RoundLine] = field(default_factory=lambda: deque(maxlen=ROUNDS_MAX))
    samples: FairQueue[Noted[SampleEvent]] = field(default_factory=notes)
    virtual: bool = False
    learners: dict[str, LearnerView] = field(default_factory=dict)
    hosts: dict[str, HostView] = field(default_factory=dict)
    fragments: dict[int, FragmentView] = field(default_factory=dict)
    open_rounds: dict[int, Noted[WaitingEvent]] = field(default_factory=dict)
    joined: FairQueue[Noted[JoinedEvent]] = field(default_factory=notes)
    left: FairQueue[Noted[LeftEvent]] = field(default_factory=notes)
    refused: FairQueue[Noted[RefusedContribution]] = field(default_factory=_notes_of_learners)
    quarantined: FairQueue[Noted[QuarantinedEvent]] = field(default_factory=_notes_of_learners)
    filled: FairQueue[Noted[FilledEvent]] = field(
        default_factory=lambda: FairQueue(NOTES_MAX, lambda note: note.fields.subjects_of)
    )
    tenures: deque[ServedTenure] = field(default_factory=lambda: deque(maxlen=NOTES_MAX))
    validations: deque[Noted[ValidationEvent]] = field(default_factory=lambda: deque(maxlen=VALIDATIONS_MAX))
    sums: RoundSums = field(default_factory=RoundSums)
    refused_by_reason: Counter[str] = field(default_factory=Counter)
    junk: Counter[str] = field(default_factory=Counter)
    commits: int = 0
    bytes_merged: int = 0
    bytes_published: int = 0
    parameters_merged: int = 0
    parameters_published: int = 0
    token_fragments_merged: int = 0
    run_tokens: int = 0
    merged: set[str] = field(default_factory=set)
    sighted: set[str] = field(default_factory=set)
    ledgers: dict[str, LedgerEvent] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    marks: FairQueue[TimeMark] = field(default_factory=lambda: FairQueue(MARKS_MAX, lambda mark: mark.who))
    faults: int = 0
    last_contributions: dict[tuple[int, str], LastContribution] = field(default_factory=dict)
    recent: dict[str, deque[Sample]] = field(default_factory=dict)
    signs: dict[str, LifeSigns] = field(default_factory=dict)
    began_s: float | None = None
    newest_s: float = 0.0
    last_s: dict[str, float] = field(default_factory=dict)
    pauses: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=NOTES_MAX))
    unreadable: int = 0
    strange: dict[str, Unreadable] = field(default_factory=dict)
    passed_over: int = 0
    _served: set[str] = field(default_factory=set)
    _committed_s: dict[str, float] = field(default_factory=dict)
    _made: dict[tuple[int, int], RoundLine] = field(default_factory=dict)
    _repeats: Repeats = field(default_factory=Repeats)

    # --- what comes in ------------------------------------------------------------------------------------------------

    async def read(self, bus: Bus, subjects: Subjects) -> None:
        """Read the event log from its beginning."""
        after = 0
        while True:
            page = await bus.replay(subjects.event("*", "*"), after=after, limit=PAGE_EVENTS)
            for entry in page:
                after = max(after, entry.sequence)
                self.take(entry.subject, entry.data, entry.stored_s)
            if len(page) < PAGE_EVENTS:
                return

    def read_file(self, path: Path) -> None:
        """Read the event log of a saved run; raise `SettingsError` if the file cannot be read."""
        for event in saved_events(path):
            if event is None:
                self.unreadable += 1
            else:
                self.on_event(event)

    def take(
        self,
        subject: str,
        data: bytes,
        stored_s: float | None = None,
        judge: Callable[[Event], Event] | None = None,
    ) -> None:
        """Take an entry of the event log as the broker stored it on `subject`, at `stored_s`.

        One that was stored twice is taken once. One that is unreadable, forged, or refused by `judge` is counted.
        """
        if self._repeats.repeats(subject, data):
            return
        try:
            event = event_of(subject, data, stored_s)
            self.on_event(event if judge is None else judge(event))
        except PeerMisbehaved as error:
            self.refuse(subject.rpartition(".")[2][:NAME_CHARS_MAX], error)

    def on_event(self, event: Event) -> EventFields | None:
        """Take an entry of the event log, and return its fields.

        None: its kind is not known, and it only shows that somebody wrote, or it is malformed, which is counted.
        """
        fields = None
        if (kind := EVENTS.get(event.kind)) is not None:
            try:
                fields = fields_of(event, kind)
                self._fold(fields, event)
            except PeerMisbehaved as error:
                self.refuse(event.who, error)
                if kind is not LedgerEvent:
                    return None
                # The shard has closed its ledger all the same; what was lost is then not told.
                self.closed.add(event.who)
        begun_s = _begun_s(event.at_s, fields)
        if begun_s is not None and self.newest_s and begun_s - self.newest_s > PAUSE_S:
            self.pauses.append((self.newest_s, begun_s))
        self.began_s = event.at_s if self.began_s is None else self.began_s
        self.newest_s = max(self.newest_s, event.at_s)
        self._note_writer(event.who, event.at_s)
        return fields

    def on_beat(self, beat: Beat, at_s: float) -> None:
        """Take a heartbeat that arrived at `at_s`, in seconds of any clock that never goes back."""
        if (found := self._life(beat.learner, beat.incarnation)) is None:
            return
        learner, life = found
        former = life.beat
        if former is not None and former.state == "left":
            return
        if learner.heard_s is not None:
            between_s = max(0.0, at_s - learner.heard_s)
            learner.present_s += between_s
            if former is not None:
                stepped_s = life.stepped(former, beat, between_s)
                learner.stepping_s += stepped_s
                learner.unmerged_s += stepped_s
        # A learner that said goodbye is no longer present; a later one under its id begins anew.
        learner.heard_s = None if beat.state == "left" else at_s
        life.beat = beat
        life.meter.take(beat.moved, at_s)
        life.left = life.left or beat.state == "left"
        life.tokens, life.steps = max(life.tokens, beat.tokens), max(life.steps, beat.step)

    def on_presence(self, presence: Presence, at_s: float) -> None:
        """Take a synchronizer process's presence message that arrived at `at_s`."""
        host = self._host(presence.name)
        host.shards.update(presence.owns)
        host.owns, host.serving = tuple(presence.owns), bool(presence.owns)
        host.meter.take(presence.moved, at_s)
        host.heard_s = at_s

    def sample_heartbeats(self) -> None:
        """Keep the newest heartbeat of each learner as a sample, at most one in `RECENT_S` seconds."""
        for learner in self.learners.values():
            life = learner.latest
            if life is None or (beat := life.beat) is None:
                continue
            self._sign(beat.learner, beat.incarnation, beat.at_s)
            if self.began_s is not None and beat.at_s < self.began_s:
                continue  # nobody trained before the run began: the curves of all would begin with that clock
            kept = self.recent.setdefault(learner.learner, deque(maxlen=RECENT_MAX))
            if kept and kept[-1].at_s <= beat.at_s < kept[-1].at_s + RECENT_S:  # a clock that was set back begins anew
                continue
            kept.append(Noted(beat.at_s, beat.learner, msgspec.structs.replace(sample_of(beat), moved=NOTHING)))

    def refuse(self, writer: str, error: PeerMisbehaved) -> None:
        """Count a message that no correct peer sends; `writer` is the process whose subject it came on."""
        self.unreadable += 1
        if writer not in self.strange and len(self.strange) >= NAMES_KEPT:
            writer = OTHER
        known = self.strange.setdefault(writer, Unreadable())
        known.count, known.reason = known.count + 1, f"{error.what}: {error.got}"

    # --- the state of the run -----------------------------------------------------------------------------------------

    @property
    def isolations(self) -> list[QuarantinedEvent]:
        """Return the incarnations that shards have put into quarantine, oldest first."""
        return [note.fields for note in self.quarantined]

    @property
    def trained_tokens(self) -> int:
        """Return what all learners report to have trained, whatever became of it."""
        return at_most(RUN_TOKENS_MAX, sum(learner.tokens for learner in self.learners.values()))

    @property
    def present_s(self) -> float:
        """Return the learner-seconds present in this session."""
        return sum(learner.present_s for learner in self.learners.values())

    @property
    def stepping_s(self) -> float:
        """Return the learner-seconds spent stepping in this session."""
        return sum(learner.stepping_s for learner in self.learners.values())

    def merging_s(self, within_s: float) -> float:
        """Return the learner-seconds spent stepping in this session; of those since a learner's last merge only `within_s`."""
        return sum(one.stepping_s - max(0.0, one.unmerged_s - within_s) for one in self.learners.values())

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Return the payload bytes that learners sent and read in this session, by their own counters."""
        beats = [life.beat for learner in self.learners.values() for life in learner.lives.values() if life.beat]
        return sum(beat.moved.payload_up for beat in beats), sum(beat.moved.payload_down for beat in beats)

    def tokens_per_s(self, now_s: float, silence_s: float) -> float:
        """Return the speed of the learners that train and were heard within `silence_s`."""
        return sum(
            beat.tokens_per_s
            for learner in self.learners.values()
            if learner.heard_s is not None
            and now_s - learner.heard_s <= silence_s
            and learner.latest is not None
            and (beat := learner.latest.beat) is not None
            and beat.state == "training"
        )

    @property
    def newest_beat_s(self) -> float:
        """Return when the newest heartbeat was sent, by its learner's clock or, if that is earlier, by ours; 0 without any."""
        lives = [learner.latest for learner in self.learners.values()]
        return max((life.beat.at_s for life in lives if life is not None and life.beat is not None), default=0.0)

    def faults_of_ended(self, learners: Collection[str]) -> int:
        """Return all faults of a run that is over: also the dead that never came back, which no event tells of.

        Those are such of `learners`, whose processes are over, as have not left, and shards that closed no ledger.
        """
        dead = sum(not life.left for learner, life in self.signs.items() if learner in learners)
        return self.faults + dead + len(self._served - self.closed)

    def closed_ledger(self) -> Ledger:
        """Return the sum of the ledgers that shards wrote when they closed, each over all its tenures."""
        whole = Ledger()
        for _, closed in sorted(self.ledgers.items()):
            whole.absorb(closed.ledger)
        return whole

    # --- what happened ------------------------------------------------------------------------------------------------

    def find(self, fragment: int, version: int | None = None) -> RoundLine | None:
        """Return the round that made `version` of a fragment, or its newest one."""
        if version is not None:
            return self._made.get((fragment, version))
        return next((line for line in reversed(self.rounds) if line.round.fragment == fragment), None)

    def waiting(self, fragment: int, version: int) -> WaitingEvent | None:
        """Return the newest `waiting` event of the round that is to make `version`, if it was called in vain."""
        still = self.open_rounds.get(fragment)
        return None if still is None or still.fields.version != version else still.fields

    @property
    def clock(self) -> RunClock:
        """Return what turns the times of this run into words."""
        return RunClock(self.began_s or 0.0, self.virtual)

    def shards(self) -> list[str]:
        """Return the names of all shards that the event log tells of."""
        named = {line.shard for line in self.rounds} | {each.shard for each in self.tenures} | self.closed
        return sorted(named, key=_in_order)

    def fragments_of(self, shard: str) -> list[int]:
        """Return the fragments that a shard serves, as far as the event log tells."""
        served = {fragment for each in self.tenures if each.shard == shard for fragment in each.fields.versions}
        return sorted(served | {line.round.fragment for line in self.rounds if line.shard == shard})

    def paused_s(self, from_s: float, until_s: float) -> float:
        """Return for how long the whole run was stopped in a stretch of time."""
        return sum(max(0.0, min(end_s, until_s) - max(begin_s, from_s)) for begin_s, end_s in self.pauses)

    @property
    def forgotten_until_s(self) -> float | None:
        """Return the time of the oldest round that is kept, where older ones may be forgotten; None: all rounds are here."""
        return self.rounds[0].at_s if self.rounds and len(self.rounds) == self.rounds.maxlen else None

    def contributions(self, learner: str | None = None) -> list[tuple[RoundLine, Contributor]]:
        """Return all merged contributions with their rounds, or those of one learner, in order."""
        return [
            (line, share)
            for line in self.rounds
            for share in line.round.contributors
            if learner is None or share.learner == learner
        ]

    def learner_names(self) -> list[str]:
        """Return the names of all learners that the event log tells of."""
        named = {share.learner for line in self.rounds for share in line.round.contributors}
        return sorted(named | {each.who for each in self.joined} | {each.fields.learner for each in self.refused})

    def adopted_by(self, fragment: int, version: int) -> dict[str, tuple[str, float]]:
        """Return the learners known to have adopted a version: their first contribution on it, and when they adopted it.

        The time is by the learner's clock, 0 where its contribution does not tell.
        """
        found: dict[str, tuple[str, float]] = {}
        # What is on this version came into one of the next rounds.
        for later in range(version + 1, version + 1 + AGE_LOOKED_AT):
            if (line := self._made.get((fragment, later))) is None:
                break
            for share in line.round.contributors:
                if base_of(line, share) == version:
                    found.setdefault(share.learner, (push_id(line, share), share.adopted_at_s))
        return found

    # --- the fold, by kind of event -----------------------------------------------------------------------------------

    @singledispatchmethod
    def _fold(self, fields: EventFields, event: Event) -> None:
        """Take an event; nothing of a kind that no reader asks about."""

    @_fold.register
    def _fold_round(self, fields: RoundEvent, event: Event) -> None:
        line = RoundLine(event.at_s, event.who, fields)
        if len(self.rounds) == self.rounds.maxlen:
            oldest = self.rounds[0].round
            self._made.pop((oldest.fragment, oldest.version), None)
        self.rounds.append(line)
        self._made[fields.fragment, fields.version] = line
        self._committed_s[event.who] = event.at_s
        self.sums.add(event.who, fields, event.at_s)
        self.commits += 1
        self.bytes_merged = at_most(TOTAL_MAX, self.bytes_merged + fields.bytes_up)
        self.bytes_published = at_most(TOTAL_MAX, self.bytes_published + fields.bytes_down)
        merged = fields.parameters * len(fields.contributors)
        self.parameters_merged = at_most(TOTAL_MAX, self.parameters_merged + merged)
        self.parameters_published = at_most(TOTAL_MAX, self.parameters_published + fields.parameters)
        self.token_fragments_merged = at_most(TOTAL_MAX, self.token_fragments_merged + fields.tokens)
        self.run_tokens = max(self.run_tokens, fields.run_tokens)
        for share in fields.contributors:
            _remember(self.merged, share.learner)
            if (learner := self.learners.get(share.learner)) is not None:
                learner.unmerged_s = 0.0
            # No sign of life: a shard may merge what a learner sent long before.
            cell = fields.fragment, share.learner
            if cell in self.last_contributions or len(self.last_contributions) < CELLS_MAX:
                last = LastContribution(fields.version, share.age, share.tokens, share.weight, event.at_s)
                self.last_contributions[cell] = last
        known = self.fragments.get(fields.fragment)
        if known is None or fields.version >= known.version:
            self.open_rounds.pop(fields.fragment, None)
            self.fragments[fields.fragment] = FragmentView(
                fields.version, len(fields.contributors), fields.live, fields.grace_s, fields.parameters
            )

    @_fold.register
    def _fold_waiting(self, fields: WaitingEvent, event: Event) -> None:
        _remember(self.sighted, event.who)
        known = self.fragments.get(fields.fragment)
        if (known is None or fields.version > known.version) and len(self.open_rounds) < FRAGMENTS_KEPT:
            self.open_rounds[fields.fragment] = Noted(event.at_s, event.who, fields)

    @_fold.register
    def _fold_refused(self, fields: RefusedEvent, event: Event) -> None:
        for each in fields.refusals:
            count(self.refused_by_reason, each.reason, 1)
            self.refused.append(Noted(event.at_s, event.who, each))

    @_fold.register
    def _fold_junk(self, fields: JunkEvent, _event: Event) -> None:
        for reason, messages in fields.reasons.items():
            count(self.junk, reason, messages)

    @_fold.register
    def _fold_quarantined(self, fields: QuarantinedEvent, event: Event) -> None:
        self.quarantined.append(Noted(event.at_s, event.who, fields))
        text = f"is in quarantine after {describe_isolation(fields.offences, fields.reason)}"
        self._mark_fault(event.at_s, "quarantined", fields.learner, text)

    @_fold.register
    def _fold_filled(self, fields: FilledEvent, event: Event) -> None:
        self.filled.append(Noted(event.at_s, event.who, fields))
        text = f"its subjects were filled: {fields.removed:,} messages beyond its share were removed; nobody signs them"
        self._mark_fault(event.at_s, "filled", fields.subjects_of, text)

    @_fold.register
    def _fold_serving(self, fields: ServingEvent, event: Event) -> None:
        shard, process = event.who, f"process {fields.pid} on {fields.host}"
        closed = shard in self.closed
        self.tenures.append(ServedTenure(shard, event.at_s, fields, self.last_s.get(shard), closed))
        if shard not in self._served:
            self._mark(event, "change", "serving", f"is served by {process}")
        elif closed:
            self._mark(event, "change", "serving", f"changed hands: {process}, tenure {fields.epoch}")
        else:
            last_s = min(event.at_s, self._committed_s.get(shard, event.at_s))
            self._mark_fault(last_s, "shard_lost", shard, "was lost: its last commit")
            lasted = as_time(max(0.0, event.at_s - last_s))
            text = f"is served again after {lasted}: {process}, tenure {fields.epoch}"
            self._mark(event, "recovery", "shard_back", text)
        self._served.add(shard)
        self.closed.discard(shard)

    @_fold.register
    def _fold_ledger(self, fields: LedgerEvent, event: Event) -> None:
        """Keep a shard's latest ledger: it is a sum over all its tenures; part 0 begins a new one."""
        former = self.ledgers.get(event.who)
        ledger = add_part(None if former is None else former.ledger, fields.ledger, fields.part)
        self.ledgers[event.who] = msgspec.structs.replace(fields, ledger=ledger)
        self.run_tokens = max(self.run_tokens, ledger.run_tokens)
        self.closed.add(event.who)

    @_fold.register
    def _fold_joined(self, fields: JoinedEvent, event: Event) -> None:
        self.joined.append(Noted(event.at_s, event.who, fields))
        if (found := self._life(event.who, fields.incarnation)) is not None:
            _, life = found
            life.joined_at_s, life.took_s, life.founder = event.at_s, fields.took_s, fields.founder
        former = self.signs.get(event.who)
        if former is None and len(self.signs) >= LEARNERS_KEPT:
            return
        self.signs[event.who] = LifeSigns(fields.incarnation, event.at_s)
        if former is None or former.incarnation >= fields.incarnation:
            self._mark(event, "change", "joined", "founded the run" if fields.founder else "joined")
        elif former.left:
            self._mark(event, "change", "joined", f"joined again, as incarnation {fields.incarnation}")
        else:
            lasted = as_time(max(0.0, event.at_s - former.last_s))
            self._mark_fault(former.last_s, "lost", event.who, "was lost: the last sign of it")
            self._mark(event, "recovery", "back", f"is back after {lasted}, as incarnation {fields.incarnation}")

    @_fold.register
    def _fold_left(self, fields: LeftEvent, event: Event) -> None:
        self.left.append(Noted(event.at_s, event.who, fields))
        if (found := self._life(event.who, fields.incarnation)) is not None:
            learner, life = found
            life.left = True
            if learner.latest is life:  # its last heartbeat may be lost
                learner.heard_s = None
            life.tokens, life.steps = max(life.tokens, fields.tokens), max(life.steps, fields.steps)
        if (signs := self._sign(event.who, fields.incarnation, event.at_s)) is not None:
            signs.left = True
            self._mark(event, "change", "left", f"left after {fields.steps:,} steps")

    @_fold.register
    def _fold_moved(self, fields: MovedEvent, event: Event) -> None:
        if (found := self._life(event.who, fields.incarnation)) is not None:
            found[1].meter.take(fields.moved)

    @_fold.register
    def _fold_hosted(self, fields: HostedEvent, event: Event) -> None:
        """Take the traffic of a synchronizer process, and the sample of its presence: its shards were alive then.

        A known learner has none of its links, and no shard, whatever it says.
        """
        if event.who in self.learners:
            raise PeerMisbehaved("a learner in the part of a synchronizer", got=event.who)
        host = self._host(event.who)
        host.shards.update(fields.shards)
        host.meter.take(fields.moved)
        for shard in fields.owns:
            self._note_writer(f"shard-{shard}", event.at_s)
            _remember(self.sighted, f"shard-{shard}")

    @_fold.register
    def _fold_sample(self, fields: SampleEvent, event: Event) -> None:
        """Take a point of the learner's curve; what it says of sums holds for a life whose heartbeats nobody heard."""
        sample = Noted(event.at_s, event.who, fields)
        self.samples.append(sample)
        self._sign(event.who, fields.incarnation, event.at_s)
        if (found := self._life(event.who, fields.incarnation)) is not None:
            learner, life = found
            life.newest = sample
            learner.curve.add(sample)
            life.meter.take(fields.moved)
            life.tokens, life.steps = max(life.tokens, fields.tokens), max(life.steps, fields.step)

    @_fold.register
    def _fold_validation(self, fields: ValidationEvent, event: Event) -> None:
        if fields.token_fragments_merged is None:
            fields = msgspec.structs.replace(fields, token_fragments_merged=self.token_fragments_merged)
        self.validations.append(Noted(event.at_s, event.who, fields))

    # --- its tables ---------------------------------------------------------------------------------------------------

    def _host(self, name: str) -> HostView:
        """Return a synchronizer process, added if new; beyond the bound only sums of the oldest stay."""
        if name not in self.hosts and len(self.hosts) >= HOSTS_MAX:
            oldest = self.hosts.pop(next(key for key in self.hosts if key != FORMER))
            former = self.hosts.setdefault(FORMER, HostView())
            former.shards |= oldest.shards
            former.meter.moved = former.meter.moved.plus(oldest.meter.moved)
        return self.hosts.setdefault(name, HostView())

    def _life(self, learner: str, incarnation: int) -> tuple[LearnerView, LearnerLife] | None:
        """Return the learner and its incarnation, added if new; None, and count it, if there is no room for its name.

        Beyond the bound of incarnations the oldest is dropped.
        """
        if learner not in self.learners and len(self.learners) >= LEARNERS_KEPT:
            self.passed_over += 1
            return None
        view = self.learners.setdefault(learner, LearnerView(learner))
        if incarnation not in view.lives and len(view.lives) >= LIVES_MAX:
            del view.lives[min(view.lives)]
        return view, view.lives.setdefault(incarnation, LearnerLife(incarnation))

    def _sign(self, learner: str, incarnation: int, at_s: float) -> LifeSigns | None:
        """Note a sign of life, and return what is known of the learner; None if there is no room for its name.

        Heartbeats may be heard before the entry that tells that their sender joined. They must not replace the former
        life, whose last sign that entry tells of.
        """
        if learner not in self.signs and len(self.signs) >= LEARNERS_KEPT:
            return None
        known = self.signs.setdefault(learner, LifeSigns(incarnation, at_s))
        if known.incarnation == incarnation:
            known.last_s = max(known.last_s, at_s)
        return known

    def _note_writer(self, who: str, at_s: float) -> None:
        if who in self.last_s or len(self.last_s) < WRITERS_MAX:
            self.last_s[who] = max(at_s, self.last_s.get(who, at_s))

    def _mark(self, event: Event, group: str, kind: str, text: str) -> None:
        self.marks.append(TimeMark(event.at_s, group, kind, event.who, text))

    def _mark_fault(self, at_s: float, kind: str, who: str, text: str) -> None:
        self.marks.append(TimeMark(at_s, "fault", kind, who, text))
        self.faults += 1


def _begun_s(at_s: float, fields: EventFields | None) -> float | None:
    """Return when the process began that an event is the first one of; after a pause of the run it is the first of all."""
    if isinstance(fields, JoinedEvent):
        return at_s - fields.began_before_s
    return at_s - fields.took_s if isinstance(fields, ServingEvent) else None


def _remember(names: set[str], name: str) -> None:
    if len(names) < WRITERS_MAX:
        names.add(name)


def _in_order(shard: str) -> tuple[int, str]:
    """Return what shards are sorted by: the second comes before the tenth."""
    return int(number) if (number := shard.rpartition("-")[2]).isdecimal() else 0, shard
