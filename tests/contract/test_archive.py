"""Marks and rebuilding, the same in a folder, in an object store in memory, and on an S3 server."""

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
from atoll.bus.memory.bus import MemoryBroker, MemoryBus
from atoll.client.data_leases import DataLeases
from atoll.client.membership import claim, dismissal
from atoll.codec import pack_arrays
from atoll.protocol.data import DataGrant, DataLedger
from atoll.run.record import read_run
from atoll.wire.messages import Lease, decode, encode
from atoll.wire.subjects import Subjects
from atoll_synchronizer.archivist import make_archivist
from support.founded_run import EVERY_S, FRAGMENTS, SHARDS, TOKENS, BrokenVault, FoundedRun, TurnedClock, run_record

MakeVault = Callable[[], ArchiveStore]


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
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/reef", method="PUT")).close()
        yield "s3://reef"
    server.stop()


@pytest.fixture(params=["folder", "memory", "s3"])
def vault(request: pytest.FixtureRequest, tmp_path: Path, run: str) -> ArchiveStore:
    """An empty vault of each kind."""
    if request.param == "folder":
        return open_archive((tmp_path / "archive").as_uri())
    if request.param == "memory":
        return S3Archive(MemoryStore(), "memory")
    return open_archive(f"{request.getfixturevalue('bucket')}/{run}")


@pytest.fixture
async def reef(vault: ArchiveStore, run: str) -> FoundedRun:
    """A founded run that archives to the vault."""
    reef = FoundedRun(run_record(run), vault, TurnedClock())
    await reef.found()
    return reef


# --- the vault ------------------------------------------------------------------------------------------------------


def test_a_vault_gives_back_what_was_put(vault: ArchiveStore) -> None:
    """Whole objects, replaced by name, listed by prefix, removed without complaint."""
    vault.put("run/a/one", b"1")
    vault.put("run/a/one", b"uno")
    vault.put("run/b/two", b"2")

    assert vault.get("run/a/one", 3) == b"uno"
    assert [(name.path, name.size_bytes) for name in vault.names("run/a")] == [("run/a/one", 3)]
    assert vault.names("elsewhere") == []
    vault.remove(["run/a/one", "run/a/none"])
    with pytest.raises(CheckpointError, match="missing"):
        vault.get("run/a/one", 3)
    with pytest.raises(CheckpointError, match="too large"):
        vault.get("run/b/two", 0)


def test_what_is_no_place_for_an_archive_is_refused() -> None:
    """The message says what is allowed and repeats no secret."""
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

    def counted(store: object, path: str, *, start: int, end: int) -> object:
        asked.append(end - start)
        return ranged(store, path, start=start, end=end)  # type: ignore[arg-type]  # a store of whatever kind

    monkeypatch.setattr(obstore, "get_range", counted)
    vault = open_archive(f"{bucket}/{run}")
    for data in (b"", b"0123", b"0123456789"):
        vault.put("object", data)
        assert vault.get("object", 10) == data
    assert asked == [4, 4, 4, 2]


