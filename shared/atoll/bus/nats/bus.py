"""The `Bus` over NATS JetStream: each method checks its arguments in the caller's loop and runs in the connection's loop."""
# ruff: noqa: D102  (a method without a docstring is the one of `Bus` or `ManagingBus`)

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from itertools import islice, repeat

from nats.aio.msg import Msg

from atoll.base.errors import AccessDenied, BrokerUnavailable, SettingsError
from atoll.base.retry import Unanswered, cancel_all
from atoll.bus.interface import (
    CoreMessage,
    NodeStatus,
    Record,
    Signatures,
    StoredCounts,
    StoredEvent,
    StoredRun,
    StreamState,
)
from atoll.bus.nats import blobs
from atoll.bus.nats.administration import (
    count_by_subject,
    node_statuses,
    remove_run,
    stored_runs,
    stream_states,
)
from atoll.bus.nats.connection import Connection, report_waiting
from atoll.bus.nats.consumers import QueueConsumer, open_consumer
from atoll.bus.nats.jetstream_api import JetStream, last_record, last_records, public_errors, put_record, walk
from atoll.bus.nats.provision import check_broker, fit, keep_live_stream, keep_together, provision, switch_taps
from atoll.bus.options import ADDRESSES, DEFAULTS, BusOptions, is_address
from atoll.bus.streams import (
    Places,
    check_size,
    fitted_plan,
    info_header,
    kept_plan,
    live_plan,
    outbox_plan,
    stream_of,
    stream_plan,
)
from atoll.bus.subscriptions import BufferedSubscription
from atoll.wire.blobs import BlobRef, Download, Portion, Upload, whole
from atoll.wire.limits import Buffer, Info
from atoll.wire.subjects import Subjects, token
from atoll.wire.traffic import BusStats

_READERS = 2


