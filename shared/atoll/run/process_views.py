"""Knowledge of each process of a run: of a learner its lives, of a synchronizer process its shards, of both their links.

Times of arrival are seconds of any clock that never goes back; nothing here reads one.

Between two heartbeats of one incarnation, stepping is the number of new steps times the step time it reports. It is at
most the time that was open: since the heartbeat before, plus up to one step's time before that, because a step may be
longer than the pause between heartbeats and is reported at its end. A throttled learner's longer step counts as
stepping.

A run may last for months, and a view of it must not grow. So the curve of a learner keeps `SAMPLES_MAX` of its samples at
most. When it is full it drops every second one, and from then on takes only every second one that comes, then every fourth,
and so on: the kept samples stay spread over the whole run. The newest is kept beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from atoll.base.quantities import RUN_TOKENS_MAX, at_most
from atoll.wire.events import SampleEvent
from atoll.wire.messages import Beat
from atoll.wire.traffic import TrafficMeter

SAMPLES_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class SampleLine:
    """A sample, with the wall time that its learner wrote, seconds since the Unix epoch."""

    at_s: float
    sample: SampleEvent


@dataclass(slots=True)
class Curve:
    """The samples of one learner, oldest first; `heard` counts all that came."""

    heard: int = 0
    newest: SampleLine | None = None
    _kept: list[SampleLine] = field(default_factory=list)
    _every: int = 1

    def __iter__(self) -> Iterator[SampleLine]:
        yield from self._kept
        if self.newest is not None and (not self._kept or self._kept[-1] is not self.newest):
            yield self.newest

    def __len__(self) -> int:
        """Return how many samples iterating gives, at most `SAMPLES_MAX` and one."""
        return sum(1 for _ in self)

    def add(self, line: SampleLine) -> None:
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
    """One incarnation of a learner; `beat` is its latest heartbeat, if one was heard.

    `meter` is that of its link. `open_s` is the time, at most one step's, that it may have spent on a step that has not
    ended.
    """

    incarnation: int
    joined_at_s: float | None = None
    took_s: float = 0.0
    founder: bool = False
    left: bool = False
    tokens: int = 0
    steps: int = 0
    beat: Beat | None = None
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
        return None if newest is None else newest.sample

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
