"""What the rounds of a run add up to, those too that a view no longer keeps one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from atoll.base.quantities import COUNT_MAX, LEARNERS_MAX, at_most
from atoll.run.event_fields import RoundView

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

    def add(self, shard: str, line: RoundView, at_s: float) -> None:
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
