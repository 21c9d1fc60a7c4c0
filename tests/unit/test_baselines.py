"""The yardsticks: data-parallel training and synchronous DiLoCo are what they say, to the bit where that is possible."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import typer
from typer.testing import CliRunner

from atoll.merge.global_update import AVERAGE, GlobalUpdate
from atoll.merge.outer import Nesterov
from atoll.settings import Settings
from atoll_learner.data.prepare import prepare
from atoll_learner.export import load_safetensors
from atoll_learner.feed import BatchReader
from atoll_learner.model import Params, init_params
from atoll_learner.process import LearnerWork, prepare_work
from atoll_learner.train import init_optimizer, make_step
from atoll_learner.train_settings import learning_rate
from benchmarks.baselines.__main__ import baseline, baseline_settings
from benchmarks.baselines.lockstep import BaselineResult, Feeds, Method, report_of, train_baseline

pytestmark = pytest.mark.second_tier

TINY = ["model.size=1", "model.context=32", "train.batch=2", "data.lease_blocks=2"]
STEP = 64
FILES = ("model", "model-average")
AVERAGED = (
    *("protocol.codec_up=f32", "protocol.correction=none", "protocol.merge=mean"),
    *("protocol.outer_lr=1", "protocol.outer_momentum=0"),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        words = " ".join(f"{word}{number * word % 17}" for word in range(120))
        (folder / f"{number}.txt").write_text(words, encoding="utf-8")
    prepare(sorted(folder.glob("*.txt")), folder / "shards", block_tokens=256, validation=0.2)
    return folder / "shards"


def settings_of(corpus: Path, *texts: str, tokens: int = 12 * STEP, learners: int = 2) -> Settings:
    said = (*TINY, f"data.dir={corpus}", f"protocol.tokens_target={tokens}", *texts)
    return baseline_settings(None, said, learners)


def trained(corpus: Path, method: Method, learners: int, *texts: str, tokens: int = 12 * STEP) -> BaselineResult:
    settings = settings_of(corpus, *texts, tokens=tokens, learners=learners)
    return train_baseline(settings, prepare_work(settings), method, learners, evaluations=4)


def plain(work: LearnerWork, settings: Settings) -> Params:
    target = settings.protocol.tokens_target
    reader = BatchReader(work.shards, work.train.sequence, work.train.batch, settings.seed)
    for start in range(0, work.shards.blocks, 2):
        reader.grant(0, start, min(start + 2, work.shards.blocks))
    step, params = make_step(work.model, work.train), init_params(work.model, settings.seed)
    state = init_optimizer(work.train, params)
    for number in range(target // work.train.tokens_per_step):
        rate = learning_rate(work.train, number * work.train.tokens_per_step, target)
        params, state, _ = step(params, state, reader.next(), rate)
    return params


def difference(ours: Params, theirs: Params) -> float:
    return max(float(np.abs(np.asarray(ours[name]) - np.asarray(theirs[name])).max()) for name in theirs)


def flat(params: Params) -> npt.NDArray[np.float32]:
    return np.concatenate([np.ravel(params[name]) for name in sorted(params)])


def test_one_data_parallel_learner_is_a_plain_loop(corpus: Path) -> None:
    settings = settings_of(corpus)
    expected = plain(prepare_work(settings), settings)

    assert difference(trained(corpus, "data-parallel", 1).params, expected) == 0.0


def test_one_synchronous_learner_is_plain_training(corpus: Path) -> None:
    """With outer rate 1, no momentum and exact transport, a - (a - b) is b but for the rounding of float32."""
    settings = settings_of(corpus)
    expected = plain(prepare_work(settings), settings)
    ours = trained(corpus, "diloco", 1, *AVERAGED, "protocol.interval_steps=4")

    assert difference(ours.params, expected) < 5e-6


def test_a_baseline_is_deterministic(corpus: Path) -> None:
    """Two trainings of the same settings and seed are equal to the bit; another seed is another training."""
    first, second = (trained(corpus, "diloco", 2, "protocol.interval_steps=4") for _ in range(2))
    other = trained(corpus, "diloco", 2, "protocol.interval_steps=4", "seed=1")

    assert difference(first.params, second.params) == 0.0
    assert (first.curve, first.final) == (second.curve, second.final)
    assert other.final != first.final


def test_a_step_of_m_learners_is_one_batch_m_times_larger(corpus: Path) -> None:
    """Data-parallel training of two takes half the steps; but for rounding it is a plain loop over both batches at once."""
    settings = settings_of(corpus)
    work, target = prepare_work(settings), settings.protocol.tokens_target
    feeds = Feeds(work, 2, settings.data.lease_blocks, settings.seed)
    step, params = make_step(work.model, work.train), init_params(work.model, settings.seed)
    state = init_optimizer(work.train, params)
    alone, of_one = params, init_optimizer(work.train, params)
    for number in range(6):
        rate = learning_rate(work.train, number * 2 * STEP, target)
        batches = feeds.next()
        params, state, _ = step(params, state, np.concatenate(batches), rate)
        alone, of_one, _ = step(alone, of_one, batches[0], rate)
    ours = trained(corpus, "data-parallel", 2)

    assert (ours.steps, ours.tokens) == (6, 12 * STEP)
    assert difference(ours.params, params) < 1e-4
    assert difference(ours.params, alone) > 1e-2


def test_meeting_takes_the_mean_of_what_learners_moved(corpus: Path) -> None:
    """One interval of two learners with outer rate 1: the mean of two plain trainings over their own batches."""
    texts = (*AVERAGED, "protocol.interval_steps=6")
    settings = settings_of(corpus, *texts)
    work, target = prepare_work(settings), settings.protocol.tokens_target
    feeds = Feeds(work, 2, settings.data.lease_blocks, settings.seed)
    step = make_step(work.model, work.train)
    both = [init_params(work.model, settings.seed)] * 2
    states = [init_optimizer(work.train, params) for params in both]
    for number in range(6):
        for m, batch in enumerate(feeds.next()):
            rate = learning_rate(work.train, number * 2 * STEP, target)
            both[m], states[m], _ = step(both[m], states[m], batch, rate)
    mean = {name: (np.asarray(both[0][name]) + np.asarray(both[1][name])) / 2 for name in both[0]}

    assert difference(trained(corpus, "diloco", 2, *texts).params, mean) < 1e-6


def test_learners_read_leases_of_their_own(corpus: Path) -> None:
    """No window is read twice within an epoch, and the next epoch begins when the blocks are used up."""
    work = prepare_work(settings_of(corpus))
    feeds = Feeds(work, 2, 2, 0)
    per_epoch = work.shards.blocks * (256 // 32)
    seen = [window.tobytes() for _ in range(per_epoch // 8) for batch in feeds.next() for window in batch]
    later = [window.tobytes() for _ in range(per_epoch // 4) for batch in feeds.next() for window in batch]

    assert len(set(seen)) == len(seen)
    assert set(later) & set(seen)


def test_accumulated_batches_keep_their_shape(corpus: Path) -> None:
    """With accumulation a learner's batch has micro-batches, and joining learners joins the rows of each."""
    work = prepare_work(settings_of(corpus, "train.accumulation=3"))

    assert [batch.shape for batch in Feeds(work, 2, 2, 0).next()] == [(3, 2, 33), (3, 2, 33)]
    assert trained(corpus, "data-parallel", 2, "train.accumulation=3", tokens=12 * STEP).steps == 2


