"""The byte ledger's arithmetic: the traffic of one link, and what data-parallel training would have sent over it.

A link connects one process with its broker. Everything is counted twice on its way, by the code that knows its meaning and by
the sockets. Each set contains the one before:

    frames   contributions, deltas, keyframes: parameters as they travel, with scales and headers, also inside a manifest
    blobs    and outer state, fragment ledgers, lent optimizers
    payload  and manifests, heads, leases, heartbeats, the event log: all that a caller gave to the bus
    wire     and subjects, headers, acknowledgements, requests, resent data: all that the sockets carried

Counters begin at 0 with the bus of a process. So a process that comes back is a new link under an old name, and sums over
incarnations are sums over links. Nothing here reads a clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec

from atoll.base.quantities import at_most

BYTES_MAX: Final = 1 << 53
METER_S: Final = 10.0
TOLD_EVERY_S: Final = 30.0
"""Interval at which a process records its link's traffic: the event log keeps it even if no process listens."""
BF16_BITS: Final = 16.0

Bytes = Annotated[int, msgspec.Meta(ge=0, le=BYTES_MAX)]


@dataclass(slots=True)
class BusStats:
    """Counters since the bus was opened; `atoll.wire.traffic` says which bytes are part of which.

    The bus counts payload, that of blobs, and what its sockets carry (`wire_`; 0 where it has none). Only the senders
    and readers of blobs know which are frames. So they count those bytes, and the parameters of fetched fragments.

    It also knows which connections to the broker `home` are lost, and for how long any was (`away_s`); without a home, to any.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    retries: int = 0
    reconnects: int = 0
    core_messages_dropped: int = 0
    wire_bytes_up: int = 0
    wire_bytes_down: int = 0
    blob_bytes_up: int = 0
    blob_bytes_down: int = 0
    frame_bytes_up: int = 0
    frame_bytes_down: int = 0
    parameters_down: int = 0
    home: str = ""
    _lost: set[int] = field(default_factory=set)
    _away_s: float = 0.0
    _since_s: float = 0.0

    @property
    def is_away(self) -> bool:
        """Return whether any connection is lost."""
        return bool(self._lost)

    def away_s(self, now_s: float) -> float:
        """Return for how many seconds any connection was lost, up to now (monotonic)."""
        return self._away_s + (now_s - self._since_s if self._lost else 0.0)

    def lose(self, url: str, connection: int, since_s: float) -> None:
        """Note that a connection to the broker at `url` is lost, or says nothing, since a moment that may be past."""
        if self.home in ("", url):
            if not self._lost:
                self._since_s = since_s
            self._lost.add(connection)

    def regain(self, connection: int, now_s: float) -> None:
        """Note that it is there again, or closed."""
        if connection in self._lost:
            self._away_s, self._since_s = self.away_s(now_s), now_s
            self._lost.discard(connection)


class LinkTraffic(msgspec.Struct, frozen=True, omit_defaults=True):
    """Bytes that a link has carried since its process began, up to the broker and down from it; see the module.

    `parameters_down` counts the parameters of fetched fragments: once per fetch, however many frames that took.
    """

    frames_up: Bytes = 0
    frames_down: Bytes = 0
    parameters_down: Bytes = 0
    blobs_up: Bytes = 0
    blobs_down: Bytes = 0
    payload_up: Bytes = 0
    payload_down: Bytes = 0
    wire_up: Bytes = 0
    wire_down: Bytes = 0

    @property
    def wire(self) -> int:
        """Return all that the sockets carried, both ways."""
        return self.wire_up + self.wire_down

    @property
    def overhead(self) -> int:
        """Return what the sockets carried beside payload, both ways; 0 where there are no sockets."""
        return max(0, self.wire - self.payload_up - self.payload_down)

    @property
    def counters(self) -> dict[str, int]:
        """Return the counters by name, for logs and reports."""
        return msgspec.structs.asdict(self)

    def plus(self, other: LinkTraffic) -> LinkTraffic:
        """Return the sum of two links' traffic; it saturates, so that a reader takes it again."""
        return LinkTraffic(
            *(at_most(BYTES_MAX, mine + its) for mine, its in zip(_numbers(self), _numbers(other), strict=True))
        )

    def latest(self, other: LinkTraffic) -> LinkTraffic:
        """Return the newer of two counts of one link: counters never go back."""
        return LinkTraffic(*(max(mine, its) for mine, its in zip(_numbers(self), _numbers(other), strict=True)))


NOTHING: Final = LinkTraffic()


def _numbers(moved: LinkTraffic) -> tuple[int, ...]:
    return msgspec.structs.astuple(moved)


def moved_by(stats: BusStats) -> LinkTraffic:
    """Return the traffic of a bus's link."""
    return LinkTraffic(
        frames_up=stats.frame_bytes_up,
        frames_down=stats.frame_bytes_down,
        parameters_down=stats.parameters_down,
        blobs_up=stats.blob_bytes_up,
        blobs_down=stats.blob_bytes_down,
        payload_up=stats.bytes_up,
        payload_down=stats.bytes_down,
        wire_up=stats.wire_bytes_up,
        wire_down=stats.wire_bytes_down,
    )


@dataclass(slots=True)
class TrafficMeter:
    """The newest count of one link, and the last few with their arrival, which give its pace."""

    moved: LinkTraffic = NOTHING
    heard: deque[tuple[float, LinkTraffic]] = field(default_factory=lambda: deque(maxlen=64))

    def take(self, moved: LinkTraffic, at_s: float | None = None) -> None:
        """Take a count that arrived at `at_s`; one without a time (from the event log) says nothing of the pace."""
        self.moved = self.moved.latest(moved)
        if at_s is None:
            return
        self.heard.append((at_s, self.moved))
        while len(self.heard) > 1 and self.heard[0][0] < at_s - METER_S:
            self.heard.popleft()

    def pace(self) -> tuple[float, float]:
        """Return the bytes per second on the wire, up and down, over the last seconds heard of."""
        if len(self.heard) < 2 or self.heard[-1][0] <= self.heard[0][0]:
            return 0.0, 0.0
        (began_s, first), (ended_s, last) = self.heard[0], self.heard[-1]
        between_s = ended_s - began_s
        return (last.wire_up - first.wire_up) / between_s, (last.wire_down - first.wire_down) / between_s


def ring_bits(learners: int, parameters: int, bits: float) -> float:
    """Return the bits that each learner sends, and also reads, when a ring reduces the whole model once."""
    return 2.0 * (learners - 1) / learners * parameters * bits


def data_parallel_bytes(learners: int, parameters: int, step_tokens: float, bits: float = BF16_BITS) -> float:
    """Return the bytes per trained token over all learners' links, up and down, if a ring reduced every step."""
    return 2.0 * ring_bits(learners, parameters, bits) / 8.0 / step_tokens


def bits_per_parameter(size_bytes: int, parameters: int) -> float | None:
    """Return the bits per parameter on the way, or None if there were no parameters."""
    return 8.0 * size_bytes / parameters if parameters else None
