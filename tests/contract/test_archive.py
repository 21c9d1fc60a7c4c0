"""Checkpoints and rebuilding, the same in a folder, in an object store in memory, and on an S3 server."""

from __future__ import annotations

import asyncio
import logging
import os
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import obstore
import pytest
from obstore.store import MemoryStore

from atoll.archive import object_store as places
from atoll.archive.object_store import ArchiveStore, FolderArchive, S3Archive, open_archive, resolved
from atoll.base.errors import ArchiveUnavailable, CheckpointError, RecordConflict, SettingsError
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.data_leases import DataLeases
from atoll.client.membership import claim, dismissal
from atoll.codec import pack_arrays
from atoll.protocol.data import DataGrant, DataLedger
from atoll.run.heads import read_heads
from atoll.run.record import read_run
from atoll.wire.messages import Lease, decode, encode
from atoll.wire.subjects import Subjects
from atoll_synchronizer.archivist import make_archivist
from support.founded_run import (
    EVERY_S,
    FRAGMENTS,
    SHARDS,
    TOKENS,
    BrokenObjectStore,
    FoundedRun,
    TurnedClock,
    run_record,
)

MakeStoreOf = Callable[[str], ArchiveStore]


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """An S3 server in this process, and a bucket in it; the library finds both by its usual variables."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    from moto.server import ThreadedMotoServer  # noqa: PLC0415  (nearly a second for those who collect)

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    told = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "a-secret-nobody-sees",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/founded", method="PUT")).close()
        yield "s3://founded"
    server.stop()


@pytest.fixture
def store_of(request: pytest.FixtureRequest, tmp_path: Path, run: str) -> MakeStoreOf:
    def made(kind: str) -> ArchiveStore:
        if kind == "folder":
            return open_archive((tmp_path / "archive").as_uri())
        if kind == "memory":
            return S3Archive(MemoryStore(), "memory")
        return open_archive(f"{request.getfixturevalue('bucket')}/{run}")

    return made


@pytest.fixture(params=["folder", "memory", pytest.param("s3", marks=pytest.mark.second_tier)])
async def founded(request: pytest.FixtureRequest, store_of: MakeStoreOf, run: str) -> FoundedRun:
    founded = FoundedRun(run_record(run), store_of(request.param), TurnedClock())
    await founded.found()
    return founded


# --- the archive store --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "memory", "s3"])
def test_a_store_gives_back_what_was_put(store_of: MakeStoreOf, kind: str) -> None:
    object_store = store_of(kind)
    object_store.put("run/a/one", b"1")
    object_store.put("run/a/one", b"uno")
    object_store.put("run/b/two", b"2")

    assert object_store.get("run/a/one", 3) == b"uno"
    assert [(name.path, name.size_bytes) for name in object_store.names("run/a")] == [("run/a/one", 3)]
    assert object_store.names("elsewhere") == []
    object_store.remove(["run/a/one", "run/a/none"])
    with pytest.raises(CheckpointError, match="missing"):
        object_store.get("run/a/one", 3)
    with pytest.raises(CheckpointError, match="too large"):
        object_store.get("run/b/two", 0)


def test_what_is_no_place_for_an_archive_is_refused() -> None:
    for url in ("", "http://host/x", "s3://", "file://host/x"):
        with pytest.raises(SettingsError, match="no place for an archive"):
            open_archive(url)
    with pytest.raises(SettingsError, match="no user name") as refusal:
        open_archive("s3://key:hunter2@bucket/x")
    assert "hunter2" not in str(refusal.value)
    for url in ("s3://key:hunter2@[bucket/x", "~nobody-of-this-name/x"):
        with pytest.raises(SettingsError, match="cannot be read") as refusal:
            open_archive(url)
        assert "hunter2" not in str(refusal.value)


def test_a_folder_is_the_same_place_for_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home is found, a relative path is made absolute; what has a scheme stays, also where a slash is missing."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    assert open_archive("~/archive").where == open_archive("archive").where == str(tmp_path / "archive")
    for url in ("s3:/bucket/x", "s3://bucket/x", "file:/folder"):
        assert resolved(url) == url
    with pytest.raises(SettingsError, match="no place for an archive"):
        open_archive("s3:/bucket/x")


def test_a_large_object_is_read_in_parts(bucket: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library bounds the time of a request; one for the whole might never end in time."""
    monkeypatch.setattr(places, "PART_BYTES", 4)
    asked: list[int] = []
    ranged = obstore.get_range

    def counted(store: object, path: str, *, start: int, end: int, length: None) -> object:
        asked.append(end - start)
        return ranged(store, path, start=start, end=end, length=length)  # type: ignore[arg-type]  # a store of whatever kind

    monkeypatch.setattr(obstore, "get_range", counted)
    object_store = open_archive(f"{bucket}/{run}")
    for data in (b"", b"0123", b"0123456789"):
        object_store.put("object", data)
        assert object_store.get("object", 10) == data
    assert asked == [4, 4, 4, 2]


