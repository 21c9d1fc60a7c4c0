"""Curves of a run over time, from samples of its learners: pure, bounded, the same for the dashboard and for the report.

Between two samples of one incarnation a learner was present, and stepped for (new steps) x (step time), at most for the time
between them. Between two incarnations of which the first did not leave it was present and did not step, and so since the last
sample of a silent learner (`silence`): faults show. In a bin of time, tokens/s is the tokens of all learners over its length,
and goodput is their seconds stepping over those present. A sample's tokens are spread evenly over the time since the one
before. The goodput of a whole run is that of its event log (`atoll.story.goodput`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from atoll.run.history import History
from atoll.run.process_views import LearnerView, Sample

BINS_MAX: Final = 180
BIN_S_MIN: Final = 2.0
NOW_S: Final = 60.0
POINTS_MAX: Final = 200
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PresentTime:
    """The time between two samples of a learner: what it trained in it, and for how long it stepped."""

    from_s: float
    to_s: float
    tokens: int
    stepping_s: float


@dataclass(slots=True)
class Rates:
    """Tokens/s and goodput in bins; `at_s` are the middles of the bins, None stands for a bin in which nobody was present.

    `now` is the goodput of the last `NOW_S`, None where that is not known: nobody was present then, or nobody says when now is.
    """

    at_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float | None] = field(default_factory=list)
    goodput: list[float | None] = field(default_factory=list)
    now: float | None = None

    def as_json(self, began_s: float) -> dict[str, list[float] | list[float | None]]:
        """Return the bins in plain JSON values, with times in seconds since `began_s`."""
        at_s = [round(at_s - began_s, 2) for at_s in self.at_s]
        return {"at_s": at_s, "tokens_per_s": self.tokens_per_s, "goodput": self.goodput}


def thinned(items: Sequence[T], len_max: int) -> list[T]:
    """Return at most `len_max` of `items`, evenly chosen, always with the first and the last."""
    if len(items) <= len_max:
        return list(items)
    step = (len(items) - 1) / (len_max - 1)
    return [items[round(i * step)] for i in range(len_max)]


def first_s(view: History) -> float:
    """Return when the first thing that a view knows of happened, seconds since the epoch; 0 if it knows nothing."""
    known = [line.at_s for learner in view.learners.values() for line in learner.curve]
    for learner in view.learners.values():
        known += [life.joined_at_s for life in learner.lives.values() if life.joined_at_s is not None]
    known += [line.at_s - line.round.took_s for line in view.rounds]
    return min(known, default=0.0)


def learner_curve(learner: str, lines: Sequence[Sample], began_s: float) -> dict[str, Any]:
    """Return at most `POINTS_MAX` samples of a learner in plain JSON values, with times in seconds since `began_s`.

    A loss is None where it knew none.
    """
    kept = thinned(lines, POINTS_MAX)
    return {
        "learner": learner,
        "at_s": [round(line.at_s - began_s, 2) for line in kept],
        "loss": [None if line.fields.loss is None else round(line.fields.loss, 5) for line in kept],
        "overhead": [round(line.fields.overhead, 6) for line in kept],
        "lag": [line.fields.lag_versions for line in kept],
    }


def lines_of(learner: LearnerView, recent: Iterable[Sample] = ()) -> list[Sample]:
    """Return a learner's samples from event log and `recent` heartbeats by life and step; of two at one step the first stays.

    Not by time: a learner's clock may be set back, and what a slow writer tells late would be a step down.
    """
    both = sorted((*learner.curve, *recent), key=lambda line: (line.fields.incarnation, line.fields.step, line.at_s))
    kept: list[Sample] = []
    for line in both:
        if not kept or _key(kept[-1]) != _key(line):
            kept.append(line)
    return kept


def _key(line: Sample) -> tuple[int, int, str]:
    return line.fields.incarnation, line.fields.step, line.fields.state


def stretches(learner: LearnerView, lines: Sequence[Sample]) -> Iterator[PresentTime]:
    """Yield the times in which a learner was present, from its samples in order."""
    former: Sample | None = None
    for line in lines:
        told = line.fields
        if former is not None and former.fields.incarnation == told.incarnation:
            begin_s, steps, tokens = former.at_s, told.step - former.fields.step, told.tokens - former.fields.tokens
        elif former is not None and former.fields.state != "left":
            begin_s, steps, tokens = former.at_s, told.step, told.tokens
        else:
            life = learner.lives.get(told.incarnation)
            begin_s = line.at_s if life is None or life.joined_at_s is None else life.joined_at_s
            steps, tokens = told.step, told.tokens
        between_s = max(0.0, line.at_s - begin_s)
        if between_s > 0.0:
            yield PresentTime(begin_s, line.at_s, max(0, tokens), min(between_s, max(0, steps) * max(0.0, told.step_s)))
        former = line


def silence(lines: Sequence[Sample], until_s: float) -> Iterator[PresentTime]:
    """Yield the time from a learner's newest sample to `until_s`, without steps: it has not said goodbye, and is not heard."""
    if lines and lines[-1].fields.state != "left" and lines[-1].at_s < until_s:
        yield PresentTime(lines[-1].at_s, until_s, 0, 0.0)


