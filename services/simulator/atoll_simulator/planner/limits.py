"""The one cause that keeps any bandwidth from being enough, or a round from ending within its overlap.

A wider link does not shorten some parts of a round: its round trips, merging, and the window, which bounds the bytes of
a blob that are sent before the first of them are acknowledged. The planner finds the cause by removing a part and
asking again. The window comes first, because a user can change it more easily than the speed of light.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from atoll.base.units import as_bytes, as_rate, as_time
from atoll_simulator.planner.question import Question

WINDOW = "the upload window"
ROUND_TRIP = "round trips"
MERGING = "merging"
TOGETHER = "round trips, the window and merging together"
NO_WINDOW_BYTES = 1 << 60


def unwindowed(question: Question) -> Question:
    """Return the question of a bus that does not wait for acknowledgements while it writes a blob."""
    return replace(question, links=replace(question.links, window_bytes=NO_WINDOW_BYTES))


def limit(question: Question, holds: Callable[[Question], bool]) -> str:
    """Return the part of a round without which `holds` is true; `TOGETHER` if no single part is the cause."""
    links = question.links
    without = {
        WINDOW: unwindowed(question),
        MERGING: replace(question, links=replace(links, merge_s=0.0)),
        ROUND_TRIP: replace(question, links=replace(links, rtt_s=0.0)),
    }
    return next((cause for cause, other in without.items() if holds(other)), TOGETHER)


def told(question: Question, cause: str) -> str:
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


def remedy(cause: str) -> str:
    """Return the change that removes a cause."""
    return {
        WINDOW: "more fragments, more overlap, a smaller codec up, a hub nearer by or a larger BusOptions.window; not the link",
        ROUND_TRIP: "more overlap, longer steps or a hub nearer by (--overlap-steps, --rtt-ms); not the link",
        MERGING: "more overlap, or faster shards and disks (--overlap-steps, --merge-s); not the link",
        TOGETHER: "more overlap or more fragments (--overlap-steps, --fragments); not the link",
    }[cause]
