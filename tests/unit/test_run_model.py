"""Evaluator and export take the model from the run record: whoever says none has the right one all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.base.errors import SettingsError
from atoll.run.merged_model import MergedModel
from atoll.settings import load
from atoll.wire.messages import RunRecord
from atoll_learner.evaluations import ReferenceEvaluation
from atoll_learner.export import first_values
from atoll_learner.process import LearnerWork, prepare_work
from atoll_learner.run_export import model_of, work_of
from support.founded_run import run_record
from support.short_shards import short_shards

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
