"""The event log of a run as a story reads it: the *history*. Reading changes nothing.

    the broker (`read`) or `events.jsonl` of a saved run (`read_file`) ──► `on_event`, event by event ──► `History`

A process that follows a run anyway has a `HistoryView`, and needs no second reading. `on_event` reduces one event; `take` first
looks whether it stands where its writer writes it (`atoll.wire.events`). Nothing reads a clock or a socket. Everything is
bounded: beyond a bound the oldest entry is forgotten, of learners' events that of the learner that wrote most. Times are
seconds since the Unix epoch by the clock of the process that wrote the event, as far as the broker's clock bears it out. An
event of an earlier release has fewer facts: they are None or zero here, and a story then says that the event log does not tell.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from atoll.base.errors import PeerMisbehaved
from atoll.base.fair_queue import FairQueue, heaviest
from atoll.base.quantities import MOMENT_MAX
from atoll.bus.interface import Bus
from atoll.protocol.ledger import Ledger, continued
from atoll.protocol.waits import id_of
from atoll.run.saved import saved_events
from atoll.run.timeline import Timeline
from atoll.run.view import ROUNDS_MAX, RoundLine, RunView
from atoll.wire.events import (
    Contributor,
    FilledEvent,
    HostedEvent,
    JoinedEvent,
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
)
from atoll.wire.messages import Event
from atoll.wire.subjects import Subjects


@dataclass(frozen=True, slots=True)
class RunClock:
    """Turns seconds since the Unix epoch into words; `began_s` is when the run began, and `virtual` that it was simulated."""

    began_s: float
    virtual: bool = False

    def at(self, at_s: float) -> str:
        """Return a moment for a person."""
        run_s = f"{at_s - self.began_s:.3f} s"
        return run_s if self.virtual else f"{run_s} ({_date(at_s).isoformat(sep=' ', timespec='milliseconds')})"

    def span(self, from_s: float, until_s: float | None) -> str:
        """Return a stretch of time for a person; `until_s` None: it lasted to the end of the event log."""
        run_s = f"from {from_s - self.began_s:.1f} s to " + (
            "the end of the event log" if until_s is None else f"{until_s - self.began_s:.1f} s"
        )
        if self.virtual:
            return run_s
        since, until = _date(from_s), None if until_s is None else _date(until_s)
        if until is None:
            return f"{run_s} (since {since:%Y-%m-%d %H:%M:%S} UTC)"
        form = "%H:%M:%S" if until.date() == since.date() else "%Y-%m-%d %H:%M:%S"
        return f"{run_s} ({since:%Y-%m-%d %H:%M:%S} to {until.strftime(form)} UTC)"


def _date(at_s: float) -> datetime:
    """Return a date; of a time that no calendar has, which a difference of claims may be, the nearest that it has."""
    return datetime.fromtimestamp(min(max(at_s, 0.0), MOMENT_MAX), UTC)


PAGE_EVENTS: Final = 1000
NOTES_MAX: Final = 20_000
WRITERS_MAX: Final = 20_000
PAUSE_S: Final = 60.0
"""Learners and synchronizers write at least twice as often while one of them runs (`TOLD_EVERY_S`)."""
F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class Noted(Generic[F]):
    """An event: when it was written, and by which learner or shard."""

    at_s: float
    who: str
    fields: F


class LearnerNamed(Protocol):
    """Fields of what a shard says of a learner."""

    @property
    def learner(self) -> str:
        """Return its name."""


N = TypeVar("N", bound=LearnerNamed)


def notes(len_max: int = NOTES_MAX) -> FairQueue[Noted[F]]:
    """Return an empty list of events; beyond its bound the writer of most of them loses its oldest one."""
    return FairQueue(len_max, lambda note: note.who)


def _of_learners() -> FairQueue[Noted[N]]:
    return FairQueue(NOTES_MAX, lambda note: note.fields.learner)


@dataclass(frozen=True, slots=True)
class RoundMoments:
    """When a round was called, met its quorum, ended and became visible, by the clock of its shard."""

    called_s: float
    quorum_s: float
    ended_s: float
    visible_s: float

    @classmethod
    def of(cls, line: RoundLine) -> RoundMoments:
        """Return them: the event is written when the version is visible, and has the durations before."""
        made = line.round
        ended_s = line.at_s - made.commit_s - made.merge_s - made.queued_s
        called_s = ended_s - made.waited_s
        return cls(called_s, called_s + made.quorum_wait_s, ended_s, line.at_s)


@dataclass(frozen=True, slots=True)
class ServedTenure:
    """The time of one owner of a shard, by its `serving` event at `from_s`.

    `former_s` is the last sign of the owner before, None for the first one; `closed` says that this one had closed its ledger.
    """

    shard: str
    from_s: float
    fields: ServingEvent
    former_s: float | None
    closed: bool


@dataclass(slots=True)
class History:
    """The events of a run, in order, by kind; `newest_s` is the time of the newest event of all, `last_s` by writer.

    `last_s` of a shard knows the samples of its owner's presence as well. `timeline` has the faults and recoveries that no
    single event tells of. In `pauses` nobody wrote anything until a process began anew: the whole run was stopped.
    `virtual` says that it was simulated.

    A page that follows a run keeps few `rounds` and `samples`. What must be true of the whole run is kept beside them:
    `newest_samples` has the newest sample of each incarnation (the one heard longest ago first), `merged` the names of all
    learners of which a contribution was merged. `sighted` has the shards whose owner has written other things than rounds: a
    sample of its presence, or why a round waits. `ledgers` has the closing ledgers of the shards in `closed`.
    """

    rounds: deque[RoundLine] = field(default_factory=lambda: deque(maxlen=ROUNDS_MAX))
    joined: FairQueue[Noted[JoinedEvent]] = field(default_factory=notes)
    left: FairQueue[Noted[LeftEvent]] = field(default_factory=notes)
    refused: FairQueue[Noted[RefusedContribution]] = field(default_factory=_of_learners)
    quarantined: FairQueue[Noted[QuarantinedEvent]] = field(default_factory=_of_learners)
    filled: FairQueue[Noted[FilledEvent]] = field(
        default_factory=lambda: FairQueue(NOTES_MAX, lambda note: note.fields.subjects_of)
    )
    tenures: deque[ServedTenure] = field(default_factory=lambda: deque(maxlen=NOTES_MAX))
    validations: FairQueue[Noted[ValidationEvent]] = field(default_factory=notes)
    samples: FairQueue[Noted[SampleEvent]] = field(default_factory=notes)
    newest_samples: dict[tuple[str, int], Noted[SampleEvent]] = field(default_factory=dict)
    merged: set[str] = field(default_factory=set)
    sighted: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    last_s: dict[str, float] = field(default_factory=dict)
    newest_s: float = 0.0
    pauses: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=NOTES_MAX))
    virtual: bool = False
    unreadable: int = 0
    _lives: dict[str, dict[int, None]] = field(default_factory=dict)
    _life_counts: dict[str, int] = field(default_factory=dict)
    _repeats: Repeats = field(default_factory=Repeats)
    _waiting: dict[tuple[int, int], WaitingEvent] = field(default_factory=dict)
    _made: dict[tuple[int, int], RoundLine] = field(default_factory=dict)

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
        """Read the event log that a saved run has left (`atoll.run.saved`).

        Raises:
            SettingsError: the file cannot be read.
        """
        for event in saved_events(path):
            if event is None:
                self.unreadable += 1
            else:
                self.on_event(event)

    def take(self, subject: str, data: bytes, stored_s: float | None = None) -> None:
        """Take one event as the broker stored it on `subject`, at `stored_s`; one that is unreadable or forged is counted."""
        if self._repeats.repeats(subject, data):
            return
        try:
            event = event_of(subject, data, stored_s)
        except PeerMisbehaved:
            self.unreadable += 1
        else:
            self.on_event(event)

    def on_event(self, event: Event, line: RoundLine | None = None) -> None:
        """Take one event; one whose fields are not those of its kind is counted and skipped. `line` is a round that is read."""
        try:
            if line is not None:
                self._take_round(line)
            elif event.kind in _KINDS:
                getattr(self, f"_on_{event.kind}")(event)
        except PeerMisbehaved:
            self.unreadable += 1
            return
        self.timeline.on_event(event)
        if event.kind in BEGINNINGS and self.newest_s:
            joined = event.kind == "joined"
            begun_s = event.at_s - (
                self.joined.newest.fields.began_before_s if joined else self.tenures[-1].fields.took_s
            )
            if begun_s - self.newest_s > PAUSE_S:
                self.pauses.append((self.newest_s, begun_s))
        self.newest_s = max(self.newest_s, event.at_s)
        self._sign(event.who, event.at_s)

    # --- what is asked --------------------------------------------------------------------------------------------

    def find(self, fragment: int, version: int | None = None) -> RoundLine | None:
        """Return the round that made `version` of a fragment, or its newest one."""
        if version is not None:
            return self._made.get((fragment, version))
        return next((line for line in reversed(self.rounds) if line.round.fragment == fragment), None)

    def waiting(self, fragment: int, version: int) -> WaitingEvent | None:
        """Return the newest `waiting` event of the round that is to make `version`, if it was called in vain."""
        return self._waiting.get((fragment, version))

    @property
    def clock(self) -> RunClock:
        """Return what turns the times of this run into words."""
        return RunClock(self.timeline.began_s or 0.0, self.virtual)

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

    def learners(self) -> list[str]:
        """Return the names of all learners that the event log tells of."""
        named = {share.learner for line in self.rounds for share in line.round.contributors}
        return sorted(
            named | {each.who for each in self.joined} | {each.fields.learner for each in self.refused} - {""}
        )

    def adopted_by(self, fragment: int, version: int) -> dict[str, tuple[str, float]]:
        """Return the learners known to have adopted a version: their first contribution on it, and when they adopted it.

        The time is by the learner's clock, 0 where its contribution does not tell.
        """
        found: dict[str, tuple[str, float]] = {}
        # What is on this version came into one of the next rounds.
        following, later = version + 1, 0
        while later < AGE_LOOKED_AT and (line := self._made.get((fragment, following + later))) is not None:
            for share in line.round.contributors:
                if base_of(line, share) == version:
                    push = id_of("push", share.learner, share.incarnation, fragment, share.push)
                    found.setdefault(share.learner, (push, share.adopted_at_s))
            later += 1
        return found

    # --- events ---------------------------------------------------------------------------------------------------

    def _on_round(self, event: Event) -> None:
        self._take_round(RoundLine(event.at_s, event.who, fields_of(event, RoundEvent)))

    def _take_round(self, line: RoundLine) -> None:
        if len(self.rounds) == self.rounds.maxlen:
            oldest = self.rounds[0].round
            self._made.pop((oldest.fragment, oldest.version), None)
        self.rounds.append(line)
        self._made[line.round.fragment, line.round.version] = line
        for share in line.round.contributors:
            _remember(self.merged, share.learner)
        self._waiting.pop((line.round.fragment, line.round.version), None)

    def _on_waiting(self, event: Event) -> None:
        told = fields_of(event, WaitingEvent)
        if len(self._waiting) >= NOTES_MAX:
            self._waiting.pop(next(iter(self._waiting)))
        self._waiting[told.fragment, told.version] = told
        _remember(self.sighted, event.who)

    def _on_refused(self, event: Event) -> None:
        for each in fields_of(event, RefusedEvent).refusals:
            self.refused.append(Noted(event.at_s, event.who, each))

    def _on_ledger(self, event: Event) -> None:
        self.closed.add(event.who)
        try:
            told = fields_of(event, LedgerEvent)
        except PeerMisbehaved:
            return  # the shard has closed its ledger all the same; what was lost is then not told
        former = self.ledgers.get(event.who)
        if former is None and len(self.ledgers) >= WRITERS_MAX:
            return
        if told.part and former is not None and len(former.accounts) >= WRITERS_MAX:
            return
        self.ledgers[event.who] = continued(former, told.ledger, told.part)

    def _on_joined(self, event: Event) -> None:
        self.joined.append(Noted(event.at_s, event.who, fields_of(event, JoinedEvent)))

    def _on_left(self, event: Event) -> None:
        self.left.append(Noted(event.at_s, event.who, fields_of(event, LeftEvent)))

    def _on_quarantined(self, event: Event) -> None:
        self.quarantined.append(Noted(event.at_s, event.who, fields_of(event, QuarantinedEvent)))

    def _on_filled(self, event: Event) -> None:
        self.filled.append(Noted(event.at_s, event.who, fields_of(event, FilledEvent)))

    def _on_serving(self, event: Event) -> None:
        told, former_s = fields_of(event, ServingEvent), self.last_s.get(event.who)
        self.tenures.append(ServedTenure(event.who, event.at_s, told, former_s, event.who in self.closed))
        self.closed.discard(event.who)
        self.ledgers.pop(event.who, None)

    def _on_moved(self, event: Event) -> None:
        fields_of(event, MovedEvent)

    def _on_hosted(self, event: Event) -> None:
        """Take the sample of a synchronizer's presence: its shards were alive then. No learner tells of shards."""
        told = fields_of(event, HostedEvent)
        if event.who not in self.timeline.lives:
            for shard in told.owns:
                self._sign(f"shard-{shard}", event.at_s)
                _remember(self.sighted, f"shard-{shard}")

    def _on_sample(self, event: Event) -> None:
        sample = Noted(event.at_s, event.who, fields_of(event, SampleEvent))
        self.samples.append(sample)
        life = event.who, sample.fields.incarnation
        # A life moves to the end with each sample: the first one has been silent longest.
        self._forget_life(life)
        self.newest_samples[life] = sample
        own = self._lives.setdefault(event.who, {})
        own[life[1]] = None
        self._life_counts[event.who] = len(own)
        if len(self.newest_samples) > WRITERS_MAX:
            most = heaviest(self._life_counts, len(self.newest_samples), event.who)
            silent = most, next(iter(self._lives[most]))
            self._forget_life(silent if silent != life else next(iter(self.newest_samples)))

    def _forget_life(self, life: tuple[str, int]) -> None:
        if self.newest_samples.pop(life, None) is None:
            return
        who, incarnation = life
        own = self._lives[who]
        del own[incarnation]
        self._life_counts[who] = len(own)
        if not own:
            del self._lives[who], self._life_counts[who]

    def _on_validation(self, event: Event) -> None:
        self.validations.append(Noted(event.at_s, event.who, fields_of(event, ValidationEvent)))

    def _sign(self, who: str, at_s: float) -> None:
        if who not in self.last_s and len(self.last_s) >= WRITERS_MAX:
            return
        self.last_s[who] = max(at_s, self.last_s.get(who, at_s))


