"""What files, variables, flags and the learner's own sections may say together, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from atoll.base.errors import SettingsError
from atoll.base.quantities import Description, Text
from atoll.cli.options import with_flags
from atoll.local.options import UpRequest, plan
from atoll.settings import load
from atoll.wire.subjects import REGION_NAMES
from atoll_learner.model_settings import ModelSettings, model_settings
from atoll_learner.sections import complete
from atoll_learner.train_settings import TrainSettings
from support.up_requests import up_request


def test_the_value_of_a_misspelt_name_is_not_repeated() -> None:
    for assignments, environment in ((["broker.pasword=hunter2"], {}), ([], {"ATOLL_BROKER__PASWORD": "hunter2"})):
        with pytest.raises(SettingsError, match=r"unknown setting broker\.pasword") as refused:
            load(None, assignments, environment)

        assert "hunter2" not in refused.value.explain()


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000 + "]" * 5000])
def test_a_file_that_python_cannot_hold_is_refused(tmp_path: Path, value: str) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f"protocol.tokens_target = {value}\n", encoding="utf-8")

    with pytest.raises(SettingsError, match="the configuration is not TOML") as refused:
        load(config, [], {})

    assert str(config) in refused.value.explain()


def test_a_list_deeper_than_python_reads_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"up\.corpus(\.0)? is wrong"):  # newer Pythons read it: no path then
        load(None, [f"up.corpus={'[' * 5000}{']' * 5000}"], {})


def test_an_unknown_table_is_refused_also_when_it_is_empty(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[brokers]\n", encoding="utf-8")

    with pytest.raises(SettingsError, match="unknown setting brokers"):
        load(config, [], {})


@pytest.mark.parametrize("name", ["data.dir", "learner.checkpoint_dir", "log.dump_dir"])
def test_an_empty_path_is_not_the_working_directory(name: str) -> None:
    """`--set data.dir=$DIR` with a variable that is not set."""
    with pytest.raises(SettingsError, match=f"{name} is wrong: a path cannot be empty"):
        load(None, [f"{name}="], {})


def test_a_name_is_a_value_or_a_table_and_not_both(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('broker = "nats://x:4222"\n', encoding="utf-8")

    with pytest.raises(SettingsError, match="a value in one place and a table in another") as refused:
        load(config, ["broker.url=nats://y:4222"], {})

    assert str(config) in refused.value.explain()
    assert "--set broker.url" in refused.value.explain()


@pytest.mark.parametrize(
    ("request_", "typed", "setting"),
    [
        (up_request(learners=0), "--learners", "up.learners"),
        (up_request(minutes=-3.0), "--minutes", "up.minutes"),
        (up_request(throttle=("learner-1=0",)), "--throttle", "up.throttle.learner-1"),
        (
            up_request(assignments=tuple(with_flags([], protocol__tokens_target=-5))),
            "--tokens",
            "protocol.tokens_target",
        ),
        (up_request(assignments=tuple(with_flags([], protocol__shards=99))), "--shards", "protocol.shards"),
        (up_request(assignments=tuple(with_flags([], seed=-1))), "--seed", "seed"),
    ],
)
def test_what_a_flag_has_set_is_refused_by_the_name_of_the_flag(request_: UpRequest, typed: str, setting: str) -> None:
    """Who typed `--tokens` may never have heard of protocol.tokens_target."""
    with pytest.raises(SettingsError) as refused:
        plan(request_, {})

    assert refused.value.what.startswith(f"{typed} is ")
    assert str(refused.value.got).endswith(f" from {typed}")
    assert (refused.value.todo or "").startswith(f"correct {typed}")
    assert refused.value.setting == setting


@pytest.mark.parametrize(
    ("assignment", "said", "todo"),
    [
        ("protocol.quorun=hunter2", "unknown setting protocol.quorun", "did you mean protocol.quorum?"),
        ("train.optimiser=hunter2", "unknown setting train.optimiser", "did you mean train.optimizer?"),
        ("model.colour=hunter2", "unknown setting model.colour", "`atoll config` lists what exists"),
    ],
)
def test_a_misspelt_name_is_told_with_the_nearest_one(assignment: str, said: str, todo: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(None, [assignment], {})

    assert (refused.value.what, refused.value.got) == (said, f"--set {assignment.partition('=')[0]}")
    assert (refused.value.todo or "").startswith(todo)
    assert "hunter2" not in refused.value.explain()


@pytest.mark.parametrize(
    ("environment", "file"),
    [
        ({"ATOLL_BROKER__IDENTITY__PASSWORD": "hunter2"}, ""),
        ({"ATOLL_PROTOCOL__QUORUM__TOKEN": "hunter2"}, ""),
        ({"ATOLL_PROTOCOL": "hunter2"}, ""),
        ({}, '[[monitor.sinks]]\nkind = "wandb"\napi_key = "hunter2"\n'),
        ({}, '[archive]\nurl = { password = "hunter2" }\n'),
        ({}, '[model]\nconfig = { password = "hunter2" }\n'),
        ({}, '[up]\ncorpus = [["hunter2"]]\n'),
    ],
)
def test_of_a_table_in_the_place_of_a_value_only_the_names_are_told(
    environment: dict[str, str], file: str, tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(file, encoding="utf-8")
    with pytest.raises(SettingsError) as refused:
        load(config, [], environment)

    assert "hunter2" not in refused.value.explain()
    assert "from a default" not in refused.value.explain()


@pytest.mark.parametrize(
    ("assignment", "said", "allowed"),
    [
        ("train.rate=5", "train.rate is out of range", "above 0, at most 1"),
        ("train.batch=abc", "train.batch is wrong: not an integer", "an integer, at least 1, at most 65,536"),
        ("train.decay=7", "train.decay is wrong: neither a share", "auto, or at least 0 and at most 1"),
        ("monitor.sinks={}", "monitor.sinks is wrong: not a list", "a list of wandb, tensorboard, trackio"),
        ("learner.region={}", "learner.region is wrong: not text", f"empty, or {REGION_NAMES}"),
    ],
)
def test_a_value_that_no_setting_can_have_is_told_with_those_that_it_can(
    assignment: str, said: str, allowed: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        load(None, [assignment], {})

    assert refused.value.what.startswith(f"setting {said}")
    assert refused.value.allowed == allowed
    assert str(refused.value.got).endswith(f" from --set {assignment.partition('=')[0]}")


def test_every_dimension_follows_from_the_dial() -> None:
    model, train = complete({"size": "m"}, {})

    assert model["layers"] == 8
    assert model["size"] == "m"
    assert set(model) == {"size", "config", *ModelSettings.model_fields} - {"vocab"}
    assert set(train) == set(TrainSettings.model_fields)
    assert train["sequence"] == model["context"]


def test_a_completed_section_completes_to_itself() -> None:
    once = complete({"layers": "2", "width": "64", "heads": "4"}, {"batch": "4"})

    assert complete(*once) == once


def test_every_description_fits_into_a_run_record() -> None:
    longest = {
        "layers": 256,
        "width": 65536,
        "heads": 1024,
        "kv_heads": 512,
        "ffn": 250000,
        "context": 1 << 20,
        "tied": False,
        "rope_theta": 1234567.890123,
        "norm_eps": 1.2345678901234e-05,
        "compute": "bfloat16",
        "head_dim": 4094,
        "qk_norm": True,
        "rope_factor": 12.345678901234,
        "rope_low_freq_factor": 1.2345678901234,
        "rope_high_freq_factor": 4.3456789012345,
        "rope_original_context": 1 << 24,
    }
    model = model_settings(longest, vocab=1 << 20)
    said = msgspec.json.decode(model.describe().encode())

    assert len(msgspec.convert(model.describe(), Description)) > 256
    assert ModelSettings(**said) == model
    assert "qkv_bias" not in said
    assert len(msgspec.convert(model_settings({}, vocab=256).describe(), Text)) < 200


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("model.layer=2", "unknown setting model.layer"),
        ("model.layers=many", "model.layers"),
        ("model.vocab=1", "model.vocab"),
        ("model.head_dim=7", "head_dim 7 must be even"),
        ("model.rope_low_freq_factor=4", "must be below"),
        ("model.heads=3", "heads 3"),
        ("model.size=xxl", "model size"),
        ("train.rate=7", "train.rate"),
        ("train.colour=blue", "unknown setting train.colour"),
        ("train.sequence=4096", "longer than the model's context"),
    ],
)
def test_a_mistake_is_refused_where_settings_are_read(assignment: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load(None, [assignment], {})