def rates(parts: Sequence[PresentTime], span: tuple[float, float] | None = None, now_s: float | None = None) -> Rates:
    """Return tokens/s and goodput over time, in bins of the time of `parts`, or of a longer `span` that holds it.

    With one span for all, the tokens/s of the learners add up to those of the run. `now_s` is this moment, by date.
    """
    if not parts:
        return Rates()
    began_s, ended_s = span_of(parts) if span is None else span
    bin_s = max(BIN_S_MIN, (ended_s - began_s) / BINS_MAX)
    count = max(1, math.ceil((ended_s - began_s) / bin_s - 1e-9))
    tokens, stepping_s, present_s = [0.0] * count, [0.0] * count, [0.0] * count
    for part in parts:
        length_s = part.to_s - part.from_s
        first = int((part.from_s - began_s) / bin_s)
        last = min(count - 1, int((part.to_s - began_s) / bin_s))
        for index in range(first, last + 1):
            low_s = max(part.from_s, began_s + index * bin_s)
            high_s = min(part.to_s, began_s + (index + 1) * bin_s)
            share = max(0.0, high_s - low_s) / length_s
            tokens[index] += share * part.tokens
            stepping_s[index] += share * part.stepping_s
            present_s[index] += share * length_s
    made = Rates()
    for index in range(count):
        length_s = min(bin_s, ended_s - began_s - index * bin_s)
        made.at_s.append(round(began_s + index * bin_s + length_s / 2.0, 3))
        there = present_s[index] > 0.0
        made.tokens_per_s.append(round(tokens[index] / length_s, 3) if there and length_s > 0.0 else None)
        made.goodput.append(round(min(1.0, stepping_s[index] / present_s[index]), 4) if there else None)
    made.now = None if now_s is None else _goodput_since(now_s - NOW_S, parts)
    return made


def span_of(parts: Sequence[PresentTime]) -> tuple[float, float]:
    """Return when the first of `parts` (not empty) began and when the last ended."""
    return min(part.from_s for part in parts), max(part.to_s for part in parts)


def _goodput_since(from_s: float, parts: Iterable[PresentTime]) -> float | None:
    """Return the goodput since a moment; of a part that began before it only what is after it counts."""
    stepping_s = present_s = 0.0
    for part in parts:
        after_s = part.to_s - max(from_s, part.from_s)
        if after_s > 0.0:
            present_s += after_s
            stepping_s += part.stepping_s * after_s / (part.to_s - part.from_s)
    return round(stepping_s / present_s, 4) if present_s > 0.0 else None
