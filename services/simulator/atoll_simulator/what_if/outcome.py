"""Outcome of a run, in figures that a recording and a simulation both have, made by the same sums.

`MadeCommit` is one commit. A recording has them in its `round` events, a simulation at its shards' decisions.
Token-fragments divided by the number of fragments are tokens, so "merged tokens/s" is what of the training reached the model.

*Goodput* is that of a run by its event log (`atoll.story.goodput`); a simulation has the recording's presence, and own steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from atoll.story.goodput import RunGoodput


@dataclass(frozen=True, slots=True)
class MadeCommit:
    """One commit: its waiting from the call, and (age, token-fragments) of each contribution."""

    fragment: int
    quorum_wait_s: float
    waited_s: float
    shares: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TrainingTotals:
    """Work of the learners: tokens, and their seconds stepping and present."""

    tokens: int
    goodput: RunGoodput


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of one run; seconds are means over its commits, `age_mean` is in versions."""

    commits: float
    merged_tokens_s: float
    trained_tokens_s: float
    goodput: float
    contributors: float
    late_share: float
    age_mean: float
    quorum_wait_s: float
    waited_s: float


TITLES = {
    "commits": "commits",
    "merged_tokens_s": "merged tokens/s",
    "trained_tokens_s": "trained tokens/s",
    "goodput": "goodput",
    "contributors": "contributions per commit",
    "late_share": "late share of contributions",
    "age_mean": "age of contributions, versions",
    "quorum_wait_s": "wait for the quorum, s",
    "waited_s": "wait of a round, s",
}
SHARES = ("goodput", "late_share", "age_mean")
"""Figures whose difference is judged as it is; those of waiting are judged beside the interval of a fragment."""
WAITS = ("quorum_wait_s", "waited_s")


@dataclass(frozen=True, slots=True)
class Miss:
    """Distance of a simulated figure from the recording's; `share` is what is compared with the bound."""

    name: str
    recording: float
    simulated: float
    share: float


def outcome(commits: Sequence[MadeCommit], trained: TrainingTotals, time_s: float, fragments: int) -> RunFigures:
    """Return the figures of a run that took `time_s` with so many `fragments`."""
    shares = [share for made in commits for share in made.shares]
    called = [made for made in commits if made.shares]
    return RunFigures(
        commits=float(len(commits)),
        merged_tokens_s=sum(tokens for _, tokens in shares) / fragments / time_s,
        trained_tokens_s=trained.tokens / time_s,
        goodput=trained.goodput.share or 0.0,
        contributors=len(shares) / max(1, len(commits)),
        late_share=sum(age > 0 for age, _ in shares) / max(1, len(shares)),
        age_mean=fmean(age for age, _ in shares) if shares else 0.0,
        quorum_wait_s=fmean(made.quorum_wait_s for made in called) if called else 0.0,
        waited_s=fmean(made.waited_s for made in called) if called else 0.0,
    )


def misses(recording: RunFigures, simulated: RunFigures, interval_s: float) -> list[Miss]:
    """Return how far every figure is from the recording's.

    The share is of the recording's figure; of shares and ages the difference itself; of waits the difference over
    `interval_s`, the mean time between two versions of a fragment; a share of milliseconds means nothing.
    """
    found = []
    for each in fields(RunFigures):
        was, now = getattr(recording, each.name), getattr(simulated, each.name)
        beside = 1.0 if each.name in SHARES else interval_s if each.name in WAITS else max(abs(was), 1e-9)
        found.append(Miss(each.name, was, now, abs(now - was) / beside))
    return found


def interval_s(commits: Sequence[MadeCommit], time_s: float) -> float:
    """Return the mean time between two versions of a fragment; the whole time where none has two."""
    by_fragment = Counter(made.fragment for made in commits)
    return time_s * len(by_fragment) / max(1, len(commits)) if by_fragment else time_s