def test_a_folder_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    """A file where a folder should be: the reason and what to do, and nothing half-written."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArchiveUnavailable, match="free space there"):
        FolderArchive(tmp_path / "file").put("a/b", b"1")


def test_a_store_that_nobody_answers_for_is_unavailable(bucket: str) -> None:
    """A bucket that does not exist is said in a line, without the credentials."""
    with pytest.raises(ArchiveUnavailable) as refusal:
        open_archive(f"{bucket}-that-is-none/x").put("a", b"1")
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in str(refusal.value)
    assert len(str(refusal.value).splitlines()) < 6


# --- marks ----------------------------------------------------------------------------------------------------------


async def test_a_run_is_rebuilt_bit_for_bit(reef: FoundedRun) -> None:
    """Heads, values, outer state and books are those of the mark; incarnations, data leases and epochs go on."""
    await reef.round()
    await reef.round()
    assert await reef.mark() == [True, True]
    archived = await reef.contents()
    await reef.round()
    outcome, broker = await reef.rebuild()
    bus, subjects = MemoryBus(reef.run, broker), Subjects(reef.run)
    rebuilt = outcome.record.rebuilt
    lease = await bus.get_record(subjects.lease(1))
    member = await claim(bus, subjects, "a", reef.clock)
    granted = await DataLeases(bus, subjects, member, 64, lease_s=3.0, clock=reef.clock).take(20)

    assert outcome.rebuilt
    assert await reef.contents(broker) == archived
    assert rebuilt is not None
    assert (rebuilt.source, rebuilt.mark, rebuilt.generation) == ("first", 0, 1)
    assert (rebuilt.tokens, rebuilt.versions) == (2 * FRAGMENTS * TOKENS, 2 * FRAGMENTS)
    assert outcome.record.nonce != "first"
    assert member.incarnation == 1001
    assert (granted.key, granted.holder) == ((0, 0, 16), ("a", 1001))
    assert lease is not None
    assert decode(Lease, lease.data).released
    assert decode(Lease, lease.data).epoch == 1


async def test_a_rebuilt_run_goes_on_and_is_archived_in_its_turn(reef: FoundedRun) -> None:
    """The next owner fences, commits, makes marks of the new founding; a second rebuilding begins from those."""
    await reef.round()
    await reef.mark()
    reef.later()
    outcome, broker = await reef.rebuild()
    reef.record, reef.broker = outcome.record, broker
    for shard in range(SHARDS):
        await reef.serve(shard, epoch=2)
    await reef.round()
    await reef.mark()
    again, third = await reef.rebuild()

    assert again.record.rebuilt is not None
    assert again.record.rebuilt.generation == 2
    assert again.record.rebuilt.source == outcome.record.nonce
    assert {head.version for head, _ in (await reef.contents(third)).values()} == {2}
    assert (await claim(MemoryBus(reef.run, third), Subjects(reef.run), "a", reef.clock)).incarnation == 2001


async def test_several_rebuild_at_once_and_agree(reef: FoundedRun) -> None:
    """Two processes on one broker end with one run; a third finds it there and changes nothing."""
    await reef.round()
    await reef.mark()
    archived = await reef.contents()
    broker = MemoryBroker()
    (one, _), (two, _) = await asyncio.gather(reef.rebuild(broker, first=0), reef.rebuild(broker, first=1))
    three, _ = await reef.rebuild(broker)

    assert one.record == two.record == three.record
    assert not three.rebuilt
    assert await reef.contents(broker) == archived


async def test_a_rebuilding_that_died_half_way_is_completed(reef: FoundedRun) -> None:
    """The run record says what is being rebuilt: the next process goes on with that mark, also when a newer one is there."""
    await reef.round()
    await reef.mark()
    archived = await reef.contents()
    broker = MemoryBroker()
    first, _ = await reef.rebuild(broker)
    for fragment in (1, 3):
        await MemoryBus(reef.run, broker).purge(Subjects(reef.run).head(fragment))
    reef.later()
    await reef.round()
    await reef.mark()
    second, _ = await reef.rebuild(broker)

    assert second.record == first.record
    assert await reef.contents(broker) == archived


async def test_a_learner_that_came_before_the_member_records_is_replaced(reef: FoundedRun) -> None:
    """Its incarnation is one whose pushes the books know: kept, all that it pushes would be swallowed as known."""
    await reef.round()
    await reef.mark()
    broker = MemoryBroker()
    bus, subjects = MemoryBus(reef.run, broker), Subjects(reef.run)
    early = await claim(bus, subjects, "a", reef.clock)
    fresh = DataLedger(blocks=64, next_position=8, grants=(DataGrant(0, 0, 8, "a", 1),))
    await bus.put_record(subjects.data, encode(fresh), expected=0)
    outcome, _ = await reef.rebuild(broker)
    why = await dismissal(bus, subjects, outcome.record, early)
    data = await bus.get_record(subjects.data)
    again = await claim(bus, subjects, "a", reef.clock)

    assert early.incarnation == 1
    assert why is not None
    assert again.incarnation == 1001
    assert data is not None
    assert decode(DataLedger, data.data).next_position == 16


async def test_a_rebuilding_leaves_those_alone_who_came_after_it(reef: FoundedRun) -> None:
    """One that is slow, or goes on where another died, replaces no record that the rebuilt run has moved on."""
    await reef.round()
    await reef.mark()
    outcome, broker = await reef.rebuild()
    bus, subjects = MemoryBus(reef.run, broker), Subjects(reef.run)
    ours = await claim(bus, subjects, "a", reef.clock)
    lease = Lease(shard=0, epoch=2, nonce="owner", host="h", pid=1)
    there = await bus.get_record(subjects.lease(0))
    assert there is not None
    await bus.put_record(subjects.lease(0), encode(lease), expected=there.revision)
    await bus.purge(subjects.head(3))
    again, _ = await reef.rebuild(broker)
    kept = await bus.get_record(subjects.lease(0))

    assert again.rebuilt
    assert await dismissal(bus, subjects, outcome.record, ours) is None
    assert kept is not None
    assert decode(Lease, kept.data) == lease


async def test_a_shard_that_lived_through_the_loss_keeps_no_lease_of_the_empty_broker(reef: FoundedRun) -> None:
    """Its epoch is not above the archived heads: it is deposed, and whoever is next begins above them."""
    await reef.serve(0, epoch=9)
    await reef.round()
    await reef.mark()
    broker = MemoryBroker()
    bus, subjects = MemoryBus(reef.run, broker), Subjects(reef.run)
    for shard, epoch in enumerate((9, 1)):
        survivor = Lease(shard=shard, epoch=epoch, nonce="survivor", host="h", pid=1)
        await bus.put_record(subjects.lease(shard), encode(survivor), expected=0)
    await reef.rebuild(broker)
    leases = [await bus.get_record(subjects.lease(shard)) for shard in range(SHARDS)]
    found = [decode(Lease, lease.data) for lease in leases if lease is not None]

    assert [(lease.epoch, lease.released, lease.nonce == "survivor") for lease in found] == [
        (9, True, False),
        (1, True, False),
    ]


async def test_a_broker_that_has_the_run_is_left_alone(reef: FoundedRun) -> None:
    """The flag may stay in a deployment's file."""
    await reef.round()
    await reef.mark()
    reef.later()
    await reef.round()
    before = await reef.contents()
    outcome, _ = await reef.rebuild(reef.broker)

    away = FoundedRun(reef.record, BrokenVault(reef.vault, lists_fail=True), reef.clock)
    unread, _ = await away.rebuild(reef.broker)

    assert not outcome.rebuilt
    assert outcome.record == unread.record == reef.record
    assert await reef.contents() == before


