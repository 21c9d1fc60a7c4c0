"""A model in the words of Hugging Face: written so that others load it, and read so that no wrong number comes in silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atoll.base.errors import CheckpointError
from atoll_learner.beginning import files_of, first_values
from atoll_learner.data.prepare import prepare
from atoll_learner.data.shards import TokenShards
from atoll_learner.export import save_safetensors
from atoll_learner.hugging_face import config_of, write_beside
from atoll_learner.model import init_params
from atoll_learner.model_settings import ModelSettings

MODEL = ModelSettings(vocab=300, layers=2, width=32, heads=4, kv_heads=2, ffn=48, context=64, tied=False)


def folder(path: Path, model: ModelSettings = MODEL, **changes: Any) -> Path:  # noqa: ANN401  (any JSON)
    """Write a model as Hugging Face lays it out, in two files; return its folder."""
    path.mkdir()
    params = {name: np.asarray(leaf) for name, leaf in init_params(model, 3).items()}
    names = sorted(params)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: params[name] for name in held}, path / file, {"format": "pt"})
    weight_map = {name: file for file, held in parts.items() for name in held}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    (path / "config.json").write_text(json.dumps(config_of(model, end_token=0) | changes), encoding="utf-8")
    return path


def test_a_folder_of_several_files_is_read_whole(tmp_path: Path) -> None:
    """The same bits as one file with all of it."""
    found = first_values(MODEL, 0, folder(tmp_path / "model"))

    wanted = init_params(MODEL, 3)
    assert found.keys() == wanted.keys()
    assert all((found[name] == wanted[name]).all() for name in wanted)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_attention_heads": 8}, "num_attention_heads = 8, not 4 (model.heads)"),
        ({"num_key_value_heads": None}, "num_key_value_heads = 4, not 2 (model.kv_heads)"),
        ({"rope_theta": 500000.0}, "rope_theta = 500000.0, not 10000.0 (model.rope_theta)"),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_theta = 500000.0, not 10000.0"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3"}},
            'rope_parameters: rope_type = "llama3", which this model',
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling ="),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps = 1e-06, not 1e-05 (model.norm_eps)"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true, not false (model.tied)"),
        ({"attention_bias": True}, "attention_bias = true, which this model cannot do (false"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"model_type": "qwen3"}, 'model_type = "qwen3", which this model cannot do ("llama")'),
        ({"architectures": ["MixtralForCausalLM"]}, "architectures ="),
        ({"rope_parameters": {"type": "linear", "factor": 8.0}}, "factor = 8.0"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "full_attention ="),
        ({"rope_parameters": ["yarn"]}, 'rope_type = ["yarn"]'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config ="),
        ({"hidden_size": 10**400}, "hidden_size ="),
        ({"hidden_size": "32"}, 'hidden_size = "32", not 32'),
        ({"rms_norm_eps": None}, "rms_norm_eps = 1e-06, not 1e-05"),
        ({"tie_word_embeddings": True, "vocab_size": 301}, "vocab_size = 301, not 300"),
        ({"head_dim": 16}, "head_dim = 16, not 8"),
    ],
)
def test_a_model_whose_numbers_fit_but_mean_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    """Eight heads have the shapes of four and other logits: the field is named, with both values and the setting."""
    with pytest.raises(CheckpointError) as refused:
        first_values(MODEL, 0, folder(tmp_path / "model", **changes))

    assert named in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "default"}, "attention_bias": None, "rope_theta": 10000},
        {"rope_scaling": {}, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "rope_theta": None},
    ],
)
def test_what_means_nothing_else_is_taken(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Several words of different versions mean the same."""
    assert first_values(MODEL, 0, folder(tmp_path / "model", **changes))


def test_a_tensor_that_two_files_hold_is_refused(tmp_path: Path) -> None:
    """The last one won, whatever the index said."""
    path = folder(tmp_path / "model")
    first, second = sorted(path.glob("*.safetensors"))
    name = min(load_file(first))
    save_file(load_file(second) | {name: np.zeros_like(load_file(first)[name])}, second, {"format": "pt"})

    with pytest.raises(CheckpointError, match="two files of this model hold the same tensor"):
        first_values(MODEL, 0, path)


def test_every_difference_is_named_at_once(tmp_path: Path) -> None:
    """Who mends one after the other has to start as often."""
    with pytest.raises(CheckpointError) as refused:
        first_values(MODEL, 0, folder(tmp_path / "model", rope_theta=5e5, rms_norm_eps=1e-6))

    assert "rope_theta" in str(refused.value)
    assert "rms_norm_eps" in str(refused.value)


def test_the_description_that_we_write_into_a_file_is_compared(tmp_path: Path) -> None:
    """Without a `config.json`, too; the metadata of others say nothing to us."""
    params, asked = init_params(MODEL, 0), MODEL.model_copy(update={"rope_theta": 5e5})
    save_safetensors(params, tmp_path / "ours.safetensors", {"model": MODEL.describe()})
    save_safetensors(params, tmp_path / "theirs.safetensors", {"model": "a poem"})

    with pytest.raises(CheckpointError, match=r"rope_theta = 10000.0, not 500000.0"):
        first_values(asked, 1, tmp_path / "ours.safetensors")
    for file, model in (("ours", MODEL), ("theirs", asked)):
        assert first_values(model, 1, tmp_path / f"{file}.safetensors").keys() == params.keys()


def test_what_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    """An empty folder, a damaged configuration, an index that points out of its folder."""
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="no model lies in this folder"):
        files_of(empty)
    damaged = folder(tmp_path / "damaged")
    (damaged / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="configuration beside this model file cannot be read"):
        first_values(MODEL, 0, damaged)
    away = folder(tmp_path / "away")
    (away / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="names files elsewhere"):
        first_values(MODEL, 0, away)


def test_what_we_export_is_what_we_read(tmp_path: Path) -> None:
    """The files beside an exported model say what its settings are, and the separator of its text."""
    text = tmp_path / "text.txt"
    text.write_text("some words and more words, " * 400, encoding="utf-8")
    prepare([text, *more(tmp_path)], tmp_path / "data")
    shards, out = TokenShards(tmp_path / "data"), tmp_path / "out"
    out.mkdir()
    model = MODEL.model_copy(update={"vocab": shards.meta.vocab})
    params = init_params(model, 5)
    save_safetensors(params, out / "model.safetensors", {"model": model.describe()})

    write_beside(out, model, shards)

    found = first_values(model, 0, out)
    assert all((found[name] == params[name]).all() for name in params)
    said = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert (said["architectures"], said["eos_token_id"], said["head_dim"]) == (["LlamaForCausalLM"], 0, 8)
    assert json.loads((out / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"] == 0


def more(path: Path) -> list[Path]:
    """Return further documents: one is not enough to hold some out."""
    files = [path / f"more-{number}.txt" for number in range(30)]
    for number, file in enumerate(files):
        file.write_text(f"document {number} " * 100, encoding="utf-8")
    return files
