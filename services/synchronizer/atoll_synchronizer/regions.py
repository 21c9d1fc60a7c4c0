"""Contributions of learners whose region folds them: the shard's side of pre-merge (`atoll.merge.partial`).

    Fetch ─► the region reads it ─► a batch of one region, fragment and base ─► the region folds it ─► its sum is here ─► fact

A batch waits until all live learners of its region have answered, at most `WAIT_STEPS` steps. The machine hears of
contributions when their sum is here, and not before: a region that is cut off leaves contributions to be read, and no half
round. Chunks stay at the region's leaf (`atoll.bus.nats.region`); a shard that needs them has them sent (`fetch_back`).

A region that does not answer, that fails, or whose sum cannot be (`PartialShape.decode`) costs time only: the shard reads
the contributions by itself, and asks that region no more for `AWAY_S`. A region's word refuses nothing: the shard finds the
reason itself, so a region with bad memory isolates none of its learners. While a region is at work, what its learners sent
grows old. So it has a *credit* of such time (`RegionCredit`): in the long run it may lose `LOST_SHARE` of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from atoll.base.errors import (
    BlobCorrupt,
    BlobGone,
    BrokerUnavailable,
    BusError,
    FrameRejected,
    PeerMisbehaved,
    ProtocolMisuse,
)
from atoll.base.logs import get
from atoll.base.parallel import off_loop
from atoll.base.retry import patiently
from atoll.merge.fold import PartialMerge, SliceLength, are_plausible
from atoll.merge.partial import PartialShape, RegionShare, is_partial, partial_codec
from atoll.protocol.events import ContributionReady, PushKey
from atoll.protocol.round import token_weight
from atoll.run.delta_chain import FrameReader
from atoll.wire.messages import (
    CHUNKS_GONE,
    NOTHING_KEPT,
    SENDING,
    Contribution,
    RegionAnswer,
    RegionAsk,
    WeighedPush,
    decode,
    encode,
    keeper_word,
)
from atoll_synchronizer.aggregator import Aggregator
from atoll_synchronizer.garbage_collector import GarbageCollector
from atoll_synchronizer.shard_context import ShardContext, ShardOwner

log = get(__name__)

ASK_S: Final = 3.0
"""A region answers within a second, also if it is still at work."""
TURN_S: Final = 0.5
"""A region is asked no more often than this, however soon it answers."""
SILENT_S: Final = 10.0
"""Questions and answers wait behind what else is on a full link."""
WORK_S: Final = 180.0
AWAY_S: Final = 10.0
AWAY_DOUBLINGS: Final = 6
LOST_SHARE: Final = 0.05
"""Of its learners' time a region may lose so much in the long run."""
BACK_S: Final = 120.0
"""After so long without a word the contributions of a region are too old as a rule, whatever comes back."""
BACK_S_MAX: Final = 600.0
WAIT_STEPS: Final = 1.5
"""Learners answer at the ends of their steps: one that is as fast as the first answers within a step. The half is for links."""
WAIT_S_MIN: Final = 0.05
WAIT_S_MAX: Final = 5.0
BATCH_MAX: Final = 1024


class SumKind(NamedTuple):
    """Properties that the contributions of one sum share."""

    region: str
    fragment: int
    base_version: int
    final: bool


@dataclass(slots=True)
class Batch:
    """Contributions that wait for those of their kind: manifests by key. `made` says at last whether their sum is here."""

    manifests: dict[PushKey, Contribution] = field(default_factory=dict)
    full: asyncio.Event = field(default_factory=asyncio.Event)
    made: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    began_s: float = 0.0
    """When its region was asked for the first time."""


@dataclass(slots=True)
class RegionCredit:
    """The time of its learners that a region may still lose, as of `at_s`, and until when it is left alone.

    Time is lost where no sum comes of it, or one that comes later than an interval. Questions that wait together lose it once.
    """

    left_s: float
    at_s: float
    lost_until_s: float = 0.0
    in_vain: int = 0
    """Number of requests in vain since the last sum that came in time."""
    away_until_s: float = 0.0

    def grow(self, now_s: float, most_s: float) -> None:
        """Add what was earned until `now_s`; it is never more than `most_s`."""
        self.left_s, self.at_s = min(most_s, self.left_s + LOST_SHARE * (now_s - self.at_s)), now_s

    def lose(self, since_s: float, now_s: float) -> None:
        """Take off the time since then, as far as it was not yet lost."""
        self.left_s -= max(0.0, now_s - max(since_s, self.lost_until_s))
        self.lost_until_s = max(self.lost_until_s, now_s)