AGE_LOOKED_AT: Final = 64
"""An adoption is looked for in so many rounds after it: a contribution is hardly ever later."""

_KINDS: Final = frozenset(
    {
        "round",
        "waiting",
        "refused",
        "ledger",
        "joined",
        "left",
        "quarantined",
        "filled",
        "sample",
        "serving",
        "moved",
        "hosted",
        "validation",
    }
)
BEGINNINGS: Final = frozenset({"serving", "joined"})
"""With one of these a process has begun some time before, which its fields tell; after a pause of the whole run it is the first
event."""


def _remember(names: set[str], name: str) -> None:
    """Add a name, unless there are too many."""
    if len(names) < WRITERS_MAX:
        names.add(name)


def _in_order(shard: str) -> tuple[int, str]:
    """Return what shards are sorted by: the second comes before the tenth."""
    return int(number) if (number := shard.rpartition("-")[2]).isdecimal() else 0, shard


def base_of(line: RoundLine, share: Contributor) -> int:
    """Return the version that a contribution to this round is on."""
    return line.round.version - 1 - share.age


def push_id(line: RoundLine, share: Contributor) -> str:
    """Return the id of a contribution."""
    return id_of("push", share.learner, share.incarnation, line.round.fragment, share.push)


@dataclass(slots=True)
class HistoryView(RunView):
    """A view with the history of the same run, fed by the same events."""

    history: History = field(default_factory=History)

    def on_event(self, event: Event) -> None:
        """Let both take an entry of the event log; a round, of which both keep very many, they share."""
        commits = self.commits
        RunView.on_event(self, event)
        self.history.on_event(event, self.rounds[-1] if self.commits > commits else None)
