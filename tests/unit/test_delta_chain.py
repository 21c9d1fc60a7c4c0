"""Keyframes and deltas: who follows, who joins, who was away, and what of them lies on the broker."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from atoll.base.errors import BlobCorrupt, BlobGone, BrokerUnavailable, PeerMisbehaved
from atoll.base.large_arrays import Vector
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.membership import publish_origin
from atoll.codec import frame_bytes
from atoll.merge.global_update import CARRY
from atoll.merge.outer import MOMENTUM, derivable, make_outer
from atoll.run.delta_chain import DELTAS_BEHIND, StatedVersion, frames_of, read_values, read_version
from atoll.run.heads import GlobalFragment, fetch_frame, fetch_newest
from atoll.wire.messages import Head, encode
from atoll_synchronizer.store import ShardStore
from support.founded_run import one_fragment_run
from support.protocol_world import one_commit

SIZE = 2000
EVERY = 12
KEYFRAME_BYTES = frame_bytes(SIZE, "f32")


class ChainRun:
    """A founded run of one fragment, its owner, and somebody who reads."""

    store: ShardStore

    def __init__(self, codec: str, average_versions: int) -> None:
        self.run = one_fragment_run(SIZE, codec_down=codec, keyframe_versions=EVERY, average_versions=average_versions)
        self.subjects = self.run.subjects
        self.broker = MemoryBroker()
        self.bus, self.reader = (MemoryBus(self.run.run, self.broker) for _ in range(2))

    async def found(self) -> None:
        await self.bus.put_record(self.subjects.run_record, encode(self.run), expected=0)
        await publish_origin(self.bus, self.run, {0: drawn(0)})
        self.store = await self.owner(1)

    async def owner(self, epoch: int) -> ShardStore:
        protocol = self.run.protocol
        store = ShardStore(self.bus, self.run, 0, make_outer("nesterov", protocol.outer_lr, protocol.outer_momentum))
        await store.open(epoch)
        return store

    async def commit(self, versions: int = 1) -> None:
        """Make so many versions, and have nothing lie about that nobody needs."""
        for _ in range(versions):
            await self.store.commit(one_commit(self.head.version), drawn(self.head.version + 1))
            await self.store.garbage_collector.sweep()

    async def read(self, held: GlobalFragment | None = None) -> tuple[Vector, int]:
        before, frames = self.reader.stats.bytes_down, self.reader.stats.frame_bytes_down
        known = None if held is None else (held.version, held.values)
        values = await read_values(self.reader, self.run, self.head, known)
        assert self.reader.stats.frame_bytes_down - frames == self.reader.stats.bytes_down - before
        return values, self.reader.stats.bytes_down - before

    @property
    def head(self) -> Head:
        return self.store.holdings[0].head

    @property
    def values(self) -> Vector:
        return self.store.holdings[0].values


def drawn(seed: int) -> Vector:
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


@pytest.fixture(params=[("int4", 0), ("bf16", 0), ("int4", 4)], ids=["int4", "bf16", "averaged"])
async def founded(request: pytest.FixtureRequest) -> AsyncIterator[ChainRun]:
    """A run at version 0, also one that keeps an average, whose state does not follow from its values."""
    founded = ChainRun(*request.param)
    await founded.found()
    yield founded
    await founded.bus.close()


async def test_a_follower_reads_deltas_only_and_holds_the_shards_bits(founded: ChainRun) -> None:
    held = GlobalFragment(0, 0, drawn(0))
    for version in range(1, 2 * EVERY + 3):
        await founded.commit()
        values, read_bytes = await founded.read(held)
        assert values.tobytes() == founded.values.tobytes()
        assert read_bytes == founded.head.deltas[-1].size_bytes < KEYFRAME_BYTES / 1.9
        assert founded.head.key_version == version // EVERY * EVERY
        held = GlobalFragment(0, version, values)


async def test_who_joins_reads_the_keyframe_and_every_delta_after_it(founded: ChainRun) -> None:
    """At any version; and so does the shard's heir, who goes on with the same momentum, and the same carry if it is stored."""
    for version in range(1, EVERY + 3):
        await founded.commit()
        values, read_bytes = await founded.read()
        assert values.tobytes() == founded.values.tobytes()
        deltas = [delta.size_bytes for delta in founded.head.deltas if delta.version > founded.head.key_version]
        assert len(deltas) == version % EVERY
        assert read_bytes == KEYFRAME_BYTES + sum(deltas)
    heir = await founded.owner(2)
    ours, theirs = founded.store.holdings[0].state, heir.holdings[0].state
    assert list(ours)[:2] == list(theirs)[:2] == [MOMENTUM, CARRY]
    assert ours[MOMENTUM].tobytes() == theirs[MOMENTUM].tobytes()
    assert np.abs(ours[MOMENTUM]).max() > 0
    assert np.abs(ours[CARRY].astype(np.float32)).max() > 0
    if derivable(founded.run.protocol):
        assert not theirs[CARRY].astype(np.float32).any()
    else:
        assert ours[CARRY].tobytes() == theirs[CARRY].tobytes()
    commit = one_commit(founded.head.version)
    await heir.commit(commit, drawn(99))
    values = await read_values(founded.reader, founded.run, heir.holdings[0].head, (EVERY + 2, founded.values))
    assert values.tobytes() == heir.holdings[0].values.tobytes()