async def test_an_empty_archive_says_what_is_missing(reef: FoundedRun) -> None:
    """No mark, or a mark that one shard did not make: exit code 2, and the broker stays empty."""
    with pytest.raises(CheckpointError, match="no complete mark"):
        await reef.rebuild()
    await reef.mark(0)
    broker = MemoryBroker()
    with pytest.raises(CheckpointError, match=r"lacks shards \[1\]") as refusal:
        await reef.rebuild(broker)

    assert refusal.value.exit_code == 2
    assert await read_run(MemoryBus(reef.run, broker), Subjects(reef.run)) is None


async def test_only_marks_that_all_shards_made_count(reef: FoundedRun) -> None:
    """One shard that is ahead waits for the other; one that has finished stands in all later marks."""
    await reef.round()
    await reef.mark()
    reef.later()
    await reef.round()
    await reef.mark(0)
    behind = reef.newest()
    reef.later()
    await reef.mark(0, final=True)
    reef.later()
    await reef.mark(1)
    ended = reef.newest()

    assert [manifest.mark for manifest in behind] == [0, 0]
    assert [manifest.mark for manifest in ended] == [2 * EVERY_S, 3 * EVERY_S]


async def test_what_has_not_changed_is_not_written_again(reef: FoundedRun) -> None:
    """The second mark of an unchanged shard writes its manifest alone; a changed fragment is written."""
    await reef.round()
    await reef.mark()
    objects = {name.path for name in reef.vault.names(f"{reef.run}/shard-0")}
    reef.later()
    await reef.commit(0)
    await reef.mark()
    new = {name.path for name in reef.vault.names(f"{reef.run}/shard-0")} - objects

    assert len(objects) == 3 * FRAGMENTS // SHARDS
    assert len(new) == 3


