"""How much of a fleet's time went into the model: two words, defined alike for Atoll and for the synchronous baseline.

**Participation** is stepping time over present time: the learner-seconds of the measured window in which steps were
taken, over the learner-seconds of the window. Every learner counts as present from the beginning of the window to its
end, dead or alive, because a fault is what keeps it away; one that never came back, or never stepped, as well. The rows of
the baseline are its group's, which steps as one: what they say holds for each of its workers. Between two rows of one life
stepping is the new steps times the seconds a step takes, at most the time between the rows. A step that was taken and
later thrown away counts.

**Useful-step share** is the tokens that entered the model in the window over the tokens that the same system's learners
would have trained in the same time undisturbed. Of Atoll what was merged, in time or late; of the baseline the steps
that its group still has at the end: what it rolled back is not in it. A late contribution counts with all its tokens
although it weighs less in the merge; the *damped* share counts `age_damping^age` of them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from benchmarks.faults.extracts import Extract, ExtractRound, Row

Window = tuple[float, float]


def participation(extract: Extract) -> float:
    """Return stepping over present learner-seconds; see the module docstring."""
    seconds = extract.course.seconds
    stepping: dict[str, float] = defaultdict(float)
    for life, rows in extract.lives.items():
        learner = life.rpartition("/")[0]
        for before, after in itertools.pairwise(rows):
            between_s = max(0.0, min(after[0], seconds) - max(before[0], 0.0))
            whole_s = after[0] - before[0]
            if between_s > 0.0 and whole_s > 0.0:
                stepped_s = min(whole_s, (after[1] - before[1]) * after[3])
                stepping[learner] += stepped_s * between_s / whole_s
    present = 1 if extract.course.system == "synchronous" else extract.course.learners
    return sum(stepping.values()) / (seconds * present)


def useful_share(extract: Extract, plain: Extract, damping: float = 1.0) -> float:
    """Return useful tokens over those possible at the rate of `plain`, the same system undisturbed."""
    possible = trained(plain) / plain.course.seconds * extract.course.seconds
    return useful(extract, damping) / possible if possible else 0.0


def useful(extract: Extract, damping: float = 1.0) -> float:
    """Return the tokens that entered the model in the window, each times `damping` per version of its age."""
    if extract.course.system == "synchronous":
        return kept_steps(extract) * extract.step_tokens
    merged = sum(share.tokens * damping**share.age for made in within(extract) for share in made.shares)
    return merged / extract.fragments


def within(extract: Extract) -> list[ExtractRound]:
    """Return the commits of the window."""
    return [made for made in extract.rounds if 0.0 <= made.at_s <= extract.course.seconds]


def kept_steps(extract: Extract) -> float:
    """Return by how many steps the synchronous group's model is ahead at the end of the window of its beginning."""
    rows = sorted(row for rows in extract.lives.values() for row in rows)
    before = [row[1] for row in rows if row[0] <= 0.0]
    inside = [row[1] for row in rows if row[0] <= extract.course.seconds]
    return inside[-1] - (before[-1] if before else 0) if inside else 0


def trained(extract: Extract) -> float:
    """Return the tokens trained in the window, whatever became of them."""
    ends = (0.0, extract.course.seconds)
    return sum(grown(rows, *ends, column=2) for rows in extract.lives.values())


def grown(rows: Sequence[Row], start_s: float, stop_s: float, column: int = 1) -> float:
    """Return by how much a column of a life grew between two times, straight between its rows."""
    return _at(rows, stop_s, column) - _at(rows, start_s, column)


def _at(rows: Sequence[Row], at_s: float, column: int) -> float:
    after = bisect_right(rows, at_s, key=lambda row: row[0])
    if after == 0:
        return rows[0][column]
    if after == len(rows):
        return rows[-1][column]
    low, high = rows[after - 1], rows[after]
    return low[column] + (high[column] - low[column]) * (at_s - low[0]) / (high[0] - low[0])


def spans(rows: Sequence[Row], window: Window) -> bool:
    """Return whether a life goes on over the whole of a window, as far as was heard."""
    return bool(rows) and rows[0][0] <= window[0] and rows[-1][0] >= window[1]


def paces(extract: Extract, windows: Iterable[Window], quiet: Iterable[Window]) -> list[tuple[float, float]]:
    """Return, per window and learner that lives through it, the steps taken and those it takes in as much quiet time.

    Learners are compared with themselves; where the sums are equal they did not notice.
    """
    windows, quiet = list(windows), list(quiet)
    by_learner: dict[str, list[list[Row]]] = defaultdict(list)
    for life, rows in extract.lives.items():
        by_learner[life.rpartition("/")[0]].append(rows)
    found: list[tuple[float, float]] = []
    for lives in by_learner.values():
        calm = [(rows, w) for rows in lives for w in quiet if spans(rows, w)]
        calm_s = sum(stop - start for _, (start, stop) in calm)
        if calm_s <= 0.0:
            continue
        rate = sum(grown(rows, *w) for rows, w in calm) / calm_s
        found += [
            (grown(rows, *window), rate * (window[1] - window[0]))
            for window in windows
            for rows in lives
            if rate > 0.0 and spans(rows, window)
        ]
    return found


def gaps(busy: Iterable[Window], start_s: float, stop_s: float, shortest_s: float) -> list[Window]:
    """Return what lies between some windows, from `start_s` to `stop_s`, where it lasts `shortest_s` or longer."""
    free: list[Window] = []
    at_s = start_s
    for begin, end in sorted(busy):
        if begin - at_s >= shortest_s:
            free.append((at_s, begin))
        at_s = max(at_s, end)
    if stop_s - at_s >= shortest_s:
        free.append((at_s, stop_s))
    return free
