"""A model in the words of Hugging Face: written so that others load it, and read so that no wrong number comes in silently."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atoll.base.errors import CheckpointError, DataError, SettingsError
from atoll.model.model_files import files_of
from atoll.settings import load
from atoll_learner.data.prepare import prepare
from atoll_learner.data.shards import TokenShards
from atoll_learner.data.tokenizer import BPE_FILE, Vocabulary, train_bpe
from atoll_learner.export import check_beside, check_tokenizer, config_of, first_values, save_safetensors, write_beside
from atoll_learner.model import init_params
from atoll_learner.model_settings import ModelSettings, model_settings

MODEL = ModelSettings(vocab=300, layers=2, width=32, heads=4, kv_heads=2, ffn=48, context=64, tied=False)


def folder(path: Path, model: ModelSettings = MODEL, **changes: Any) -> Path:  # noqa: ANN401  (any JSON)
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
    found = first_values(MODEL, 0, folder(tmp_path / "model"))

    wanted = init_params(MODEL, 3)
    assert found.keys() == wanted.keys()
    assert all((found[name] == wanted[name]).all() for name in wanted)


def refused(file: Path, changes: dict[str, Any], model: ModelSettings = MODEL) -> str:
    """Return how a model beside a configuration with `changes` is refused; None in place of a value that is left out."""
    said = config_of(model, end_token=0) | changes
    file.write_text(
        json.dumps({name: value for name, value in said.items() if value is not LEFT_OUT}), encoding="utf-8"
    )
    with pytest.raises(CheckpointError) as refusal:
        check_beside(file, model)
    return str(refusal.value)


LEFT_OUT = object()
QWEN2 = MODEL.model_copy(update={"qkv_bias": True})
QWEN3 = MODEL.model_copy(update={"qk_norm": True, "head_dim": 16})
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = {**LLAMA3, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_attention_heads": 8}, "num_attention_heads = 8, not 4 (model.heads)"),
        ({"num_attention_heads": LEFT_OUT}, "num_attention_heads is missing"),
        ({"num_key_value_heads": None}, "num_key_value_heads = 4, not 2 (model.kv_heads)"),
        ({"num_key_value_heads": LEFT_OUT}, "num_key_value_heads = 4, not 2 (model.kv_heads)"),
        ({"rope_theta": 500000.0}, "rope_theta = 500000.0, not 10000.0 (model.rope_theta)"),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_theta = 500000.0, not 10000.0"),
        ({"rope_parameters": LLAMA3}, "rope_parameters: original_max_position_embeddings is missing"),
        ({"rope_parameters": SCALED}, "rope_parameters: factor = 8.0, not 1.0 (model.rope_factor)"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling: low_freq_factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_scaling: rope_type = "linear", which this model'),
        (
            {"rope_scaling": {"rope_type": "default"}, "rope_parameters": SCALED},
            "which is not what rope_parameters say",
        ),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps = 1e-06, not 1e-05 (model.norm_eps)"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true, not false (model.tied)"),
        ({"attention_bias": True}, "attention_bias = true, which this model cannot do (false"),
        ({"mlp_bias": True}, "mlp_bias = true, which this model cannot do (false"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"model_type": "mistral"}, 'model_type = "mistral", which this model cannot do ("llama", "qwen2", "qwen3")'),
        ({"model_type": LEFT_OUT}, "model_type = null, which this model cannot do"),
        ({"model_type": ["llama"]}, 'model_type = ["llama"], which this model cannot do'),
        (
            {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
            'model_type = "qwen2", which has model.qkv_bias = true',
        ),
        ({"architectures": ["MixtralForCausalLM"]}, "architectures ="),
        ({"architectures": ["Qwen3ForCausalLM"]}, 'architectures = ["Qwen3ForCausalLM"]'),
        ({"rope_parameters": {"type": "linear", "factor": 8.0}}, "factor = 8.0"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "full_attention ="),
        ({"rope_parameters": ["yarn"]}, 'rope_type = ["yarn"]'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            'layer_types = ["full_attention", "sliding_attention"]',
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config ="),
        ({"hidden_size": 10**400}, "hidden_size ="),
        ({"hidden_size": "32"}, 'hidden_size = "32", which is not a whole number from 1'),
        ({"rms_norm_eps": None}, "rms_norm_eps = 1e-06, not 1e-05"),
        ({"tie_word_embeddings": True, "vocab_size": 301}, "vocab_size = 301, not 300"),
        ({"head_dim": 16}, "head_dim = 16, not 8"),
        ({"max_position_embeddings": 32}, "max_position_embeddings = 32, less than 64 (model.context)"),
    ],
)
def test_a_model_whose_numbers_fit_but_mean_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    """Eight heads have the shapes of four and other logits: the field is named, with both values and the setting."""
    assert named in refused(tmp_path / "config.json", changes)


@pytest.mark.parametrize(
    ("model", "changes", "named"),
    [
        (QWEN3, {"attention_bias": True}, "attention_bias = true, which this model cannot do"),
        (QWEN3, {"head_dim": LEFT_OUT}, "head_dim = 128, not 16 (model.head_dim)"),
        (QWEN3, {"num_key_value_heads": LEFT_OUT}, "num_key_value_heads = 32, not 2 (model.kv_heads)"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window = true, which this model"),
        (QWEN2, {"model_type": "llama"}, 'model_type = "llama", which has model.qkv_bias = false'),
    ],
)
def test_what_a_family_takes_where_its_file_is_silent_is_compared(
    tmp_path: Path, model: ModelSettings, changes: dict[str, Any], named: str
) -> None:
    """A Qwen without `head_dim` has heads of 128 channels in Transformers, whatever its width."""
    assert named in refused(tmp_path / "config.json", changes, model)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (MODEL, {"rope_scaling": {"rope_type": "default"}, "attention_bias": None, "rope_theta": 10000}),
        (
            MODEL,
            {"rope_scaling": {}, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "rope_theta": 7},
        ),
        (MODEL, {"max_position_embeddings": 2048, "architectures": None, "hidden_act": "swish"}),
        (QWEN2, {"sliding_window": 4096, "max_window_layers": 28, "layer_types": ["full_attention"] * 2}),
        (QWEN2, {"attention_bias": True}),
        (QWEN3, {"sliding_window": None, "use_sliding_window": False}),
        (
            MODEL.model_copy(update={"rope_factor": 8.0}),
            {"rope_scaling": None, "rope_theta": None, "rope_parameters": SCALED | {"rope_theta": 1e4}},
        ),
    ],
)
def test_what_means_nothing_else_is_taken(tmp_path: Path, model: ModelSettings, changes: dict[str, Any]) -> None:
    """Several words of different versions mean the same, and some families do not read what others do."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_of(model, end_token=0) | changes), encoding="utf-8")

    check_beside(file, model)

    assert model_settings({"config": str(tmp_path), "context": 64}, vocab=None) == model


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none", None, "names no configuration"),
        ("damaged", "{", "cannot be read"),
        ("other", json.dumps({"model_type": "gpt2"}), 'model_type = "gpt2"'),
        ("quantised", json.dumps(config_of(MODEL, end_token=0) | {"quantization_config": {}}), "quantization_config"),
        (
            "endless",
            json.dumps(config_of(MODEL, end_token=0) | {"max_position_embeddings": None}),
            "max_position_embeddings is missing",
        ),
        ("odd", json.dumps(config_of(MODEL, end_token=0) | {"num_attention_heads": 3}), "width 32"),
        ("words", json.dumps(config_of(MODEL, end_token=0) | {"num_attention_heads": "many"}), 'heads = "many"'),
    ],
)
def test_a_configuration_that_no_model_of_ours_follows_is_refused(
    tmp_path: Path, name: str, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")

    with pytest.raises(SettingsError, match=re.escape(said)):
        load(None, [f"model.config={tmp_path / name}"], {})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": True}, "num_hidden_layers = true, which is not a whole number from 1"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers = 2.0, which is not a whole number from 1"),
        ({"max_position_embeddings": "64"}, 'max_position_embeddings = "64", which is not a whole number from 1'),
        ({"rms_norm_eps": True}, "rms_norm_eps = true, which is not a number from 1e-30 to 1e+30"),
        ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings = "yes", which is not true or false'),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings = 0, which is not true or false"),
        ({"rms_norm_eps": 1e-320}, "rms_norm_eps = 1e-320, which is not a number from 1e-30 to 1e+30"),
        ({"rope_theta": 10**40}, f"rope_theta = {10**40}, which is not a number from 1e-30 to 1e+30"),
        ({"rope_theta": 0}, "rope_theta = 0, which is not a number from 1e-30 to 1e+30"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, 'rope_parameters: rope_theta = "1e4", which is not a number'),
        (
            {"rope_scaling": SCALED | {"factor": "8"}},
            'rope_scaling: factor = "8", which is not a number from 1e-30 to 1e+30',
        ),
    ],
)
def test_a_field_of_another_kind_is_refused_by_its_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    """True became a layer, "yes" became true, and a base of 0 the usual one; told once, also beside a model."""
    file = tmp_path / "config.json"
    assert refused(file, changes).count(named) == 1

    with pytest.raises(SettingsError, match=re.escape(named)):
        load(None, [f"model.config={file}"], {})


