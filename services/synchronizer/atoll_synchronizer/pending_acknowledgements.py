"""The queue's deliveries that a shard has not settled yet: manifests and farewells, until their fate is durable.

The intake puts deliveries in here. The shard settles a contribution last of all: it tells the learner of a refusal,
empties the contribution's place in line, and leaves the chunks to the garbage collector. After a crash before that, the
queue delivers the contribution once more, and the shard finds it in the fragment's ledger.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from atoll.base.logs import get
from atoll.base.retry import patiently
from atoll.bus.interface import Bus, Delivery
from atoll.protocol.events import Acknowledge, Dismiss, Isolate, PushKey
from atoll.wire.messages import Contribution, Verdict, encode
from atoll.wire.subjects import Subjects
from atoll_synchronizer.garbage_collector import GarbageCollector
from atoll_synchronizer.shard_context import EventLog

log = get(__name__)

HOLD_S = 20.0


class PendingManifest(NamedTuple):
    """A contribution that is not settled yet."""

    delivery: Delivery
    manifest: Contribution


class PendingAcknowledgements:
    """The unsettled deliveries of one tenure: `contributions` by key, `farewells` by learner and incarnation."""

    def __init__(self, bus: Bus, subjects: Subjects, event_log: EventLog, garbage_collector: GarbageCollector) -> None:
        """Hold nothing yet."""
        self._bus = bus
        self._subjects = subjects
        self._event_log = event_log
        self._garbage_collector = garbage_collector
        self.contributions: dict[PushKey, PendingManifest] = {}
        self.farewells: dict[tuple[str, int], Delivery] = {}

    async def acknowledge(self, action: Acknowledge) -> None:
        """Settle one contribution for good."""
        if action.key not in self.contributions:
            # Delivered again while we settled the first delivery: one acknowledgement was enough.
            return
        delivery, manifest = self.contributions.pop(action.key)
        if action.fate == "refused":
            log.warning("contribution.refused", **action.key._asdict(), reason=action.reason)
            await self._tell(action.key, action.reason)
            await self._event_log.record("refused", **action.key._asdict(), reason=action.reason)
        await patiently(delivery.ack)
        self._garbage_collector.leave(action.key.fragment, f"{manifest.blob.stem}.*")

    async def dismiss(self, action: Dismiss) -> None:
        """Remove a farewell from the queue."""
        farewell = self.farewells.pop((action.learner, action.incarnation), None)
        if farewell is not None:
            await patiently(farewell.ack)

    async def isolate(self, action: Isolate) -> None:
        """Log, and record in the event log, that an incarnation is in quarantine; its next push learns so."""
        log.error(
            "learner.quarantined",
            learner=action.learner,
            incarnation=action.incarnation,
            offences=action.offences,
            reason=action.reason,
            todo="look at that machine; its next incarnation begins with a clean record",
        )
        await self._event_log.record(
            "quarantined",
            learner=action.learner,
            incarnation=action.incarnation,
            offences=action.offences,
            reason=action.reason,
        )

    async def keep_holding(self) -> None:
        """Tell the queue at intervals that we still work on the pending deliveries."""
        while True:
            await asyncio.sleep(HOLD_S)
            for delivery, _ in list(self.contributions.values()):
                await patiently(delivery.hold)

    async def _tell(self, key: PushKey, reason: str) -> None:
        verdict = Verdict(
            learner=key.learner,
            incarnation=key.incarnation,
            fragment=key.fragment,
            push=key.push,
            fate="refused",
            reason=reason,
        )
        await patiently(lambda: self._bus.tell(self._subjects.verdict(key.learner), encode(verdict)))
