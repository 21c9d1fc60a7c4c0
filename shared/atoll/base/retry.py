"""The one retry policy: what is tried again, after which pauses, and when it is given up.

Pauses double from `RETRY_S` to `RETRY_S_MAX`. A caller that says nothing more tries for ever: what a shard does is ordered,
and the next thing rests on the last. A caller with `patience_s` gives up when that time has gone by, or, with a measure of
`progress`, when that time has gone by without any: a slow link is no reason.

    await patiently(lambda: bus.publish(…), doing="the event")             until the broker is back
    await Retry("the blob", patience_s=60, progress=upload.missing).result(attempt)   while it gets on

Attempts are told to the log with their number and the pause, at powers of two, so that a long outage does not fill it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from atoll.base.errors import BrokerUnavailable, StorageFull
from atoll.base.logs import get

T = TypeVar("T")

RETRY_S = 0.1
RETRY_S_MAX = 5.0
AWAY: Final[tuple[type[Exception], ...]] = (BrokerUnavailable, StorageFull)
"""What passes when the broker is back, or has room again."""

_chance = random.SystemRandom()

log = get(__name__)


class Pauses:
    """Pauses that double from `first_s` to `longest_s`; with `jitter` each is shortened by up to that share."""

    def __init__(self, first_s: float | None = None, longest_s: float | None = None, jitter: float = 0.0) -> None:
        """Begin with the first attempt."""
        self._pause_s = RETRY_S if first_s is None else first_s
        self._longest_s = RETRY_S_MAX if longest_s is None else longest_s
        self._jitter = jitter
        self.attempts = 1

    def next_s(self) -> float:
        """Return the next pause, and count the attempt that follows it."""
        now_s = self._pause_s * (1.0 - self._jitter * _chance.random() if self._jitter else 1.0)
        self._pause_s = min(2.0 * self._pause_s, self._longest_s)
        self.attempts += 1
        return now_s


@dataclass(frozen=True, slots=True)
class Retry:
    """How one piece of work is tried again.

    Attributes:
        doing: what it is about, for the log.
        on: errors after which it is tried again; all others get through at once.
        patience_s: seconds after which it is given up; None for never.
        progress: what must change within the patience; None: the patience counts from the beginning.
        now_s: the clock of the patience; None for the loop's.
    """

    doing: str
    on: tuple[type[Exception], ...] = AWAY
    patience_s: float | None = None
    progress: Callable[[], object] | None = None
    now_s: Callable[[], float] | None = None

    async def result(self, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what `attempt` returns; raise its last error when the patience is over."""
        now_s = self.now_s or asyncio.get_running_loop().time
        pauses, since_s, seen = Pauses(), now_s(), object()
        while True:
            try:
                return await attempt()
            except self.on as error:
                if self.patience_s is not None:
                    there = seen if self.progress is None else self.progress()
                    if there != seen:
                        since_s, seen = now_s(), there
                    elif now_s() > since_s + self.patience_s:
                        raise
                attempts, pause_s = pauses.attempts, pauses.next_s()
                if attempts & (attempts - 1) == 0:
                    log.warning(
                        "broker.waiting", doing=self.doing, attempts=attempts, pause_s=pause_s, reason=str(error)
                    )
                await asyncio.sleep(pause_s)


async def patiently(attempt: Callable[[], Coroutine[Any, Any, T]], doing: str = "the broker") -> T:
    """Return what `attempt` returns; while the broker is away or full, wait and try again."""
    return await Retry(doing).result(attempt)
