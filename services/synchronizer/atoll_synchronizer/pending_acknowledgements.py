"""The queue's deliveries that a shard has not settled yet: manifests and farewells, until their fate is durable.

The shard settles a contribution last of all: it tells the learner of a refusal, empties the contribution's place in
line, and leaves the chunks to the garbage collector. After a crash before that, the queue delivers the contribution
once more, and the shard finds it in the fragment's ledger.
"""

from __future__ import annotations

import asyncio

from atoll.base.logs import get
from atoll.base.retry import patiently
from atoll.bus.interface import Bus, Delivery
from atoll.protocol.events import Acknowledge, Dismiss, Isolate, PushKey
from atoll.wire.messages import Contribution, Verdict, encode
from atoll.wire.subjects import Subjects
from atoll_synchronizer.event_log import EventLog
from atoll_synchronizer.garbage_collector import GarbageCollector

log = get(__name__)

HOLD_S = 20.0


class PendingAcknowledgements:
    """The unsettled deliveries of one tenure."""

    def __init__(self, bus: Bus, subjects: Subjects, event_log: EventLog, garbage_collector: GarbageCollector) -> None:
        """Hold nothing yet."""
        self._bus = bus
        self._subjects = subjects
        self._event_log = event_log
        self._garbage_collector = garbage_collector
        self._contributions: dict[PushKey, tuple[Delivery, Contribution]] = {}
        self._farewells: dict[tuple[str, int], Delivery] = {}

    def take(self, key: PushKey, delivery: Delivery, manifest: Contribution) -> None:
        """Keep a contribution; a second delivery replaces the first."""
        self._contributions[key] = (delivery, manifest)

    def take_farewell(self, learner: str, incarnation: int, delivery: Delivery) -> None:
        """Keep a farewell."""
        self._farewells[learner, incarnation] = delivery

    def manifest(self, key: PushKey) -> Contribution:
        """Return the manifest of a pending contribution."""
        return self._contributions[key][1]

    def size_bytes(self, key: PushKey) -> int:
        """Return the size of a contribution, 0 when it is not here any more."""
        held = self._contributions.get(key)
        return held[1].blob.size_bytes if held else 0

    async def acknowledge(self, action: Acknowledge) -> None:
        """Settle one contribution for good."""
        if action.key not in self._contributions:
            # Delivered again while we settled the first delivery: one acknowledgement was enough.
            return
        delivery, manifest = self._contributions.pop(action.key)
        if action.fate == "refused":
            log.warning("contribution.refused", **action.key._asdict(), reason=action.reason)
            await self._tell(action.key, action.reason)
            await self._event_log.record("refused", **action.key._asdict(), reason=action.reason)
        await patiently(delivery.ack)
        self._garbage_collector.leave(action.key.fragment, f"{manifest.blob.stem}.*")

    async def dismiss(self, action: Dismiss) -> None:
        """Remove a farewell from the queue."""
        farewell = self._farewells.pop((action.learner, action.incarnation), None)
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
            for delivery, _ in list(self._contributions.values()):
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
