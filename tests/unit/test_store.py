"""What a shard's store leaves behind: nothing that no head names, whoever died in the middle of what."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atoll.base.errors import BrokerUnavailable, RecordConflict, RunLost, RunWentBack, StorageFull
from atoll.base.large_arrays import Vector
from atoll.base.retry import all_of
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.membership import publish_origin
from atoll.merge.fold import l2_norm
from atoll.merge.global_update import GlobalUpdate, UpdatedFragment
from atoll.merge.outer import State, make_outer
from atoll.model.layout import Layout, TensorSpec, plan_layout
from atoll.protocol.events import PushKey
from atoll.protocol.ledger import FragmentLedger, Ledger
from atoll.protocol.settings import ProtocolSettings
from atoll.run.ledger import read_ledger
from atoll.wire.blobs import BlobRef, Upload
from atoll.wire.limits import Buffer
from atoll.wire.messages import RunRecord, encode
from atoll.wire.subjects import Subjects
from atoll_synchronizer import store as shard_store
from atoll_synchronizer.store import ShardStore
from support.links import unique_run
from support.protocol_world import one_commit

SIZE = 12
LAYOUT: Layout = plan_layout([TensorSpec("w", (SIZE,), "float32")], 1)
STEP = np.ones(SIZE, dtype=np.float32)


class StoreDesk:
    """A founded run of one fragment on an in-memory bus, and the stores of its successive owners."""

    def __init__(self) -> None:
        self.name = unique_run()
        self.subjects = Subjects(self.name)
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.name, self.broker)
        protocol = ProtocolSettings(fragments=1, interval_steps=4, shards=1, codec_down="f32")
        self.run = RunRecord(
            run=self.name, founder="a", nonce="0" * 16, founded_at_s=0.0, layout=LAYOUT, protocol=protocol
        )

    async def owner(self, epoch: int, versions: dict[int, int] | None = None) -> ShardStore:
        with contextlib.suppress(RecordConflict):
            await self.bus.put_record(self.subjects.run_record, encode(self.run), expected=0)
        store = ShardStore(self.bus, self.run, 0, make_outer("nesterov", 1.0, 0.9), versions)
        await store.open(epoch)
        return store

    async def chunks(self) -> set[str]:
        """Return the stems of all frames, states and books that the broker holds."""
        prefix = self.subjects.prefix
        kept = [await self.bus.get_records(f"{prefix}.{kind}.>") for kind in ("gl.c", "gl.d", "st.c", "st.b")]
        return {record.subject.rpartition(".")[0] for records in kept for record in records}

    @staticmethod
    def named(store: ShardStore) -> set[str]:
        head = store.holdings[0].head
        return {blob.stem for blob in store._protected(head)}


@pytest.fixture
async def desk() -> AsyncIterator[StoreDesk]:
    desk = StoreDesk()
    await publish_origin(desk.bus, desk.run, {0: np.zeros(SIZE, dtype=np.float32)})
    yield desk
    await desk.bus.close()


async def test_an_owner_keeps_what_its_head_names_and_no_more(desk: StoreDesk) -> None:
    """Whatever it commits and keeps: frame, previous frame, state and books, and for a while what the last commit left."""
    store = await desk.owner(1)
    before: set[str] = set()
    for version in range(4):
        await store.commit(one_commit(version), STEP)
        await store.keep(0, FragmentLedger(run_tokens=version).freeze(Ledger(run_tokens=version)))

        assert before <= await desk.chunks() <= desk.named(store) | before
        before = {stem for stem in desk.named(store) if ".st.b." not in stem}
    await store.garbage_collector.sweep()
    assert await desk.chunks() == desk.named(store)


@pytest.mark.parametrize("gone", [False, True])
async def test_a_store_that_went_back_is_not_served_again_by_a_process_that_knows_better(
    desk: StoreDesk, *, gone: bool
) -> None:
    """Somebody restored an older copy of the broker's store: learners would go on from another model than theirs."""
    versions: dict[int, int] = {}
    store = await desk.owner(1, versions)
    old = await desk.bus.get_record(desk.subjects.head(0))
    assert old is not None
    for version in range(3):
        await store.commit(one_commit(version), STEP)
    if gone:
        await desk.bus.purge(desk.subjects.head(0))
    else:
        for stream in desk.broker.streams.values():
            if newest := stream.last(desk.subjects.head(0)):
                stream.kept[newest.sequence] = replace(newest, data=old.data)

    with pytest.raises(RunWentBack, match="version 3 or later"):
        await desk.owner(2, versions)
    if not gone:
        with pytest.raises(RunWentBack, match="at version 0"):
            await desk.owner(3, versions)