def test_a_folder_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArchiveUnavailable, match="free space there"):
        FolderArchive(tmp_path / "file").put("a/b", b"1")


def test_a_store_that_nobody_answers_for_is_unavailable(bucket: str) -> None:
    with pytest.raises(ArchiveUnavailable) as refusal:
        open_archive(f"{bucket}-that-is-none/x").put("a", b"1")
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in str(refusal.value)
    assert len(str(refusal.value).splitlines()) < 6


def test_a_key_that_is_no_path_is_named(bucket: str, run: str) -> None:
    """The library lists nothing beside it, so somebody must remove it, and needs to know which it is."""
    object_store = open_archive(f"{bucket}/{run}")
    object_store.put("demo/one", b"1")
    server = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    urllib.request.urlopen(
        urllib.request.Request(f"http://{server}/founded/{run}/demo//two%01", b"2", method="PUT")
    ).close()
    with pytest.raises(ArchiveUnavailable, match=r"demo//two\\x01"):
        object_store.names("demo")


# --- checkpoints ----------------------------------------------------------------------------------------------------------


async def test_a_run_is_rebuilt_bit_for_bit(founded: FoundedRun) -> None:
    """Heads, values, outer state and ledgers are those of the checkpoint; incarnations, data leases and epochs go on."""
    await founded.round()
    await founded.round()
    assert await founded.checkpoint() == [True, True]
    archived = await founded.contents()
    await founded.round()
    outcome, broker = await founded.rebuild()
    bus, subjects = MemoryBus(founded.run, broker), Subjects(founded.run)
    rebuilt = outcome.record.rebuilt
    lease = await bus.get_record(subjects.lease(1))
    member = await claim(bus, subjects, "a", founded.clock)
    granted = await DataLeases(bus, subjects, member, 64, lease_s=3.0, clock=founded.clock).take(20)

    assert outcome.rebuilt
    assert await founded.contents(broker) == archived
    for head in (await read_heads(bus, outcome.record)).values():
        for ref in (head.keyframe, head.state, head.fragment_ledger):
            assert ref is not None
            # An owner of the former founding removes by the name that it gave, or by its tenure.
            assert ref.stem.endswith(f".rebuilt.{outcome.record.nonce}")
    assert rebuilt is not None
    assert (rebuilt.source, rebuilt.checkpoint, rebuilt.generation) == ("first", 0, 1)
    assert (rebuilt.tokens, rebuilt.versions) == (2 * TOKENS, 2 * FRAGMENTS)
    assert outcome.record.nonce != "first"
    assert member.incarnation == 1001
    assert (granted.key, granted.holder) == ((0, 0, 16), ("a", 1001))
    assert lease is not None
    assert decode(Lease, lease.data).released
    assert decode(Lease, lease.data).epoch == 1