async def test_a_derived_state_is_stored_with_keyframes_alone(founded: ChainRun) -> None:
    """And goes when the next keyframe is there; version 0 has none."""
    states: set[str | None] = set()
    for version in range(1, 2 * EVERY + 2):
        await founded.commit()
        state = founded.head.state
        states.add(None if state is None else state.stem)
        there = await founded.bus.get_records(f"{founded.subjects.prefix}.st.c.>")
        assert {record.subject.rpartition(".")[0] for record in there} == ({state.stem} if state is not None else set())
        if derivable(founded.run.protocol):
            assert (state is None) == (version < EVERY)
    assert len(states) == (3 if derivable(founded.run.protocol) else 2 * EVERY + 1)


async def test_a_state_is_followed_from_a_version_that_is_held(founded: ChainRun) -> None:
    """To the same bits as from the keyframe, and from the keyframe if what is held turns out to be wrong."""
    await founded.commit(EVERY + 2)
    update = founded.store.update_of(0)
    held = await read_version(founded.reader, founded.run, founded.head, update)
    await founded.commit(2)
    wrong = StatedVersion(held.version, held.values + 1, {MOMENTUM: np.ones(SIZE, np.float32)})
    before = held.values.tobytes(), held.state[MOMENTUM].tobytes()
    for known in (None, held, wrong):
        read = await read_version(founded.reader, founded.run, founded.head, update, known)
        assert read.version == founded.head.version
        assert read.values.tobytes() == founded.values.tobytes()
        assert read.state[MOMENTUM].tobytes() == founded.store.holdings[0].state[MOMENTUM].tobytes()
    assert before == (held.values.tobytes(), held.state[MOMENTUM].tobytes())


async def test_a_keyframe_without_its_state_is_refused(founded: ChainRun) -> None:
    """Another momentum would follow from it, and nobody would notice; only version 0 has none."""
    update = founded.store.update_of(0)
    await founded.commit(EVERY - 1)
    assert founded.head.key_version == 0
    await read_version(founded.reader, founded.run, founded.head, update)
    await founded.commit(2)
    if derivable(founded.run.protocol):
        with pytest.raises(BlobCorrupt, match="without the outer state"):
            await read_version(founded.reader, founded.run, msgspec.structs.replace(founded.head, state=None), update)


@pytest.mark.parametrize("behind", [DELTAS_BEHIND, DELTAS_BEHIND + 1])
async def test_who_was_away_for_long_begins_at_the_keyframe(founded: ChainRun, behind: int) -> None:
    await founded.commit(EVERY - behind)
    held = GlobalFragment(0, founded.head.version, founded.values)
    await founded.commit(behind)
    values, read_bytes = await founded.read(held)
    assert values.tobytes() == founded.values.tobytes()
    assert (read_bytes == KEYFRAME_BYTES) == (behind > DELTAS_BEHIND)


async def test_who_holds_something_else_begins_again(founded: ChainRun) -> None:
    """A digest tells; the right values come from the keyframe. Who is ahead of the head begins there, too."""
    await founded.commit(3)
    wrong = founded.values.copy()
    wrong[7] += np.float32(1e-6)
    for held in (GlobalFragment(0, 2, wrong), GlobalFragment(0, 3, wrong), GlobalFragment(0, 4, wrong)):
        values, read_bytes = await founded.read(held)
        assert values.tobytes() == founded.values.tobytes()
        assert read_bytes > KEYFRAME_BYTES
    assert (await founded.read(GlobalFragment(0, 3, founded.values)))[1] == 0


