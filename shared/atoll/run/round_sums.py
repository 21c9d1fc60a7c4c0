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
class RoundSums:
    """Commits by shard, rounds by what ended them, contributions and how many were late, and slices judged by learner."""

    commits: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    contributions: int = 0
    late: int = 0
    shortened: Counter[str] = field(default_factory=Counter)
    unheard: Counter[str] = field(default_factory=Counter)

    def add(self, shard: str, line: RoundView) -> None:
        """Take one round."""
        count(self.commits, shard, 1, LEARNERS_MAX)
        count(self.ends, line.end, 1)
        self.contributions = at_most(COUNT_MAX, self.contributions + len(line.contributors))
        for share in line.contributors:
            self.late = at_most(COUNT_MAX, self.late + (share.age > 0))
            if share.shortened:
                count(self.shortened, share.learner, share.shortened, LEARNERS_MAX)
            if share.unheard:
                count(self.unheard, share.learner, share.unheard, LEARNERS_MAX)