async def test_a_rebuilt_run_goes_on_and_is_archived_in_its_turn(founded: FoundedRun) -> None:
    """The next owner fences, commits, makes checkpoints of the new founding; a second rebuilding begins from those."""
    await founded.round()
    await founded.checkpoint()
    founded.later()
    outcome, broker = await founded.rebuild()
    founded.record, founded.broker = outcome.record, broker
    for shard in range(SHARDS):
        await founded.serve(shard, epoch=2)
    await founded.round()
    await founded.checkpoint()
    again, third = await founded.rebuild()

    assert again.record.rebuilt is not None
    assert again.record.rebuilt.generation == 2
    assert again.record.rebuilt.source == outcome.record.nonce
    assert {head.version for head, _ in (await founded.contents(third)).values()} == {2}
    assert (await claim(MemoryBus(founded.run, third), Subjects(founded.run), "a", founded.clock)).incarnation == 2001


async def test_several_rebuild_at_once_and_agree(founded: FoundedRun) -> None:
    """Two processes on one broker end with one run; a third finds it there and changes nothing."""
    await founded.round()
    await founded.checkpoint()
    archived = await founded.contents()
    broker = MemoryBroker()
    (one, _), (two, _) = await asyncio.gather(founded.rebuild(broker, first=0), founded.rebuild(broker, first=1))
    three, _ = await founded.rebuild(broker)

    assert one.record == two.record == three.record
    assert not three.rebuilt
    assert await founded.contents(broker) == archived


async def test_a_rebuilding_that_died_half_way_is_completed(founded: FoundedRun) -> None:
    """The run record names the checkpoint: the next process goes on with that one, also when there is a newer one."""
    await founded.round()
    await founded.checkpoint()
    archived = await founded.contents()
    broker = MemoryBroker()
    first, _ = await founded.rebuild(broker)
    for fragment in (1, 3):
        await MemoryBus(founded.run, broker).purge(Subjects(founded.run).head(fragment))
    founded.later()
    await founded.round()
    await founded.checkpoint()
    second, _ = await founded.rebuild(broker)

    assert second.record == first.record
    assert await founded.contents(broker) == archived


async def test_data_leases_that_nobody_could_go_on_with_are_left_out(founded: FoundedRun) -> None:
    """A run checkpoint of an earlier release may hold what fitted into a record only as its writer had shortened it."""
    grants = tuple(DataGrant(0, 0, 1, "m", life) for life in range(13_000))
    await founded.round()
    with pytest.MonkeyPatch.context() as earlier:
        earlier.setattr(
            "atoll_synchronizer.archivist.readable", lambda *_: DataLedger(blocks=64, next_position=20, grants=grants)
        )
        await founded.checkpoint()
    outcome, broker = await founded.rebuild()

    assert outcome.rebuilt
    assert await MemoryBus(founded.run, broker).get_record(Subjects(founded.run).data) is None


async def test_a_learner_that_came_before_the_member_records_is_replaced(founded: FoundedRun) -> None:
    """Its incarnation is one whose pushes the ledgers know: kept, all that it pushes would be swallowed as known."""
    await founded.round()
    await founded.checkpoint()
    broker = MemoryBroker()
    bus, subjects = MemoryBus(founded.run, broker), Subjects(founded.run)
    early = await claim(bus, subjects, "a", founded.clock)
    fresh = DataLedger(blocks=64, next_position=8, grants=(DataGrant(0, 0, 8, "a", 1),))
    await bus.put_record(subjects.data, encode(fresh), expected=0)
    outcome, _ = await founded.rebuild(broker)
    why = await dismissal(bus, subjects, outcome.record, early)
    data = await bus.get_record(subjects.data)
    again = await claim(bus, subjects, "a", founded.clock)

    assert early.incarnation == 1
    assert why is not None
    assert again.incarnation == 1001
    assert data is not None
    assert decode(DataLedger, data.data).next_position == 16


