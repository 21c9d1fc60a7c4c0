"""A small run whose shards are moved by hand: stores on an in-memory broker, one archivist per shard, a clock to turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.checkpoints import Manifest
from atoll.archive.object_store import ArchiveStore, Name
from atoll.archive.rebuild import RebuildOutcome, rebuild
from atoll.base.clock import SystemClock
from atoll.base.errors import ArchiveUnavailable
from atoll.bus.interface import Signatures
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.membership import claim, publish_origin
from atoll.codec import pack_arrays
from atoll.merge.outer import make_outer
from atoll.merge.round_merge import update_of
from atoll.model.layout import TensorSpec, plan_layout
from atoll.protocol.data import DataGrant, DataLedger
from atoll.protocol.events import Commit, PushKey, Share
from atoll.protocol.ledger import FragmentLedger, Ledger, SettledPushes
from atoll.protocol.settings import ProtocolSettings
from atoll.run.delta_chain import read_version
from atoll.run.heads import read_heads
from atoll.settings.sections import ArchiveSettings
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import Head, Lease, RunRecord, encode
from atoll.wire.subjects import Subjects
from atoll_synchronizer.archivist import Archivist
from atoll_synchronizer.store import ShardStore
from support.links import unique_run

FRAGMENTS, SHARDS, EVERY_S = 4, 2, 10
TOKENS = 100


class TurnedClock(SystemClock):
    """The wall clock is turned by hand."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def wall(self) -> float:
        return self.now_s


@dataclass
class BrokenObjectStore:
    """Another archive store that fails at the `fails_at`-th act from now on; a write may leave half an object."""

    inner: ArchiveStore
    fails_at: int = 1 << 30
    acts: int = 0
    lists_fail: bool = False
    where: str = "broken"

    def _act(self) -> None:
        self.acts += 1
        if self.acts >= self.fails_at:
            raise ArchiveUnavailable("the archive cannot be used", got="No space left on device")

    def put(self, path: str, data: bytes) -> None:
        """Write, unless it is time to fail."""
        self._act()
        self.inner.put(path, data)

    def get(self, path: str, size_bytes_max: int) -> bytes:
        return self.inner.get(path, size_bytes_max)

    def names(self, prefix: str) -> list[Name]:
        """List, unless the archive is away."""
        if self.lists_fail:
            raise ArchiveUnavailable("the archive cannot be used", got="no route to host")
        return self.inner.names(prefix)

    def remove(self, paths: list[str]) -> None:
        """Remove one by one, unless it is time to fail."""
        for path in paths:
            self._act()
            self.inner.remove([path])


def one_fragment_run(size: int, **protocol: Any) -> RunRecord:  # noqa: ANN401  (its settings)
    """Return the record of a run of its own of one fragment of so many numbers, and one shard."""
    return RunRecord(
        run=unique_run(),
        founder="a",
        nonce="0" * 16,
        founded_at_s=0.0,
        layout=plan_layout([TensorSpec("w", (size,), "float32")], 1),
        protocol=ProtocolSettings(fragments=1, shards=1, interval_steps=4, **protocol).check(),
    )


def run_record(run: str) -> RunRecord:
    """Return the record of a run of two shards."""
    layout = plan_layout([TensorSpec("a", (40, 3), "float32"), TensorSpec("b", (9,), "float32")], FRAGMENTS)
    protocol = msgspec.convert(
        {"fragments": FRAGMENTS, "shards": SHARDS, "outer_momentum": 0.9}, ProtocolSettings
    ).check()
    return RunRecord(
        run=run, founder="a", nonce="first", founded_at_s=1_000_000.0, layout=layout, protocol=protocol, data="d"
    )


