"""What is measured of the values of a run: once for the same values, of the newest heads, as of the versions that were read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from atoll.archive.object_store import FolderArchive
from atoll.base.errors import BlobGone
from atoll.bus.interface import Bus
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.local.run_store import lost_commits, newest_is_exported
from atoll.run import delta_chain, heads, merged_model
from atoll.run.folder import RunFolder
from atoll.run.merged_model import MergedModel, read_merged
from atoll.settings import load
from atoll.wire.messages import Head, RunRecord
from atoll_learner.evaluate import Moment, ends_before
from atoll_learner.evaluations import MeasureOnce, measure_merged
from atoll_learner.process import LearnerWork, prepare_work
from atoll_learner.run_export import Measured, write_measured
from support.founded_run import FRAGMENTS, TOKENS, FoundedRun, TurnedClock, run_record
from support.short_shards import short_shards


class CountedMeasure:
    """A measure that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, params: dict[str, Any]) -> float:
        self.asked += 1
        return float(sum(np.asarray(leaf, np.float64).sum() for leaf in params.values()))


def values(number: float, dtype: Any = np.float32) -> dict[str, Any]:  # noqa: ANN401  (any dtype)
    """Return parameters that are new arrays each time, as each reading of a run makes them."""
    return {"w": np.full((2, 3), number, dtype), "scale": np.asarray(number, dtype)}


def test_the_last_point_of_a_curve_and_the_export_are_one_measurement() -> None:
    """Newest values and average are each measured once, though the run's model is read anew for the export."""
    counting = CountedMeasure()
    measure = MeasureOnce(counting)
    curve, export = (
        measure_merged(MergedModel(values(2.0), 7, 7, values(1.0)), measure, tokens, clock=lambda: 0.0)
        for tokens in (90, 100)
    )

    assert counting.asked == 2
    assert msgspec.structs.replace(curve, run_tokens=100) == export
    assert (export.bits_per_byte, export.average) == (14.0, 7.0)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_other_values_at_the_same_versions_are_measured(dtype: Any) -> None:  # noqa: ANN401
    """A run that went back to a checkpoint gives versions out a second time; one bit in one leaf is another model."""
    counting = CountedMeasure()
    measure = MeasureOnce(counting)
    other = values(2.0, dtype)
    other["scale"] = np.asarray(3.0, dtype)

    assert measure(values(2.0, dtype)) != measure(other)
    assert measure(values(2.0, dtype)) == 14.0
    assert counting.asked == 2


@pytest.mark.parametrize(
    ("target", "former", "now_tokens", "first"),
    [
        (1000, Moment(500, 10.0, 3.0), 900, True),
        (1000, Moment(500, 10.0, 1.0), 900, False),
        (1000, Moment(500, 10.0, 3.0), 1000, True),
        (0, Moment(500, 10.0, 3.0), 900, False),
        (1000, Moment(900, 10.0, 3.0), 900, False),
        (1000, Moment(), 900, False),
    ],
    ids=["two seconds are left", "there is time", "at the target", "no target", "nobody trains", "the first one"],
)
def test_a_measurement_that_the_end_would_overtake_is_left_to_the_end(
    target: int, former: Moment, now_tokens: int, *, first: bool
) -> None:
    assert ends_before(target, former, Moment(now_tokens, 18.0)) == first


async def test_versions_and_tokens_are_those_of_the_values_that_were_read(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame that is gone is read by the newer head: the measurement of its values must not stand at too few tokens."""
    founded = FoundedRun(run_record(run), FolderArchive(tmp_path), TurnedClock())
    await founded.found()
    seen = await heads.read_heads(founded.bus, founded.record)
    await founded.commit(0)
    read = delta_chain.read_values

    async def former(*_: object) -> dict[int, Head]:
        return dict(seen)

    async def gone(bus: Bus, record: RunRecord, head: Head, *more: Any) -> Any:  # noqa: ANN401  (passed on)
        if (head.fragment, head.version) == (0, 0):
            raise BlobGone("removed")
        return await read(bus, record, head, *more)

    monkeypatch.setattr(merged_model, "read_heads", former)
    monkeypatch.setattr(heads, "read_values", gone)
    merged = await read_merged(founded.bus, founded.record)

    assert (merged.versions_min, merged.versions_max, merged.token_fragments) == (0, 1, TOKENS)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> LearnerWork:
    """Return what an export must know of the text that it was measured on."""
    shards = short_shards(tmp_path_factory.mktemp("text"))
    return prepare_work(load(None, (f"data.dir={shards}", "model.size=1", "model.context=32")).settings)


async def export(run: FoundedRun, folder: RunFolder, work: LearnerWork) -> None:
    merged = await read_merged(run.bus, run.record)
    write_measured(work, folder.out, merged, Measured(8.0, 2.0, None), time.monotonic())


async def test_an_export_is_the_newest_until_any_fragment_goes_on(tmp_path: Path, work: LearnerWork) -> None:
    """Also a fragment whose version lies between the others', so that neither bound of the versions tells of it."""
    run = FoundedRun(run_record("r"), FolderArchive(tmp_path / "archive"), TurnedClock())
    await run.found()
    for fragment in range(FRAGMENTS):
        for _ in range((0, 1, 1, 3)[fragment]):
            await run.commit(fragment)
    with RunFolder(tmp_path / "run") as folder:
        assert not await newest_is_exported(run.bus, "r", folder), "nothing is there"
        await export(run, folder, work)
        assert await newest_is_exported(run.bus, "r", folder)
        await run.commit(1)
        assert not await newest_is_exported(run.bus, "r", folder)
        await export(run, folder, work)
        assert await newest_is_exported(run.bus, "r", folder)


async def test_a_run_that_the_broker_does_not_have_has_no_export(tmp_path: Path, work: LearnerWork) -> None:
    run = FoundedRun(run_record("r"), FolderArchive(tmp_path / "archive"), TurnedClock())
    await run.found()
    with RunFolder(tmp_path / "run") as folder:
        await export(run, folder, work)
        assert not await newest_is_exported(MemoryBus("r", MemoryBroker()), "r", folder)


async def test_heads_that_went_back_are_told(tmp_path: Path) -> None:
    """More commits were seen than the heads have: somebody wrote old ones again, or the store was put back."""
    run = FoundedRun(run_record("r"), FolderArchive(tmp_path / "archive"), TurnedClock())
    await run.found()
    await run.round()

    assert await lost_commits(run.bus, "r", FRAGMENTS) is None
    assert "4 of 5 commits" in str(await lost_commits(run.bus, "r", FRAGMENTS + 1))
    assert await lost_commits(MemoryBus("r", MemoryBroker()), "r", 0) is None, "nothing was lost where nothing was seen"
