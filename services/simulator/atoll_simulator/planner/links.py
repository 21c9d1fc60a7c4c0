"""The effect of each region's link: the time of a round, the part that overlap hides, and the bandwidth needed.

A round takes three and a half round trips (call 1/2, the chunks' acknowledgements 1, manifest 1/2, head 1/2, reading 1), the
transfer up, merging, the transfer down. Links are full duplex: one fragment goes up while another comes down, so a fragment
occupies the link for the longer leg only. A region's share of the hub or its one TCP connection may be slower than its link.
The window of unacknowledged chunks slows one blob, and so the round, but not the link, on which others go up meanwhile.

The one cause that keeps any bandwidth from being enough (round trips, merging, the window) is found by removing a part and
asking again; the window first, because a user can change it more easily than the speed of light.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from atoll.base.wording import as_bytes, as_rate, as_time
from atoll.protocol.pacing import grace_window
from atoll_simulator.planner import utilisation
from atoll_simulator.planner.failures import Failures, stops
from atoll_simulator.planner.question import WANTED, Question
from atoll_simulator.planner.timeline import Stream
from atoll_simulator.planner.traffic import Traffic

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
    r"""Return the pace of each region's learners, which are spread over the regions in turn.

    *Merged* is the share of the training that ever enters the model: rounds take time, and work done meanwhile is overwritten.

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
    return length_s * sum(_binomial_below(wanted, others, chance) for chance in chances) / PARTS


def _binomial_below(wanted: int, others: int, chance: float) -> float:
    if chance >= 1.0:
        return 0.0
    there, away = math.log(chance), math.log1p(-chance)
    ways = math.lgamma(others + 1)
    return sum(
        math.exp(ways - math.lgamma(k + 1) - math.lgamma(others - k + 1) + k * there + (others - k) * away)
        for k in range(wanted)
    )


ROUND_TRIPS = 3.5
TRIPS_DOWN = 1.5
ONE_CONNECTION = "one connection"
WINDOW = "the upload window"
ROUND_TRIP = "round trips"
MERGING = "merging"
TOGETHER = "round trips, the window and merging together"
NO_WINDOW_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Region:
    """One region's link, in bits per second and seconds.

    Attributes:
        up, down: the capacity of the link.
        up_usable, down_usable: the part that hub and connection leave; `bound_by` says what bounds the longer leg.
        up_average, down_average: the traffic of the plan in the mean.
        busy: share of time that the busier direction carries something; above 1 it cannot.
        journey_s: one round from call to adoption, alone on the link.
        hidden_s: how much of it overlap hides.
        utilisation: compute utilisation if a step waited for its fragment, as in the literature.
        interval: steps between two rounds of a fragment, since learners do not wait.
        merged: share of what its learners train that ever enters the model (`atoll_simulator.planner.links`).
    """

    up: float
    down: float
    up_usable: float
    down_usable: float
    bound_by: str
    up_average: float
    down_average: float
    busy: float
    journey_s: float
    hidden_s: float
    utilisation: float
    interval: float
    merged: float


def regions(question: Question, moved: Traffic) -> tuple[Region, ...]:
    """Return the effect of the plan on each region's link."""
    alone = [_usable(question, up, down) for up, down in zip(question.links.up, question.links.down, strict=True)]
    together = paces(question, [_journey(question, moved, usable) for usable in alone])
    return tuple(_region(question, moved, usable, pace) for usable, pace in zip(alone, together, strict=True))


def stream(question: Question, moved: Traffic, up: float, down: float) -> Stream:
    """Return how fragments travel over a link of `up` and `down` usable bits per second."""
    up_s, down_s = 8.0 * moved.up / up, 8.0 * moved.down / down
    protocol, links = question.protocol, question.links
    held_s = max(0.0, 8.0 * moved.up / links.window_bits_per_s - up_s)
    return Stream(
        fragments=protocol.fragments,
        interval=protocol.interval_steps,
        overlap=protocol.overlap_steps,
        send_s=max(up_s, down_s),
        after_s=min(up_s, down_s) + held_s + ROUND_TRIPS * links.rtt_s + links.merge_s + question.added_up_s,
    )


def utilisation_at(question: Question, moved: Traffic, bits_per_s: float) -> float:
    """Return the utilisation over a link of `bits_per_s` in each direction with no other bound."""
    return utilisation.streaming(question.step_s, stream(question, moved, bits_per_s, bits_per_s))


def required_rates(question: Question, moved: Traffic) -> dict[float, float | None]:
    """Return, by wanted utilisation, the bits per second that a learner's link needs in each direction."""
    return {
        wanted: utilisation.required_rate(lambda rate: utilisation_at(question, moved, rate), wanted)
        for wanted in WANTED
    }


def explain_unreachable(question: Question, moved: Traffic) -> str:
    """Return why the least utilisation that no bandwidth reaches is out of reach; empty if every one is reached."""
    widest = utilisation.LINK_BITS_PER_S_MAX
    best = utilisation_at(question, moved, widest)
    missed = [wanted for wanted in WANTED if best < wanted]
    if not missed:
        return ""
    return describe_cause(
        question, limiting_cause(question, lambda other: utilisation_at(other, moved, widest) >= missed[0])
    )


