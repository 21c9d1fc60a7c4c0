"""Knowledge of each process of a run: of a learner its lives, of a synchronizer process its shards, of both their links.

Times of arrival are seconds of any clock that never goes back; nothing here reads one. Between two heartbeats of one
incarnation, stepping is the number of new steps times the step time it reports, at most the time that was open: since the
heartbeat before, plus up to one step's time before that, because a step is reported at its end.

Life is judged by a reader that has a clock (`Hearing`), the same for consoles, pages, metrics and alerts. A learner is
heard if its newest heartbeat is at most the run's `silence_s` old, a synchronizer process if its newest presence is at most a
lease and two beats old: one of them may be lost on the way. A learner's state is what its newest heartbeat says, while heard:

joining, training, draining   as it says itself; joining also without a heartbeat, if its life began just now
silent                        it was heard or has begun, has not left, and is not heard any more
left                          it has said goodbye
ended                         only the event log tells of it, and nobody heard how it ended
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from atoll.base.quantities import RUN_TOKENS_MAX, at_most
from atoll.protocol.ownership import BEATS_PER_LEASE
from atoll.protocol.pacing import BEATS_PER_SILENCE
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.events import SampleEvent
from atoll.wire.messages import Beat
from atoll.wire.traffic import TrafficMeter

SAMPLES_MAX: Final = 512
BEATS_UNHEARD: Final = 2.0
"""How many usual pauses between heartbeats one who has just begun to listen waits before it calls a learner silent."""


F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class Noted(Generic[F]):
    """An event: when it was written, seconds since the epoch by its writer's clock, and by which learner or shard."""

    at_s: float
    who: str
    fields: F


Sample = Noted[SampleEvent]


@dataclass(slots=True)
class Curve:
    """Samples of one learner, oldest first, spread over the whole run, and the newest; `heard` counts all that came.

    When it is full it drops every second one, and from then on takes only every second one that comes, then every fourth.
    """

    heard: int = 0
    newest: Sample | None = None
    _kept: list[Sample] = field(default_factory=list)
    _every: int = 1

    def __iter__(self) -> Iterator[Sample]:
        yield from self._kept
        if self.newest is not None and (not self._kept or self._kept[-1] is not self.newest):
            yield self.newest

    def add(self, line: Sample) -> None:
        """Take the next sample of the event log."""
        if self.heard % self._every == 0:
            if len(self._kept) >= SAMPLES_MAX:
                # What stays has even places, so the place of the next one to keep is a multiple of the new stride too.
                self._kept = self._kept[::2]
                self._every *= 2
            if self.heard % self._every == 0:
                self._kept.append(line)
        self.heard += 1
        self.newest = line


@dataclass(slots=True)
class LearnerLife:
    """One incarnation of a learner; `beat` is its latest heartbeat and `newest` its latest sample, if there was one.

    `meter` is that of its link. `open_s` is the time, at most one step's, that it may have spent on a step that has not ended.
    """

    incarnation: int
    joined_at_s: float | None = None
    took_s: float = 0.0
    founder: bool = False
    left: bool = False
    tokens: int = 0
    steps: int = 0
    beat: Beat | None = None
    newest: Sample | None = None
    meter: TrafficMeter = field(default_factory=TrafficMeter)
    open_s: float = 0.0

    def stepped(self, former: Beat, beat: Beat, between_s: float) -> float:
        """Return the seconds of steps that ended between two heartbeats that arrived `between_s` apart."""
        step_s = max(0.0, beat.step_s)
        heard_s = self.open_s + between_s
        stepped_s = min(heard_s, max(0, beat.step - former.step) * step_s)
        self.open_s = min(heard_s - stepped_s, step_s)
        return stepped_s


@dataclass(slots=True)
class LearnerView:
    """A learner id: its incarnations, when it was last heard (arrival, seconds), its learner-seconds, and its curve.

    `unmerged_s` are the seconds that it has stepped since it was part of a version last.
    """

    learner: str
    lives: dict[int, LearnerLife] = field(default_factory=dict)
    heard_s: float | None = None
    present_s: float = 0.0
    stepping_s: float = 0.0
    unmerged_s: float = 0.0
    curve: Curve = field(default_factory=Curve)

    @property
    def latest(self) -> LearnerLife | None:
        """Return the newest incarnation known."""
        return self.lives[max(self.lives)] if self.lives else None

    @property
    def has_left(self) -> bool:
        """Return whether its newest incarnation has said goodbye."""
        return self.latest is not None and self.latest.left

    @property
    def report(self) -> Beat | SampleEvent | None:
        """Return what it said last of its steps: the newest life's heartbeat, else its newest sample in the event log."""
        life, newest = self.latest, self.curve.newest
        if life is not None and life.beat is not None:
            return life.beat
        return None if newest is None else newest.fields

    @property
    def tokens(self) -> int:
        """Return the tokens of all its incarnations, as far as known."""
        return at_most(RUN_TOKENS_MAX, sum(life.tokens for life in self.lives.values()))


@dataclass(slots=True)
class HostView:
    """A synchronizer process: shards it has owned, those it owns, its link, last heard (arrival, seconds)."""

    shards: set[int] = field(default_factory=set)
    owns: tuple[int, ...] = ()
    serving: bool = False
    meter: TrafficMeter = field(default_factory=TrafficMeter)
    heard_s: float | None = None


@dataclass(frozen=True, slots=True)
class Hearing:
    """Times at which a run was listened to.

    Attributes:
        protocol: what the run agreed on.
        now_s: the moment by the clock of the view's arrivals.
        wall_s: the same moment by date; None where no date is known.
        began_s: when the listener began, by the clock of `now_s`.
        over: whether the run has reached its end.
    """

    protocol: ProtocolSettings
    now_s: float
    wall_s: float | None
    began_s: float
    over: bool

    @property
    def has_listened(self) -> bool:
        """Return whether every live learner must have been heard by now: what says nothing since we listen is silent."""
        return self.now_s - self.began_s >= BEATS_UNHEARD * self.protocol.silence_s / BEATS_PER_SILENCE

    def hears(self, learner: LearnerView) -> bool:
        """Return whether a learner is heard, and has not left: its farewell may have come by the event log alone."""
        return (
            not learner.has_left
            and learner.heard_s is not None
            and self.now_s - learner.heard_s <= self.protocol.silence_s
        )

    def hears_host(self, host: HostView) -> bool:
        """Return whether a synchronizer process is heard."""
        bound_s = self.protocol.lease_s * (1.0 + 2.0 / BEATS_PER_LEASE)
        return host.heard_s is not None and self.now_s - host.heard_s <= bound_s

    def state(self, learner: LearnerView) -> str:
        """Return what a learner does."""
        life = learner.latest
        if life is None or learner.has_left:
            return "left"
        if life.beat is not None:
            return life.beat.state if self.hears(learner) else "silent"
        return self._without_beat(life.joined_at_s)

    def _without_beat(self, joined_at_s: float | None) -> str:
        if self.over:
            return "ended"
        if self.wall_s is not None and joined_at_s is not None and self.wall_s - joined_at_s <= self.protocol.silence_s:
            return "joining"
        if self.has_listened:
            return "silent"
        return "joining" if self.wall_s is None else "ended"
