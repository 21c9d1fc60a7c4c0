"""What stands out in a run, by cause: each cause once, and beneath it the findings that it explains.

    shards and the broker ──┐
                            ├──► all findings ──► each consequence goes under its cause ──► causes, by urgency
    learners ───────────────┘

By urgency: what goes on comes before what has ended, the graver cause before the others, the newer finding before the older
one. So a shard that is dead now stands before the hundred outages that a long run has survived.

A finding compares a learner with the *other* learners, and a shard with its own usual pace. Each names the figures it rests
on and where they are in the event log, so that a person can check it. What is below the bounds of the modules that find
(`shard_findings`, `learner_findings`) is not worth a finding; the stories of a round, a shard and a learner have all figures.

What explains what is in two tables. A cause explains other findings of the *same culprit*: contributions over a slow link come
too late and are refused. Or it explains what fell mostly into its *time*, whoever it befell: while the disk is full, uploads
of all learners wait. The tables say what is usual; a person checks it by the times. What had ended before a cause began is no
effect of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from atoll.story.attribution import shares_of
from atoll.story.history import History
from atoll.story.learner_findings import (
    absent_learners,
    bad_directions,
    exceeded_shares,
    many_clips,
    many_refusals,
    much_superseded,
    quarantines,
    slow_learners,
    slow_links,
    without_contributions,
)
from atoll.story.outages import SILENT_TIMES, usual_pause_s
from atoll.story.run_finding import Cause, RunFinding
from atoll.story.shard_findings import hindered_commits, shards_without_owner

SAME_CULPRIT: Final[Mapping[Cause, tuple[Cause, ...]]] = {
    "bad direction": ("quarantine", "refusals", "clipped", "nothing merged"),
    "quarantine": ("refusals", "nothing merged"),
    "slow link": ("stale refusals", "superseded", "nothing merged"),
    "slow learner": ("stale refusals", "superseded", "nothing merged"),
    "learner was gone": ("superseded", "nothing merged"),
    "refusals": ("nothing merged",),
    "stale refusals": ("nothing merged",),
}
"""What a cause explains of its own culprit."""
SAME_TIME: Final[Mapping[Cause, tuple[Cause, ...]]] = {
    "disk was full": ("shard without owner", "slow link", "learner was gone", "stale refusals", "superseded"),
    "broker was away": ("shard without owner", "slow link", "learner was gone", "stale refusals", "superseded"),
    "shard without owner": ("stale refusals",),
}
"""What a cause explains of everybody, if most of it fell into the time of the cause."""
MOSTLY: Final = 0.5
GRAVITY: Final[tuple[Cause, ...]] = (
    "disk was full",
    "broker was away",
    "shard without owner",
    "share exceeded",
    "bad direction",
    "quarantine",
    "slow link",
    "slow learner",
    "learner was gone",
    "superseded",
    "refusals",
    "stale refusals",
    "clipped",
    "nothing merged",
)
"""The causes, the gravest first: what stops everybody, what harms the model, what harms one learner."""
ENDS: Final[frozenset[Cause]] = frozenset({"shard without owner", "quarantine", "learner was gone", "nothing merged"})
"""Findings of which an event tells the end. Of the others `until_s` is only the newest measurement that they rest on."""
RECENT_S: Final = 60.0
"""Such a measurement of the last minute, or of the last usual pauses between rounds: what was measured goes on."""


def findings(history: History) -> list[RunFinding]:
    """Return what stands out by cause, the most urgent first; nothing for a run that goes as it should.

    A history that keeps only the newest rounds, as that of a page does, tells nothing that had ended before them.
    """
    shares = shares_of(history.rounds)
    found = [
        *hindered_commits(history),
        *shards_without_owner(history),
        *bad_directions(history, shares),
        *quarantines(history),
        *exceeded_shares(history),
        *slow_links(history, shares),
        *slow_learners(history, shares),
        *absent_learners(history),
        *much_superseded(history),
        *many_refusals(history),
        *many_clips(history),
        *without_contributions(history),
    ]
    kept_s = history.forgotten_until_s
    found = [each for each in found if each.until_s is None or kept_s is None or each.until_s >= kept_s]
    return by_urgency(by_cause(found, history.newest_s), history.newest_s - _recent_s(history)) if found else []


def by_urgency(found: Iterable[RunFinding], recent_s: float) -> list[RunFinding]:
    """Return findings in the order in which a person needs them; what was measured after `recent_s` goes on."""

    def urgency(each: RunFinding) -> tuple[bool, int, float]:
        goes_on = each.until_s is None or (each.cause not in ENDS and each.until_s >= recent_s)
        return not goes_on, GRAVITY.index(each.cause), -each.from_s

    return sorted(found, key=urgency)


def _recent_s(history: History) -> float:
    usual_s = [usual_pause_s(history, shard) or 0.0 for shard in history.shards()]
    return max(RECENT_S, SILENT_TIMES * max(usual_s, default=0.0))


def by_cause(found: list[RunFinding], newest_s: float) -> list[RunFinding]:
    """Return the findings that no other one explains, each with those that it does; causes come before what they explain.

    What has a consequence of its own passes that on to its cause: a reader sees one level.
    """
    beneath: dict[int, int] = {}
    for place, each in enumerate(found):
        cause = next((at for at, one in enumerate(found) if at != place and _explains(one, each, newest_s)), None)
        if cause is not None:
            beneath[place] = cause
    led_to: dict[int, list[RunFinding]] = {}
    for place in beneath:
        led_to.setdefault(_root(place, beneath), []).append(found[place])
    return [
        replace(each, consequences=tuple(led_to.get(place, ())))
        for place, each in enumerate(found)
        if place not in beneath
    ]


def _root(place: int, beneath: Mapping[int, int]) -> int:
    while place in beneath:
        place = beneath[place]
    return place


def _explains(cause: RunFinding, other: RunFinding, newest_s: float) -> bool:
    if cause.culprit == other.culprit and other.cause in SAME_CULPRIT.get(cause.cause, ()):
        # The refusals before a quarantine are the offences that it is for.
        return cause.cause == "quarantine" or other.until_s is None or other.until_s >= cause.from_s
    if other.cause not in SAME_TIME.get(cause.cause, ()):
        return False
    ended_s = newest_s if other.until_s is None else other.until_s
    until_s = newest_s if cause.until_s is None else cause.until_s
    within_s = min(until_s, ended_s) - max(cause.from_s, other.from_s)
    return within_s >= MOSTLY * (ended_s - other.from_s)
