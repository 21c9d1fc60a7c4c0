"""Data names no code: what a record, an archive or a file of another says is run only where our own settings say it, too."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from atoll.archive.object_store import FolderArchive
from atoll.archive.replay import RunReplay
from atoll.archive.rounds import RoundStore
from atoll.base.clock import SystemClock
from atoll.base.errors import SettingsError
from atoll.bus.interface import Bus
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.membership import found_or_join
from atoll.local.options import UpPlan, plan
from atoll.protocol.settings import ProtocolSettings
from atoll.run.folder import EMBEDDED, RunFile, RunFolder
from atoll.run.record import read_run
from atoll.settings import load
from atoll.settings.sections import ArchiveSettings
from atoll.wire.messages import RunRecord
from atoll.wire.subjects import Subjects
from atoll_synchronizer import process
from atoll_synchronizer.service import ShardService
from support.command_line import invoked
from support.founded_run import FoundedRun, TurnedClock, run_record
from support.memory_world import MemoryWorld, settings
from support.up_requests import up_request

DEADLINE_S: Final = 60.0
NOT_TOLD: Final = "this process was not told to run it"
CODE: Final = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
def outer(lr):
    import optax
    return optax.sgd(lr, momentum=0.5)
windows = outer
"""


@dataclass(frozen=True)
class Trap:
    """A module that can be imported, and leaves a file when it is."""

    folder: Path
    name: str

    @property
    def ran(self) -> bool:
        return (self.folder / "ran").exists()

    @property
    def outer(self) -> str:
        return f"{self.name}:outer"

    def in_record(self, record: RunRecord) -> RunRecord:
        protocol = msgspec.structs.replace(record.protocol, outer=self.outer, correction="none")
        return msgspec.structs.replace(record, protocol=protocol.check())


