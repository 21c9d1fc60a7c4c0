"""Counts what is dropped, and tells it now and then: a line and an event per message would cost more than the message.

Reasons are few; senders may be any number, so only the first `SENDERS_MAX` of each interval are counted by name.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from atoll.base.logs import get
from atoll_synchronizer.shard_context import EventLog

REPORT_S: Final = 10.0
SENDERS_MAX: Final = 1024
SENDERS_TOLD: Final = 8
SENDER_CHARS_MAX: Final = 64

log = get(__name__)


class JunkReport:
    """What one tenure has dropped; `messages` counts since its beginning."""

    def __init__(self, event_log: EventLog) -> None:
        """Begin with nothing."""
        self._event_log = event_log
        self._reasons: Counter[str] = Counter()
        self._senders: Counter[str] = Counter()
        self.messages = 0

    def count(self, reason: str, sender: str) -> None:
        """Note a dropped message, by the subject that it came on."""
        self.messages += 1
        self._reasons[reason] += 1
        sender = sender[:SENDER_CHARS_MAX]
        if sender in self._senders or len(self._senders) < SENDERS_MAX:
            self._senders[sender] += 1

    async def keep_telling(self) -> None:
        """Tell at intervals."""
        while True:
            await asyncio.sleep(REPORT_S)
            await self.tell()

    async def tell(self) -> None:
        """Log and record what was dropped since the last time, if anything was."""
        if not self._reasons:
            return
        reasons, senders = self._reasons, self._senders
        self._reasons, self._senders = Counter(), Counter()
        most = dict(senders.most_common(SENDERS_TOLD))
        log.warning("junk.dropped", messages=reasons.total(), reasons=dict(reasons), senders=most)
        await self._event_log.record("junk", messages=reasons.total(), reasons=dict(reasons), senders=most)