async def test_a_rebuilding_leaves_those_alone_who_came_after_it(founded: FoundedRun) -> None:
    """One that is slow, or goes on where another died, replaces no record that the rebuilt run has moved on."""
    await founded.round()
    await founded.checkpoint()
    outcome, broker = await founded.rebuild()
    bus, subjects = MemoryBus(founded.run, broker), Subjects(founded.run)
    ours = await claim(bus, subjects, "a", founded.clock)
    lease = Lease(shard=0, epoch=2, nonce="owner", run_nonce="r", host="h", pid=1)
    there = await bus.get_record(subjects.lease(0))
    assert there is not None
    await bus.put_record(subjects.lease(0), encode(lease), expected=there.revision)
    await bus.purge(subjects.head(3))
    again, _ = await founded.rebuild(broker)
    kept = await bus.get_record(subjects.lease(0))

    assert again.rebuilt
    assert await dismissal(bus, subjects, outcome.record, ours) is None
    assert kept is not None
    assert decode(Lease, kept.data) == lease


async def test_a_shard_that_lived_through_the_loss_keeps_no_lease_of_the_empty_broker(founded: FoundedRun) -> None:
    """Its epoch is not above the archived heads: it is deposed, and whoever is next begins above them."""
    await founded.serve(0, epoch=9)
    await founded.round()
    await founded.checkpoint()
    broker = MemoryBroker()
    bus, subjects = MemoryBus(founded.run, broker), Subjects(founded.run)
    for shard, epoch in enumerate((9, 1)):
        survivor = Lease(shard=shard, epoch=epoch, nonce="survivor", run_nonce="r", host="h", pid=1)
        await bus.put_record(subjects.lease(shard), encode(survivor), expected=0)
    await founded.rebuild(broker)
    leases = [await bus.get_record(subjects.lease(shard)) for shard in range(SHARDS)]
    found = [decode(Lease, lease.data) for lease in leases if lease is not None]

    assert [(lease.epoch, lease.released, lease.nonce == "survivor") for lease in found] == [
        (9, True, False),
        (1, True, False),
    ]


async def test_a_broker_that_has_the_run_is_left_alone(founded: FoundedRun) -> None:
    await founded.round()
    await founded.checkpoint()
    founded.later()
    await founded.round()
    before = await founded.contents()
    outcome, _ = await founded.rebuild(founded.broker)

    away = FoundedRun(founded.record, BrokenObjectStore(founded.object_store, lists_fail=True), founded.clock)
    unread, _ = await away.rebuild(founded.broker)

    assert not outcome.rebuilt
    assert outcome.record == unread.record == founded.record
    assert await founded.contents() == before


async def test_an_empty_archive_says_what_is_missing(founded: FoundedRun) -> None:
    """No checkpoint, or a checkpoint that one shard did not make: exit code 2, and the broker stays empty."""
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        await founded.rebuild()
    await founded.checkpoint(0)
    broker = MemoryBroker()
    with pytest.raises(CheckpointError, match=r"lacks shards \[1\]") as refusal:
        await founded.rebuild(broker)

    assert refusal.value.exit_code == 2
    assert await read_run(MemoryBus(founded.run, broker), Subjects(founded.run)) is None


async def test_only_marks_that_all_shards_made_count(founded: FoundedRun) -> None:
    """One shard that is ahead waits for the other; one that has finished stands in all later checkpoints."""
    await founded.round()
    await founded.checkpoint()
    founded.later()
    await founded.round()
    await founded.checkpoint(0)
    behind = founded.newest()
    founded.later()
    await founded.checkpoint(0, final=True)
    founded.later()
    await founded.checkpoint(1)
    ended = founded.newest()

    assert [manifest.number for manifest in behind] == [0, 0]
    assert [manifest.number for manifest in ended] == [2 * EVERY_S, 3 * EVERY_S]


async def test_what_has_not_changed_is_not_written_again(founded: FoundedRun) -> None:
    """The second checkpoint of an unchanged shard writes its manifest alone; a changed fragment is written."""
    await founded.round()
    await founded.checkpoint()
    objects = {name.path for name in founded.object_store.names(f"{founded.run}/shard-0")}
    founded.later()
    await founded.commit(0)
    await founded.checkpoint()
    new = {name.path for name in founded.object_store.names(f"{founded.run}/shard-0")} - objects

    assert len(objects) == 3 * FRAGMENTS // SHARDS
    assert len(new) == 3


