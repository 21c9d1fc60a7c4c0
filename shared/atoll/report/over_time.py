"""A run over time, and what was slow in it: two parts of `report.json`, from what the dashboard and `atoll why` compute.

Curves are those of `atoll.run.curves`, from the samples of the event log, so the report of a run and its page in
`atoll dashboard` agree. Times are seconds since `began_s`, the first thing that the event log tells of. A learner's tokens/s
are in the bins of the whole run, so that those of all learners add up to the run's. Everything is bounded: `LEARNERS_MAX`
learners, and at most `POINTS_MAX` points each.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from atoll.run.curves import first_s, learner_curve, lines_of, rates, span_of, stretches
from atoll.run.view import RunView
from atoll.story.history import History
from atoll.story.run_finding import RunFinding
from atoll.story.slowness import slowness

LEARNERS_MAX: Final = 64


def curves_of_run(view: RunView) -> dict[str, Any]:
    """Return loss, lag, overhead and tokens/s of each learner, and tokens/s and goodput of all, in plain JSON values."""
    began_s = first_s(view)
    lines = {name: lines_of(one) for name, one in sorted(view.learners.items())}
    parts = {name: list(stretches(view.learners[name], samples)) for name, samples in lines.items()}
    every = [part for own in parts.values() for part in own]
    span = span_of(every) if every else (0.0, 0.0)
    made = rates(every, span)
    learners = []
    for name in list(lines)[:LEARNERS_MAX]:
        own = rates(parts[name], span)
        learners.append({**asdict(learner_curve(name, lines[name], began_s)), "tokens_per_s": own.tokens_per_s})
    return {
        "began_s": round(began_s, 3),
        "learners": learners,
        "learners_left_out": max(0, len(lines) - LEARNERS_MAX),
        "rates": {
            "at_s": [round(at_s - began_s, 2) for at_s in made.at_s],
            "tokens_per_s": made.tokens_per_s,
            "goodput": made.goodput,
        },
    }


def slow_parts(history: History | None, began_s: float) -> dict[str, Any] | None:
    """Return what was slow, in plain JSON values, with times in seconds since `began_s`; None without the event log."""
    if history is None:
        return None
    told = slowness(history)
    return {
        "lost": [
            {**asdict(part), "seconds": round(part.seconds, 3), "share": round(part.share, 5)} for part in told.lost
        ],
        "findings": [_finding(found, began_s) for found in told.findings],
        "notes": list(told.notes),
    }


def _finding(found: RunFinding, began_s: float) -> dict[str, Any]:
    until_s = None if found.until_s is None else round(found.until_s - began_s, 3)
    return {
        **asdict(found),
        "from_s": round(found.from_s - began_s, 3),
        "until_s": until_s,
        "evidence": list(found.evidence),
        "consequences": [_finding(each, began_s) for each in found.consequences],
    }