async def test_what_somebody_deleted_is_written_again(reef: FoundedRun) -> None:
    """An archive that was emptied under a running shard is whole again after the next mark."""
    await reef.round()
    await reef.mark()
    reef.vault.remove([name.path for name in reef.vault.names(reef.run)])
    reef.later()
    await reef.mark()

    assert [manifest.mark for manifest in reef.newest()] == [EVERY_S, EVERY_S]


async def test_old_marks_go_and_so_do_their_objects(reef: FoundedRun) -> None:
    """Two complete marks are kept; every object left is named by one of them."""
    for _ in range(5):
        await reef.round()
        await reef.mark()
        reef.later()
    named = {
        f"{reef.run}/shard-{manifest.shard}/{digest}"
        for mark in reef.shelf.marks()
        if mark.complete
        for manifest in reef.shelf.verified(mark)
        for digest in manifest.objects
    }
    left = {name.path for shard in range(SHARDS) for name in reef.vault.names(f"{reef.run}/shard-{shard}")}

    # The first shard to make a mark cannot know yet that the other will: it keeps one more.
    assert [mark.mark for mark in reef.shelf.marks() if mark.complete] == [3 * EVERY_S, 4 * EVERY_S]
    assert named <= left
    assert len(left) <= len(named) + 3 * FRAGMENTS // SHARDS


async def test_a_shard_that_is_alone_does_not_fill_the_archive(reef: FoundedRun) -> None:
    """Where the other shard makes no marks none is complete, and a bounded number is kept all the same."""
    for _ in range(20):
        await reef.commit(0)
        await reef.mark(0)
        reef.later()

    assert len(reef.shelf.parts()) == 2 + 8


async def test_a_deposed_owner_replaces_nothing(reef: FoundedRun) -> None:
    """Neither at the mark that its successor made, nor at a later one that its successor has not made yet."""
    await reef.round()
    old_store, old = reef.stores[0], reef.archivists[0]
    await reef.mark()
    reef.later()
    await reef.serve(0, epoch=2)
    await reef.round()
    await reef.mark()
    assert await old.mark(reef.bus, old_store, lambda: reef.told)
    beside = reef.newest()
    reef.later()
    await reef.mark(1)
    assert await old.mark(reef.bus, old_store, lambda: reef.told)
    after = reef.newest()

    assert [(manifest.mark, manifest.epoch) for manifest in beside] == [(EVERY_S, 2), (EVERY_S, 1)]
    assert [(manifest.mark, manifest.epoch) for manifest in after] == [(EVERY_S, 2), (EVERY_S, 1)]


async def test_a_damaged_object_is_passed_over_with_a_warning(reef: FoundedRun) -> None:
    """The newest mark that is whole is rebuilt from; when none is left the error says so."""
    await reef.round()
    await reef.mark()
    archived = await reef.contents()
    reef.later()
    await reef.round()
    await reef.mark()
    for manifest in reef.newest()[:1]:
        reef.vault.put(
            f"{reef.run}/shard-0/{manifest.pieces[0].frame.digest}", b"x" * manifest.pieces[0].frame.size_bytes
        )
    _, broker = await reef.rebuild()
    for manifest in reef.newest()[1:]:
        reef.vault.remove([f"{reef.run}/shard-1/{manifest.pieces[0].frame.digest}"])

    assert await reef.contents(broker) == archived
    with pytest.raises(CheckpointError, match="no complete mark"):
        await reef.rebuild()


async def test_a_damaged_manifest_is_passed_over(reef: FoundedRun) -> None:
    """Half a manifest makes its mark nothing."""
    await reef.round()
    await reef.mark()
    reef.later()
    await reef.mark()
    newest = reef.shelf.marks()[-1].parts[0].path
    reef.vault.put(newest, reef.vault.get(newest, 1 << 20)[:200])

    assert [manifest.mark for manifest in reef.newest()] == [0, 0]


