"""Spans of a process, from when to when it did what, for a profile: kept while somebody records, and free of cost otherwise.

    with spans.span("push fragment 3", base=7): …      a span, also across awaits; spans of one lane may overlap
    spans.instant("fragment 3 adopted", version=8)     a moment

`policy.log` is None until a profile begins. Times are `time.monotonic()`, in seconds. Any thread may write.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

SPANS_MAX: Final = 200_000

Fact = str | int | float


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took from `began_s` to `ended_s`; a moment where they are equal."""

    name: str
    began_s: float
    ended_s: float
    facts: dict[str, Fact]


@dataclass(slots=True)
class SpanPolicy:
    """The spans of this process, in the order in which they ended; None while nobody records."""

    log: deque[Span] | None = None


policy = SpanPolicy()


@contextmanager
def span(name: str, **facts: Fact) -> Iterator[None]:
    """Keep how long the block took, also if it raises."""
    kept = policy.log
    if kept is None:
        yield
        return
    began_s = time.monotonic()
    try:
        yield
    finally:
        kept.append(Span(name, began_s, time.monotonic(), facts))


def instant(name: str, **facts: Fact) -> None:
    """Keep that something happened now."""
    if (kept := policy.log) is not None:
        now_s = time.monotonic()
        kept.append(Span(name, now_s, now_s, facts))