def test_a_configuration_takes_the_place_of_the_dial_and_does_not_stay(tmp_path: Path) -> None:
    """What is given beside it wins; processes that get the completed settings need no such file."""
    (tmp_path / "config.json").write_text(json.dumps(config_of(QWEN3, end_token=0)), encoding="utf-8")

    model = load(None, [f"model.config={tmp_path}", "model.compute=bfloat16"], {}).settings.model

    assert model["config"] is None
    assert model_settings(model, vocab=300) == QWEN3.model_copy(update={"compute": "bfloat16"})
    with pytest.raises(SettingsError, match="301 tokens in the data"):
        model_settings(model, vocab=301)


def test_tensors_that_follow_from_others_are_passed_over(tmp_path: Path) -> None:
    """Frequencies of rotations, and a copy of the embedding as the head; a head of its own is refused."""
    model = MODEL.model_copy(update={"tied": True})
    params = {name: np.asarray(leaf) for name, leaf in init_params(model, 3).items()}
    more_of_it = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "lm_head.weight": params["model.embed_tokens.weight"],
    }
    save_file(params | more_of_it, tmp_path / "same.safetensors")
    save_file(params | {"lm_head.weight": 2 * params["model.embed_tokens.weight"]}, tmp_path / "other.safetensors")

    assert first_values(model, 0, tmp_path / "same.safetensors").keys() == params.keys()
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        first_values(model, 0, tmp_path / "other.safetensors")


