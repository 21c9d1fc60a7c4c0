"""The archive of a locked run, and somebody who can write to its folder and has no key: what he does is noticed."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import msgspec
import pytest
from obstore.store import MemoryStore

from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.checkpoints import MANIFEST_BYTES_MAX, CheckpointObject, founding, opening
from atoll.archive.object_store import BESIDE, FolderArchive, S3Archive
from atoll.base.errors import CheckpointError
from atoll.cli.replay import show, sign
from atoll.keys.identity import HeldIdentity, read_identity
from atoll.keys.roll import KeyFolder
from support.founded_run import EVERY_S, SHARDS, BrokenObjectStore, FoundedRun, TurnedClock, run_record

RUN = "demo"
FAR = 9999999990
MAYBE_ANOTHER_VERSION = "until then no object"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFolder:
    keys = KeyFolder(tmp_path_factory.mktemp("keys") / "own")
    keys.create(["127.0.0.1"], time.time())
    keys.add("shard", "synchronizer", RUN, time.time())
    return keys


def identity(keys: KeyFolder, name: str) -> HeldIdentity:
    return read_identity(keys.path / "identities" / RUN / f"{name}.toml")


@pytest.fixture
async def founded(tmp_path: Path, keys: KeyFolder) -> FoundedRun:
    signatures = identity(keys, "shard").signatures()
    founded = FoundedRun(run_record(RUN), FolderArchive(tmp_path / "archive"), TurnedClock(), signatures=signatures)
    await founded.found()
    for _ in range(3):
        await on_schedule(founded)
    return founded


async def on_schedule(founded: FoundedRun, checkpoints: int = 1) -> None:
    for _ in range(checkpoints):
        await founded.round()
        assert all(await founded.checkpoint())
        founded.later()


def manifest_path(founded: FoundedRun, number: int, *, shard: int = 0, epoch: int = 1) -> str:
    return opening(founded.record, number, shard, epoch).replace(".open", "")


def newest_number(founded: FoundedRun) -> int:
    return founded.checkpoint_store.newest()[0].number


# --- names that somebody chose --------------------------------------------------------------------------------------------


async def test_an_empty_file_rolls_no_archive_back(founded: FoundedRun, capsys: pytest.CaptureFixture[str]) -> None:
    """He says that shard 0 goes on in an epoch far away, or before: nobody signed it, so it is absent, and told once."""
    for number, epoch in ((4, 999_999_999), (0, 2)):
        founded.object_store.put(opening(founded.record, number, 0, epoch), b"")
    await on_schedule(founded, 4)
    said = capsys.readouterr().err

    assert newest_number(founded) == 6 * EVERY_S
    assert said.count("archive.manifest_unreadable") == 2
    assert "nobody signed this" in said
    assert "archive.not_counted" not in said


async def test_in_an_open_run_a_shard_says_that_its_checkpoints_do_not_count(
    founded: FoundedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """There everybody who can write is believed, so the shard that is shut out tells it at its next checkpoint."""
    founded.signatures = None
    founded.archivists = {shard: founded.archivist(shard) for shard in range(SHARDS)}
    await on_schedule(founded)
    assert "archive.not_counted" not in capsys.readouterr().err
    founded.object_store.put(opening(founded.record, 4, 0, 999_999_999), b"")
    await on_schedule(founded)
    said = capsys.readouterr().err

    assert said.count("archive.not_counted") == 1
    assert "who else can write there" in said


@pytest.mark.parametrize("junk", [b"", b"junk", b"[" * 9999])
async def test_a_junk_manifest_of_a_far_number_moves_no_number_and_removes_no_checkpoint(
    founded: FoundedRun, junk: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """For every shard, so that it looks complete. Old checkpoints and their objects still go as before."""
    for shard in range(SHARDS):
        for number in range(FAR, FAR + 5):
            founded.object_store.put(manifest_path(founded, number, shard=shard), junk)
    await on_schedule(founded, 6)
    said = capsys.readouterr().err
    checkpoints = founded.checkpoint_store.checkpoints()
    named = {
        digest for part in checkpoints[-1].parts.values() for digest in founded.checkpoint_store.read(part).objects
    }

    assert [c.number for c in checkpoints if c.complete][-2:] == [7 * EVERY_S, 8 * EVERY_S]
    assert newest_number(founded) == 8 * EVERY_S
    assert len(founded.checkpoint_store.objects(1)) <= 2 * len(named)
    assert said.count("archive.manifest_unreadable") == 5 * SHARDS * SHARDS
    assert MAYBE_ANOTHER_VERSION not in said


async def test_in_an_open_run_junk_that_may_be_of_another_version_keeps_its_objects(
    founded: FoundedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does it move a number there; and once it is older than what is kept, it goes."""
    founded.signatures = None
    founded.archivists = {shard: founded.archivist(shard) for shard in range(SHARDS)}
    old = manifest_path(founded, 1)
    founded.object_store.put(manifest_path(founded, FAR), b"junk")
    founded.object_store.put(old, b"junk")
    before = founded.checkpoint_store.objects(0)
    await on_schedule(founded, 4)

    assert newest_number(founded) == 6 * EVERY_S
    assert before <= founded.checkpoint_store.objects(0)
    assert old not in {part.path for part in founded.checkpoint_store.parts()}
    assert MAYBE_ANOTHER_VERSION in capsys.readouterr().err