class JetStreamBus:
    """A `Bus` whose broker is a nats-server with JetStream; make one with `open`."""

    def __init__(
        self, connection: Connection, subjects: Subjects, bulk: blobs.BulkTraffic | None = None, *, nearby: bool = False
    ) -> None:
        """Wrap an open connection: to the run, or to what the leaf of a region keeps of it itself, `nearby`."""
        self.stats: BusStats = connection.stats
        self.signatures: Signatures | None = None
        self._connection = connection
        self._subjects = subjects
        self._needed = stream_plan(subjects.run)
        self._plans = (*self._needed, live_plan(subjects.run))
        if nearby:
            self._plans += (outbox_plan(subjects.run, connection.domain), kept_plan(subjects.run, connection.domain))
        self._jetstream = JetStream(connection, nearby=nearby)
        self._bulk = bulk or blobs.BulkTraffic.of(connection)
        self._feeds: dict[BufferedSubscription, tuple[Connection, int]] = {}
        self._resting: dict[float, Connection] = {}
        self._consumers: list[QueueConsumer] = []
        self._together: asyncio.Task[None] | None = None
        self._live: asyncio.Task[None] | None = None

    @property
    def connection(self) -> Connection:
        """Return the connection on which everything small travels."""
        return self._connection

    @property
    def subjects(self) -> Subjects:
        return self._subjects

    @classmethod
    async def open(
        cls,
        url: str,
        run: str,
        *,
        name: str,
        options: BusOptions = DEFAULTS,
        stats: BusStats | None = None,
    ) -> JetStreamBus:
        """Connect to the broker at `url` for `run` as `name`, counting in `stats`; nothing is created there.

        Raises `BrokerUnavailable`: unreachable within `options.patience_s`, too old, no JetStream, max_payload too small.
        """
        if not is_address(url):
            raise SettingsError(
                "this is not the address of a broker",
                got=repr(url),
                allowed=ADDRESSES,
                todo="correct --broker, or broker.url",
            )
        subjects = Subjects(run)
        connection = Connection(url, name, options, stats or BusStats())
        bus = cls(connection, subjects)
        try:
            await connection.call(bus._prepare(url))
        except BaseException:
            await connection.stop()
            raise
        return bus

    async def _prepare(self, url: str) -> None:
        patience_s = self._connection.options.patience_s
        try:
            with report_waiting(url, patience_s):
                await self._connection.connect(patience_s)
        except TimeoutError:
            raise BrokerUnavailable(
                f"no broker answers at {url}",
                got=f"{self._connection.complaints.text or 'silence'} for {patience_s:g} s",
                todo="start one, or correct the address; verbs that watch read the folder of a run that is over (--out DIR)",
            ) from None
        await check_broker(self._jetstream, url)

    def reconnects(self, subject: str) -> int:
        del subject  # one broker keeps all
        return self._connection.reconnects

    async def provision(self, stream_bytes_max: int, bulk: Sequence[str] = ()) -> None:
        del bulk  # `atoll.bus.spread` opens those
        run, prefix, options = self._subjects.run, self._subjects.prefix, self._connection.options
        plans = stream_plan(run, stream_bytes_max, options.replicas)
        await self._connection.call(provision(self._jetstream, plans, prefix, bodies=options.taps == "bodies"))

    async def switch_taps(self, *, bodies: bool) -> int:
        prefix = self._subjects.prefix
        return await self._connection.call(switch_taps(self._jetstream, self._needed, prefix, bodies=bodies))

    def beside(self, run: str) -> JetStreamBus:
        return JetStreamBus(self._connection, Subjects(run))

    def nearby(self) -> JetStreamBus:
        """Return a bus to what the leaf of a region keeps of this run itself, on this bus's connections."""
        return JetStreamBus(self._connection, self._subjects, self._bulk.nearby(), nearby=True)

    async def stored_runs(self) -> list[StoredRun]:
        return await self._connection.call(stored_runs(self._jetstream))

    async def stream_states(self) -> list[StreamState]:
        with public_errors(self._subjects.run, "the broker does not say how full its streams are"):
            return await self._connection.call(stream_states(self._jetstream, self._plans))

    async def nodes(self, wait_s: float) -> list[NodeStatus]:
        with public_errors(self._subjects.run, "the broker does not say what its nodes are"):
            return await self._connection.call(node_statuses(self._connection, wait_s))

    async def remove_run(self) -> int:
        return await self._connection.call(remove_run(self._jetstream, self._subjects.run))

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        stream_of(self._plans, f"{stem}.0")
        upload = Upload.of(payload)
        writing = repeat(self._jetstream) if upload.is_small else self._bulk.writing
        await self._connection.call(blobs.write(writing, self._connection, stem, upload))
        return upload.ref(stem)

    async def get_blob(self, ref: BlobRef, size_bytes_max: int) -> bytes:
        return await whole(self, Download(ref, size_bytes_max))

    async def pieces(self, download: Download) -> AsyncGenerator[Portion]:
        stream = stream_of(self._plans, f"{download.ref.stem}.0").name
        pages = iter(download.pages())
        if download.is_small:
            for page in pages:
                portion = await self._connection.call(self._read_page(stream, download, page))
                for number, piece in portion:
                    download.take(number, piece)
                yield portion
        reading: set[asyncio.Future[Portion]] = set()
        done: set[asyncio.Future[Portion]] = set()
        try:
            while True:
                for page in islice(pages, _READERS - len(reading)):
                    work = self._connection.call(self._read_page(stream, download, page))
                    reading.add(asyncio.ensure_future(work))
                for portion in [each.result() for each in done]:
                    for number, piece in portion:
                        download.take(number, piece)
                    yield portion
                if not reading:
                    break
                done, reading = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in reading:
                each.cancel()
            await asyncio.gather(*reading, *done, return_exceptions=True)  # of several that failed one was raised
        download.verify()

    async def pieces_there(self, download: Download) -> AsyncGenerator[Portion]:
        """Yield the missing pieces from the first on, up to the first page that is not whole yet; see `pieces`."""
        stream = stream_of(self._plans, f"{download.ref.stem}.0").name
        for page in download.pages():
            found = await self._connection.call(self._read_there(stream, download.ref.stem, page))
            portion: Portion = [(int(message.subject.rpartition(".")[2]), message.data) for message in found]
            for number, piece in portion:
                download.take(number, piece)
            if portion:
                yield portion
            if len(portion) < len(page):
                return

    async def _read_there(self, stream: str, stem: str, page: list[int]) -> list[StoredEvent]:
        async with self._bulk.pages:
            return await blobs.read_there(
                next(self._bulk.reading), stream, [f"{stem}.{number}" for number in page], once=True
            )

    async def _read_page(self, stream: str, download: Download, page: list[int]) -> Portion:
        if download.is_small:
            return await blobs.read_page(repeat(self._jetstream), self._connection, stream, download, page)
        async with self._bulk.pages:
            return await blobs.read_page(self._bulk.reading, self._connection, stream, download, page)

    async def fit(self, places: Places) -> int:
        run, prefix = self._subjects.run, self._subjects.prefix
        return await self._connection.call(fit(self._jetstream, fitted_plan(run, places), prefix))

    async def count_stored(self, subject_filter: str, *, more_than: int) -> StoredCounts:
        plan = stream_of(self._plans, subject_filter)
        with public_errors(subject_filter, "the broker does not say what it keeps"):
            return await self._connection.call(count_by_subject(self._jetstream, plan.name, subject_filter, more_than))

    async def purge(self, subject_filter: str, *, keep: int = 0) -> int:
        plan = stream_of(self._plans, subject_filter)
        which = {"filter": subject_filter, **({"keep": keep} if keep else {})}
        purge = self._jetstream.api(f"STREAM.PURGE.{plan.name}", which)
        with public_errors(subject_filter):
            answer = await self._connection.call(purge)
        purged = answer.get("purged")
        return purged if isinstance(purged, int) else 0

    async def put_record(
        self,
        subject: str,
        data: bytes,
        *,
        expected: int | None,
        info: Info | None = None,
        reconnects: int | None = None,
    ) -> int:
        check_size(subject, data)
        plan = stream_of(self._plans, subject)
        return await self._connection.call(
            put_record(self._jetstream, plan.name, (subject, data), info_header(info), expected, reconnects)
        )

    async def get_record(self, subject: str) -> Record | None:
        plan = stream_of(self._plans, subject)
        found = await self._connection.call(last_record(self._jetstream, plan.name, subject))
        return None if found is None else found[0]

    async def get_records(self, subject_filter: str) -> list[Record]:
        plan = stream_of(self._plans, subject_filter)
        return await self._connection.call(last_records(self._jetstream, plan.name, subject_filter))

    async def publish(self, subject: str, data: bytes, *, msg_id: str, info: Info | None = None) -> None:
        check_size(subject, data)
        stream_of(self._plans, subject)
        headers = {"Nats-Msg-Id": msg_id, **info_header(info)}
        await self._connection.call(self._jetstream.store(subject, data, headers))

    async def consume(self, subject_filter: str, *, durable: str, takeover: bool = False) -> QueueConsumer:
        plan = stream_of(self._plans, subject_filter)
        name = token(durable, "durable name")
        consumer = await self._connection.call(
            open_consumer(self._jetstream, plan.name, subject_filter, name, takeover=takeover)
        )
        self._consumers.append(consumer)
        if self._live is None:
            keeping = keep_live_stream(self._jetstream, self._subjects.run)
            self._live = asyncio.create_task(self._connection.call(keeping))
        if self._connection.nodes > 1 and self._together is None:
            streams = [each.name for each in self._needed]
            self._together = asyncio.create_task(
                self._connection.call(keep_together(self._jetstream, streams, plan.name))
            )
        return consumer

    async def replay(self, subject_filter: str, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        plan = stream_of(self._plans, subject_filter)
        return await self._connection.call(walk(self._jetstream, plan.name, subject_filter, after=after, limit=limit))

    async def tell(self, subject: str, data: bytes) -> None:
        """Send at most once; while the broker is away the core message is dropped and counted."""
        check_size(subject, data)
        try:
            await self._connection.call(self._connection.send(subject, data, timeout_s=0.0))
        except Unanswered:
            self.stats.core_messages_dropped += 1
        else:
            self.stats.bytes_up += len(data)

    async def reach(self, timeout_s: float) -> bool:
        try:
            await self._connection.call(self._connection.echo(timeout_s))
        except Unanswered:
            return False
        return True

    async def listen(
        self, subject_filter: str, *, len_max: int = 1024, late_s_max: float = 0.0
    ) -> BufferedSubscription:
        feed = BufferedSubscription(len_max, self.stats, self._hush)
        self._feeds[feed] = await self._connection.call(self._hear(subject_filter, feed, late_s_max))
        return feed

    async def _hear(self, subject_filter: str, feed: BufferedSubscription, late_s_max: float) -> tuple[Connection, int]:
        connection = self._connection
        if late_s_max:
            if late_s_max not in self._resting:
                self._resting[late_s_max] = connection.branch(rest_s=late_s_max)
            connection = self._resting[late_s_max]

        def on_message(message: Msg) -> None:
            self.stats.bytes_down += len(message.data)
            feed.push(CoreMessage(message.subject, message.data, message.reply or None, message.headers or {}))

        with public_errors(subject_filter, "cannot listen"):
            return connection, await connection.subscribe(subject_filter, on_message)

    async def _hush(self, feed: BufferedSubscription) -> None:
        connection, key = self._feeds.pop(feed, (None, 0))
        if connection is not None:
            await self._connection.call(connection.unsubscribe(key))

    async def ask(self, subject: str, data: bytes, *, timeout_s: float, answer_at: str = "") -> bytes | None:
        check_size(subject, data)
        try:
            asking = (
                self._connection.request_at(answer_at, subject, data, timeout_s)
                if answer_at
                else self._connection.request(subject, data, timeout_s=timeout_s)
            )
            answer = await self._connection.call(asking)
        except Unanswered:
            return None
        self.stats.bytes_down += len(answer.data)
        return bytes(answer.data)

    async def close(self) -> None:
        try:
            await cancel_all([task for task in (self._together, self._live) if task is not None])
            for consumer in self._consumers:
                with contextlib.suppress(BrokerUnavailable, AccessDenied):
                    await consumer.close()
            for feed in list(self._feeds):
                feed.end()
        finally:
            await self._connection.stop()
