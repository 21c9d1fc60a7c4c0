"""A bus that hands every call on to another one: a layer over it states only what it changes."""
# ruff: noqa: D102  (each method is the one of `Bus`)

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from atoll.bus.interface import Bus, Consumer, Record, StoredCounts, StoredEvent, Subscription
from atoll.bus.streams import Places
from atoll.wire.blobs import BlobRef, Download, Portion, Upload
from atoll.wire.limits import Buffer, Info
from atoll.wire.traffic import BusStats


class ForwardingBus:
    """Another bus, `_inner`, which is closed with this one."""

    def __init__(self, inner: Bus) -> None:
        """Count in the stats of `inner`."""
        self.stats: BusStats = inner.stats
        self._inner = inner

    async def provision(self, stream_bytes_max: int, bulk: Sequence[str] = ()) -> None:
        await self._inner.provision(stream_bytes_max, bulk)

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        return await self._inner.put_blob(stem, payload)

    async def get_blob(self, ref: BlobRef, size_bytes_max: int) -> bytes:
        return await self._inner.get_blob(ref, size_bytes_max)

    def pieces(self, download: Download) -> AsyncGenerator[Portion]:
        return self._inner.pieces(download)

    async def fit(self, places: Places) -> int:
        return await self._inner.fit(places)

    async def count_stored(self, subject_filter: str, *, more_than: int) -> StoredCounts:
        return await self._inner.count_stored(subject_filter, more_than=more_than)

    async def purge(self, subject_filter: str, *, keep: int = 0) -> int:
        return await self._inner.purge(subject_filter, keep=keep)

    async def put_record(
        self,
        subject: str,
        data: bytes,
        *,
        expected: int | None,
        info: Info | None = None,
        reconnects: int | None = None,
    ) -> int:
        return await self._inner.put_record(subject, data, expected=expected, info=info, reconnects=reconnects)

    def reconnects(self, subject: str) -> int:
        return self._inner.reconnects(subject)

    async def get_record(self, subject: str) -> Record | None:
        return await self._inner.get_record(subject)

    async def get_records(self, subject_filter: str) -> list[Record]:
        return await self._inner.get_records(subject_filter)

    async def publish(self, subject: str, data: bytes, *, msg_id: str, info: Info | None = None) -> None:
        await self._inner.publish(subject, data, msg_id=msg_id, info=info)

    async def consume(self, subject_filter: str, *, durable: str, takeover: bool = False) -> Consumer:
        return await self._inner.consume(subject_filter, durable=durable, takeover=takeover)

    async def replay(self, subject_filter: str, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        return await self._inner.replay(subject_filter, after=after, limit=limit)

    async def tell(self, subject: str, data: bytes) -> None:
        await self._inner.tell(subject, data)

    async def reach(self, timeout_s: float) -> bool:
        return await self._inner.reach(timeout_s)

    async def listen(self, subject_filter: str, *, len_max: int = 1024, late_s_max: float = 0.0) -> Subscription:
        return await self._inner.listen(subject_filter, len_max=len_max, late_s_max=late_s_max)

    async def ask(self, subject: str, data: bytes, *, timeout_s: float, answer_at: str = "") -> bytes | None:
        return await self._inner.ask(subject, data, timeout_s=timeout_s, answer_at=answer_at)

    async def close(self) -> None:
        await self._inner.close()
