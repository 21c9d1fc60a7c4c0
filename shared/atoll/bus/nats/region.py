"""The bus of a process in a region: its broker is a leaf (`atoll.bus.regions`), and the run is at the hub behind it.

* **Frames are read from the mirror** at the leaf, so each crosses the WAN once. Chunks that it lacks are read from the hub,
  through the leaf, as soon as the mirror is as far as the newest head, or does not get on.
* **What a learner sends waits in the outbox** at the leaf while the link is cut: contributions and events, in the order of
  their writing (`OutboxOrder`). A write takes to it once nobody answered `AWAY_LOOKS` looks in a row.
* **The chunks of contributions stay at the leaf** where the region folds them itself (`BusOptions.region`): its synchronizer
  reads them there and nowhere else, and only their sum goes to the hub. The keeper sends them when a shard asks for them.
* **Everything else goes through the leaf to the hub**, and is refused when the hub is away: records, leases, queues.

The keeper (`atoll.bus.nats.region_keeper`) makes mirror and outbox of a run when a process first asks for them. Without a
keeper this is a bus to the hub.

`reconnects` counts lost connections to the leaf. A hub that loses power is not counted, so a process that writes heads from a
region (a founder; synchronizers belong at the hub) relies on a hub that syncs before it answers, which is the default.
"""
# ruff: noqa: D102  (a method without a docstring is the one of `Bus`)

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nats.errors import NoRespondersError

from atoll.base.errors import BlobGone, BrokerUnavailable, RunReplaced
from atoll.base.logs import get
from atoll.base.retry import Unanswered
from atoll.bus.interface import ForwardingBus
from atoll.bus.nats.jetstream_api import JetStream, newest_sequence, public_errors, read_field
from atoll.bus.streams import outbox_plan, stream_of, stream_plan
from atoll.wire.blobs import Download, Upload, whole

if TYPE_CHECKING:
    from atoll.bus.interface import Subscription
    from atoll.bus.nats.bus import JetStreamBus
    from atoll.wire.blobs import BlobRef, Portion
    from atoll.wire.limits import Buffer, Info

READY: Final = b"+ready"
ASK_S: Final = 3.0
ASK_AGAIN_S: Final = 60.0
"""Interval at which a keeper is told that a run is still wanted."""
ASK_SOON_S: Final = 5.0
STALE_S: Final = 30.0
"""A mirror that has heard nothing from the hub for so long, or got no further, is not waited for. The hub says something each
second, but on a full link that waits behind megabytes, as what the mirror says to the hub does."""
AGAIN_S: Final = 0.1
LOOK_S: Final = 1.0
AWAY_LOOKS: Final = 3

log = get(__name__)


@dataclass(frozen=True, slots=True)
class MirrorState:
    """Progress of a mirror, by the numbers of the mirrored stream, and for how long it has heard nothing."""

    last_seq: int
    silent_s: float


