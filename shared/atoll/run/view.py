"""The known state of a run, from heartbeats and events: a pure reducer, the same for the live view and the report.

`on_beat` takes heartbeats, which may be lost; `on_event` takes entries of the event log, each once and in order.
Nothing here reads a clock or a socket: arrival times are arguments. Everything is bounded: beyond a bound the view
forgets the oldest entry. It keeps sums beside the lists, so that forgetting does not change them; sums saturate. Only
the table of learners does not forget: on an open broker anybody invents names, and what is said under a name beyond
`LEARNERS_KEPT` is counted and passed over, so that invented ones put nobody out who is known.

**Goodput** is the share of learner-seconds spent stepping. A learner id is *present* from its first heartbeat of this
session until it says that it left. A gap between two incarnations (killed, restarted, compiling) counts as presence
without stepping, so faults show. `atoll.run.process_views` has the rule for a single heartbeat.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

import msgspec

from atoll.base.errors import PeerMisbehaved
from atoll.base.quantities import COUNT_MAX, LEARNERS_MAX, RUN_TOKENS_MAX, TOTAL_MAX, at_most
from atoll.protocol.ledger import continued
from atoll.run.process_views import HostView, LearnerLife, LearnerView, SampleLine
from atoll.wire.events import (
    HostedEvent,
    JoinedEvent,
    JunkEvent,
    LedgerEvent,
    LeftEvent,
    MovedEvent,
    QuarantinedEvent,
    RefusedEvent,
    RoundEvent,
    SampleEvent,
    ValidationEvent,
    WaitingEvent,
    fields_of,
)
from atoll.wire.messages import Beat, Event, Presence

NAMES_KEPT: Final = 256
OTHER: Final = "other"
"""What names beyond the bound of a count are counted under: whoever writes the event log chooses them."""


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


ROUNDS_MAX: Final = 100_000
VALIDATIONS_MAX: Final = 10_000
ISOLATIONS_MAX: Final = 1_000
LIVES_MAX: Final = 10_000
HOSTS_MAX: Final = 1_000
FRAGMENTS_KEPT: Final = 1 << 16
LEARNERS_KEPT: Final = 2 * LEARNERS_MAX
FORMER: Final = ""
"""The name for the bytes of synchronizer processes that the view has forgotten."""


@dataclass(frozen=True, slots=True)
class MeasuredEvent:
    """A validation, and the token-fragments merged in what it measured; if it does not say so, before it in the event log."""

    validation: ValidationEvent
    token_fragments_merged: int


@dataclass(slots=True)
class Unreadable:
    """Messages of one writer that no correct peer sends: how many, and what was wrong with the newest."""

    count: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RoundLine:
    """A commit, with the shard that made it and the wall time it wrote."""

    at_s: float
    shard: str
    round: RoundEvent


@dataclass(frozen=True, slots=True)
class IsolationLine:
    """A learner was put into quarantine at `at_s` (wall time)."""

    at_s: float
    event: QuarantinedEvent


@dataclass(frozen=True, slots=True)
class WaitingRound:
    """A round that was called again and has not ended, as its shard told of it last, at `at_s` (wall time)."""

    at_s: float
    event: WaitingEvent


@dataclass(slots=True)
class FragmentView:
    """A fragment's newest commit, and its parameters."""

    version: int
    contributors: int
    live: int
    grace_s: float
    end: str
    parameters: int = 0