def test_a_tensor_that_two_files_hold_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    first, second = sorted(path.glob("*.safetensors"))
    name = min(load_file(first))
    save_file(load_file(second) | {name: np.zeros_like(load_file(first)[name])}, second, {"format": "pt"})

    with pytest.raises(CheckpointError, match="two files of this model hold the same tensor"):
        first_values(MODEL, 0, path)


def test_the_description_that_we_write_into_a_file_is_compared(tmp_path: Path) -> None:
    """Without a `config.json`, too; the metadata of others say nothing to us."""
    params, asked = init_params(MODEL, 0), MODEL.model_copy(update={"rope_theta": 5e5})
    save_safetensors(params, tmp_path / "ours.safetensors", {"model": MODEL.describe()})
    save_safetensors(params, tmp_path / "theirs.safetensors", {"model": "a poem"})
    assert (tmp_path / "ours.safetensors").stat().st_mode & 0o777 == 0o644

    with pytest.raises(CheckpointError, match=r"rope_theta = 10000.0, not 500000.0"):
        first_values(asked, 1, tmp_path / "ours.safetensors")
    with pytest.raises(CheckpointError, match=r"rope_factor = 1.0, not 8.0"):
        first_values(MODEL.model_copy(update={"rope_factor": 8.0}), 1, tmp_path / "ours.safetensors")
    for file, model in (("ours", MODEL), ("theirs", asked)):
        assert first_values(model, 1, tmp_path / f"{file}.safetensors").keys() == params.keys()


def test_what_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="no model lies in this folder"):
        files_of(empty)
    damaged = folder(tmp_path / "damaged")
    (damaged / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="configuration of this model cannot be read"):
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
    assert said["rope_scaling"] is None
    assert json.loads((out / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"] == 0


def test_text_of_another_tokenizer_than_the_models_is_refused(tmp_path: Path) -> None:
    """Equal but for what does not change a whole text's tokens; bytes and another vocabulary are named."""
    files, theirs = more(tmp_path), tmp_path / "model"
    theirs.mkdir()
    train_bpe(["many other words in another language"] * 9, 320, theirs / BPE_FILE)
    prepare(files, tmp_path / "same", vocabulary=Vocabulary.of(theirs, ""))
    prepare(files, tmp_path / "other", vocabulary=310)
    prepare(files, tmp_path / "bytes")
    said = json.loads((theirs / BPE_FILE).read_text(encoding="utf-8")) | {"truncation": None, "version": "1.1"}
    (theirs / BPE_FILE).write_text(json.dumps(said), encoding="utf-8")

    check_tokenizer(theirs, TokenShards(tmp_path / "same"))
    check_tokenizer(theirs / "model.safetensors", TokenShards(tmp_path / "same"))
    check_tokenizer(tmp_path, TokenShards(tmp_path / "bytes"))  # nothing to compare with
    for name, got in (("other", f"other/{BPE_FILE}"), ("bytes", "plain bytes")):
        with pytest.raises(DataError, match="another tokenizer") as refusal:
            check_tokenizer(theirs, TokenShards(tmp_path / name))
        assert got in str(refusal.value)


def more(path: Path) -> list[Path]:
    """Return further documents: one is not enough to hold some out."""
    files = [path / f"more-{number}.txt" for number in range(30)]
    for number, file in enumerate(files):
        file.write_text(f"document {number} " * 100, encoding="utf-8")
    return files