async def test_what_somebody_deleted_is_written_again(founded: FoundedRun) -> None:
    """An archive that was emptied under a running shard is whole again after the next checkpoint."""
    await founded.round()
    await founded.checkpoint()
    founded.object_store.remove([name.path for name in founded.object_store.names(founded.run)])
    founded.later()
    await founded.checkpoint()

    assert [manifest.number for manifest in founded.newest()] == [EVERY_S, EVERY_S]


async def test_old_marks_go_and_so_do_their_objects(founded: FoundedRun) -> None:
    for _ in range(5):
        await founded.round()
        await founded.checkpoint()
        founded.later()
    named = {
        f"{founded.run}/shard-{manifest.shard}/{digest}"
        for checkpoint in founded.checkpoint_store.checkpoints()
        if checkpoint.complete
        for manifest in founded.checkpoint_store.verified(checkpoint)
        for digest in manifest.objects
    }
    left = {name.path for shard in range(SHARDS) for name in founded.object_store.names(f"{founded.run}/shard-{shard}")}

    # The first shard to make a checkpoint cannot know yet that the other will: it keeps one more.
    assert [checkpoint.number for checkpoint in founded.checkpoint_store.checkpoints() if checkpoint.complete] == [
        3 * EVERY_S,
        4 * EVERY_S,
    ]
    assert named <= left
    assert len(left) <= len(named) + 3 * FRAGMENTS // SHARDS


async def test_a_shard_that_is_alone_does_not_fill_the_archive(founded: FoundedRun) -> None:
    """Where the other shard makes no checkpoints none is complete, and a bounded number is kept all the same."""
    for _ in range(20):
        await founded.commit(0)
        await founded.checkpoint(0)
        founded.later()

    assert len(founded.checkpoint_store.parts()) == 2 + 8


async def test_a_deposed_owner_replaces_nothing(founded: FoundedRun) -> None:
    """Neither at the checkpoint that its successor made, nor at a later one that its successor has not made yet."""
    await founded.round()
    old_store, old = founded.stores[0], founded.archivists[0]
    await founded.checkpoint()
    founded.later()
    await founded.serve(0, epoch=2)
    await founded.round()
    await founded.checkpoint()
    assert await old.checkpoint(founded.bus, old_store, lambda: founded.told)
    beside = founded.newest()
    founded.later()
    await founded.checkpoint(1)
    assert await old.checkpoint(founded.bus, old_store, lambda: founded.told)
    after = founded.newest()

    assert [(manifest.number, manifest.epoch) for manifest in beside] == [(EVERY_S, 2), (EVERY_S, 1)]
    assert [(manifest.number, manifest.epoch) for manifest in after] == [(EVERY_S, 2), (EVERY_S, 1)]


async def test_a_damaged_object_is_passed_over_with_a_warning(founded: FoundedRun) -> None:
    """The newest checkpoint that is whole is rebuilt from; when none is left the error says so."""
    await founded.round()
    await founded.checkpoint()
    archived = await founded.contents()
    founded.later()
    await founded.round()
    await founded.checkpoint()
    for manifest in founded.newest()[:1]:
        founded.object_store.put(
            f"{founded.run}/shard-0/{manifest.pieces[0].frame.digest}", b"x" * manifest.pieces[0].frame.size_bytes
        )
    _, broker = await founded.rebuild()
    for manifest in founded.newest()[1:]:
        founded.object_store.remove([f"{founded.run}/shard-1/{manifest.pieces[0].frame.digest}"])

    assert await founded.contents(broker) == archived
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        await founded.rebuild()


# --- when the archive fails (a folder is enough) --------------------------------------------------------------------


@pytest.fixture
async def folder_reef(tmp_path: Path, run: str) -> FoundedRun:
    founded = FoundedRun(run_record(run), FolderArchive(tmp_path / "archive"), TurnedClock())
    await founded.found()
    return founded