def explain_too_late(question: Question, moved: Traffic) -> str:
    """Return why no bandwidth lets a round end within tau steps; empty if one does."""
    if burst(question, moved) is not None:
        return ""
    return describe_cause(question, limiting_cause(question, lambda other: burst(other, moved) is not None))


def burst(question: Question, moved: Traffic) -> float | None:
    """Return the bits per second, each way, with which a round ends within tau steps; None if none do.

    It is at least the mean traffic of the longer leg, since otherwise rounds would queue for the link.
    """
    links = question.links
    left_s = question.hidden_s - ROUND_TRIPS * links.rtt_s - links.merge_s - question.added_up_s
    windowed_s = 8.0 * moved.up / links.window_bits_per_s
    if left_s <= windowed_s:
        return None
    rate = 8.0 * (moved.up + moved.down) / left_s
    alone = rate if rate <= links.window_bits_per_s else 8.0 * moved.down / (left_s - windowed_s)
    return max(alone, average(question, max(moved.up, moved.down)))


def average(question: Question, size: int) -> float:
    """Return the bits per second of `size` bytes a round."""
    return 8.0 * size / question.round_every_s


@dataclass(frozen=True, slots=True)
class _Usable:
    """A link's capacity, the part that hub and connection leave, and the bound of each direction; bits per second."""

    has: tuple[float, float]
    up: float
    down: float
    bound_up: str
    bound_down: str


def _usable(question: Question, up: float, down: float) -> _Usable:
    links, senders = question.links, question.senders
    bounds_up = {"the link": up, ONE_CONNECTION: links.connection_bits_per_s}
    bounds_down = {"the link": down, ONE_CONNECTION: links.connection_bits_per_s}
    if links.hub_in is not None:
        bounds_up["the hub"] = links.hub_in / senders
    if links.hub_out is not None:
        bounds_down["the hub"] = links.hub_out / senders
    bound_up, bound_down = min(bounds_up, key=bounds_up.__getitem__), min(bounds_down, key=bounds_down.__getitem__)
    return _Usable((up, down), bounds_up[bound_up], bounds_down[bound_down], bound_up, bound_down)


def _journey(question: Question, moved: Traffic, usable: _Usable) -> Journey:
    """Return a round's two halves: the way down with the head's and the question for it, merging, and the rest."""
    stretch = stream(question, moved, usable.up, usable.down)
    returned_s = 8.0 * moved.down / usable.down + TRIPS_DOWN * question.links.rtt_s + question.links.merge_s
    collected_s = max(0.0, stretch.send_s + stretch.after_s - returned_s)
    return Journey(collected_s, returned_s, utilisation.interval_reached(question.step_s, stretch))


def _region(question: Question, moved: Traffic, usable: _Usable, pace: MergePace) -> Region:
    journey = stream(question, moved, usable.up, usable.down)
    longer_up = moved.up / usable.up >= moved.down / usable.down
    took_s = journey.send_s + journey.after_s
    return Region(
        up=usable.has[0],
        down=usable.has[1],
        up_usable=usable.up,
        down_usable=usable.down,
        bound_by=usable.bound_up if longer_up else usable.bound_down,
        up_average=average(question, moved.up),
        down_average=average(question, moved.down),
        busy=journey.send_s / question.round_every_s,
        journey_s=took_s,
        hidden_s=min(took_s, question.hidden_s),
        utilisation=utilisation.streaming(question.step_s, journey),
        interval=pace.interval,
        merged=pace.merged,
    )


def without_window(question: Question) -> Question:
    """Return the question of a bus that does not wait for acknowledgements while it writes a blob."""
    return replace(question, links=replace(question.links, window_bytes=NO_WINDOW_BYTES))


def limiting_cause(question: Question, holds: Callable[[Question], bool]) -> str:
    """Return the part of a round without which `holds` is true; `TOGETHER` if no single part is the cause."""
    links = question.links
    without = {
        WINDOW: without_window(question),
        MERGING: replace(question, links=replace(links, merge_s=0.0)),
        ROUND_TRIP: replace(question, links=replace(links, rtt_s=0.0)),
    }
    return next((cause for cause, other in without.items() if holds(other)), TOGETHER)


def describe_cause(question: Question, cause: str) -> str:
    """Return a cause with its numbers."""
    links = question.links
    trip = f"{1000.0 * links.rtt_s:g} ms"
    return {
        WINDOW: f"a blob goes up with {as_bytes(links.window_bytes)} in flight, so at {as_rate(links.window_bits_per_s)} at "
        f"most over {trip}, whatever the link",
        ROUND_TRIP: f"the round trips of {trip} alone are too long",
        MERGING: f"the {as_time(links.merge_s)} of merging and disk alone are too long",
        TOGETHER: f"round trips of {trip}, the window of {as_bytes(links.window_bytes)} and {links.merge_s:g} s of merging are "
        f"too long together",
    }[cause]


def cause_remedy(cause: str) -> str:
    """Return the change that removes a cause."""
    return {
        WINDOW: "more fragments, more overlap, a smaller codec up, a hub nearer by or a larger BusOptions.window; not the link",
        ROUND_TRIP: "more overlap, longer steps or a hub nearer by (--overlap-steps, --rtt-ms); not the link",
        MERGING: "more overlap, or faster shards and disks (--overlap-steps, --merge-s); not the link",
        TOGETHER: "more overlap or more fragments (--overlap-steps, --fragments); not the link",
    }[cause]
