"""The curve of a learner: its samples of the event log, as many of them as a picture can show.

A run may last for months, and a view of it must not grow. So a curve keeps `SAMPLES_MAX` samples at most. When it is full it
drops every second one, and from then on takes only every second one that comes, then every fourth, and so on: the kept samples
stay spread over the whole run. The newest is kept beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from atoll.run.event_fields import SampleEvent

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
        """Iterate over the kept samples, and the newest."""
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