async def test_a_write_that_is_interrupted_anywhere_costs_one_mark_at_most(folder_reef: FoundedRun) -> None:
    """However far a checkpoint came (objects, manifest, tidying), a complete one is there, and the next succeeds."""
    founded = folder_reef
    for _ in range(3):
        await founded.round()
        await founded.checkpoint()
        founded.later()
    finished = False
    for acts in range(1, 100):
        await founded.commit(0)
        await founded.checkpoint(1)
        broken = BrokenObjectStore(founded.object_store, fails_at=acts)
        archivist = founded.archivist(0, broken)
        done = await archivist.checkpoint(founded.bus, founded.stores[0], lambda: founded.told)
        newest = founded.newest()
        assert newest[0].number >= founded.checkpoint_store.checkpoints()[-1].number - EVERY_S
        assert archivist.failures == (not done)
        finished = broken.acts < acts
        assert await founded.checkpoint(0) == [True]
        archived = founded.newest()[0].pieces[0].head
        there = founded.stores[0].holdings[archived.fragment].head
        assert (archived.version, archived.digest) == (there.version, there.digest)
        founded.later()
        if finished:
            break

    assert finished


async def test_a_full_archive_is_counted_and_hurts_nobody(folder_reef: FoundedRun) -> None:
    founded = folder_reef
    full = BrokenObjectStore(founded.object_store, fails_at=1)
    founded.archivists = {shard: founded.archivist(shard, full) for shard in range(SHARDS)}
    for _ in range(3):
        await founded.round()
        assert await founded.checkpoint() == [False, False]
        founded.later()
    full.fails_at = 1 << 30
    assert await founded.checkpoint() == [True, True]

    assert [archivist.failures for archivist in founded.archivists.values()] == [3, 3]
    assert {piece.head.version for manifest in founded.newest() for piece in manifest.pieces} == {3}


async def test_an_owner_of_the_former_founding_stands_down(folder_reef: FoundedRun) -> None:
    """Whoever held the run record of before the rebuilding serves nothing of the rebuilt run, and its learner leaves."""
    founded = folder_reef
    before = await claim(MemoryBus(founded.run, MemoryBroker()), Subjects(founded.run), "b", founded.clock)
    await founded.round()
    await founded.checkpoint()
    _, founded.broker = await founded.rebuild()
    why = await dismissal(founded.bus, Subjects(founded.run), founded.record, before)

    with pytest.raises(RecordConflict, match="rebuilt"):
        await founded.serve(0, epoch=9)
    assert why is not None
    assert why.exit_code == 3
    assert "not the one that this learner joined" in str(why)


def test_without_a_url_or_a_schedule_nothing_is_archived(folder_reef: FoundedRun) -> None:
    """An empty URL, or every 0 s."""
    settings = folder_reef.archivists[0]._settings
    for changed in ({"url": ""}, {"every_s": 0}):
        made = make_archivist(settings.model_copy(update=changed), folder_reef.record, 0, folder_reef.clock)
        assert made is None


async def test_outer_state_of_every_kind_goes_on_to_the_same_bits_after_a_rebuild(folder_reef: FoundedRun) -> None:
    """Momentum, average and carry: the rebuilt run commits what the lost one would have."""
    founded = folder_reef
    protocol = msgspec.structs.replace(
        founded.record.protocol, correction="heloco", average_versions=4, codec_down="int4", keyframe_versions=7
    ).check()
    founded.record = msgspec.structs.replace(founded.record, run="levers", protocol=protocol)
    founded.broker = MemoryBroker()
    await founded.found()
    for _ in range(2):
        await founded.round()
    await founded.checkpoint()
    outcome, broker = await founded.rebuild()
    lost = []
    for record, here in ((founded.record, founded.broker), (outcome.record, broker)):
        founded.record, founded.broker, founded.pushes = record, here, 2 * FRAGMENTS
        for shard in range(SHARDS):
            await founded.serve(shard, epoch=5)
        for _ in range(2):
            await founded.round()
        held = [store.holdings[p] for store in founded.stores.values() for p in sorted(store.holdings)]
        lost.append([(h.head.version, h.values.tobytes(), pack_arrays(h.state)) for h in held])

    assert lost[0] == lost[1]
    assert {version for version, *_ in lost[0]} == {4}
