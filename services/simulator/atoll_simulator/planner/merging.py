r"""The share of the training that ever enters the model: rounds take time, and work done meanwhile is overwritten.

A learner pushes its work at the call, and adopts the next version when the round is over. Its work in between is
superseded (`atoll.protocol.island`). With H steps between rounds and J of them between push and adoption,

.. math::

    merged = \frac{H - J}{H}, \qquad J = \frac{collected + held + returned}{step} + 1

* *collected*: until the round ends, seconds. The K-th fastest way up decides, then grace, which waits for the slower ones
  for as long as Eq. 3 grants at most.
* *held*: how much longer a quorum above one takes because learners stand still. The rest of a stop that another meets
  is uniform over its length D. Of M - 1 others K - 1 must be there, each with the chance u + (1 - u) y by y D
  seconds, so it takes D times the mean over y of P(fewer are there) in the mean.
* *returned*: merging, news of the head, the way down.
* the one step more: half of the step in which the call comes, half of that in which the frame does.

With `adoption = "carry"` nothing is overwritten if the link keeps up: all is merged. A link that must carry c > 1 times
its capacity makes fragments come round every c H steps. Most of that time they stand in line, and training is
overwritten. We have no theory of how much: the share is divided by c^1.5, fitted by eye on simulations, and is within
25 points of theirs, on either side. With "carry" it is divided by c, a lower bound. The forms are compared with
`atoll_simulator.fleet.rounds`: 3 points if the link keeps up, 6 with failures and any quorum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.protocol.waits import grace_window
from atoll_simulator.planner.failures import Failures, stops
from atoll_simulator.planner.question import Question

PARTS = 32
CROWDING = 1.5
UNSURE = 25.0
"""The largest difference in points between this form and the simulation if the link is too slow."""


@dataclass(frozen=True, slots=True)
class Journey:
    """One region's round alone on its link, seconds until it is at the shard and from there; `interval`: steps it allows."""

    collected_s: float
    returned_s: float
    interval: float


@dataclass(frozen=True, slots=True)
class MergePace:
    """Of one region's learners: steps between two rounds of a fragment, and the share of what they train that is merged."""

    interval: float
    merged: float


def paces(question: Question, journeys: Sequence[Journey]) -> tuple[MergePace, ...]:
    """Return the pace of each region's learners, which are spread over the regions in turn."""
    protocol, learners = question.protocol, question.learners
    if protocol.quorum > learners:
        return tuple(MergePace(math.inf, 0.0) for _ in journeys)
    all_of_them = [journeys[number % len(journeys)] for number in range(learners)]
    due = sorted(journey.interval for journey in all_of_them)[protocol.quorum - 1]
    arrivals_s = sorted(journey.collected_s for journey in all_of_them)
    quorum_s = arrivals_s[protocol.quorum - 1]
    grace_s = grace_window(protocol, question.step_s, quorum_s, question.links.merge_s).granted_s
    ends_s = min(arrivals_s[-1], quorum_s + grace_s) + held_s(
        question.failures, learners, question.chips, protocol.quorum
    )
    return tuple(_pace(question, journey, ends_s, due) for journey in journeys)


def _pace(question: Question, journey: Journey, ends_s: float, due: float) -> MergePace:
    every = question.protocol.interval_steps
    interval = max(journey.interval, due)
    crowded = interval / every
    if question.protocol.adoption == "carry":
        return MergePace(interval, 1.0 / crowded)
    lost = (ends_s + journey.returned_s) / question.step_s + 1.0
    return MergePace(interval, max(0.0, 1.0 - lost / every) / crowded**CROWDING)


def held_s(failures: Failures, learners: int, chips: int, quorum: int) -> float:
    """Return how many seconds longer a round takes, in the mean, until `quorum` of `learners` do not stand still."""
    stopped, length_s = stops(failures, chips)
    others, wanted = learners - 1, quorum - 1
    if wanted < 1 or wanted > others or length_s == 0.0:
        return 0.0
    chances = [1.0 - stopped * (1.0 - (part + 0.5) / PARTS) for part in range(PARTS)]
    return length_s * sum(_fewer(wanted, others, chance) for chance in chances) / PARTS


def _fewer(wanted: int, others: int, chance: float) -> float:
    """Return the chance that fewer than `wanted` of `others` are there, each with `chance`, independently."""
    if chance >= 1.0:
        return 0.0
    there, away = math.log(chance), math.log1p(-chance)
    ways = math.lgamma(others + 1)
    return sum(
        math.exp(ways - math.lgamma(k + 1) - math.lgamma(others - k + 1) + k * there + (others - k) * away)
        for k in range(wanted)
    )