async def test_a_ledger_that_is_not_there_is_told_from_one_that_changes(desk: StoreDesk) -> None:
    """A damaged store has lost a blob that a head names: to ask again would never help."""
    store = await desk.owner(1)
    await store.commit(one_commit(0), STEP)
    named = store.holdings[0].head.fragment_ledger
    assert named is not None
    assert await read_ledger(desk.bus, desk.run)

    await desk.bus.purge(f"{named.stem}.*")
    with pytest.raises(RunLost, match="lost the ledger"):
        await read_ledger(desk.bus, desk.run)


async def test_what_a_dead_owner_left_is_swept_by_its_heir(desk: StoreDesk) -> None:
    """Chunks of a commit that never became visible, and of versions that nobody purged, are gone after two commits."""
    first = await desk.owner(1)
    for version in range(3):
        await first.commit(one_commit(version), STEP)
    lost = one_commit(3)
    for stem in (
        desk.subjects.global_stem(0, 4, "1.lost"),
        desk.subjects.state_stem(0, 4, "1.lost"),
        desk.subjects.ledger_stem(0, "1.lost"),
        desk.subjects.global_stem(0, 1, "1.unpurged"),
    ):
        await desk.bus.put_blob(stem, lost.fragment_ledger)
    heir = await desk.owner(2)

    for version in range(3, 5):
        assert len(await desk.chunks() - desk.named(heir)) >= 4
        await heir.commit(one_commit(version), STEP)

    await heir.garbage_collector.sweep()
    assert await desk.chunks() == desk.named(heir)
    third = await desk.owner(3)
    assert third.holdings[0].head.version == 5
    np.testing.assert_array_equal(third.holdings[0].values, heir.holdings[0].values)


async def test_what_a_machine_decides_is_not_durable_yet(desk: StoreDesk) -> None:
    store = await desk.owner(1)
    await store.commit(one_commit(0), STEP)
    ours = store.copied_ledgers()
    ours[0].merge(one_commit(1).shares[0])

    assert ours[0].knows(PushKey("a", 1, 0, 2))
    assert not store.fragment_ledger[0].knows(PushKey("a", 1, 0, 2))
    assert sum(account.settled for account in store.ledger(Ledger()).accounts.values()) == 8


async def test_a_deposed_owner_removes_what_it_wrote_in_vain(desk: StoreDesk) -> None:
    first = await desk.owner(1)
    await first.commit(one_commit(0), STEP)
    heir = await desk.owner(2)

    with pytest.raises(RecordConflict):
        await first.commit(one_commit(1), STEP)

    assert await desk.chunks() == desk.named(heir)


async def test_a_former_owner_that_wakes_up_late_writes_nothing(desk: StoreDesk) -> None:
    """It won its lease and was frozen before it fenced: the fragment has a later owner by now, and stays that one's."""
    first = await desk.owner(1)
    await first.commit(one_commit(0), STEP)
    heir = await desk.owner(3)
    before = await desk.bus.get_record(desk.subjects.head(0))

    with pytest.raises(RecordConflict, match="later owner"):
        await desk.owner(2)

    after = await desk.bus.get_record(desk.subjects.head(0))
    assert after is not None
    assert after == before
    await heir.commit(one_commit(1), STEP)
    assert heir.holdings[0].head.tokens_merged == 16


