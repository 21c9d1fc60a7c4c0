"""Whether the hub answers through the link of a region: what the health of a leaf broker shows.

A leaf serves its learners while its hub is away, so that its process lives says nothing of the link: a cut one, and a hub that
does not let the region in, look alike there. The watch asks the hub's JetStream for an answer, again and again.

A closed link is known at once: nobody answers. One that carries nothing counts as cut after `STALE_S`, because the question
waits behind megabytes on a link that is full.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from nats.errors import NoRespondersError

from atoll.base.errors import AtollError
from atoll.base.logs import get
from atoll.base.retry import Unanswered
from atoll.bus.nats.jetstream_api import JetStream
from atoll.bus.nats.region import STALE_S

if TYPE_CHECKING:
    from atoll.bus.nats.connection import Connection

LOOK_S: Final = 2.0

log = get(__name__)


class HubWatch:
    """Asks the hub, in the loop of a connection to the leaf; `answers` may be read by any thread."""

    def __init__(self, connection: Connection) -> None:
        """Do nothing yet; `watch` does."""
        self._connection = connection
        self._heard_s = float("-inf")

    @property
    def answers(self) -> bool:
        """Return whether the hub has answered within `STALE_S`, and the link has not been closed since."""
        return time.monotonic() - self._heard_s <= STALE_S

    async def watch(self) -> None:
        """Ask without end: cancel it. A leaf that does not let us in is asked on: a certificate may be renewed."""
        question, refused = f"{JetStream(self._connection).root}.INFO", False
        while True:
            try:
                await self._connection.request(question, timeout_s=STALE_S)
                self._heard_s, refused = time.monotonic(), False
            except Unanswered as reason:
                if isinstance(reason.__cause__, NoRespondersError):
                    self._heard_s = float("-inf")
            except AtollError as reason:
                if not refused:
                    log.warning("region.unwatched", reason=str(reason))
                refused = True
            await asyncio.sleep(LOOK_S)