async def test_show_tells_with_an_identity_what_a_rebuilding_sees(
    founded: FoundedRun, keys: KeyFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without one it believes names: a shard that somebody shut out is missing in what it made since."""
    founded.object_store.put(opening(founded.record, EVERY_S, 0, 999_999_999), b"")
    show(founded.object_store.where)
    unsigned = "".join(capsys.readouterr())
    show(founded.object_store.where, identity=keys.path / "identities" / RUN / "shard.toml")
    signed = "".join(capsys.readouterr())

    assert f"checkpoint {2 * EVERY_S:>8}  lacks shards 0" in unsigned
    assert f"checkpoint {2 * EVERY_S:>8}  complete" in signed
    assert "nobody signed this" in signed


async def test_what_is_removed_while_it_is_looked_at_is_no_junk(
    founded: FoundedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(BrokenObjectStore):
        def get(self, path: str, size_bytes_max: int) -> bytes:
            self.inner.remove([path])
            return super().get(path, size_bytes_max)

    assert CheckpointStore(Slow(founded.object_store), RUN, founded.signatures).believed() == []
    assert "archive.manifest_unreadable" not in capsys.readouterr().err


async def test_honest_manifests_in_other_places_count_for_nothing(founded: FoundedRun) -> None:
    """Of an earlier checkpoint, another shard, epoch, founding or run: a signature holds for one place."""
    _, manifests = founded.checkpoint_store.newest()
    later = msgspec.structs.replace(founded.record, nonce="zz", founded_at_s=founded.record.founded_at_s + 1e6)
    stored = {manifest.shard: founded.object_store.get(manifest.path, 1 << 20) for manifest in manifests}
    for shard, data in stored.items():
        here = manifest_path(founded, 9 * EVERY_S, shard=shard)
        for place in (
            here,
            manifest_path(founded, 2 * EVERY_S, shard=shard, epoch=9),
            manifest_path(founded, 9 * EVERY_S, shard=1 - shard),
            here.replace(".json", ".final.json"),
            here.replace(founding(founded.record), founding(later)),
            here.replace(f"{RUN}/", "other/"),
        ):
            founded.object_store.put(place, data)

    assert newest_number(founded) == 2 * EVERY_S
    assert CheckpointStore(founded.object_store, "other", founded.signatures).believed() == []


async def test_a_former_manifest_that_is_put_back_is_only_that(founded: FoundedRun) -> None:
    """Two shards of different checkpoints: a part says its number, and parts of different numbers make no checkpoint."""
    _, manifests = founded.checkpoint_store.newest()
    kept = founded.object_store.get(manifests[0].path, 1 << 20)
    await on_schedule(founded, 5)
    founded.object_store.put(manifests[0].path, kept)

    assert newest_number(founded) == 7 * EVERY_S
    assert {m.number for m in founded.checkpoint_store.newest()[1]} == {7 * EVERY_S}


ODD = [
    "demo/checkpoints/x/1/0.1.1.json",
    "demo/checkpoints/00000000000001-0000-\x1b[2J/1/00000.00002.000000001.json",
    "demo/checkpoints/00000000000001-0000-a/" + "9" * 200 + "/0.1.1.json",
    "demo/checkpoints/00000000000001-0000-a/\u0663/0.1.1.json",
    "demo/checkpoints/00000000000001-0000-a/1/0.1.1.json\n",
    "demo/checkpoints/checkpoints/00000000000001-0000-a/1/0.1.1.json",
    "demo/shard-0/\udcff",
    "not a run/\udcff",
]


@pytest.mark.parametrize("name", ODD, ids=ascii)
async def test_a_name_with_odd_characters_is_nobodys(
    founded: FoundedRun, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is neither a part nor an object, hinders no checkpoint, and `atoll archive show` does not print it as it is."""
    before = founded.checkpoint_store.parts()
    founded.object_store.put(name, b"{}")
    after = founded.checkpoint_store.parts()
    await on_schedule(founded)
    show(founded.object_store.where)
    said = "".join(capsys.readouterr())

    assert before == after
    assert newest_number(founded) == 3 * EVERY_S
    assert f"checkpoint {3 * EVERY_S:>8}  complete" in said
    assert "\x1b[2J" not in said


def test_odd_names_of_an_object_store_are_listed_or_said() -> None:
    store = S3Archive(MemoryStore(), "memory")
    store.put("demo/shard-0/%2e%2e", b"1")
    store.put("demo/shard-0/" + "a" * 64, b"1")

    assert CheckpointStore(store, RUN).objects(0) == {CheckpointObject("a" * 64, 1)}


# --- a shard that goes on -------------------------------------------------------------------------------------------------


async def test_a_shard_that_goes_on_signs_that_it_does(founded: FoundedRun) -> None:
    """So its final part lapses behind a lock, too; a signature moved to another epoch does not make it lapse."""
    await founded.checkpoint(1, final=True)
    await founded.serve(1, epoch=2)
    full = BrokenObjectStore(founded.object_store, fails_at=2)
    failed = await founded.archivist(1, full).checkpoint(founded.bus, founded.stores[1], lambda: founded.told)
    opened = [part for part in founded.checkpoint_store.believed() if part.opened]
    moved = opening(founded.record, 2 * EVERY_S, 0, 7)
    founded.object_store.put(moved, founded.object_store.get(opened[0].path, 1 << 10))
    founded.later()
    await founded.checkpoint(0)
    lapsed = newest_number(founded)
    await founded.checkpoint(1)

    assert not failed
    assert [(part.shard, part.epoch) for part in opened] == [(1, 2)]
    assert lapsed == 2 * EVERY_S
    assert newest_number(founded) == 4 * EVERY_S
    assert moved not in {part.path for part in founded.checkpoint_store.believed()}


# --- what a refusal says --------------------------------------------------------------------------------------------------


async def test_a_refusal_says_what_was_refused_and_why(founded: FoundedRun, tmp_path: Path) -> None:
    """Behind a lock: an open run's archive, and one that was signed with other keys; signing is the remedy of both."""
    path = manifest_path(founded, 2 * EVERY_S)
    store = founded.checkpoint_store
    part = next(part for part in store.parts() if part.path == path)
    own = KeyFolder(tmp_path / "others")
    own.create(["127.0.0.1"], time.time())
    other = read_identity(own.add("shard", "synchronizer", RUN, time.time())).signatures()
    manifest = store.read(part)
    CheckpointStore(founded.object_store, RUN, other).publish(manifest)
    with pytest.raises(CheckpointError, match=r"does not vouch[\s\S]*other keys[\s\S]*atoll archive sign") as foreign:
        store.read(part)
    CheckpointStore(founded.object_store, RUN).publish(manifest)
    with pytest.raises(CheckpointError, match=r"nobody signed this[\s\S]*an open run[\s\S]*atoll archive sign"):
        store.read(part)

    assert path in str(foreign.value)
    assert "open run" not in str(foreign.value)


async def test_the_operator_signs_what_he_trusts(
    founded: FoundedRun, keys: KeyFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that can be read of an open run's archive, and that a finished shard goes on; and says which."""
    signatures, founded.signatures = founded.signatures, None
    founded.archivists = {shard: founded.archivist(shard) for shard in range(SHARDS)}
    await founded.checkpoint(1, final=True)
    founded.later()
    await founded.serve(1, epoch=2)
    await founded.round()
    await founded.checkpoint()
    founded.object_store.put(manifest_path(founded, FAR), b"junk")
    founded.signatures = signatures
    sign(founded.object_store.where, run=RUN, identity=keys.path / "identities" / RUN / "shard.toml")
    said = "".join(capsys.readouterr())

    assert newest_number(founded) == 4 * EVERY_S
    assert [(part.shard, part.epoch) for part in founded.checkpoint_store.believed() if part.opened] == [(1, 2)]
    assert "shard 1 goes on in epoch 2" in said
    assert "not signed: a manifest of the archive is damaged" in said


# --- links, pipes and sizes -----------------------------------------------------------------------------------------------


def elsewhere(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    file = folder / ("a" * 64)
    file.write_bytes(b"dear")
    os.utime(file, (1, 1))
    return file


async def test_nothing_is_removed_through_a_link(founded: FoundedRun, tmp_path: Path) -> None:
    """The folder of a shard became a link to another one, whose files are old and named like ours."""
    file = elsewhere(tmp_path)
    shard = Path(founded.object_store.where) / RUN / "shard-0"
    shard.rename(tmp_path / "moved")
    shard.symlink_to(file.parent)
    with pytest.raises(CheckpointError, match=r"something else[\s\S]*demo/shard-0"):
        founded.checkpoint_store.sweep(0)
    founded.archivists[0] = founded.archivist(0)

    assert await founded.checkpoint(0) == [False]
    assert file.read_bytes() == b"dear"
    assert [there.name for there in file.parent.iterdir()] == [file.name]


def test_a_store_follows_no_link_and_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It reads, writes, lists and removes nothing there; the archive's own folder may be a link."""
    file = elsewhere(tmp_path)
    (tmp_path / "disk").mkdir()
    (tmp_path / "archive").symlink_to(tmp_path / "disk")
    store = FolderArchive(tmp_path / "archive")
    store.put("run/one", b"1")
    (tmp_path / "disk" / "run" / "folder").symlink_to(file.parent)
    (tmp_path / "disk" / "run" / "file").symlink_to(file)
    for path in ("run/folder/" + file.name, "../elsewhere/" + file.name, str(file), "run//one", "run/one\0"):
        for act in (
            lambda path=path: store.get(path, 10),
            lambda path=path: store.put(path, b"new"),
            lambda path=path: store.remove([path]),
        ):
            with pytest.raises(CheckpointError, match=r"something else|no path"):
                act()
    for prefix in ("run/folder", "..", "run/../.."):
        with pytest.raises(CheckpointError, match=r"something else|no path"):
            store.names(prefix)
    with pytest.raises(CheckpointError, match="something else"):
        store.get("run/file", 10)

    assert [name.path for name in store.names("")] == ["run/one"]
    assert [name.path for name in store.names("run")] == ["run/one"]
    assert capsys.readouterr().err.count("archive.link") == 2
    store.put("run/file", b"new")
    assert store.get("run/file", 3) == b"new"
    assert file.read_bytes() == b"dear"


async def test_only_objects_are_swept(founded: FoundedRun) -> None:
    folder = Path(founded.object_store.where) / RUN / "shard-0"
    (folder / "below").mkdir()
    orphan, notes, deep = folder / ("b" * 64), folder / "NOTES", folder / "below" / ("c" * 64)
    for file in (orphan, notes, deep):
        file.write_bytes(b"x")
        os.utime(file, (1, 1))

    assert founded.checkpoint_store.sweep(0) == 1
    assert (orphan.exists(), notes.exists(), deep.exists()) == (False, True, True)


@pytest.mark.parametrize("what", ["pipe", "enormous"])
async def test_an_object_that_is_no_object_ends_no_process(founded: FoundedRun, what: str) -> None:
    """A pipe would never end, a sparse file of terabytes fill the memory: the checkpoint before it is taken."""
    part = founded.checkpoint_store.checkpoints()[-1].parts[0]
    manifest = founded.checkpoint_store.read(part)
    place = Path(founded.object_store.where) / RUN / "shard-0" / manifest.pieces[0].frame.digest
    place.unlink()
    if what == "pipe":
        os.mkfifo(place)
    else:
        place.touch()
        os.truncate(place, 1 << 40)

    assert newest_number(founded) == EVERY_S


async def test_a_manifest_is_bounded_before_it_is_read(founded: FoundedRun, capsys: pytest.CaptureFixture[str]) -> None:
    path = manifest_path(founded, FAR)
    founded.object_store.put(path, b"")
    os.truncate(Path(founded.object_store.where) / path, MANIFEST_BYTES_MAX + (1 << 40))
    await on_schedule(founded)

    assert newest_number(founded) == 3 * EVERY_S
    assert "too large" in capsys.readouterr().err


@pytest.mark.parametrize("piece", ["frame", "state", "fragment_ledger"])
async def test_a_manifest_that_names_an_enormous_object_is_refused(founded: FoundedRun, piece: str) -> None:
    founded.signatures = None
    store = founded.checkpoint_store
    part = store.checkpoints()[-1].parts[0]
    manifest = store.read(part)
    large = msgspec.structs.replace(manifest.pieces[0], **{piece: CheckpointObject("a" * 64, 1 << 40)})
    store.publish(msgspec.structs.replace(manifest, pieces=(large, *manifest.pieces[1:])))

    with pytest.raises(CheckpointError, match="too large an object"):
        store.read(part)
    assert newest_number(founded) == EVERY_S


def test_a_draft_that_nobody_may_remove_hides_no_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever restores from a folder that it may only read finds what is there, whatever a killed shard has left beside it."""
    archive = FolderArchive(tmp_path)
    archive.put("run/object", b"there")
    draft = tmp_path / "run" / f"{BESIDE}draft"
    draft.write_bytes(b"half")
    os.utime(draft, (0.0, 0.0))

    def refused(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", refused)
    assert [name.path for name in archive.names("")] == ["run/object"]
    monkeypatch.undo()
    assert [name.path for name in archive.names("")] == ["run/object"]
    assert not draft.exists()
