"""A failure made small: which happenings of a schedule are needed for it, by leaving out more and more of them."""

from __future__ import annotations

from collections.abc import Callable

from schedules.faults import Happening

Breaks = Callable[[frozenset[int]], bool]

ATTEMPTS_MAX = 60


def minimised(happenings: list[Happening], breaks: Breaks, attempts_max: int = ATTEMPTS_MAX) -> frozenset[int]:
    """Return a set of happenings with which a schedule still `breaks`.

    Whole kinds are left out first, then parts of the list, then single ones. A schedule with fewer happenings is another
    schedule from the first one left out on, so this finds a small set, not the least.
    """
    left = attempts_max
    kept = frozenset(each.number for each in happenings)

    def without(gone: frozenset[int]) -> bool:
        nonlocal kept, left
        if left <= 0 or not gone & kept:
            return False
        left -= 1
        if not breaks(kept - gone):
            return False
        kept -= gone
        return True

    for kind in sorted({each.kind for each in happenings}):
        without(frozenset(each.number for each in happenings if each.kind == kind))
    size = max(1, len(kept) // 2)
    while left > 0 and kept:
        numbers = sorted(kept)
        found = [without(frozenset(numbers[at : at + size])) for at in range(0, len(numbers), size)]
        if size == 1 and not any(found):
            break
        size = max(1, size // 2)
    return kept
