"""A bounded queue that many senders fill: beyond the bound, the sender that has most in it loses its oldest entry.

If the oldest entry of all were lost, one sender could push out what the others have said.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

E = TypeVar("E")


def heaviest(weights: Mapping[str, int], total: int, newest: str) -> str:
    """Return who has most of `total`, or `newest` if it has at least the mean: that one is found without a search."""
    if weights[newest] * len(weights) >= total:
        return newest
    return max(weights, key=weights.__getitem__)


class FairQueue(Generic[E]):
    """Entries in the order in which they came, of a weight of at most `weight_max` together; the newest always stays."""

    def __init__(
        self, weight_max: int, sender_of: Callable[[E], str], weight_of: Callable[[E], int] = lambda _: 1
    ) -> None:
        self.weight_max = weight_max
        self._sender_of, self._weight_of = sender_of, weight_of
        self._entries: OrderedDict[int, E] = OrderedDict()
        self._places: dict[str, deque[int]] = {}
        self._weights: dict[str, int] = {}
        self._weight = 0
        self._next = 0

    def append(self, entry: E) -> int:
        """Add an entry and return how many were forgotten for it."""
        sender, place = self._sender_of(entry), self._next
        self._next += 1
        self._entries[place] = entry
        self._places.setdefault(sender, deque()).append(place)
        self._weigh(sender, self._weight_of(entry))
        forgotten = 0
        while self._weight > self.weight_max and len(self._entries) > 1:
            oldest = self._places[heaviest(self._weights, self._weight, sender)][0]
            self._take(oldest if oldest != place else next(iter(self._entries)))
            forgotten += 1
        return forgotten

    def pop(self) -> E:
        """Take the oldest entry of all; there must be one."""
        return self._take(next(iter(self._entries)))

    def clear(self) -> None:
        """Forget all entries."""
        self._entries.clear()
        self._places.clear()
        self._weights.clear()
        self._weight = 0

    def _take(self, place: int) -> E:
        entry = self._entries.pop(place)
        sender = self._sender_of(entry)
        self._places[sender].popleft()  # the oldest of all, and the oldest of a sender, are first among its own
        self._weigh(sender, -self._weight_of(entry))
        if not self._places[sender]:
            del self._places[sender], self._weights[sender]
        return entry

    def _weigh(self, sender: str, weight: int) -> None:
        self._weights[sender] = self._weights.get(sender, 0) + weight
        self._weight += weight

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[E]:
        return iter(self._entries.values())

    @property
    def newest(self) -> E:
        """Return the newest entry; there must be one."""
        return self._entries[next(reversed(self._entries))]