class RegionReader:
    """Has regions read and fold, in one tenure of a shard."""

    def __init__(
        self,
        context: ShardContext,
        aggregator: Aggregator,
        garbage_collector: GarbageCollector,
        owner: ShardOwner,
    ) -> None:
        self._context = context
        self._run = context.run
        self._aggregator = aggregator
        self._garbage_collector = garbage_collector
        self._owner = owner
        self._sizes = context.run.layout.fragment_sizes()
        self._open: dict[SumKind, Batch] = {}
        self._heard: dict[SumKind, set[str]] = {}
        self._credits: dict[tuple[str, str], RegionCredit] = {}
        """By region and learner; "" stands for what all learners of a region lose."""
        self._folding: Counter[tuple[str, int]] = Counter()
        self._abandoned: set[tuple[str, int]] = set()
        """Of which region and fragment a sum may be stored that nobody has waited for."""
        self._nonce, self._asked = secrets.token_hex(8), itertools.count()

    async def read(self, region: str, key: PushKey, manifest: Contribution) -> tuple[str, float]:
        """Read a contribution at the hub, as `Aggregator.fetch`; what stays in its `region` is sent meanwhile.

        A reader looks for missing chunks for a while before it calls them gone. A fast loop takes several intervals by then,
        so the keeper is asked at once.
        """
        if not region or manifest.frame:
            return await self._aggregator.fetch(key, manifest)
        sent = asyncio.create_task(self.fetch_back(region, manifest))
        try:
            reason, norm = await self._aggregator.fetch(key, manifest)
            if reason == CHUNKS_GONE and await sent:
                reason, norm = await self._aggregator.fetch(key, manifest)
        finally:
            sent.cancel()
        return reason, norm

    async def fetch_back(self, region: str, manifest: Contribution) -> bool:
        """Have the keeper of a region send a contribution's chunks that stay there; return False if it has none.

        While the region is away, wait: its learners are cut off as well, and what they have sent must not be refused for that.
        While it sends, wait too: the same question joins what is being sent. True is no promise; the caller looks.
        """
        clock, word, subjects = self._context.clock, keeper_word("send", manifest.blob.stem), self._run.subjects
        began_s = heard_s = clock.monotonic()
        while clock.monotonic() < min(heard_s + BACK_S, began_s + BACK_S_MAX):
            try:
                told = await self._context.bus.ask(
                    subjects.region_kept(region),
                    word,
                    timeout_s=ASK_S,
                    answer_at=subjects.region_answer(region, self._new_nonce()),
                )
            except (BusError, BrokerUnavailable):
                told = None
            if told == SENDING:
                heard_s = clock.monotonic()
            elif told is not None and told.startswith(b"+"):
                return told != NOTHING_KEPT
            await asyncio.sleep(AWAY_S / 5)
        return True

    def note_settled(self, manifest: Contribution) -> None:
        """Tell a region that nobody will read a contribution of its learners again."""
        if (region := self._owner.region_of(manifest.learner)) and not manifest.frame:
            self._owner.spawn(self._tell_settled(region, manifest))

    async def _tell_settled(self, region: str, manifest: Contribution) -> None:
        push = WeighedPush(manifest.learner, manifest.incarnation, manifest.push, 0.0)
        drop = RegionAsk(verb="drop", run_nonce=self._run.nonce, fragment=manifest.fragment, pushes=(push,))
        bus, subjects = self._context.bus, self._run.subjects
        try:
            if is_partial(self._run.protocol, manifest.fragment, self._sizes[manifest.fragment]):
                await bus.tell(subjects.premerge(region), encode(drop))
            await bus.tell(subjects.region_kept(region), keeper_word("drop", manifest.blob.stem))
        except (BusError, BrokerUnavailable) as error:  # it ages out there
            log.debug("region.untold", region=region, reason=str(error))

    async def take(self, region: str, key: PushKey, manifest: Contribution, cause_id: str) -> bool:
        """Have a contribution read and folded by its region; return whether the machine has heard of it.

        If not, the caller reads it.
        """
        p, run, began_s = key.fragment, self._run, self._context.clock.monotonic()
        if began_s < max(self._credit_of(region).away_until_s, self._credit_of(region, key.learner).away_until_s):
            return False
        # The bounds of a sum and the length of a contribution follow from what its learner claims. A claim that cannot be is
        # refused where contributions are read.
        plausible = are_plausible(manifest.norms, run.layout.slices(p), run.protocol.of(p).norm_max)
        if not plausible or not is_partial(run.protocol, p, self._sizes[p]):
            return False
        read = await self._ask(region, RegionAsk(verb="read", run_nonce=run.nonce, manifest=manifest), began_s)
        if read is None:
            return False
        if read.reason:  # a learner says itself where it is: what is not there costs the others of that region nothing
            self._lose(region, began_s, key.learner)
            return False
        kind = SumKind(region, p, manifest.base_version, manifest.final)
        batch = self._open.get(kind)
        if batch is None:
            batch = self._open[kind] = Batch(began_s=began_s)
            self._owner.spawn(self._settle(kind, batch, cause_id))
        batch.manifests[key] = manifest
        self._note(kind, key.learner, batch)
        return await asyncio.shield(batch.made)

    def _note(self, kind: SumKind, learner: str, batch: Batch) -> None:
        for other in [
            other for other in self._heard if other[:2] == kind[:2] and other.base_version < kind.base_version
        ]:
            del self._heard[other]
        heard = self._heard.setdefault(kind, set())
        heard.add(learner)
        if self._owner.live_in(kind.region) <= heard or len(batch.manifests) >= BATCH_MAX:
            batch.full.set()

    async def _settle(self, kind: SumKind, batch: Batch, cause_id: str) -> None:
        made = False
        try:
            made = await self._make(kind, batch, cause_id)
        finally:
            if not batch.made.done():
                batch.made.set_result(made)

    async def _make(self, kind: SumKind, batch: Batch, cause_id: str) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(WAIT_S_MIN, min(WAIT_S_MAX, WAIT_STEPS * self._owner.step_s()))):
                await batch.full.wait()
        del self._open[kind]
        pushes = tuple(
            WeighedPush(key.learner, key.incarnation, key.push, token_weight(manifest.tokens, manifest.steps))
            for key, manifest in batch.manifests.items()
        )
        head = self._owner.head_of(kind.fragment)
        asked = RegionAsk(
            verb="fold",
            run_nonce=self._run.nonce,
            fragment=kind.fragment,
            base_version=kind.base_version,
            pushes=pushes,
            state=head.state,
            version=head.version,
        )
        partial = await self._summed(kind, asked, batch, pushes)
        if partial is None:
            return False
        first, *others = batch.manifests
        self._aggregator.keep_sum(batch.manifests, partial)
        norms = {key: _norm(manifest) for key, manifest in batch.manifests.items()}
        log.info("region.sum_read", region=kind.region, fragment=kind.fragment, pushes=len(pushes))
        self._owner.tell(
            ContributionReady(
                at_s=self._context.clock.monotonic(),
                key=first,
                norm=norms[first],
                base_norm=self._owner.norm_of(kind.fragment),
                others=tuple((key, norms[key]) for key in others),
                cause_id=cause_id,
            )
        )
        return True

    async def _summed(
        self, kind: SumKind, asked: RegionAsk, batch: Batch, pushes: Sequence[WeighedPush]
    ) -> PartialMerge | None:
        place = kind.region, kind.fragment
        sums = f"{self._run.subjects.partial_stems(*place)}.*"
        if place in self._abandoned and not self._folding[place]:
            self._abandoned.discard(place)
            await self._garbage_collector.remove(sums)
        self._folding[place] += 1
        try:
            answer = await self._ask(kind.region, asked, batch.began_s)
            if answer is not None:
                partial = await self._receive(kind, answer, batch, pushes)
                if self._context.clock.monotonic() > batch.began_s + self._interval_s():
                    self._lose(kind.region, batch.began_s)
                else:
                    for whose in ("", *(key.learner for key in batch.manifests)):
                        self._credit_of(kind.region, whose).in_vain = 0
                return partial
        except (FrameRejected, PeerMisbehaved, BlobGone, BlobCorrupt) as error:
            self._leave_alone(kind.region, str(error), batch.began_s)
        finally:
            self._folding[place] -= 1
        # The region may be at it still, so its sums are removed now, and before it is asked for the next one.
        self._abandoned.add(place)
        if not self._folding[place]:
            self._garbage_collector.leave(kind.fragment, sums)
        return None

    async def _receive(
        self, kind: SumKind, answer: RegionAnswer, batch: Batch, pushes: Sequence[WeighedPush]
    ) -> PartialMerge:
        p, bus, run = kind.fragment, self._context.bus, self._run
        blob, stem = answer.blob, run.subjects.partial_stem(kind.region, p, kind.base_version, "")
        if answer.reason or answer.missing or blob is None or not blob.stem.startswith(stem):
            got = answer.reason or f"{len(answer.missing)} contributions missing, {blob}"
            raise PeerMisbehaved("a region has no sum", got=got)
        settings, elements = run.protocol.of(p), self._sizes[p]
        shape, codec = PartialShape.of(run.layout.slices(p), elements, settings), partial_codec(settings)
        reader = await off_loop(elements, FrameReader.of, blob, shape.elements_sent, codec, shape.measured)
        await patiently(lambda: reader.receive(bus), "a region's sum")
        self._garbage_collector.leave(p, f"{blob.stem}.*")
        shares = [
            RegionShare(manifest.norms, push.weight, 1.0)
            for manifest, push in zip(batch.manifests.values(), pushes, strict=True)
        ]
        lengths = [SliceLength(*one) for one in answer.lengths]
        return shape.decode(reader.frame.vector, reader.frame.norms(), lengths, shares)

    async def _ask(self, region: str, asked: RegionAsk, since_s: float) -> RegionAnswer | None:
        bus, clock, subjects = self._context.bus, self._context.clock, self._run.subjects
        heard_s = clock.monotonic()
        until_s = max(heard_s + ASK_S, since_s + self._patience_s(region))
        credit, reason = self._credit_of(region), "it is at work for too long"
        try:
            data = encode(asked)
            while credit.away_until_s <= (asked_s := clock.monotonic()) < until_s:
                answer_at = subjects.premerge_answer(region, self._new_nonce())
                told = await bus.ask(subjects.premerge(region), data, timeout_s=ASK_S, answer_at=answer_at)
                now_s = clock.monotonic()
                if told is not None:
                    answer, heard_s = decode(RegionAnswer, told), now_s
                    if answer.done:
                        return answer
                # An answer of nobody comes at once: then nobody listens there.
                elif now_s - asked_s < TURN_S or now_s - heard_s >= SILENT_S:
                    reason = "no answer"
                    break
                await asyncio.sleep(max(0.0, asked_s + TURN_S - clock.monotonic()))
        except (BusError, BrokerUnavailable) as error:  # of our own broker: the region loses nothing by it
            reason, since_s = str(error), clock.monotonic()
        except (PeerMisbehaved, ProtocolMisuse) as error:
            reason = str(error)
        self._leave_alone(region, reason, since_s)
        return None

    def _patience_s(self, region: str) -> float:
        """Return how long a region may be at work: while what it reads is not too old yet, and as far as its credit goes."""
        fresh_s = max(ASK_S, self._run.protocol.age_max * self._interval_s())
        return min(WORK_S, fresh_s, self._credit_of(region).left_s)

    def _interval_s(self) -> float:
        return self._run.protocol.interval_steps * self._owner.step_s()

    def _credit_of(self, region: str, learner: str = "") -> RegionCredit:
        """Return the credit of a region as of now; a new one may lose all that makes a contribution too old, once.

        With a learner, it is of what that one sends and its region does not take.
        """
        now_s = self._context.clock.monotonic()
        most_s = min(WORK_S, max(2.0 * SILENT_S, self._run.protocol.age_max * self._interval_s()))
        credit = self._credits.setdefault((region, learner), RegionCredit(most_s, now_s))
        credit.grow(now_s, most_s)
        return credit

    def _lose(self, region: str, since_s: float, learner: str = "") -> None:
        credit, now_s = self._credit_of(region, learner), self._context.clock.monotonic()
        credit.lose(since_s, now_s)
        if self._owed_s(credit) > 0.0:
            reason = "it does not take what this learner sends" if learner else "what it makes comes too late"
            self._leave_alone(region, reason, now_s, learner)

    def _owed_s(self, credit: RegionCredit) -> float:
        return (min(WORK_S, max(ASK_S, self._interval_s())) - credit.left_s) / LOST_SHARE

    def _new_nonce(self) -> str:
        """Return what no question has had: an answer to another one is none."""
        return f"{self._nonce}-{next(self._asked)}"

    def _leave_alone(self, region: str, reason: str, since_s: float, learner: str = "") -> None:
        """Ask a region no more for a while, each time in a row for twice as long, and say so once; note the time as lost.

        Questions that waited beside the first one end with it.
        """
        credit, now_s = self._credit_of(region, learner), self._context.clock.monotonic()
        credit.lose(since_s, now_s)
        if now_s < credit.away_until_s:
            return
        for_s = max(AWAY_S * 2 ** min(credit.in_vain, AWAY_DOUBLINGS), self._owed_s(credit))
        credit.in_vain += 1
        credit.away_until_s = now_s + for_s
        log.warning(
            "region.away",
            region=region,
            for_s=round(for_s, 1),
            reason=reason,
            instead="its contributions are read here",
            **({"learner": learner} if learner else {}),
        )


def _norm(manifest: Contribution) -> float:
    """Return the L2 norm that a learner claims; its region has found it to be so."""
    return math.hypot(*manifest.norms)
