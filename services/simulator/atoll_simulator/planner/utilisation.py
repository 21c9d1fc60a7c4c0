"""Compute utilisation and bandwidth in closed form, each equal to its graph in `atoll_simulator.planner.timeline`.

With a step of T seconds in L layers, of which the backward pass has the share w (2/3), and c seconds of the link:

    data-parallel   T' = T + max(c / L, c - w T (1 - 1/L))       c per step: all but the last layer's part hides in backward
    DiLoCo          H T + max(c / L, c - w T (1 - 1/L)) per H steps; H T + c without overlap
    streaming       a fragment leaves every k = H/P steps and is due tau steps later, D seconds after it left. The first
                    that leaves no earlier than that is n steps behind it, so n steps take D + (n - tau) T at least:
                    T' = T + max(0, D - tau T) / n, and T' >= c / k, which the link needs

Streaming is exact if H is a multiple of P; else the two differ by up to 20 points if a link is nearly full. A learner of Atoll
does not wait: fragments come round less often than every H steps (`interval_reached`). The loss of compute in the literature is
a higher staleness here; the threshold, and so the bandwidth required, is the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from atoll_simulator.planner.timeline import GraphStep, Stream

HOPS = 1000
PUBLISHED_SHARE = 2.0 / 3.0
"""Share of a synchronous reduction's bits that a site sends in the published bandwidth tables, whatever the number of sites.

With it and `PUBLISHED_LAYERS`, both from two cells, the published rows come out within one step of their grid
(`benchmarks.network.bandwidth`, a test). It is no more than their way of counting: a ring sends more, and waits for latency.
"""
PUBLISHED_LAYERS = 36
BISECTIONS = 60
LINK_BITS_PER_S_MIN = 1.0
LINK_BITS_PER_S_MAX = 1e18


def data_parallel(step: GraphStep, reduce_s: float) -> float:
    """Return the utilisation when every step reduces everything in `reduce_s` seconds of the link."""
    return diloco(step, reduce_s, 1)


def diloco(step: GraphStep, reduce_s: float, interval: int, *, overlap: bool = True) -> float:
    """Return the utilisation when every `interval` steps reduce everything."""
    hidden_s = step.backward_s * (1.0 - 1.0 / step.layers)
    exposed_s = max(reduce_s / step.layers, reduce_s - hidden_s) if overlap else reduce_s
    return interval * step.takes_s / (interval * step.takes_s + exposed_s)


def streaming(step_s: float, stream: Stream) -> float:
    """Return the utilisation when a step waits for the fragments that left tau steps before it."""
    together = math.ceil(stream.fragments / stream.interval)
    journey_s = stream.after_s + stream.send_s * (together if stream.shared else 1)
    stretched_s = step_s + max(0.0, journey_s - stream.overlap * step_s) / steps_of_a_journey(
        stream.fragments, stream.interval, stream.overlap
    )
    if stream.shared:
        stretched_s = max(stretched_s, stream.send_s * stream.fragments / stream.interval)
    return step_s / stretched_s


@functools.lru_cache(maxsize=256)
def steps_of_a_journey(fragments: int, interval: int, overlap: int) -> float:
    """Return the mean steps from one fragment's leaving to the leaving of the next that its arrival holds up."""
    at, hops = 0, 0
    for _ in range(HOPS):
        due = at + overlap + 1
        number = -(-((due - 1) * fragments + 1) // interval)
        at = -(-number * interval // fragments)
        hops += 1
    return at / hops


def interval_reached(step_s: float, stream: Stream) -> float:
    """Return the steps between two rounds of a fragment when no learner waits: H, or more if the link is too slow."""
    occupied_s = stream.send_s * stream.fragments if stream.shared else 0.0
    in_turn_s = stream.send_s + stream.after_s
    return max(float(stream.interval), occupied_s / step_s, in_turn_s / step_s)


def required_rate(utilisation: Callable[[float], float], wanted: float) -> float | None:
    """Return the least bits per second at which `utilisation`, which never falls with bandwidth, reaches `wanted`.

    None when no bandwidth reaches it, because time is lost to causes other than bandwidth (latency, merging); 0 when
    nothing is sent, so that none is needed.
    """
    low, high = math.log(LINK_BITS_PER_S_MIN), math.log(LINK_BITS_PER_S_MAX)
    if utilisation(LINK_BITS_PER_S_MAX) < wanted:
        return None
    if utilisation(LINK_BITS_PER_S_MIN) >= wanted:
        return 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if utilisation(math.exp(middle)) >= wanted else (middle, high)
    return math.exp(high)