@dataclass
class FoundedRun:
    """One founded run. `stores` and `archivists` are by shard; `told` is what learners reported.

    With `signatures` its archive is that of a locked run.
    """

    record: RunRecord
    object_store: ArchiveStore
    clock: TurnedClock
    keep: int = 2
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    stores: dict[int, ShardStore] = field(default_factory=dict)
    archivists: dict[int, Archivist] = field(default_factory=dict)
    told: Ledger = field(default_factory=Ledger)
    pushes: int = 0
    signatures: Signatures | None = None

    @property
    def run(self) -> str:
        return self.record.run

    @property
    def bus(self) -> MemoryBus:
        return MemoryBus(self.run, self.broker)

    @property
    def checkpoint_store(self) -> CheckpointStore:
        return CheckpointStore(self.object_store, self.run, self.signatures)

    async def found(self) -> None:
        """Write the run record, version 0, a member and some data leases; make every shard's first tenure."""
        subjects = Subjects(self.run)
        await self.bus.put_record(subjects.run_record, encode(self.record), expected=0)
        rng = np.random.default_rng(7)
        sizes = self.record.layout.fragment_sizes()
        values = {p: rng.standard_normal(size, dtype=np.float32) for p, size in enumerate(sizes)}
        await publish_origin(self.bus, self.record, values)
        await claim(self.bus, subjects, "a", self.clock)
        leased = DataLedger(blocks=64, next_position=16, grants=(DataGrant(0, 0, 16, "a", 1),))
        await self.bus.put_record(subjects.data, encode(leased), expected=0)
        for shard in range(SHARDS):
            await self.serve(shard, epoch=1)

    async def serve(self, shard: int, epoch: int) -> None:
        protocol = self.record.protocol
        outer = make_outer(protocol.outer, protocol.outer_lr, protocol.outer_momentum, protocol.outer)
        self.stores[shard] = ShardStore(self.bus, self.record, shard, outer)
        await self.stores[shard].open(epoch)
        self.archivists[shard] = self.archivist(shard)

    def archivist(self, shard: int, object_store: ArchiveStore | None = None) -> Archivist:
        """Return one more archivist of a shard."""
        checkpoint_store = CheckpointStore(object_store or self.object_store, self.run, self.signatures)
        settings = ArchiveSettings(url="here", every_s=EVERY_S, keep=self.keep)
        return Archivist(checkpoint_store, self.record, shard, settings, self.clock)

    async def commit(self, fragment: int) -> None:
        """Commit one contribution of learner a, incarnation 1, and let it report."""
        store = self.stores[self.record.protocol.shard_of(fragment)]
        self.pushes += 1
        version = store.holdings[fragment].head.version
        share = Share(
            key=PushKey("a", 1, fragment, version + 1),
            base_version=version,
            tokens=TOKENS,
            steps=1,
            weight=1.0,
            age=0,
            credit=TOKENS,
        )
        fragment_ledger = store.fragment_ledger.get(fragment, FragmentLedger(settled={"a/1": SettledPushes()}))
        fragment_ledger.merge(share)
        self.told.count(fragment_ledger.tokens_counted)
        self.told.take_report("a", 1, TOKENS * self.pushes, TOKENS * self.pushes, 0, 0)
        command = Commit(
            fragment=fragment,
            base_version=version,
            shares=(share,),
            called_s=0.0,
            quorum_s=0.0,
            grace_s=0.0,
            end="all",
            live=1,
            fragment_ledger=fragment_ledger.freeze(self.told),
        )
        size = self.record.layout.fragment_sizes()[fragment]
        await store.commit(command, np.random.default_rng(self.pushes).standard_normal(size, dtype=np.float32))

    async def round(self) -> None:
        for fragment in range(FRAGMENTS):
            await self.commit(fragment)

    async def checkpoint(self, *shards: int, final: bool = False) -> list[bool]:
        """Let shards (all by default) make the checkpoint that is due."""
        return [
            await self.archivists[shard].checkpoint(self.bus, self.stores[shard], lambda: self.told, final=final)
            for shard in shards or range(SHARDS)
        ]

    def later(self, checkpoints: int = 1) -> None:
        """Turn the clock to a later checkpoint."""
        self.clock.now_s += checkpoints * EVERY_S

    async def rebuild(self, broker: MemoryBroker | None = None, first: int = 0) -> tuple[RebuildOutcome, MemoryBroker]:
        """Rebuild the run, on an empty broker unless one is given."""
        broker = broker or MemoryBroker()
        outcome = await rebuild(MemoryBus(self.run, broker), self.checkpoint_store, self.clock, first=first)
        return outcome, broker

    async def contents(self, broker: MemoryBroker | None = None) -> dict[int, tuple[Head, list[bytes]]]:
        """Return every head, less the names of blobs and how its values are cut, and the bytes of values, state and ledger."""
        bus = MemoryBus(self.run, broker or self.broker)
        protocol = self.record.protocol
        outer = make_outer(protocol.outer, protocol.outer_lr, protocol.outer_momentum, protocol.outer)
        found = {}
        for fragment, head in (await read_heads(bus, self.record)).items():
            update = update_of(self.record.protocol, fragment, outer)
            read = await read_version(bus, self.record, head, update)
            ledger = head.fragment_ledger
            kept = b"" if ledger is None else await bus.get_blob(ledger, 1 << 20)
            plain = msgspec.structs.replace(
                head,
                keyframe=BlobRef("", 0, 0, ""),
                key_version=0,
                deltas=(),
                superseded=(),
                state=None,
                fragment_ledger=None if ledger is None else msgspec.structs.replace(ledger, stem=""),
            )
            found[fragment] = plain, [read.values.tobytes(), pack_arrays(read.state), kept]
        return found

    def newest(self) -> list[Manifest]:
        """Return the manifests of the newest whole checkpoint."""
        return self.checkpoint_store.newest()[1]


async def say_lease(run: FoundedRun, tokens: int, shard: int = 0, *, closed: bool = False) -> None:
    """Write the lease of a shard of a run that is at so many tokens."""
    ledger = Ledger(run_tokens=tokens)
    subject = run.record.subjects.lease(shard)
    former = await run.bus.get_record(subject)
    told = Lease(
        shard=shard, epoch=1, nonce="n", host="h", pid=1, run_nonce=run.record.nonce, ledger=ledger, closed=closed
    )
    await run.bus.put_record(subject, encode(told), expected=0 if former is None else former.revision)