def test_the_curve_is_measured_where_learners_meet(corpus: Path) -> None:
    """A start, about as many points as asked for, and the end, which the report counts as merged."""
    got = trained(corpus, "diloco", 2, "protocol.interval_steps=4")
    work = prepare_work(settings_of(corpus))
    report = report_of(got, work)

    assert [point.tokens for point in got.curve] == [0, 8 * STEP, 12 * STEP]
    assert report["validation"]["curve"][-1]["tokens_merged"] == report["tokens_by_fate"]["merged"] == 12 * STEP
    assert report["validation"]["final_bits_per_byte"] < report["validation"]["initial_bits_per_byte"]


@pytest.mark.parametrize(("method", "versions"), [("data-parallel", range(1, 7)), ("diloco", (4, 6))])
def test_the_average_is_that_of_a_run_over_every_version(corpus: Path, method: Method, versions: Sequence[int]) -> None:
    """Steps of data-parallel training and meetings of DiLoCo are versions, as in `atoll.merge.global_update`."""
    apart, kept = "protocol.interval_steps=4", "protocol.average_versions=3"
    whole = "protocol.codec_down=f32"
    settings = settings_of(corpus, apart, kept, whole)
    work = prepare_work(settings)
    got, without = (trained(corpus, method, 2, *texts) for texts in ((apart, kept, whole), (apart, whole)))
    rules = GlobalUpdate(Nesterov(1.0, 0.0), settings.protocol)
    values = flat(init_params(work.model, settings.seed))
    state = rules.init(values)
    for steps in versions:
        reached = flat(train_baseline(settings, work, method, 2, stop_tokens=2 * steps * STEP).params)
        advanced = rules.step(values, values - reached, state)
        values, state = advanced.values, advanced.state

    assert got.averaged is not None
    assert np.abs(flat(got.averaged) - state[AVERAGE]).max() < 1e-6
    assert (got.final, without.average) == (without.final, None)
    assert report_of(got, work)["validation"]["average_bits_per_byte"] == got.average != got.final


def test_a_divergence_is_an_outcome(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that are no numbers any more end the training with a report that says so, not with a figure."""
    monkeypatch.setattr("benchmarks.baselines.lockstep.learning_rate", lambda *_: math.nan)
    got = trained(corpus, "data-parallel", 2)

    assert (got.finite, got.final, got.steps) == (False, None, 2)
    assert report_of(got, prepare_work(settings_of(corpus)))["ended"] == "failed"


def test_the_verb_writes_a_report_and_a_model(corpus: Path, tmp_path: Path) -> None:
    """`--stop` leaves the first part of a longer schedule, from which another training can begin."""
    words = ["--method", "data-parallel", "--learners", "2", "--tokens", str(12 * STEP)]
    words += ["--stop", str(4 * STEP), "--seed", "3", "--out", str(tmp_path), "--set", f"data.dir={corpus}"]
    for text in (*TINY, "protocol.average_versions=2"):
        words += ["--set", text]
    app = typer.Typer()
    app.command()(baseline)
    result = CliRunner().invoke(app, words)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))

    assert result.exit_code == 0, result.output
    assert (report["tokens_trained"], report["seed"], report["group"]) == (4 * STEP, 3, 2)
    model = prepare_work(settings_of(corpus)).model
    newest, average = (load_safetensors([tmp_path / f"{name}.safetensors"], init_params(model, 0)) for name in FILES)
    assert 0.0 < difference(newest, average) < 1.0
