"""Settlement of what one owner of a shard took from its queue: acknowledgements, and verdicts for the learners.

Each delivery of the queue is kept until its fate is durable. The shard settles a contribution last of all: it empties the
contribution's place in line, and leaves the chunks to the garbage collector. After a crash before that, the queue delivers
the contribution once more, and the shard finds it in the fragment's ledger.

A learner hears of a refusal as soon as it is decided, and of what was clipped. Refusals are told in batches: after an
outage hundreds come at once, and one event and one pass over the network serve all of them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from atoll.base.errors import BrokerUnavailable, BusError
from atoll.base.logs import get
from atoll.base.retry import patiently
from atoll.bus.interface import Bus, Delivery
from atoll.protocol.events import Acknowledge, Dismiss, Fold, Isolate, PushKey, Refuse
from atoll.run.decisions import CLIP_CURE, ISOLATION_CURE, describe_clip, describe_isolation, describe_outlier
from atoll.wire.events import NOT_NOTED, QuarantinedEvent, RefusedContribution, RefusedEvent
from atoll.wire.messages import Contribution, Verdict, encode
from atoll.wire.subjects import Subjects
from atoll_synchronizer.garbage_collector import GarbageCollector
from atoll_synchronizer.shard_context import EventLog, ShardOwner

log = get(__name__)
HOLD_S: Final = 5.0  # a third of `BusOptions.ack_wait_s`: two words may be lost
TOGETHER_S: Final = 0.1
REFUSALS_PER_EVENT: Final = 256


@dataclass(slots=True)
class PendingManifest:
    """A contribution that is not settled yet; when it arrived and was read, in monotonic seconds (`ready_s` 0: not yet)."""

    delivery: Delivery
    manifest: Contribution
    arrived_s: float
    ready_s: float = 0.0


class PendingAcknowledgements:
    """The unsettled deliveries of one tenure: `contributions` by key, `farewells` by learner and incarnation."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        event_log: EventLog,
        garbage_collector: GarbageCollector,
        owner: ShardOwner,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._event_log = event_log
        self._garbage_collector = garbage_collector
        self.contributions: dict[PushKey, PendingManifest] = {}
        self.farewells: dict[tuple[str, int], Delivery] = {}
        self._refused: list[tuple[Refuse, RefusedContribution]] = []
        self._clipped: list[Fold] = []
        self._news = asyncio.Event()
        self._owner = owner

    async def acknowledge(self, action: Acknowledge) -> None:
        """Settle a contribution for good."""
        # One that was delivered again while we settled the first delivery needs no second acknowledgement.
        if (held := self.contributions.pop(action.key, None)) is not None:
            # The broker need not confirm it: what is delivered once more is in the ledger.
            await held.delivery.drop()
            if not held.manifest.frame:
                self._garbage_collector.leave(action.key.fragment, f"{held.manifest.blob.stem}.*")
            self._owner.note_settled(held.manifest)

    async def dismiss(self, action: Dismiss) -> None:
        """Remove a farewell from the queue."""
        farewell = self.farewells.pop((action.learner, action.incarnation), None)
        if farewell is not None:
            await patiently(farewell.ack)

    def refuse(self, action: Refuse) -> None:
        """Have a refusal told to its learner and recorded."""
        measured, why = {}, {}
        if action.norms is not None:
            measured = dict(zip(("norm", "norm_max"), action.norms, strict=True))
            why = {"why": describe_outlier(*action.norms), "todo": ISOLATION_CURE}
        log.warning("contribution.refused", **action.key._asdict(), reason=action.reason, **measured, **why)
        self._refused.append((action, self._refusal(action)))
        self._news.set()

    def tell_clip(self, action: Fold) -> None:
        """Have its learner told if a contribution was folded at less than its length; the `round` event records it."""
        if action.scale == 1.0:
            return
        why = describe_clip(action.norm, action.scale * action.norm)
        log.info("contribution.clipped", **action.key._asdict(), why=why, todo=CLIP_CURE)
        self._clipped.append(action)
        self._news.set()

    async def keep_telling(self) -> None:
        """Tell of refusals and clips, those of a moment together."""
        while True:
            await self._news.wait()
            await asyncio.sleep(TOGETHER_S)
            await self.tell_refusals()

    async def tell_refusals(self) -> None:
        """Tell of refusals that nobody was told of yet, and of clips; what a cancellation leaves is told by the next call."""
        refused, self._refused = self._refused, []
        clipped, self._clipped = self._clipped, []
        self._news.clear()
        try:
            for fold in clipped:
                await self._tell(fold.key, "clipped", norms=(fold.norm, fold.scale * fold.norm))
            for action, _ in refused:
                await self._tell(action.key, "refused", action.reason, action.norms)
            while refused:
                batch = refused[:REFUSALS_PER_EVENT]
                del refused[:REFUSALS_PER_EVENT]  # from here on it is the event log's
                await self._event_log.record(RefusedEvent(refusals=tuple(row for _, row in batch)))
        finally:
            self._refused[:0] = refused

    def _refusal(self, action: Refuse) -> RefusedContribution:
        held, (norm, norm_max) = self.contributions.get(action.key), action.norms or (NOT_NOTED, NOT_NOTED)
        return RefusedContribution(
            **action.key._asdict(),
            reason=action.reason,
            cause_id=action.cause_id,
            base_version=None if held is None else held.manifest.base_version,
            upload_s=(NOT_NOTED if held is None else held.manifest.notes.upload_s) or NOT_NOTED,
            norm=norm,
            norm_max=norm_max,
        )

    async def isolate(self, action: Isolate) -> None:
        """Log, and record in the event log, that an incarnation is in quarantine; its next push learns so."""
        fields = QuarantinedEvent(
            learner=action.learner,
            incarnation=action.incarnation,
            offences=action.offences,
            reason=action.reason,
        )
        why = describe_isolation(action.offences, action.reason)
        log.error("learner.quarantined", **msgspec.structs.asdict(fields), why=why, todo=ISOLATION_CURE)
        await self._event_log.record(fields)

    async def keep_holding(self) -> None:
        """Tell the queue at intervals that we still work on the pending deliveries."""
        while True:
            await asyncio.sleep(HOLD_S)
            for held in list(self.contributions.values()):
                await patiently(held.delivery.hold)

    async def _tell(
        self,
        key: PushKey,
        fate: Literal["refused", "clipped"],
        reason: str = "",
        norms: tuple[float, float] | None = None,
    ) -> None:
        """Tell a learner of a verdict; one that does not hear of a refusal learns so by being called again."""
        norm, norm_max = norms or (0.0, 0.0)
        verdict = Verdict(
            learner=key.learner,
            incarnation=key.incarnation,
            fragment=key.fragment,
            push=key.push,
            fate=fate,
            reason=reason,
            norm=norm,
            norm_max=norm_max,
        )
        try:
            await self._bus.tell(self._subjects.verdict(key.learner), encode(verdict))
        except (BusError, BrokerUnavailable) as error:
            log.warning("verdict.unsent", **key._asdict(), reason=str(error))
