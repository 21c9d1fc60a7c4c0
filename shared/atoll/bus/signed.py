"""A bus whose messages are signed by who writes them and checked by who reads them, whatever broker lies between.

A locked door does not keep the broker's own operator, or whoever copies its store, from writing what he likes. So each process
of a locked run signs its records, queued messages and core messages for their subjects, and believes only what somebody signed
who may write there (`atoll.keys.signatures`). The signature is a line behind the message's JSON.

* Chunks are not signed one by one: a signed message names them by a BLAKE3 (`atoll.wire.blobs`). Nor is the event log, on which
  nothing in Atoll acts, nor words with a region's keeper, which could withhold what they are about anyhow.
* Answers go to an inbox that only the broker knows beforehand, so they are signed as answers of the run.
* A signature covers the *founding*: the nonce of the run record, which alone is signed without one. So what a former run of
  this id has stored cannot be shown to the next. The bus learns it from the record when that passes, or asks.
* A message is believed only if the filter that asked for it covers the subject on which the broker says that it came.
* The broker drops what bears an id that it knows, whoever chose it. So ids are hashed with a secret of this bus, or a learner
  could have another's messages dropped.

A message that is not believed is not an error of the bus: the bus hands up in its place why, and `decode` refuses that like any
other unreadable message.
"""
# ruff: noqa: D102  (a method without a docstring is the one of `Bus`)

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from atoll.base.errors import BrokerUnavailable, PeerMisbehaved, RunReplaced, on_one_line
from atoll.base.retry import wait_at_most
from atoll.bus.interface import ForwardingBus
from atoll.wire.blobs import Upload
from atoll.wire.messages import RunRecord, decode, unproven
from atoll.wire.subjects import Subjects, matches

if TYPE_CHECKING:
    from atoll.bus.interface import (
        Bus,
        Consumer,
        CoreMessage,
        Delivery,
        Record,
        Signatures,
        StoredEvent,
        Subscription,
    )
    from atoll.wire.blobs import BlobRef
    from atoll.wire.limits import Buffer, Info

INBOX: Final = "_INBOX."
UNSIGNED: Final = ("ev", "tap", "rg")
ID_BYTES: Final = 16
LIVE_BYTES_MAX: Final = 1 << 17
"""No core message of ours is longer, but for what shards ask regions; a longer one is not worth a look at its signature."""
LOOK_S: Final = 1.0
"""For so long a live message, and those behind it, wait for the record that says whether to believe it."""
LOOK_AGAIN_S: Final = 2.0
"""So often a message that is not believed has the run record read again: the run may have been founded anew."""


@dataclass(slots=True)
class Founding:
    """The founding of a run that a process takes part in, as its buses know it; empty while they do not."""

    nonce: str = ""
    looked_s: float = 0.0


def is_signed(subject: str) -> bool:
    """Return whether messages on `subject` carry a signature: all of a run, but its events, its taps and words with keepers."""
    levels = subject.split(".", 3)
    return len(levels) > 2 and levels[0] == "atoll" and levels[2] not in UNSIGNED


def tapped_subject(subject: str) -> str:
    """Return the subject whose message a tap shows; empty if `subject` is no tap."""
    levels = subject.split(".", 3)
    return f"{levels[0]}.{levels[1]}.{levels[3]}" if len(levels) > 3 and levels[2] == "tap" else ""


