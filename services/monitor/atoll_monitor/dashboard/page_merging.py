"""What was merged, as a page shows it: the newest rounds with their phases, and the map of fragments and learners."""

from __future__ import annotations

from typing import Any, Final

from atoll.run.decisions import describe_wait
from atoll.run.timeline import Timeline
from atoll.run.view import RoundLine, RunView
from atoll_monitor.dashboard.page_facts import LEARNERS_MAX

ROUNDS_MAX: Final = 160
ROUNDS_MIN: Final = 40
ROUNDS_PER_FRAGMENT: Final = 6


def shown_rounds(view: RunView, fragments: int) -> list[RoundLine]:
    """Return the newest rounds, some of each of so many fragments."""
    return list(view.rounds)[-min(ROUNDS_MAX, max(ROUNDS_MIN, ROUNDS_PER_FRAGMENT * fragments)) :]


def fragment_map(
    view: RunView, timeline: Timeline, learners: list[str], fragments: list[int], began_s: float
) -> dict[str, Any]:
    """Return, for each fragment and learner, the version that the learner's last contribution was made on, and when."""
    rows = []
    for fragment in fragments:
        newest = view.fragments[fragment]
        cells: list[dict[str, Any] | None] = []
        for learner in learners:
            last = timeline.contributions.get((fragment, learner))
            cells.append(
                None
                if last is None
                else {
                    "base": last.base,
                    "lag": max(0, newest.version - last.version),
                    "age": last.age,
                    "tokens": last.tokens,
                    "weight": round(last.weight, 4),
                    "at_s": round(last.at_s - began_s, 2),
                }
            )
        rows.append({"fragment": fragment, "version": newest.version, "parameters": newest.parameters, "cells": cells})
    return {"learners": learners, "rows": rows}


def round_row(line: RoundLine, began_s: float) -> dict[str, Any]:
    """Return a round with the lengths of its phases, in their order, before the moment when it became visible."""
    made = line.round
    quorum_s = min(max(0.0, made.quorum_wait_s), max(0.0, made.waited_s))
    why = "" if made.why is None else "; ".join(describe_wait(made.why).values())
    return {
        "fragment": made.fragment,
        "version": made.version,
        "at_s": round(line.at_s - began_s, 3),
        "phases": [
            round(value, 4)
            for value in (
                quorum_s,
                max(0.0, made.waited_s - quorum_s),
                max(0.0, made.queued_s),
                max(0.0, made.merge_s),
                max(0.0, made.commit_s),
            )
        ],
        "granted_s": round(made.grace_s, 4),
        "shard": line.shard,
        "contributors": [[share.learner, share.age, share.tokens] for share in made.contributors[:LEARNERS_MAX]],
        "live": made.live,
        "end": made.end,
        "why": why,
    }