class RegionBus(ForwardingBus):
    """A bus to the hub through a leaf, and to the leaf's own mirror and outbox; see the module."""

    def __init__(self, hub: JetStreamBus) -> None:
        super().__init__(hub)
        self._leaf = hub.nearby()
        self._connection = hub.connection
        self._far, self._near = JetStream(hub.connection), JetStream(hub.connection, nearby=True)
        self._domain = hub.connection.domain
        self._subjects = hub.subjects
        self._global = stream_of(stream_plan(hub.subjects.run), hub.subjects.run_record).name
        self._asking = asyncio.Lock()
        self._asked_s, self._is_kept = float("-inf"), False
        self._order = OutboxOrder(self._waiting)
        self._folds = hub.connection.options.region == self._domain

    # --- what the leaf keeps ----------------------------------------------------------------------------------------

    async def _is_run_kept(self) -> bool:
        async with self._asking:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._asked_s >= (ASK_AGAIN_S if self._is_kept else ASK_SOON_S):
                self._asked_s = now_s
                asked = self._connection.request(self._subjects.region(self._domain), timeout_s=ASK_S)
                try:
                    self._is_kept = (await self._connection.call(asked)).data == READY
                except Unanswered:
                    log.debug("region.unkept", region=self._domain)
            return self._is_kept

    async def _stream_info(self, stream: str) -> dict[str, Any]:
        with public_errors(stream):
            return await self._near.stream_info(stream) or {}

    async def _mirror(self) -> MirrorState | None:
        answer = await self._stream_info(self._global)
        try:
            silent_ns = read_field(answer, int, "mirror", "active")  # -1: it has only begun
            return MirrorState(read_field(answer, int, "state", "last_seq"), silent_ns / 1e9)
        except Unanswered:
            return None

    def _is_mirrored(self, subject: str) -> bool:
        return subject.startswith(f"{self._subjects.prefix}.gl.")

    async def get_blob(self, ref: BlobRef, size_bytes_max: int) -> bytes:
        return await whole(self, Download(ref, size_bytes_max))

    def _stays(self, stem: str) -> bool:
        return self._folds and self._subjects.is_contribution(stem)

    async def pieces(self, download: Download) -> AsyncGenerator[Portion]:
        """Yield the missing pieces, from what the leaf keeps as far as it has them."""
        if self._stays(download.ref.stem):
            here = download.elsewhere(self._subjects.kept(self._domain, download.ref.stem))
            sources = [self._kept_pieces(here)]
        elif self._is_mirrored(download.ref.stem) and await self._is_run_kept():
            sources = [self._mirror_pieces(download), self._inner.pieces(download)]
        else:
            sources = [self._inner.pieces(download)]
        for source in sources:
            async with contextlib.aclosing(source) as pieces:
                async for portion in pieces:
                    yield portion

    async def _kept_pieces(self, here: Download) -> AsyncGenerator[Portion]:
        try:
            async with contextlib.aclosing(self._leaf.pieces(here)) as pieces:
                async for portion in pieces:
                    yield portion
        except RunReplaced:
            raise BlobGone("this region keeps nothing of the run yet", got=here.ref.stem) from None

    async def _mirror_pieces(self, download: Download) -> AsyncGenerator[Portion]:
        now_s = asyncio.get_running_loop().time
        seen: object = None
        needed, since_s = None, now_s()
        while (state := await self._connection.call(self._mirror())) is None or state.silent_s < STALE_S:
            if state is None:
                self._is_kept = False  # the keeper has given it up; it is asked again
                return
            async with contextlib.aclosing(self._leaf.pieces_there(download)) as pieces:
                async for portion in pieces:
                    yield portion
            if not download.pages():
                return
            if needed is None:
                needed = await self._connection.call(newest_sequence(self._far, self._global, self._subjects.head("*")))
            # Chunks are older than the head that names them. So a mirror that is as far as the newest head has had them.
            if state.last_seq >= needed:
                return
            there = (state.last_seq, len(download.pages()))
            if there != seen:
                seen, since_s = there, now_s()
            elif now_s() - since_s > STALE_S:
                return
            await asyncio.sleep(AGAIN_S)

    # --- what may wait there ----------------------------------------------------------------------------------------

    def _may_wait(self, subject: str) -> bool:
        """Return whether something may come late; a sum of the region may not: its shard is waiting for it."""
        if self._subjects.is_partial(subject):
            return False
        return subject.startswith((f"{self._subjects.prefix}.up.", f"{self._subjects.prefix}.ev."))

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        upload = Upload.of(payload)
        if self._stays(stem) and await self._is_run_kept():
            await self._leaf.put_blob(self._subjects.kept(self._domain, stem), upload)
            return upload.ref(stem)
        if not self._may_wait(stem):
            return await self._inner.put_blob(stem, upload)
        later = self._subjects.outbox(self._domain, stem)
        await self._send(lambda: self._inner.put_blob(stem, upload), lambda: self._leaf.put_blob(later, upload))
        return upload.ref(stem)

    async def publish(self, subject: str, data: bytes, *, msg_id: str, info: Info | None = None) -> None:
        if not self._may_wait(subject):
            await self._inner.publish(subject, data, msg_id=msg_id, info=info)
            return
        later = self._subjects.outbox(self._domain, subject)
        await self._send(
            lambda: self._inner.publish(subject, data, msg_id=msg_id, info=info),
            lambda: self._leaf.publish(later, data, msg_id=msg_id, info=info),
        )

    async def _send(
        self, directly: Callable[[], Coroutine[None, None, object]], later: Callable[[], Awaitable[object]]
    ) -> None:
        if not await self._order.must_wait():
            if not await self._is_run_kept():
                await directly()
                return
            sending = asyncio.create_task(directly())
            try:
                if await self._is_through(sending):
                    return
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            log.warning(
                "region.hub_away", region=self._domain, waits="contributions and events, in the region's outbox"
            )
        with self._order.entering():
            await later()

    async def _waiting(self) -> int | None:
        outbox = await self._connection.call(self._stream_info(outbox_plan(self._subjects.run, self._domain).name))
        try:
            return read_field(outbox, int, "state", "messages") if outbox else 0
        except Unanswered:
            return None

    async def _is_through(self, sending: asyncio.Task[object]) -> bool:
        looks = 0
        while looks < AWAY_LOOKS:
            done, _ = await asyncio.wait({sending}, timeout=LOOK_S)
            if done and isinstance(sending.exception(), BrokerUnavailable) and await self._hub_answers(ASK_S) is False:
                return False
            if done:
                await sending
                return True
            looks = looks + 1 if await self._hub_answers(ASK_S) is False else 0
        return False

    async def _hub_answers(self, timeout_s: float) -> bool | None:
        """Return whether the hub answers: False if the leaf has no link to it, None if no answer came in time."""
        try:
            await self._connection.call(self._connection.request(f"{self._far.root}.INFO", timeout_s=timeout_s))
        except Unanswered as reason:
            return False if isinstance(reason.__cause__, NoRespondersError) else None
        return True

    # --- what the hub does ------------------------------------------------------------------------------------------

    async def purge(self, subject_filter: str, *, keep: int = 0) -> int:
        """Delete also from the mirror, which hears nothing of deletions at the hub."""
        purged = await self._inner.purge(subject_filter, keep=keep)
        if keep:
            return purged
        if self._stays(subject_filter) and await self._is_run_kept():
            with contextlib.suppress(BrokerUnavailable):
                purged += await self._leaf.purge(self._subjects.kept(self._domain, subject_filter))
        if self._is_mirrored(subject_filter) and await self._is_run_kept():
            with contextlib.suppress(BrokerUnavailable):
                await self._leaf.purge(subject_filter)
        return purged

    async def reach(self, timeout_s: float) -> bool:
        return await self._hub_answers(timeout_s) is True

    async def listen(self, subject_filter: str, *, len_max: int = 1024, late_s_max: float = 0.0) -> Subscription:
        """Listen once the hub knows that we do: an answer of it follows what we told it before."""
        heard = await self._inner.listen(subject_filter, len_max=len_max, late_s_max=late_s_max)
        await self._hub_answers(ASK_S)
        return heard


class OutboxOrder:
    """The order in which what a process of a region writes reaches the hub: a manifest never before its chunks.

    Once something of this process is in the outbox, or on its way there, all that follows goes there, too, until the outbox is
    empty. An outbox that is found empty says nothing while chunks travel to the leaf, nor if some have begun to travel while it
    was asked.
    """

    def __init__(self, waiting: Callable[[], Awaitable[int | None]]) -> None:
        """Begin with nothing in the outbox. `waiting` returns how many messages it holds, None if nobody says."""
        self._waiting = waiting
        self._holds_ours = False
        self._entered = self._entering = 0  # writes that have begun to enter, and those of them that have not ended

    async def must_wait(self) -> bool:
        """Return whether something that this process wrote before may still be in the outbox, or is on its way there."""
        if self._holds_ours and not self._entering:
            entered, waiting = self._entered, await self._waiting()
            if waiting == 0 and self._entered == entered:
                self._holds_ours = False
        return self._holds_ours

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Say that the block writes into the outbox."""
        self._holds_ours = True
        self._entered += 1
        self._entering += 1
        try:
            yield
        finally:
            self._entering -= 1
