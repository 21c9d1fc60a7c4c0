"""A small simulator of work that waits for work: compute and communication as a graph, and when each part ends.

A node needs a resource (compute, a link) for some time and may begin when all its predecessors have ended. A resource does one
thing at a time, in the order in which nodes became ready; a node without one only takes time. The literature's schedules:

    data-parallel      a layer's gradient is reduced as soon as its backward has ended, and its next forward needs it
    DiLoCo             H steps, then one reduction by layers of everything; overlapped with that one backward, or not at all
    streaming          every H/P steps a fragment leaves, and the step that is tau steps later waits for it

Utilisation is compute over time, once things repeat. `utilisation` has the closed forms; a test compares them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

COMPUTE = "compute"
LINK = "link"
WARM_PERIODS = 3
STREAMED_STEPS = 1000


@dataclass(frozen=True, slots=True)
class GraphWork:
    """One node: `takes_s` on `resource` (None: no resource), after the nodes numbered `after`."""

    resource: str | None
    takes_s: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphStep:
    """The work of a training step: `takes_s` in all, in `layers` equal layers, backward twice as long as forward."""

    takes_s: float
    layers: int = 1
    backward_share: float = 2.0 / 3.0

    @property
    def forward_s(self) -> float:
        """Return the seconds of the forward pass."""
        return self.takes_s * (1.0 - self.backward_share)

    @property
    def backward_s(self) -> float:
        """Return the seconds of the backward pass."""
        return self.takes_s * self.backward_share


def ends(works: Sequence[GraphWork]) -> list[float]:
    """Return when each node ends, in seconds; a node may only come after earlier ones."""
    return _GraphRun(works).run()


class _GraphRun:
    def __init__(self, works: Sequence[GraphWork]) -> None:
        self._works = works
        self._waits = [len(work.after) for work in works]
        self._followers: list[list[int]] = [[] for _ in works]
        for number, work in enumerate(works):
            for before in work.after:
                self._followers[before].append(number)
        self._queues: dict[str, list[tuple[float, int]]] = {work.resource: [] for work in works if work.resource}
        self._busy = dict.fromkeys(self._queues, False)
        self._running: list[tuple[float, int]] = []

    def run(self) -> list[float]:
        """Play to the end and return when each node ended."""
        done = [0.0] * len(self._works)
        for number, count in enumerate(self._waits):
            if count == 0:
                self._ready(number, 0.0)
        while self._running:
            at_s, number = heapq.heappop(self._running)
            done[number] = at_s
            for follower in self._followers[number]:
                self._waits[follower] -= 1
                if self._waits[follower] == 0:
                    self._ready(follower, at_s)
            resource = self._works[number].resource
            if resource is not None:
                self._busy[resource] = False
                self._begin(resource, at_s)
        return done

    def _ready(self, number: int, at_s: float) -> None:
        resource = self._works[number].resource
        if resource is None:
            heapq.heappush(self._running, (at_s + self._works[number].takes_s, number))
            return
        heapq.heappush(self._queues[resource], (at_s, number))
        self._begin(resource, at_s)

    def _begin(self, resource: str, at_s: float) -> None:
        if not self._busy[resource] and self._queues[resource]:
            _, number = heapq.heappop(self._queues[resource])
            self._busy[resource] = True
            heapq.heappush(self._running, (at_s + self._works[number].takes_s, number))


def data_parallel(step: GraphStep, reduce_s: float) -> float:
    """Return the utilisation of data-parallel training whose whole reduction takes `reduce_s` of the link per step."""
    return diloco(step, reduce_s, 1)


def diloco(step: GraphStep, reduce_s: float, interval: int, *, overlap: bool = True) -> float:
    """Return the utilisation of H = `interval` steps between two reductions of everything, by layers.

    With `overlap` the reduction runs beside the last backward, as in data-parallel training; else after it, whole.
    """
    works: list[GraphWork] = []
    reduced: list[int] = []
    marks: list[int] = []
    layers = step.layers
    for _ in range(WARM_PERIODS + 2):
        last = marks[-1:]
        for layer in range(layers):
            gate = reduced[layer : layer + 1] if overlap else reduced[-1:]
            works.append(GraphWork(COMPUTE, step.forward_s / layers, (*last, *gate)))
            last = [len(works) - 1]
        if interval > 1:
            works.append(GraphWork(COMPUTE, (interval - 1) * step.takes_s, tuple(last)))
            last = [len(works) - 1]
        reduced = [0] * layers
        for layer in reversed(range(layers)):
            works.append(GraphWork(COMPUTE, step.backward_s / layers, tuple(last)))
            last = [len(works) - 1]
            if overlap:
                works.append(GraphWork(LINK, reduce_s / layers, tuple(last)))
                reduced[layer] = len(works) - 1
        marks.append(last[0])
        if not overlap:
            works.append(GraphWork(LINK, reduce_s, tuple(last)))
            reduced = [len(works) - 1]
    return _share(ends(works), marks, interval * step.takes_s)


@dataclass(frozen=True, slots=True)
class Stream:
    """Travel of fragments: P per H steps, each `send_s` of the link and `after_s` beyond it, due within tau steps.

    `shared` says whether the link carries one fragment at a time; if not, each has a link of its own, as if bandwidth
    were not divided between those in flight.
    """

    fragments: int
    interval: int
    overlap: int
    send_s: float
    after_s: float = 0.0
    shared: bool = True


def streaming(step_s: float, stream: Stream) -> float:
    """Return the utilisation when a step waits for the fragments that left tau steps before it."""
    periods = max(2 * WARM_PERIODS, -(-STREAMED_STEPS // stream.interval))
    total = periods * stream.interval
    leaving: dict[int, int] = {}
    for number in range(stream.fragments * (total // stream.interval + 1)):
        at = -(-number * stream.interval // stream.fragments)
        leaving[at] = leaving.get(at, 0) + 1
    works: list[GraphWork] = []
    marks: list[int] = []
    arrived: dict[int, list[int]] = {}
    for number in range(total):
        works.append(GraphWork(COMPUTE, step_s, (*marks[-1:], *arrived.pop(number - stream.overlap - 1, []))))
        marks.append(len(works) - 1)
        for _ in range(leaving.get(number, 0)):
            works.append(GraphWork(LINK if stream.shared else None, stream.send_s, (marks[-1],)))
            works.append(GraphWork(None, stream.after_s, (len(works) - 1,)))
            arrived.setdefault(number, []).append(len(works) - 1)
    done = ends(works)
    kept = [mark for number, mark in enumerate(marks) if number % stream.interval == 0]
    return _share(done, kept, stream.interval * step_s, warm=periods // 2)


def _share(done: Sequence[float], marks: Sequence[int], period_s: float, warm: int = WARM_PERIODS) -> float:
    """Return compute over time between the marks after `warm` of them; marks are `period_s` of compute apart."""
    kept = marks[warm - 1 :]
    took_s = done[kept[-1]] - done[kept[0]]
    return min(1.0, (len(kept) - 1) * period_s / took_s)
