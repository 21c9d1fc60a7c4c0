"""When an evaluator writes the model, which it takes, as export does, from the run record."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from atoll.archive.object_store import FolderArchive
from atoll.base.errors import AccessDenied, BrokerUnavailable, PeerMisbehaved, SettingsError, StorageFull
from atoll.bus.interface import Record
from atoll.bus.memory import MemoryBus
from atoll.run.heads import read_heads
from atoll.run.merged_model import MergedModel
from atoll.settings import load
from atoll.wire.events import EvaluatedEvent, event_of
from atoll.wire.limits import Info
from atoll.wire.messages import RunRecord
from atoll.wire.subjects import Subjects
from atoll_learner import evaluate
from atoll_learner.evaluate import MeasuringPace, evaluate_until, export_at_stop, measure_and_export
from atoll_learner.evaluations import Evaluation, ReferenceEvaluation
from atoll_learner.export import first_values
from atoll_learner.process import LearnerWork, prepare_work
from atoll_learner.run_export import model_of, work_of
from support.events import fields
from support.founded_run import FRAGMENTS, SHARDS, FoundedRun, TurnedClock, run_record, say_lease
from support.regions import free_port
from support.short_shards import short_shards

TARGET = 700
DEADLINE_S = 60.0
LONG_S = 3600.0
"""A pause that nothing of a test outlasts."""
BUSY_S = 0.1


@dataclass
class NotedEvaluation(Evaluation):
    """Measures nothing, and notes what is asked of it; writing fails as often as `failures` says."""

    failures: int = 0
    prepared: bool = False
    written: list[int] = field(default_factory=list)
    concluded: list[int] = field(default_factory=list)

    def measure(self, run: RunRecord, merged: MergedModel, tokens: int) -> EvaluatedEvent:
        del run
        return fields(EvaluatedEvent, run_tokens=tokens, values={"value": 1.0}, versions_max=merged.versions_max)

    def prepare(self) -> None:
        self.prepared = True

    def write(self, run: RunRecord, merged: MergedModel) -> None:
        del run
        if self.failures:
            self.failures -= 1
            raise StorageFull("full", todo="make room")
        self.written.append(merged.versions_max)

    def conclude(self, run: RunRecord, merged: MergedModel, began_s: float) -> None:
        del run, began_s
        self.concluded.append(merged.versions_max)


@dataclass
class BusyEvaluation(NotedEvaluation):
    """Uses a core for a while at each measurement, and counts them."""

    asked: int = 0

    def measure(self, run: RunRecord, merged: MergedModel, tokens: int) -> EvaluatedEvent:
        until_s = time.process_time() + BUSY_S
        while time.process_time() < until_s:
            pass
        self.asked += 1
        return super().measure(run, merged, tokens)


class LookedAtBus(MemoryBus):
    """Counts the looks at the lease of the last shard."""

    looks = 0

    async def get_record(self, subject: str) -> Record | None:
        self.looks += subject == Subjects("r").lease(SHARDS - 1)
        return await super().get_record(subject)


@pytest.fixture
def run(tmp_path: Path) -> FoundedRun:
    record = run_record("r")
    protocol = msgspec.structs.replace(record.protocol, tokens_target=TARGET)
    record = msgspec.structs.replace(record, protocol=protocol)
    return FoundedRun(record, FolderArchive(tmp_path / "archive"), TurnedClock())


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not done():  # noqa: ASYNC110  (what is waited for happens in threads)
            await asyncio.sleep(0.01)


async def measured(run: FoundedRun) -> list[int]:
    entries = await run.bus.replay(run.record.subjects.event("evaluated", "*"), after=0, limit=1000)
    return [msgspec.json.decode(event_of(entry.subject, entry.data).fields["versions_max"]) for entry in entries]


async def close(run: FoundedRun) -> None:
    for shard in range(SHARDS):
        await say_lease(run, TARGET, shard, closed=True)


@pytest.mark.parametrize(
    ("pace", "spent_s", "expected_s"), [(MeasuringPace(15.0, 0.06), 3.0, 50.0), (MeasuringPace(15.0, 0.06), 0.6, 15.0)]
)
def test_what_took_long_is_measured_less_often(pace: MeasuringPace, spent_s: float, expected_s: float) -> None:
    """Three seconds of a core in fifty are 6 %; where it takes less the interval is as it was told."""
    assert pace.pause_s(spent_s) == pytest.approx(expected_s)
    assert MeasuringPace(15.0).pause_s(1000.0) == 15.0


def test_a_model_that_nobody_changed_is_not_measured_again(run: FoundedRun) -> None:
    """A run that is over would fill its event log with one figure."""

    async def scenario(evaluation: BusyEvaluation) -> None:
        await run.found()
        stop, bus = asyncio.Event(), LookedAtBus("r", run.broker)
        following = asyncio.create_task(evaluate_until(stop, bus, "r", evaluation, MeasuringPace(0.01), last=False))
        await until(lambda: evaluation.asked == 1)
        bus.looks = 0
        await until(lambda: bus.looks >= 3)
        assert evaluation.asked == 1
        await run.commit(0)
        await until(lambda: evaluation.asked == 2)
        stop.set()
        await following

    asyncio.run(scenario(BusyEvaluation()))


class GoneBus(MemoryBus):
    """A broker that answers nothing: a publish waits, as it does for a minute, and no echo comes back."""

    async def publish(self, subject: str, data: bytes, *, msg_id: str, info: Info | None = None) -> None:
        del subject, data, msg_id, info
        await asyncio.Event().wait()

    async def reach(self, timeout_s: float) -> bool:
        del timeout_s
        return False


class RefusingBus(GoneBus):
    """Its broker does not let us in any more."""

    async def reach(self, timeout_s: float) -> bool:
        del timeout_s
        raise AccessDenied("the broker does not let us in", todo="ask for a new key")


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [(GoneBus, BrokerUnavailable, "told to stop"), (RefusingBus, AccessDenied, "does not let us in")],
)
def test_who_is_told_to_stop_waits_no_minute_for_a_broker_and_says_why(
    run: FoundedRun, kind: type[GoneBus], error: type[Exception], words: str
) -> None:
    """It waited for one and more, and ignored SIGTERM meanwhile; of a broker that refused it said that it did not answer."""

    async def scenario(evaluation: NotedEvaluation) -> None:
        await run.found()
        stop, bus = asyncio.Event(), kind("r", run.broker)
        working = asyncio.create_task(measure_and_export(stop, bus, "r", evaluation, MeasuringPace(LONG_S), last=True))
        stop.set()
        with pytest.raises(error, match=words):
            async with asyncio.timeout(DEADLINE_S):
                await working

    asyncio.run(scenario(NotedEvaluation()))


@pytest.mark.parametrize("sound", [False, True])
def test_a_run_that_will_never_be_readable_ends_an_evaluator_that_has_measured_nothing(
    run: FoundedRun,
    sound: bool,  # noqa: FBT001
) -> None:
    async def scenario(evaluation: NotedEvaluation) -> None:
        await run.found()
        stop = asyncio.Event()
        if not sound:
            await damage(run)
        following = asyncio.create_task(evaluate_until(stop, run.bus, "r", evaluation, MeasuringPace(0.01), last=False))
        if not sound:
            with pytest.raises(PeerMisbehaved):
                await following
            return
        await until(lambda: evaluation.prepared)
        with capture_logs() as lines:
            await damage(run)
            await until(lambda: sum(line["event"] == "evaluation.skipped" for line in lines) > 1)
        assert not following.done()
        stop.set()
        await following

    asyncio.run(scenario(NotedEvaluation()))


async def damage(run: FoundedRun) -> None:
    record = await run.bus.get_record(run.record.subjects.run_record)
    assert record is not None
    await run.bus.put_record(run.record.subjects.run_record, b"\xc1", expected=record.revision)


def test_a_run_that_ends_during_a_pause_is_exported_at_once(run: FoundedRun) -> None:
    """Nobody has to ask, however long the pause is; one shard that still merges is waited for."""

    async def scenario(evaluation: NotedEvaluation) -> list[int]:
        await run.found()
        stop, bus = asyncio.Event(), LookedAtBus("r", run.broker)
        following = asyncio.create_task(evaluate_until(stop, bus, "r", evaluation, MeasuringPace(LONG_S), last=True))
        await until(lambda: evaluation.prepared)
        await run.commit(0)
        await say_lease(run, TARGET, 0, closed=True)
        await say_lease(run, TARGET, 1)
        bus.looks = 0
        await until(lambda: bus.looks >= 2)
        assert not evaluation.written
        await close(run)
        await until(lambda: bool(evaluation.concluded))
        stop.set()
        exported = await following
        assert exported == await read_heads(run.bus, run.record)
        await export_at_stop(run.bus, "r", evaluation, exported)
        return await measured(run)

    evaluation = NotedEvaluation()

    assert asyncio.run(scenario(evaluation))[-1] == 1
    assert (evaluation.written, evaluation.concluded) == ([1], [1]), "the stop has nothing to add"


def test_what_goes_on_after_its_export_is_exported_again(run: FoundedRun) -> None:
    async def scenario(evaluation: NotedEvaluation) -> None:
        await run.found()
        await close(run)
        stop = asyncio.Event()
        following = asyncio.create_task(
            evaluate_until(stop, run.bus, "r", evaluation, MeasuringPace(LONG_S), last=True)
        )
        await until(lambda: bool(evaluation.concluded))
        for fragment in range(FRAGMENTS):
            await run.commit(fragment)
        stop.set()
        await export_at_stop(run.bus, "r", evaluation, await following)

    evaluation = NotedEvaluation()
    asyncio.run(scenario(evaluation))

    assert (evaluation.written, evaluation.concluded) == ([0, 1], [0, 1])


def test_a_full_disk_costs_no_measurement_and_is_tried_again(run: FoundedRun) -> None:
    """What cannot be written is measured and told all the same; at the stop a failure is one."""

    async def scenario(evaluation: NotedEvaluation) -> list[int]:
        await run.found()
        await close(run)
        stop = asyncio.Event()
        following = asyncio.create_task(evaluate_until(stop, run.bus, "r", evaluation, MeasuringPace(0.01), last=True))
        await until(lambda: bool(evaluation.concluded))
        stop.set()
        await following
        await run.commit(0)
        evaluation.failures = 1
        with pytest.raises(StorageFull):
            await export_at_stop(run.bus, "r", evaluation, await following)
        return await measured(run)

    evaluation = NotedEvaluation(failures=2)
    told = asyncio.run(scenario(evaluation))

    assert (evaluation.written, evaluation.concluded) == ([0], [0])
    assert told == [0, 0, 0, 1], "two that failed, the third, and the one at the stop"


@pytest.mark.parametrize("last", [False, True])
def test_who_is_told_to_stop_while_no_broker_answers_leaves(monkeypatch: pytest.MonkeyPatch, *, last: bool) -> None:
    """However patient it is otherwise; with a model to write it says that there is none."""
    monkeypatch.setattr(evaluate, "STOP_PATIENCE_S", 0.1)
    address = f"broker.url=nats://127.0.0.1:{free_port()}"
    settings = load(None, [address, "broker.patience_s=3600"], {}).settings

    async def scenario() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, stop.set)
        async with asyncio.timeout(DEADLINE_S):
            assert await evaluate._open_bus(stop, settings, last=last) is None
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with pytest.raises(BrokerUnavailable, match="told to stop") if last else contextlib.nullcontext():
        asyncio.run(scenario())


RUN_OF = ("model.size=1", "model.context=64", "model.heads=2", "model.qk_norm=true")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_shards(tmp_path_factory.mktemp("text"))


def told(text: Path, *settings: str) -> LearnerWork:
    return prepare_work(load(None, (f"data.dir={text}", *settings)).settings)


def record_of(work: LearnerWork) -> RunRecord:
    return msgspec.structs.replace(run_record("r"), model=work.model.describe())


@pytest.mark.parametrize("said", [(), ("model.size=xs",), ("model.layers=2", "model.tied=false"), RUN_OF])
def test_a_reader_has_the_model_of_the_run_whatever_it_says(text: Path, said: tuple[str, ...]) -> None:
    founder = told(text, *RUN_OF)
    reader = work_of(record_of(founder), told(text, *said))

    assert reader.model == founder.model
    assert reader.train.sequence == founder.train.sequence == 64


@pytest.mark.parametrize("model", ["", "a forest", "{}", "[1]", '{"layers": 2}', "[" * 4000])
def test_a_model_of_somebody_s_own_is_refused_in_words(text: Path, model: str) -> None:
    run = msgspec.structs.replace(run_record("r"), model=model)

    assert model_of(run) is None
    with pytest.raises(SettingsError, match="not the reference model"):
        work_of(run, told(text))


def test_text_of_a_larger_vocabulary_is_refused(text: Path) -> None:
    founder = told(text, *RUN_OF)
    small = msgspec.structs.replace(run_record("r"), model=founder.model.model_copy(update={"vocab": 200}).describe())

    with pytest.raises(SettingsError, match="tokens that the model of run"):
        work_of(small, told(text))


def test_an_evaluation_measures_and_writes_the_run_s_model(text: Path, tmp_path: Path) -> None:
    founder = told(text, *RUN_OF)
    params: dict[str, Any] = first_values(founder.model, 0, None)
    merged = MergedModel(params, 0, 0)
    settings = load(None, (f"data.dir={text}",)).settings
    evaluation = ReferenceEvaluation(settings, prepare_work(settings), tmp_path)
    evaluation.write(record_of(founder), merged)
    measured = evaluation.measure(record_of(founder), merged, 0)
    evaluation.conclude(record_of(founder), merged, 0.0)

    assert measured.bits_per_byte == pytest.approx(8.0, abs=0.3)
    assert '"num_hidden_layers": 1' in (tmp_path / "config.json").read_text(encoding="utf-8")
    assert (tmp_path / "validation.json").exists()
