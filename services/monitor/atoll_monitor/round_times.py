"""Durations of rounds, in each of their phases: sums and buckets, taken from the event log.

    called ──quorum_wait──► quorum ──grace──► decided ──queued──► merging ──merge──► merged ──commit──► visible

A histogram per phase, with the same bounds for all: they reach from a fragment on a laptop to a round across an ocean.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

from atoll.base.errors import PeerMisbehaved
from atoll.wire.events import RoundEvent, fields_of
from atoll.wire.messages import Event

BOUNDS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
PHASES: Final = ("quorum_wait", "grace", "queued", "merge", "commit")


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

    def on_event(self, event: Event) -> None:
        """Take an entry of the event log; others than rounds are skipped, and one that cannot be read says nothing."""
        if event.kind != "round":
            return
        try:
            line = fields_of(event, RoundEvent)
        except PeerMisbehaved:
            return
        for name, duration_s in phases_of(line).items():
            self.phases[name].take(duration_s)
        self.committed_at_s[line.fragment] = max(event.at_s, self.committed_at_s.get(line.fragment, 0.0))


def phases_of(line: RoundEvent) -> dict[str, float]:
    """Return the duration of each phase of a round, in seconds.

    A round that ended before its quorum has waited for nothing else.
    """
    quorum_wait_s = min(max(0.0, line.quorum_wait_s), max(0.0, line.waited_s))
    return {
        "quorum_wait": quorum_wait_s,
        "grace": max(0.0, line.waited_s - quorum_wait_s),
        "queued": max(0.0, line.queued_s),
        "merge": max(0.0, line.merge_s),
        "commit": max(0.0, line.commit_s),
    }