@pytest.fixture
def trap(tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch) -> Trap:
    """A module of a name of its own, so that none was imported before."""
    folder = tmp_path / "code"
    folder.mkdir()
    name = f"trap_{run.replace('-', '_')}"
    (folder / f"{name}.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    return Trap(folder, name)


def reach(monkeypatch: pytest.MonkeyPatch, broker: MemoryBroker) -> None:
    async def opened(url: str, run: str, **_: Any) -> Bus:  # noqa: ANN401  (how it would be reached)
        del url
        return MemoryBus(run, broker)

    monkeypatch.setattr(process, "open_bus", opened)


async def served(*assignments: str) -> None:
    """Be a synchronizer's process; one that is not refused would serve for ever."""
    async with asyncio.timeout(DEADLINE_S):
        await process.serve(load(assignments=assignments, environment={}).settings)


async def test_a_shard_runs_no_code_that_a_founder_names(
    run: str, trap: Trap, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    founded = FoundedRun(run_record(run), FolderArchive(tmp_path / "archive"), TurnedClock())
    await founded.found()
    record = await founded.bus.get_record(Subjects(run).run_record)
    assert record is not None
    hostile = msgspec.structs.replace(trap.in_record(founded.record), founder="mallory")
    await founded.bus.put_record(Subjects(run).run_record, msgspec.json.encode(hostile), expected=record.revision)
    reach(monkeypatch, founded.broker)

    with pytest.raises(SettingsError, match=NOT_TOLD) as refused:
        await served(f"run={run}")
    with pytest.raises(SettingsError, match=NOT_TOLD):
        ShardService(founded.bus, hostile, 0, SystemClock())

    assert not trap.ran
    assert f"protocol.outer = {trap.outer} of the run, nesterov here" in str(refused.value)
    assert "ATOLL_PROTOCOL__OUTER" in str(refused.value)


async def test_an_archive_whose_seal_was_made_anew_runs_nothing_at_restore(
    run: str, trap: Trap, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    founded = FoundedRun(run_record(run), FolderArchive(tmp_path / "archive"), TurnedClock())
    await founded.found()
    await founded.round()
    await founded.checkpoint()
    store = founded.checkpoint_store
    _, manifests = store.newest()
    for manifest in manifests:
        store.publish(msgspec.structs.replace(manifest, run=trap.in_record(manifest.run)))
    assert founded.checkpoint_store.newest()[1][0].run.protocol.outer == trap.outer
    broker = MemoryBroker()
    reach(monkeypatch, broker)
    told = [f"run={run}", f"synchronizer.restore={tmp_path / 'archive'}"]

    with pytest.raises(SettingsError, match=NOT_TOLD):
        await served(*told)

    assert not trap.ran
    assert await read_run(MemoryBus(run, broker), Subjects(run)) is None


async def test_a_learner_runs_no_code_that_a_founder_names(run: str, trap: Trap) -> None:
    bus, record = MemoryBus(run, MemoryBroker()), run_record(run)
    await found_or_join(bus, trap.in_record(record))
    joined, _ = await found_or_join(bus, record)

    assert joined.protocol.outer == trap.outer
    assert not trap.ran


def test_a_replay_runs_no_code_that_an_archive_names(run: str, trap: Trap, tmp_path: Path) -> None:
    """Neither the library nor the verb; with a setting of one's own both go on to the rounds."""
    rounds = RoundStore.of(FolderArchive(tmp_path / "archive"), run_record(run))
    rounds.put_run(trap.in_record(run_record(run)))
    words = ["replay", run, "--archive", str(tmp_path / "archive")]

    with pytest.raises(SettingsError, match=NOT_TOLD):
        RunReplay(rounds)
    assert NOT_TOLD in str(invoked(words).exception)
    assert NOT_TOLD in str(invoked([*words, "--set", "protocol.outer=optax:adam"]).exception)
    assert NOT_TOLD in str(invoked(["attribute", *words[1:], "--fragment", "0", "--round", "1"]).exception)
    assert not trap.ran
    assert "no such round is retained" in str(invoked([*words, "--set", f"protocol.outer={trap.outer}"]).exception)
    assert trap.ran


def test_code_that_all_hosts_name_is_trained_with_and_replayed(run: str, trap: Trap, tmp_path: Path) -> None:
    archive = ArchiveSettings(url=str(tmp_path / "archive"), contributions=True)
    protocol = settings(tokens_target=600, outer=trap.outer, correction="none", outer_lr=0.5)
    world = MemoryWorld(run, protocol, archive=archive)
    world.go(lambda: world.train("a", 1.0), lambda: world.train("b", 0.5))
    world.home.stop()
    store = FolderArchive(tmp_path / "archive")
    rounds = RoundStore(store, run, store.names(f"{run}/rounds")[0].path.split("/")[2])

    made = [each for fragment in range(4) for each in RunReplay(rounds, trap.outer).fragment(fragment)]

    assert trap.ran
    assert made
    assert [each.differences for each in made if not each.identical] == []


@pytest.fixture
def earlier(tmp_path: Path, trap: Trap) -> Path:
    """The folder of a run that names code, and a folder in which compiled programs lie."""
    folder = tmp_path / "earlier"
    kept = {"data.source": f"{trap.name}:windows", "learner.compile_cache": str(tmp_path / "programs")}
    with RunFolder(folder) as opened:
        opened.save(RunFile(run="earlier", learners=2, settings=kept, broker=EMBEDDED, tokens=10**9))
    return folder


def begun(out: Path, like: Path | None, *assignments: str) -> UpPlan:
    """Return the plan of a run like another one, or of one that goes on."""
    return plan(up_request(out=out, like=like, assignments=assignments), {})


def test_a_file_of_an_earlier_run_names_no_code(tmp_path: Path, earlier: Path, trap: Trap) -> None:
    """Neither a run that begins like it, nor one that goes on: what it names has to be given again, and then it holds."""
    source = f"{trap.name}:windows"
    for out, like in ((tmp_path / "next", earlier), (earlier, None)):
        with pytest.raises(SettingsError, match="only code that you name yourself") as refused:
            begun(out, like)
        assert f"data.source = {source} (from " in str(refused.value)
        up = begun(out, like, f"data.source={source}")
        assert up.settings.data.source == source
        assert up.settings.learner.compile_cache is None, "JAX runs what lies there"
    assert not trap.ran


def test_an_earlier_run_chooses_among_the_optimizers_of_the_list(tmp_path: Path, earlier: Path, trap: Trap) -> None:
    file = earlier / "run.json"
    told = json.loads(file.read_text(encoding="utf-8"))
    for outer, allowed in (("optax:adam", True), (trap.outer, False)):
        told["settings"] = {"protocol.outer": outer, "protocol.correction": "none"}
        file.write_text(json.dumps(told), encoding="utf-8")
        if allowed:
            assert begun(tmp_path / "next", earlier).settings.protocol.outer == outer
            continue
        with pytest.raises(SettingsError, match="only code that you name yourself"):
            begun(tmp_path / "next", earlier)


@pytest.mark.parametrize(
    "spec", ["", "sgd", "optax:", ":x", "a b", "nesterov:", "a:b.c", "a:b()", "a:b\x1b[2J", "os:system('x')", "a/b:c"]
)
def test_what_is_no_name_of_an_optimizer_is_no_setting_and_in_no_record(spec: str) -> None:
    record = run_record("r")
    forged = msgspec.structs.replace(record, protocol=msgspec.structs.replace(record.protocol, outer=spec))

    assert "unknown outer optimizer" in forged.fault()
    with pytest.raises(SettingsError, match="unknown outer optimizer"):
        ProtocolSettings(outer=spec, correction="none").check()