async def test_a_head_knows_the_tokens_of_all_commits_whoever_made_them(desk: StoreDesk) -> None:
    for epoch, version in enumerate(range(6), start=1):
        store = await desk.owner(epoch)
        await store.commit(one_commit(version), STEP)
        head = store.holdings[0].head
        settled = store.fragment_ledger[0].settled.values()

        assert head.tokens_merged == 8 * (version + 1)
        assert head.tokens_merged == sum(account.merged + account.merged_late for account in settled)


class Cramped(MemoryBus):
    """A bus whose broker has no room for an outer state, so many times."""

    refusals = 2
    stored: list[str]

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        """Refuse some, note the others once all of them is stored that was not before."""
        if ".st.c." in stem and self.refusals:
            self.refusals -= 1
            raise StorageFull("no room")
        incomplete = bool(Upload.of(payload).missing())
        ref = await super().put_blob(stem, payload)
        self.stored += [stem] if incomplete else []
        return ref


async def test_a_commit_that_failed_goes_on_where_it_was(desk: StoreDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer step is taken once, and what was stored is not stored again; what comes out is what would have."""
    other = StoreDesk()
    await publish_origin(other.bus, other.run, {0: np.zeros(SIZE, dtype=np.float32)})
    smooth = await other.owner(1)
    await smooth.commit(one_commit(0), STEP)
    desk.bus = bus = Cramped(desk.name, desk.bus._broker)
    bus.stored = []
    store = await desk.owner(1)
    steps, step = list[Vector](), GlobalUpdate.step

    def counted(self: GlobalUpdate, values: Vector, pseudo_gradient: Vector, state: State) -> UpdatedFragment:
        steps.append(values)
        return step(self, values, pseudo_gradient, state)

    monkeypatch.setattr(GlobalUpdate, "step", counted)
    for _ in range(2):
        with pytest.raises(StorageFull):
            await store.commit(one_commit(0), STEP)
    await store.commit(one_commit(0), STEP)
    assert len(steps) == 1, "the outer step is taken once"
    assert len(bus.stored) == len(set(bus.stored)) == 3
    assert store.holdings[0].values.tobytes() == smooth.holdings[0].values.tobytes()
    await store.garbage_collector.sweep()
    assert await desk.chunks() == desk.named(store)


async def test_what_a_broker_loses_while_values_are_measured_is_stored_again(
    desk: StoreDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, bus, norm = await desk.owner(1), desk.bus, l2_norm
    stored, ended = asyncio.Event(), threading.Event()

    def slow(values: Vector) -> float:
        ended.wait(240.0)
        return norm(values)

    async def all_stored(uploads: Iterable[Coroutine[Any, Any, BlobRef]]) -> list[BlobRef]:
        refs = await all_of(uploads)
        stored.set()
        return refs

    async def cut() -> None:
        await stored.wait()
        await bus.purge(f"{desk.subjects.prefix}.gl.c.0.1.>")
        bus.stats.reconnects += 1
        ended.set()

    monkeypatch.setattr(shard_store, "l2_norm", slow)
    monkeypatch.setattr(shard_store, "off_loop", lambda _, work, *given: asyncio.to_thread(work, *given))
    monkeypatch.setattr(shard_store, "all_of", all_stored)
    await asyncio.gather(store.commit(one_commit(0), STEP), cut())
    heir = await desk.owner(2)
    assert heir.holdings[0].values.tobytes() == store.holdings[0].values.tobytes()


async def test_what_a_broker_may_have_lost_is_stored_again(desk: StoreDesk) -> None:
    """A power cut between two attempts takes acknowledged chunks along; a head must not name what is not there."""
    desk.bus = bus = Cramped(desk.name, desk.bus._broker)
    bus.stored, bus.refusals = [], 1
    store = await desk.owner(1)
    with pytest.raises(StorageFull):
        await store.commit(one_commit(0), STEP)
    await bus.purge(f"{desk.subjects.prefix}.gl.c.0.1.>")
    bus.stats.reconnects += 1
    await store.commit(one_commit(0), STEP)
    heir = await desk.owner(2)
    assert heir.holdings[0].values.tobytes() == store.holdings[0].values.tobytes()


class PowerCutBus(MemoryBus):
    """A bus whose broker loses power once, between a blob that it acknowledged and the head that names it."""

    def __init__(self, run: str, broker: MemoryBroker) -> None:
        """Join `broker`; `cut` says which write of a record the power cut precedes."""
        super().__init__(run, broker)
        self.cut = False
        self.lost = ""

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        ref = await super().put_blob(stem, payload)
        self.lost = stem
        return ref

    async def put_record(self, subject: str, data: bytes, **how: Any) -> int:  # noqa: ANN401  (as the bus takes it)
        if self.cut:
            self.cut = False
            await self.purge(f"{self.lost}.*")
            self.stats.reconnects += 1
        if how.pop("reconnects", None) not in {None, self.stats.reconnects}:
            raise BrokerUnavailable("the connection was lost before the record was written")
        return await super().put_record(subject, data, **how)


@pytest.mark.parametrize("kind", ["commit", "keep"])
async def test_a_head_never_names_what_a_power_cut_took_before_it_was_sent(kind: str) -> None:
    """The attempt fails and is made again, with everything stored anew: a schedule of faults found both ways open."""
    desk = StoreDesk()
    desk.bus = bus = PowerCutBus(desk.name, MemoryBroker())
    await publish_origin(desk.bus, desk.run, {0: np.zeros(SIZE, dtype=np.float32)})
    store = await desk.owner(1)

    async def attempt() -> None:
        if kind == "commit":
            await store.commit(one_commit(0), STEP)
        else:
            await store.keep(0, one_commit(0).fragment_ledger)

    bus.cut = True
    with pytest.raises(BrokerUnavailable):
        await attempt()
    assert StoreDesk.named(store) <= await desk.chunks()
    await attempt()

    assert StoreDesk.named(store) <= await desk.chunks()
    assert store.holdings[0].head.fragment_ledger is not None
    await bus.close()


class ForgetfulStoreBus(MemoryBus):
    """A bus that loses the answer to a founder's head until a shard has fenced that head."""

    async def put_record(self, subject: str, data: bytes, **how: Any) -> int:  # noqa: ANN401  (as the bus takes it)
        """Write, let the shard fence, and find something else than what was written."""
        revision = await super().put_record(subject, data, **how)
        if ".gl.head." in subject and how["expected"] == 0:
            await super().put_record(subject, data.replace(b'"epoch":0', b'"epoch":1'), expected=revision)
            raise RecordConflict("someone else wrote the record first")
        return revision


async def test_a_founder_never_removes_a_keyframe_that_a_fenced_head_names() -> None:
    desk = StoreDesk()
    desk.bus = ForgetfulStoreBus(desk.name, MemoryBroker())

    await publish_origin(desk.bus, desk.run, {0: np.zeros(SIZE, dtype=np.float32)})
    store = await desk.owner(2)

    assert StoreDesk.named(store) <= await desk.chunks()
    await desk.bus.close()


async def test_an_heir_removes_a_founder_s_keyframe_that_a_deposed_owner_was_to_remove(desk: StoreDesk) -> None:
    """It carries no epoch: the owner whose commit superseded it was deposed while readers might still have wanted it."""
    former = await desk.owner(1)
    founded = former.holdings[0].head.keyframe.stem
    await former.commit(one_commit(0), STEP)
    await former.commit(one_commit(1), STEP)
    assert founded in await desk.chunks()

    heir = await desk.owner(2)
    await heir.commit(one_commit(2), STEP)

    assert founded not in await desk.chunks()
    assert StoreDesk.named(heir) <= await desk.chunks()
