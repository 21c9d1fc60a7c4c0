"""State of a watched run at a moment, which metrics, sinks, traces and pages read in the event loop that writes it.

Times without a date are those of a clock that never goes back. Everything here is bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from atoll.base.clock import Clock
from atoll.base.fair_queue import FairQueue
from atoll.bus.interface import StreamState
from atoll.protocol.settings import ProtocolSettings
from atoll.report.page_data import NodeSeen
from atoll.run.history import History, RoundLine, notes
from atoll.run.process_views import Hearing, Noted
from atoll.wire.events import EventFields, RoundEvent, RoundPhases, SampleEvent
from atoll.wire.messages import Event, RunRecord

ANSWERED_S_MAX: Final = 15.0
"""An echo is sent every two seconds and may take five; three that fail in a row are an outage."""
ROUNDS_KEPT: Final = 320
"""The rounds of which causes are found. A round of 64 learners takes about 80 KB."""
SAMPLES_KEPT: Final = 512

BOUNDS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
"""Bounds of the histogram of each phase, from a fragment on a laptop to a round across an ocean, in seconds."""
PHASES: Final = tuple(name.removesuffix("_s") for name in RoundPhases._fields)

Observer = Callable[[Event, EventFields | None], None]


@dataclass(frozen=True, slots=True)
class BrokerFigures:
    """One nats-server: memory, processor, connections, traffic since it began, and what its streams take."""

    memory_bytes: float = 0.0
    cpu_ratio: float = 0.0
    connections: int = 0
    slow_consumers: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    store_bytes: int = 0
    store_bytes_max: int = 0


@dataclass(frozen=True, slots=True)
class DiskFigures:
    """A file system, in bytes."""

    size_bytes: int
    free_bytes: int


@dataclass(slots=True)
class PhaseHistogram:
    """Counts of durations up to each of `BOUNDS_S` (and of longer ones), not summed up, and the sum of all, in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def take(self, duration_s: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS_S, duration_s)] += 1
        self.sum_s += duration_s

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative counts by upper bound, as Prometheus has them."""
        total, found = 0, []
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


@dataclass(slots=True)
class RoundTimes:
    """The phases of all rounds that were heard of, and when the newest version became visible."""

    phases: dict[str, PhaseHistogram] = field(default_factory=lambda: {name: PhaseHistogram() for name in PHASES})
    committed_at_s: dict[int, float] = field(default_factory=dict)

    def on_event(self, event: Event, fields: EventFields | None) -> None:
        """Take an entry of the event log; others than rounds are skipped."""
        if isinstance(fields, RoundEvent):
            for name, duration_s in zip(PHASES, fields.phases, strict=True):
                self.phases[name].take(duration_s)
            self.committed_at_s[fields.fragment] = max(event.at_s, self.committed_at_s.get(fields.fragment, 0.0))


@dataclass
class ObservedHistory(History):
    """A history that keeps fewer rounds, and hands observers each event with its fields, None if they cannot be read.

    An observer raises nothing: the event log goes on for the others.
    """

    rounds: deque[RoundLine] = field(default_factory=lambda: deque(maxlen=ROUNDS_KEPT))
    samples: FairQueue[Noted[SampleEvent]] = field(default_factory=lambda: notes(SAMPLES_KEPT))
    observers: list[Observer] = field(default_factory=list)

    def on_event(self, event: Event) -> EventFields | None:
        """Take an entry of the event log."""
        fields = super().on_event(event)
        for observer in self.observers:
            observer(event, fields)
        return fields


@dataclass(slots=True)
class MonitoredRun:
    """One run as the monitor sees it.

    Attributes:
        view: its state from heartbeats, presences and the event log; a new one when the run is founded anew.
        record: its run record, None before the run is founded.
        answered_s: when the broker last answered an echo, by `clock`; None before the first. `began_s`: when the monitor began.
        brokers: what the brokers' own endpoints said, by name; None of one that does not answer.
        nodes: the addresses of a broker that has several: its nodes, and further brokers of the run.
        certificates: when the certificate of each of the broker's addresses ends, in seconds since the epoch.
        read_up_to: the number in the event log of the newest entry that `view` has.
        dropped_lines: lines that the journal could not write.
    """

    run: str
    clock: Clock
    view: ObservedHistory = field(default_factory=ObservedHistory)
    record: RunRecord | None = None
    answered_s: float | None = None
    began_s: float = 0.0
    times: RoundTimes = field(default_factory=RoundTimes)
    region_of: Callable[[str], str] = lambda _: ""
    brokers: dict[str, BrokerFigures | None] = field(default_factory=dict)
    nodes: dict[str, NodeSeen] = field(default_factory=dict)
    streams: tuple[StreamState, ...] = ()
    disks: dict[str, DiskFigures] = field(default_factory=dict)
    certificates: dict[str, float] = field(default_factory=dict)
    read_up_to: Callable[[], int] = lambda: 0
    dropped_lines: Callable[[], int] = lambda: 0

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew: another run has taken this one's place. Observers stay."""
        observers = [one for one in self.view.observers if one != self.times.on_event]
        self.times = RoundTimes()
        self.view, self.record = ObservedHistory(observers=[self.times.on_event, *observers]), None

    @property
    def protocol(self) -> ProtocolSettings:
        """Return what the run agreed on; the defaults before it is founded."""
        return ProtocolSettings() if self.record is None else self.record.protocol

    @property
    def connected(self) -> bool:
        """Return whether the broker has answered lately."""
        return self.answered_s is not None and self.clock.monotonic() - self.answered_s <= ANSWERED_S_MAX

    @property
    def hearing(self) -> Hearing:
        """Return what judges who is heard at this moment."""
        return Hearing(self.protocol, self.clock.monotonic(), self.clock.wall(), self.began_s, self.over)

    @property
    def over(self) -> bool:
        """Return whether the run has reached its target, or its broker is about to end."""
        target = self.protocol.tokens_target
        return self.record is not None and (self.record.closing or 0 < target <= self.view.run_tokens)
