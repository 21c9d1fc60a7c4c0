"""The curves of a page, from `atoll.run.curves`, and the row of a run among others.

The goodput of the whole run is that of the report and of `atoll why` (`atoll.story.goodput`). What it was in a short time is
reckoned from samples, and a learner that is silent has none: until it is back or left it counts as present without steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from atoll.report.comparison import ComparedRun
from atoll.run.curves import POINTS_MAX, PresentTime, learner_curve, lines_of, rates, silence, stretches, thinned
from atoll.run.process_views import SampleLine
from atoll.run.view import RunView
from atoll.story.goodput import goodput_of
from atoll.story.history import History
from atoll_monitor.dashboard.page_facts import PageFacts, shown_learners

STEPPING: Final = ("training", "draining")


def curves_of(view: RunView, history: History, facts: PageFacts) -> dict[str, Any]:
    """Return the curves: loss of the merged model; loss, lag and overhead of each learner; tokens/s and goodput of all."""
    timeline = history.timeline
    began_s = facts.began_s(timeline)
    lines = {name: lines_of(one, timeline.recent.get(name, ())) for name, one in view.learners.items()}
    parts = [part for name, one in view.learners.items() for part in stretches(one, lines[name])]
    parts += _silences(view, lines, facts)
    made = rates(parts, now_s=None if facts.saved else facts.wall_s)
    goodput = goodput_of(history).share
    validated = thinned(list(timeline.validated), POINTS_MAX)
    losses, lags = [], []
    for one in shown_learners(view):
        told = [line for line in lines[one.learner] if line.sample.loss is not None]
        known = learner_curve(one.learner, told, began_s)
        losses.append({"learner": one.learner, "at_s": known.at_s, "loss": known.loss})
        whole = learner_curve(one.learner, lines[one.learner], began_s)
        lags.append({"learner": one.learner, "at_s": whole.at_s, "lag": whole.lag, "overhead": whole.overhead})
    return {
        "run": facts.run,
        "merged": {
            "at_s": [round(at_s - began_s, 2) for at_s, _ in validated],
            "tokens": [told.run_tokens for _, told in validated],
            "bits_per_byte": [round(told.bits_per_byte, 5) for _, told in validated],
            "average": [None if told.average is None else round(told.average, 5) for _, told in validated],
        },
        "losses": losses,
        "lags": lags,
        "rates": {
            "at_s": [round(at_s - began_s, 2) for at_s in made.at_s],
            "tokens_per_s": made.tokens_per_s,
            "goodput": made.goodput,
        },
        "goodput": {"now": made.now, "whole": None if goodput is None else round(goodput, 4)},
    }


def _silences(view: RunView, lines: Mapping[str, Sequence[SampleLine]], facts: PageFacts) -> Iterator[PresentTime]:
    """Yield the time that learners have been silent, of a run that goes on and whose broker answers: else nobody is heard.

    It ends where the samples of those that train end, for a step may last minutes: what they do since is not known yet, and a
    curve must not fall for want of a sample. Where nobody trains it ends now.
    """
    if facts.saved or facts.over or not facts.answered:
        return
    states = {name: facts.hearing.state(one) for name, one in view.learners.items()}
    known_s = [lines[name][-1].at_s for name, state in states.items() if state in STEPPING and lines[name]]
    until_s = min(facts.wall_s, max(known_s, default=facts.wall_s))
    for name, state in states.items():
        if state == "silent":
            yield from silence(lines[name], until_s)


def compared(runs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of runs, from the states and curves of each: those of `atoll report compare`, and curves beside them."""
    return [
        {
            **asdict(
                ComparedRun(
                    path="",
                    run=state["run"],
                    ended=state["status"],
                    clock=state["clock"],
                    tokens=state["tokens"],
                    wall_s=state["newest_s"],
                    bits_per_byte=state["bits_per_byte"],
                    goodput=curves["goodput"]["whole"],
                    bytes_per_token=state["traffic"]["bytes_per_token"],
                    commits=state["commits"],
                    learners=len(state["learners"]) + state["left_out"]["learners"],
                    faults=state["faults"],
                )
            ),
            "merged": curves["merged"],
            "rates": curves["rates"],
        }
        for state, curves in runs
    ]
