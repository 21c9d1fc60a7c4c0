"""A shard's state and how it becomes durable: global fragments, outer-optimizer state, ledger.

The commit of version v + 1 of a fragment is four writes in this order, and a crash between any two is harmless:

    1. chunks of the new global frame          (nobody sees them yet)
    2. chunks of outer state and ledger        (nobody sees them yet)
    3. the head, by compare-and-set            <- the commit point: it names both
    4. purge of the frame before the previous  (housekeeping; orphans age out)

The previous frame stays until the next commit, because a reader may be in the middle of it. A refused compare-and-set
means that somebody else owns the fragment: `commit` raises `RecordConflict` and this shard must stand down.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from atoll.bus.interface import BlobRef, Bus
from atoll.bus.subjects import Subjects
from atoll.codecs import decode_frame, encode_frame, frame_bytes_max, pack_arrays, unpack_arrays
from atoll.errors import RecordConflict
from atoll.outer import OuterOptimizer
from atoll.protocol.events import Commit, PushKey
from atoll.protocol.ledger import Ledger
from atoll.wire.messages import Head, Included, Lease, RunRecord, decode, encode

Vector = npt.NDArray[np.float32]

STATE_BYTES_MAX = 8 << 30


@dataclass(slots=True)
class Holding:
    """One fragment as its shard holds it: values, outer state, and the head (with revision) that made them visible."""

    head: Head
    revision: int
    values: Vector
    state: dict[str, npt.NDArray[np.generic]]
    before: BlobRef | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """What one commit wrote: the new head and the bytes of its frame and state."""

    head: Head
    frame_bytes: int
    state_bytes: int


class Store:
    """Loads and commits the fragments of one shard."""

    def __init__(self, bus: Bus, run: RunRecord, shard: int, outer: OuterOptimizer) -> None:
        """Hold nothing yet; `open` loads."""
        self._bus = bus
        self._run = run
        self._shard = shard
        self._outer = outer
        self._subjects = Subjects(run.run)
        self.epoch = 0
        self.holdings: dict[int, Holding] = {}
        self.ledger = Ledger()

    async def open(self) -> None:
        """Begin a tenure (epoch + 1), then load every fragment's head, frame and state, and the newest ledger."""
        self.ledger = await self._take_lease()
        for fragment in self._run.protocol.fragments_of(self._shard):
            self.holdings[fragment] = await self._load(fragment)

    def settled(self) -> dict[int, list[PushKey]]:
        """Return what the heads already list, so that a redelivery is acknowledged and not merged again."""
        return {
            p: [PushKey(share.learner, share.incarnation, p, share.push) for share in holding.head.included]
            for p, holding in self.holdings.items()
        }

    async def commit(self, command: Commit, displacement: Vector, ledger: bytes) -> Written:
        """Take the outer step and make `command.base_version + 1` visible; `ledger` is its JSON at the decision.

        Raises:
            RecordConflict: somebody else wrote this fragment's head.
        """
        held = self.holdings[command.fragment]
        version = command.base_version + 1
        nonce = secrets.token_hex(4)
        values, state = await asyncio.to_thread(self._outer.update, held.values, displacement, held.state)
        frame = await asyncio.to_thread(encode_frame, values, "f32")
        books: dict[str, npt.NDArray[np.generic]] = {"ledger": np.frombuffer(ledger, dtype=np.uint8)}
        packed = await asyncio.to_thread(pack_arrays, {**books, **{f"outer.{k}": v for k, v in state.items()}})
        blob, state_blob = await asyncio.gather(
            self._bus.put_blob(self._subjects.global_stem(command.fragment, version, nonce), frame),
            self._bus.put_blob(self._subjects.state_stem(command.fragment, version, nonce), packed),
        )
        head = self._head(command, held, nonce, blob, state_blob)
        subject = self._subjects.head(command.fragment)
        revision = await self._bus.put_record(
            subject, encode(head), expected=held.revision, info=_head_info(head, command)
        )
        superseded = [held.before, held.head.state]
        self.holdings[command.fragment] = Holding(head, revision, values, state, before=held.head.blob)
        await asyncio.gather(*(self._bus.purge(f"{old.stem}.*") for old in superseded if old is not None))
        return Written(head, len(frame), len(packed))

    async def close(self, ledger: Ledger) -> None:
        """End the tenure: leave the final ledger in the lease record, for whoever resumes the run."""
        ledger.sequence += 1
        record = await self._bus.get_record(self._subjects.lease(self._shard))
        if record is None:
            return
        lease = decode(Lease, record.data)
        if lease.epoch == self.epoch:
            closed = msgspec.structs.replace(lease, ledger=ledger)
            await self._bus.put_record(self._subjects.lease(self._shard), encode(closed), expected=record.revision)

    async def _take_lease(self) -> Ledger:
        subject = self._subjects.lease(self._shard)
        while True:
            record = await self._bus.get_record(subject)
            former = None if record is None else decode(Lease, record.data)
            lease = Lease(
                shard=self._shard,
                epoch=1 if former is None else former.epoch + 1,
                nonce=secrets.token_hex(4),
                host=socket.gethostname(),
                pid=os.getpid(),
            )
            try:
                await self._bus.put_record(subject, encode(lease), expected=0 if record is None else record.revision)
            except RecordConflict:
                continue
            self.epoch = lease.epoch
            return former.ledger if former is not None and former.ledger is not None else Ledger()

    async def _load(self, fragment: int) -> Holding:
        record = await self._bus.get_record(self._subjects.head(fragment))
        if record is None:
            raise RecordConflict(f"fragment {fragment} lost its head", todo="was the broker's store deleted?")
        head = decode(Head, record.data)
        elements = self._run.layout.fragment_sizes()[fragment]
        frame = await self._bus.get_blob(head.blob, frame_bytes_max(elements))
        values = await asyncio.to_thread(decode_frame, frame, elements_expected=elements)
        if head.state is None:
            return Holding(head, record.revision, values, self._outer.init(values), before=head.previous)
        packed = await self._bus.get_blob(head.state, STATE_BYTES_MAX)
        arrays = await asyncio.to_thread(unpack_arrays, packed, STATE_BYTES_MAX)
        ledger = msgspec.json.decode(arrays.pop("ledger").tobytes(), type=Ledger)
        if ledger.sequence > self.ledger.sequence:
            self.ledger = ledger
        state = {name.removeprefix("outer."): array for name, array in arrays.items()}
        return Holding(head, record.revision, values, state, before=head.previous)

    def _head(self, command: Commit, held: Holding, nonce: str, blob: BlobRef, state: BlobRef) -> Head:
        return Head(
            fragment=command.fragment,
            version=command.base_version + 1,
            epoch=self.epoch,
            nonce=nonce,
            layout=self._run.layout.fingerprint,
            blob=blob,
            state=state,
            included=tuple(
                Included(
                    share.key.learner,
                    share.key.incarnation,
                    share.key.push,
                    share.base_version,
                    share.tokens,
                    share.steps,
                    share.weight,
                    share.age,
                )
                for share in command.shares
            ),
            tokens_merged=held.head.tokens_merged + sum(share.tokens for share in command.shares),
            previous=held.head.blob,
        )


def _head_info(head: Head, command: Commit) -> dict[str, str | int | float | bool]:
    """Return what taps show of a head."""
    return {
        "fragment": head.fragment,
        "version": head.version,
        "contributors": len(head.included),
        "learners": ",".join(share.key.learner for share in command.shares),
        "tokens": sum(share.tokens for share in command.shares),
        "grace_s": round(command.grace_s, 4),
        "end": command.end,
        "bytes": head.blob.size_bytes,
        "epoch": head.epoch,
    }
