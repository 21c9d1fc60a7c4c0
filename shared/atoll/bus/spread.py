"""A bus over several brokers: the fragments of a run are spread over them, and everything else has one home.

Fragment p lies on broker p mod n, where broker 0 is the home and the others follow in the order of the run record
(`RunRecord.bulk`). A head lies with the chunks that it names, because one server then loses both or neither. Membership,
leases, queues, calls and the event log stay at home: they are small, and they have one order only on one server.

    up.c.<learner>.<p>.>   gl.head.<p>   gl.c.<p>.>   gl.d.<p>.>   st.>   tap.gl.head.<p>     broker p mod n
    all other subjects                                                                        home

A bus learns where fragments lie from the run record: it reads the record when it first needs to know, and it looks at each
record that passes. A process may reach the brokers at other addresses than its peers do (`BusOptions.bulk`). A broker that is
away stops its own fragments and no others; a call that concerns all fragments waits for it.
"""
# ruff: noqa: D102  (a method without a docstring is the one of `Bus`)

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from atoll.base.errors import BrokerUnavailable, PeerMisbehaved, RunReplaced, SettingsError
from atoll.base.logs import get
from atoll.base.retry import all_of, cancel_all
from atoll.base.wording import few
from atoll.bus.interface import ForwardingBus, StoredCounts
from atoll.bus.subscriptions import BufferedSubscription
from atoll.wire.messages import RunRecord, decode
from atoll.wire.subjects import ALL_FRAGMENTS, Subjects, fragment_level

if TYPE_CHECKING:
    from atoll.bus.interface import Bus, Record, Subscription
    from atoll.bus.streams import Places
    from atoll.wire.blobs import BlobRef, Download, Portion, Upload
    from atoll.wire.limits import Buffer, Info

HOME: Final = 0
LISTEN_AGAIN_S: Final = 1.0
FRAGMENTS_NAMED: Final = 4

log = get(__name__)