@dataclass(slots=True)
class RunView:
    """The state of a run as far as heard.

    `open_rounds` are those of fragments that were called again. `unreadable` counts messages that no correct peer sends,
    `strange` those by writer. `passed_over` counts messages of learners for which there was no room. `run_tokens` is the run's
    count by its shards' word: the tokens merged in the fragment that is the furthest.
    """

    learners: dict[str, LearnerView] = field(default_factory=dict)
    hosts: dict[str, HostView] = field(default_factory=dict)
    fragments: dict[int, FragmentView] = field(default_factory=dict)
    open_rounds: dict[int, WaitingRound] = field(default_factory=dict)
    rounds: deque[RoundLine] = field(default_factory=lambda: deque(maxlen=ROUNDS_MAX))
    validations: deque[MeasuredEvent] = field(default_factory=lambda: deque(maxlen=VALIDATIONS_MAX))
    closed: dict[str, LedgerEvent] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    junk: Counter[str] = field(default_factory=Counter)
    isolations: deque[IsolationLine] = field(default_factory=lambda: deque(maxlen=ISOLATIONS_MAX))
    sums: RoundSums = field(default_factory=RoundSums)
    commits: int = 0
    bytes_merged: int = 0
    bytes_published: int = 0
    parameters_merged: int = 0
    parameters_published: int = 0
    token_fragments_merged: int = 0
    run_tokens: int = 0
    unreadable: int = 0
    strange: dict[str, Unreadable] = field(default_factory=dict)
    passed_over: int = 0

    @property
    def quarantined(self) -> list[QuarantinedEvent]:
        """Return the learners that shards have put into quarantine, oldest first."""
        return [line.event for line in self.isolations]

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
        """Return the learner-seconds spent stepping in this session, without those that no merge has followed for too long.

        Of what a learner has stepped since it was part of a version last, only `within_s` counts: who trains and gives nothing
        does no good.
        """
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

    def on_event(self, event: Event) -> None:
        """Take an entry of the event log. Unknown kinds are skipped, malformed entries counted."""
        handler = getattr(self, f"_on_{event.kind}", None) if event.kind in _KINDS else None
        if handler is None:
            return
        try:
            handler(event)
        except PeerMisbehaved as error:
            self.refuse(event.who, f"{error.what}: {error.got}")

    def refuse(self, writer: str, reason: str) -> None:
        """Count a message that no correct peer sends; `writer` is the process whose subject it came on."""
        self.unreadable += 1
        if writer not in self.strange and len(self.strange) >= NAMES_KEPT:
            writer = OTHER
        told = self.strange.setdefault(writer, Unreadable())
        told.count, told.reason = told.count + 1, reason

    def _on_round(self, event: Event) -> None:
        line = fields_of(event, RoundEvent)
        self.rounds.append(RoundLine(event.at_s, event.who, line))
        self.sums.add(event.who, line, event.at_s)
        self.commits += 1
        self.bytes_merged = at_most(TOTAL_MAX, self.bytes_merged + line.bytes_up)
        self.bytes_published = at_most(TOTAL_MAX, self.bytes_published + line.bytes_down)
        merged = line.parameters * len(line.contributors)
        self.parameters_merged = at_most(TOTAL_MAX, self.parameters_merged + merged)
        self.parameters_published = at_most(TOTAL_MAX, self.parameters_published + line.parameters)
        self.token_fragments_merged = at_most(TOTAL_MAX, self.token_fragments_merged + line.tokens)
        self.run_tokens = max(self.run_tokens, line.run_tokens)
        for share in line.contributors:
            if (learner := self.learners.get(share.learner)) is not None:
                learner.unmerged_s = 0.0
        known = self.fragments.get(line.fragment)
        if known is None or line.version >= known.version:
            self.open_rounds.pop(line.fragment, None)
            self.fragments[line.fragment] = FragmentView(
                line.version, len(line.contributors), line.live, line.grace_s, line.end, line.parameters
            )

    def _on_waiting(self, event: Event) -> None:
        told = fields_of(event, WaitingEvent)
        known = self.fragments.get(told.fragment)
        if (known is None or told.version > known.version) and len(self.open_rounds) < FRAGMENTS_KEPT:
            self.open_rounds[told.fragment] = WaitingRound(event.at_s, told)

    def _on_joined(self, event: Event) -> None:
        told = fields_of(event, JoinedEvent)
        if (found := self._life(event.who, told.incarnation)) is None:
            return
        _, life = found
        life.joined_at_s, life.took_s, life.founder = event.at_s, told.took_s, told.founder

    def _on_left(self, event: Event) -> None:
        told = fields_of(event, LeftEvent)
        if (found := self._life(event.who, told.incarnation)) is None:
            return
        learner, life = found
        life.left = True
        if learner.latest is life:  # its last heartbeat may be lost
            learner.heard_s = None
        life.tokens, life.steps = max(life.tokens, told.tokens), max(life.steps, told.steps)

    def _on_refused(self, event: Event) -> None:
        for refusal in fields_of(event, RefusedEvent).refusals:
            count(self.refused, refusal.reason, 1)

    def _on_junk(self, event: Event) -> None:
        for reason, messages in fields_of(event, JunkEvent).reasons.items():
            count(self.junk, reason, messages)

    def _on_quarantined(self, event: Event) -> None:
        self.isolations.append(IsolationLine(event.at_s, fields_of(event, QuarantinedEvent)))

    def _on_ledger(self, event: Event) -> None:
        """Keep a shard's latest ledger: it is a sum over all its tenures; part 0 begins a new one."""
        told = fields_of(event, LedgerEvent)
        former = self.closed.get(event.who)
        fragment_ledger = continued(None if former is None else former.ledger, told.ledger, told.part)
        self.closed[event.who] = msgspec.structs.replace(told, ledger=fragment_ledger)
        self.run_tokens = max(self.run_tokens, fragment_ledger.run_tokens)

    def _on_moved(self, event: Event) -> None:
        told = fields_of(event, MovedEvent)
        if (found := self._life(event.who, told.incarnation)) is not None:
            found[1].meter.take(told.moved)

    def _on_hosted(self, event: Event) -> None:
        """Keep the traffic of a synchronizer process. A known learner has none of its links, whatever it says."""
        told = fields_of(event, HostedEvent)
        if event.who in self.learners:
            raise PeerMisbehaved("a learner in the part of a synchronizer", got=event.who)
        host = self._host(event.who)
        host.shards.update(told.shards)
        host.meter.take(told.moved)

    def _on_sample(self, event: Event) -> None:
        """Keep a point of the learner's curve; what it says of sums holds for a life whose heartbeats nobody heard."""
        told = fields_of(event, SampleEvent)
        if (found := self._life(event.who, told.incarnation)) is None:
            return
        learner, life = found
        learner.curve.add(SampleLine(event.at_s, told))
        life.meter.take(told.moved)
        life.tokens, life.steps = max(life.tokens, told.tokens), max(life.steps, told.step)

    def _on_validation(self, event: Event) -> None:
        told = fields_of(event, ValidationEvent)
        merged = told.token_fragments_merged
        self.validations.append(MeasuredEvent(told, self.token_fragments_merged if merged is None else merged))

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


_KINDS: Final = frozenset(
    {
        "round",
        "joined",
        "left",
        "refused",
        "junk",
        "quarantined",
        "ledger",
        "moved",
        "hosted",
        "sample",
        "validation",
        "waiting",
    }
)