class SignedBus(ForwardingBus):
    """Another bus whose messages carry signatures; see the module."""

    def __init__(self, inner: Bus, run: str, signatures: Signatures, founding: Founding | None = None) -> None:
        """Sign and check what goes through `inner`, which this bus closes with itself; buses of a process share `founding`."""
        super().__init__(inner)
        self.signatures = self._signing = signatures
        self._subjects = Subjects(run)
        self._founding = founding or Founding()
        self._ids = secrets.token_bytes(ID_BYTES)

    # --- what is written --------------------------------------------------------------------------------------------

    async def put_record(
        self,
        subject: str,
        data: bytes,
        *,
        expected: int | None,
        info: Info | None = None,
        reconnects: int | None = None,
    ) -> int:
        # A signature is the same each time, so a retry finds its own record.
        signed = await self._sign(subject, data)
        revision = await self._inner.put_record(subject, signed, expected=expected, info=info, reconnects=reconnects)
        if subject == self._subjects.run_record:
            self._learn(data)
        return revision

    async def publish(self, subject: str, data: bytes, *, msg_id: str, info: Info | None = None) -> None:
        own = hashlib.blake2b(msg_id.encode(), key=self._ids, digest_size=ID_BYTES).hexdigest()
        await self._inner.publish(subject, await self._sign(subject, data), msg_id=own, info=info)

    async def tell(self, subject: str, data: bytes) -> None:
        await self._inner.tell(subject, await self._sign(subject, data))

    async def ask(self, subject: str, data: bytes, *, timeout_s: float, answer_at: str = "") -> bytes | None:
        signed = await self._sign(subject, data)
        answer = await self._inner.ask(subject, signed, timeout_s=timeout_s, answer_at=answer_at)
        if answer is None or not is_signed(subject):
            return answer
        return await self._verify(answer_at or self._subjects.answer, answer, live=True)

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        upload = Upload.of(payload)
        upload.collision_free = True  # so that no other bytes meet the reference's digest
        return await self._inner.put_blob(stem, upload)

    # --- what is read -----------------------------------------------------------------------------------------------

    async def get_record(self, subject: str) -> Record | None:
        record = await self._inner.get_record(subject)
        if record is None:
            return None
        record = replace(record, data=await self.strip_signature(subject, record.subject, record.data))
        if subject == self._subjects.run_record:
            self._learn(record.data)
        return record

    async def get_records(self, subject_filter: str) -> list[Record]:
        return [
            replace(record, data=await self.strip_signature(subject_filter, record.subject, record.data))
            for record in await self._inner.get_records(subject_filter)
            if matches(subject_filter, record.subject)
        ]

    async def replay(self, subject_filter: str, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        found = await self._inner.replay(subject_filter, after=after, limit=limit)
        return [
            replace(entry, data=await self.strip_signature(subject_filter, entry.subject, entry.data))
            for entry in found
            if matches(subject_filter, entry.subject)
        ]

    async def consume(self, subject_filter: str, *, durable: str, takeover: bool = False) -> Consumer:
        consumer = await self._inner.consume(subject_filter, durable=durable, takeover=takeover)
        return _SignedConsumer(consumer, self, subject_filter)

    async def listen(self, subject_filter: str, *, len_max: int = 1024, late_s_max: float = 0.0) -> Subscription:
        heard = await self._inner.listen(subject_filter, len_max=len_max, late_s_max=late_s_max)
        return _SignedSubscription(heard, self, subject_filter)

    # --- belief -----------------------------------------------------------------------------------------------------

    async def strip_signature(self, subject_filter: str, subject: str, data: bytes, *, live: bool = False) -> bytes:
        """Return a message that was asked for by `subject_filter` without its signature, or why it is not believed."""
        if not matches(subject_filter, subject):
            return unproven(f"it was not asked for: {subject}")
        if shown := tapped_subject(subject):
            # Taps of old have no body.
            return await self._verify(shown, data, live=False) if data and is_signed(shown) else data
        if live and len(data) > LIVE_BYTES_MAX and not subject.startswith(self._subjects.premerge("")):
            return unproven(f"it is too long: {len(data)} bytes")
        return await self._verify(subject, data, live=live) if is_signed(subject) else data

    async def _verify(self, subject: str, data: bytes, *, live: bool) -> bytes:
        founding = await self._founding_of(subject, live=live)
        try:
            return self._signing.verify(subject, data, founding, live=live)
        except PeerMisbehaved as error:
            reason = f"{error.what}: {error.got}" if error.got else error.what
        if await self._is_refounded(founding, live=live):
            return await self._verify(subject, data, live=live)
        return unproven(reason)

    async def _sign(self, subject: str, data: bytes) -> bytes:
        if subject.startswith(INBOX):
            subject = self._subjects.answer
        return self._signing.sign(subject, data, await self._founding_of(subject)) if is_signed(subject) else data

    async def _founding_of(self, subject: str, *, live: bool = False) -> str:
        if subject == self._subjects.run_record:
            return ""
        if not self._founding.nonce:
            await self._look(live=live)
        return self._founding.nonce

    async def _is_refounded(self, founding: str, *, live: bool) -> bool:
        now_s = asyncio.get_running_loop().time()
        if founding and now_s - self._founding.looked_s > LOOK_AGAIN_S:
            self._founding.looked_s = now_s
            await self._look(live=live)
        return bool(founding) and self._founding.nonce != founding

    async def _look(self, *, live: bool) -> None:
        """Read the run record, if there is one; raise `BrokerUnavailable` if it cannot be read, for a `live` message soon."""
        record = self.get_record(self._subjects.run_record)
        try:
            await (wait_at_most(record, LOOK_S) if live else record)
        except RunReplaced:  # the broker has no streams of this run
            return
        except TimeoutError:
            raise BrokerUnavailable("the run record cannot be read", got=f"no answer within {LOOK_S:g} s") from None

    def _learn(self, record: bytes) -> None:
        """Take the founding from a run record; one that cannot be read is its reader's trouble."""
        with contextlib.suppress(PeerMisbehaved):
            self._founding.nonce = decode(RunRecord, record).nonce


@dataclass(frozen=True, slots=True)
class _SignedConsumer:
    consumer: Consumer
    bus: SignedBus
    wanted: str

    @property
    def turns(self) -> int:
        return self.consumer.turns

    async def next(self, timeout_s: float) -> Delivery | None:
        found = await self.consumer.next(timeout_s)
        return None if found is None else await self._believed(found)

    async def arrived(self, most: int) -> Sequence[Delivery]:
        return [await self._believed(one) for one in await self.consumer.arrived(most)]

    async def _believed(self, held: Delivery) -> Delivery:
        held.data = await self.bus.strip_signature(self.wanted, held.subject, held.data)
        return held

    async def drained(self) -> bool | None:
        return await self.consumer.drained()

    async def close(self) -> None:
        await self.consumer.close()


@dataclass(frozen=True, slots=True)
class _SignedSubscription:
    heard: Subscription
    bus: SignedBus
    wanted: str

    async def __aiter__(self) -> AsyncIterator[CoreMessage]:
        async for core_message in self.heard:
            yield await self._believed(core_message)

    async def next(self, timeout_s: float) -> CoreMessage | None:
        found = await self.heard.next(timeout_s)
        return None if found is None else await self._believed(found)

    async def _believed(self, heard: CoreMessage) -> CoreMessage:
        # Nobody has to believe what is only live: a record that cannot be read now must neither end nor hold up the feed.
        try:
            data = await self.bus.strip_signature(self.wanted, heard.subject, heard.data, live=True)
        except BrokerUnavailable as error:
            data = unproven(on_one_line(str(error)))
        return replace(heard, data=data)

    async def close(self) -> None:
        await self.heard.close()