class SpreadBus(ForwardingBus):
    """The home's bus and, once they are needed, those of the further brokers; see the module."""

    def __init__(
        self,
        home: Bus,
        run: str,
        opener: Callable[[str], Awaitable[Bus]],
        *,
        own_addresses: Sequence[str] = (),
    ) -> None:
        """Route from `home`; `opener` opens a bus of the same run at another address, with the stats of `home`.

        All are closed with this one. `own_addresses` are those at which this process reaches the further brokers.
        """
        super().__init__(home)
        self._run_record = Subjects(run).run_record
        self._heads = Subjects(run).head("*")
        self._opener = opener
        self._own_addresses = tuple(own_addresses)
        self._addresses: tuple[str, ...] | None = None
        self._further: dict[int, Bus] = {}
        """Buses to the further brokers that were needed so far, by number."""
        self._opening: dict[int, asyncio.Lock] = {}
        self._feeders: dict[BufferedSubscription, list[asyncio.Task[None]]] = {}

    # --- where what lies --------------------------------------------------------------------------------------------

    async def _learn(self, bulk: Sequence[str]) -> None:
        if self._own_addresses and len(self._own_addresses) != len(bulk):
            raise SettingsError(
                "the run's fragments lie on another number of brokers than this process knows",
                got=f"{len(self._own_addresses)} addresses in broker.bulk",
                allowed=f"{len(bulk)}, as its founder said: {', '.join(bulk) or 'all lie on the home broker'}",
                todo="correct broker.bulk, or leave it away if the founder's addresses are good here, too",
            )
        addresses = self._own_addresses or tuple(bulk)
        former, self._addresses = self._addresses, addresses
        if former is not None and addresses != former:
            # Taken out before anything is awaited: another task may look for a bus, or learn the same, meanwhile.
            further, self._further = self._further, {}
            for bus in further.values():
                await bus.close()

    async def _look(self, record: bytes) -> None:
        with contextlib.suppress(PeerMisbehaved):
            await self._learn(decode(RunRecord, record).bulk)

    async def _brokers(self) -> int:
        if self._addresses is None:
            with contextlib.suppress(RunReplaced):  # the home has no streams of this run
                await self.get_record(self._run_record)
        return 1 + len(self._addresses or ())

    async def _bus(self, number: int) -> Bus:
        if number == HOME:
            return self._inner
        if number not in self._further:
            async with self._opening.setdefault(number, asyncio.Lock()):
                while number not in self._further:
                    addresses = self._addresses or ()
                    if number > len(addresses):
                        raise BrokerUnavailable("the run lies on fewer brokers than it did", got=number)
                    opened = await self._opener(addresses[number - 1])
                    try:
                        await self._check_place(opened, number, 1 + len(addresses))
                    except BaseException:
                        await opened.close()
                        raise
                    if self._addresses == addresses:
                        self._further[number] = opened
                    else:
                        await opened.close()
        return self._further[number]

    async def _check_place(self, bus: Bus, number: int, brokers: int) -> None:
        try:
            heads = await bus.get_records(self._heads)
        except RunReplaced:  # nobody has founded the run there
            return
        there = {int(record.subject.rpartition(".")[2]) for record in heads}
        if wrong := sorted(fragment for fragment in there if fragment % brokers != number):
            raise SettingsError(
                f"broker {number} of the run's further ones keeps the fragments of another",
                got=f"fragment {few(map(str, wrong), FRAGMENTS_NAMED)}",
                allowed=f"fragments {number}, {number + brokers}, ...",
                todo="give the addresses of broker.bulk in the founder's order, or leave it away",
            )

    async def _numbers(self, subject_filter: str) -> list[int]:
        if self._addresses == ():
            return [HOME]
        level = fragment_level(subject_filter)
        if level is None:
            return [HOME]
        brokers = await self._brokers()
        return list(range(brokers)) if level == ALL_FRAGMENTS else [int(level) % brokers]

    async def _keepers(self, subject_filter: str) -> list[Bus]:
        return [await self._bus(number) for number in await self._numbers(subject_filter)]

    async def _keeper(self, subject: str) -> Bus:
        return (await self._keepers(subject))[0]

    def reconnects(self, subject: str) -> int:
        level = fragment_level(subject) if self._addresses else None
        number = HOME if level is None else int(level) % (1 + len(self._addresses or ()))
        bus = self._inner if number == HOME else self._further.get(number)
        return 0 if bus is None else bus.reconnects(subject)

    # --- fragments --------------------------------------------------------------------------------------------------

    async def provision(self, stream_bytes_max: int, bulk: Sequence[str] = ()) -> None:
        await self._learn(bulk)
        for number in range(await self._brokers()):
            await (await self._bus(number)).provision(stream_bytes_max)

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        return await (await self._keeper(stem)).put_blob(stem, payload)

    async def get_blob(self, ref: BlobRef, size_bytes_max: int) -> bytes:
        return await (await self._keeper(ref.stem)).get_blob(ref, size_bytes_max)

    async def pieces(self, download: Download) -> AsyncGenerator[Portion]:
        bus = await self._keeper(download.ref.stem)
        async with contextlib.aclosing(bus.pieces(download)) as pieces:
            async for portion in pieces:
                yield portion

    async def fit(self, places: Places) -> int:
        buses = [await self._bus(number) for number in range(await self._brokers())]
        return sum(await all_of(bus.fit(places) for bus in buses))

    async def count_stored(self, subject_filter: str, *, more_than: int) -> StoredCounts:
        """Sum up over the brokers that keep some of it; bytes are of the fullest."""
        found = await all_of(
            bus.count_stored(subject_filter, more_than=more_than) for bus in await self._keepers(subject_filter)
        )
        fullest = max(found, key=lambda one: one.size_bytes / max(1, one.bytes_max))
        by_subject = {subject: count for one in found for subject, count in one.by_subject.items()}
        return StoredCounts(by_subject, fullest.size_bytes, fullest.bytes_max)

    async def purge(self, subject_filter: str, *, keep: int = 0) -> int:
        first, *others = await self._keepers(subject_filter)
        if not others:
            return await first.purge(subject_filter, keep=keep)
        return sum(await all_of(bus.purge(subject_filter, keep=keep) for bus in (first, *others)))

    async def put_record(
        self,
        subject: str,
        data: bytes,
        *,
        expected: int | None,
        info: Info | None = None,
        reconnects: int | None = None,
    ) -> int:
        bus = await self._keeper(subject)
        revision = await bus.put_record(subject, data, expected=expected, info=info, reconnects=reconnects)
        if subject == self._run_record:
            await self._look(data)
        return revision

    async def get_record(self, subject: str) -> Record | None:
        record = await (await self._keeper(subject)).get_record(subject)
        if subject == self._run_record and record is not None:
            await self._look(record.data)
        return record

    async def get_records(self, subject_filter: str) -> list[Record]:
        found = await all_of(bus.get_records(subject_filter) for bus in await self._keepers(subject_filter))
        return sorted((record for some in found for record in some), key=lambda record: record.subject)

    async def listen(self, subject_filter: str, *, len_max: int = 1024, late_s_max: float = 0.0) -> Subscription:
        """Listen at all brokers that may say something; one that is away is heard once it is back."""

        async def listen_at(number: int) -> Subscription | None:
            try:
                bus = await self._bus(number)
                return await bus.listen(subject_filter, len_max=len_max, late_s_max=late_s_max)
            except BrokerUnavailable as error:
                log.warning("broker.unheard", broker=number, subject=subject_filter, reason=str(error))
                return None

        async def feed(number: int, found: Subscription | None) -> None:
            while found is None:
                await asyncio.sleep(LISTEN_AGAIN_S)
                found = await listen_at(number)
            async for core_message in found:
                merged.push(core_message)

        numbers = await self._numbers(subject_filter)
        if numbers == [HOME]:
            return await self._inner.listen(subject_filter, len_max=len_max, late_s_max=late_s_max)
        first = await all_of(listen_at(number) for number in numbers)
        merged = BufferedSubscription(len_max, self.stats, self._hush)
        feeds = zip(numbers, first, strict=True)
        self._feeders[merged] = [asyncio.create_task(feed(number, found)) for number, found in feeds]
        return merged

    async def _hush(self, merged: BufferedSubscription) -> None:
        await cancel_all(self._feeders.pop(merged, []))

    async def close(self) -> None:
        for merged in list(self._feeders):
            await merged.close()
        await asyncio.gather(*(bus.close() for bus in (self._inner, *self._further.values())))