async def test_a_head_that_went_back_is_not_followed(founded: ChainRun) -> None:
    """The run was lost and rebuilt from a checkpoint: its learners end, and adopt nothing older before they do."""
    await founded.commit(2)
    newest = await fetch_newest(founded.reader, founded.run, GlobalFragment(0, 2, drawn(0)), again=True)
    assert newest is not None
    assert newest.version == 2

    with pytest.raises(BlobGone, match="older than what we hold"):
        await fetch_newest(founded.reader, founded.run, GlobalFragment(0, 3, newest.values))


async def test_a_delta_that_is_not_compressed_is_the_same_delta(founded: ChainRun) -> None:
    """As long as its codec says, for readers who have more of the link than of the processor."""
    codec = founded.run.protocol.codec_down
    await founded.store.commit(one_commit(0), drawn(1), compress=False)
    assert founded.head.deltas[-1].size_bytes == frame_bytes(SIZE, codec)
    values, _ = await founded.read(GlobalFragment(0, 0, drawn(0)))
    assert values.tobytes() == founded.values.tobytes()


async def test_a_head_that_does_not_add_up_is_refused(founded: ChainRun) -> None:
    await founded.commit(4)
    head = founded.head
    false = msgspec.structs.replace(head.deltas[0], chunks=2)
    for wrong, error in (
        (msgspec.structs.replace(head, deltas=head.deltas[1:]), PeerMisbehaved),
        (msgspec.structs.replace(head, deltas=()), PeerMisbehaved),
        (msgspec.structs.replace(head, digest="0" * 32), BlobCorrupt),
        (msgspec.structs.replace(head, deltas=(false, *head.deltas[1:])), BlobCorrupt),
    ):
        with pytest.raises(error):
            await read_values(founded.reader, founded.run, wrong)


async def test_who_is_overtaken_while_reading_goes_on_with_the_newer_head(founded: ChainRun) -> None:
    """What one head superseded stays for one more commit, then it is gone; a reader asks for the head again."""
    await founded.commit(EVERY - 1)
    old = founded.head
    await founded.commit()
    assert (await read_values(founded.reader, founded.run, old)).size == SIZE
    await founded.commit()
    with pytest.raises(BlobGone):
        await read_values(founded.reader, founded.run, old)
    frame = await fetch_frame(founded.reader, founded.run, old)
    assert (frame.version, frame.values.tobytes()) == (EVERY + 1, founded.values.tobytes())


async def test_the_broker_keeps_what_heads_name_and_no_more(founded: ChainRun) -> None:
    """Over several keyframes, the frames on the broker are those of the head and those it superseded."""
    for _ in range(2 * EVERY + DELTAS_BEHIND):
        await founded.commit()
        there = await founded.bus.get_records(f"{founded.subjects.prefix}.gl.*.0.>")
        stems = {record.subject.rpartition(".")[0] for record in there}
        named = {ref.stem for ref in (*frames_of(founded.subjects, founded.head), *founded.head.superseded)}
        assert stems == named
        assert len(founded.head.deltas) < EVERY + DELTAS_BEHIND


@pytest.mark.parametrize("damage", ["purged", "changed"])
async def test_a_follower_without_a_delta_goes_on_with_the_keyframe(founded: ChainRun, damage: str) -> None:
    """What is gone or damaged and lies before the keyframe stands in nobody's way; after it, nobody can read."""
    await founded.commit(EVERY - 1)
    held = GlobalFragment(0, founded.head.version - 2, drawn(5))
    await founded.commit(3)
    for version in (EVERY - 1, EVERY + 1):
        spoilt = next(ref for ref in frames_of(founded.subjects, founded.head) if f".gl.d.0.{version}." in ref.stem)
        await founded.bus.purge(f"{spoilt.stem}.*")
        if damage == "changed":
            await founded.bus.put_blob(spoilt.stem, bytes(spoilt.size_bytes))
        if version < EVERY:
            assert (await founded.read(held))[0].tobytes() == founded.values.tobytes()
        else:
            with pytest.raises((BlobGone, BlobCorrupt)):
                await founded.read(held)
            with pytest.raises(BrokerUnavailable, match="cannot be read"):
                await founded.owner(2)


@pytest.mark.parametrize("since", [0, (1 << 52) + 1])
async def test_an_absurd_version_costs_nothing(founded: ChainRun, since: int) -> None:
    """A head of a few bytes must not make its reader count to a million of millions."""
    head = msgspec.structs.replace(founded.head, version=1 << 52, key_version=since)
    with pytest.raises(PeerMisbehaved, match="without its deltas"):
        await read_values(founded.bus, founded.run, head, (since, drawn(1)))