# --- when the archive fails (a folder is enough) --------------------------------------------------------------------


@pytest.fixture
async def folder_reef(tmp_path: Path, run: str) -> FoundedRun:
    """A founded run that archives to a folder."""
    reef = FoundedRun(run_record(run), FolderArchive(tmp_path / "archive"), TurnedClock())
    await reef.found()
    return reef


async def test_a_write_that_is_interrupted_anywhere_costs_one_mark_at_most(folder_reef: FoundedRun) -> None:
    """However far a mark came (objects, manifest, tidying), a complete one is there, and the next succeeds."""
    reef = folder_reef
    for _ in range(3):
        await reef.round()
        await reef.mark()
        reef.later()
    finished = False
    for acts in range(1, 100):
        await reef.commit(0)
        await reef.mark(1)
        broken = BrokenVault(reef.vault, fails_at=acts)
        archivist = reef.archivist(0, broken)
        done = await archivist.mark(reef.bus, reef.stores[0], lambda: reef.told)
        newest = reef.newest()
        assert newest[0].mark >= reef.shelf.marks()[-1].mark - EVERY_S
        assert archivist.failures == (not done)
        finished = broken.acts < acts
        assert await reef.mark(0) == [True]
        assert reef.newest()[0].pieces[0].head == reef.stores[0].holdings[reef.newest()[0].pieces[0].head.fragment].head
        reef.later()
        if finished:
            break

    assert finished


async def test_a_full_archive_is_counted_and_hurts_nobody(folder_reef: FoundedRun) -> None:
    """Marks fail, commits go on; with room again the next mark is whole."""
    reef = folder_reef
    full = BrokenVault(reef.vault, fails_at=1)
    reef.archivists = {shard: reef.archivist(shard, full) for shard in range(SHARDS)}
    for _ in range(3):
        await reef.round()
        assert await reef.mark() == [False, False]
        reef.later()
    full.fails_at = 1 << 30
    assert await reef.mark() == [True, True]

    assert [archivist.failures for archivist in reef.archivists.values()] == [3, 3]
    assert {piece.head.version for manifest in reef.newest() for piece in manifest.pieces} == {3}


async def test_an_owner_of_the_former_founding_stands_down(folder_reef: FoundedRun) -> None:
    """Whoever held the run record of before the rebuilding serves nothing of the rebuilt run, and its learner leaves."""
    reef = folder_reef
    before = await claim(MemoryBus(reef.run, MemoryBroker()), Subjects(reef.run), "b", reef.clock)
    await reef.round()
    await reef.mark()
    _, reef.broker = await reef.rebuild()
    why = await dismissal(reef.bus, Subjects(reef.run), reef.record, before)

    with pytest.raises(RecordConflict, match="rebuilt"):
        await reef.serve(0, epoch=9)
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
    """Momentum, average, carry and the place of the next restart: the rebuilt run commits what the lost one would have."""
    reef = folder_reef
    protocol = msgspec.structs.replace(
        reef.record.protocol,
        correction="heloco",
        outer_restart_versions=3,
        average_versions=4,
        codec_down="int4",
        keyframe_versions=7,
    ).check()
    reef.record = msgspec.structs.replace(reef.record, run="levers", protocol=protocol)
    reef.broker = MemoryBroker()
    await reef.found()
    for _ in range(2):
        await reef.round()
    await reef.mark()
    outcome, broker = await reef.rebuild()
    lost = []
    for record, here in ((reef.record, reef.broker), (outcome.record, broker)):
        reef.record, reef.broker, reef.pushes = record, here, 2 * FRAGMENTS
        for shard in range(SHARDS):
            await reef.serve(shard, epoch=5)
        for _ in range(2):
            await reef.round()
        held = [store.holdings[p] for store in reef.stores.values() for p in sorted(store.holdings)]
        lost.append([(h.head.version, h.values.tobytes(), pack_arrays(h.state)) for h in held])

    assert lost[0] == lost[1]
    assert {version for version, *_ in lost[0]} == {4}
