"""Counts what is dropped, and tells it now and then: a line and an event per message would cost more than the message.

Reasons are few; senders may be any number, so only the first `SENDERS_MAX` of each interval are counted by name.

Where messages are signed, one that is not believed is nobody's. A region's broker can write on the subjects of others, so such
messages are counted apart: by the learner whose subject it was, who need not have sent them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from atoll.base.logs import get
from atoll.wire.signature_line import is_unproven
from atoll_synchronizer.shard_context import EventLog

REPORT_S: Final = 10.0
SENDERS_MAX: Final = 1024
SENDERS_TOLD: Final = 8
SENDER_CHARS_MAX: Final = 64
UNSIGNED: Final = "unsigned"

log = get(__name__)


class JunkReport:
    """What one tenure has dropped; `messages` counts since its beginning."""

    def __init__(self, event_log: EventLog) -> None:
        """Begin with nothing."""
        self._event_log = event_log
        self._reasons: Counter[str] = Counter()
        self._senders: Counter[str] = Counter()
        self._unsigned: Counter[str] = Counter()
        self.messages = 0

    def count(self, reason: str, data: bytes, learner: str) -> None:
        """Note a dropped message that came on a subject of this learner; one that nobody signed is `unsigned`."""
        self.messages += 1
        reason, names = (UNSIGNED, self._unsigned) if is_unproven(data) else (reason, self._senders)
        self._reasons[reason] += 1
        learner = learner[:SENDER_CHARS_MAX]
        if learner in names or len(names) < SENDERS_MAX:
            names[learner] += 1

    async def keep_telling(self) -> None:
        """Tell at intervals."""
        while True:
            await asyncio.sleep(REPORT_S)
            await self.tell()

    async def tell(self) -> None:
        """Log and record what was dropped since the last time, if anything was."""
        if not self._reasons:
            return
        dropped = {
            "messages": self._reasons.total(),
            "reasons": dict(self._reasons),
            "senders": dict(self._senders.most_common(SENDERS_TOLD)),
            "unsigned_on_subjects_of": dict(self._unsigned.most_common(SENDERS_TOLD)),
        }
        self._reasons, self._senders, self._unsigned = Counter(), Counter(), Counter()
        log.warning("junk.dropped", **dropped)
        await self._event_log.record("junk", **dropped)
