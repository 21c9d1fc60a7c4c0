"""Small random models made, and folders loaded, by Transformers; run in an environment that holds it and no Atoll.

    huggingface.py make FOLDER WIDTH SEED    write a folder for each case, and its tokens and logits as FOLDER/CASE.npz
    huggingface.py logits FOLDER TOKENS OUT  load a folder as it is, and write the logits of TOKENS (.npy) to OUT (.npy)

Every tensor is drawn, gains and biases too: at their first values they would hide a reader that leaves them out. Logits are
those of float32 arithmetic, whatever the numbers of the file.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

LENGTH = 48
ROWS = 1
VOCAB = 48
FILES = 3
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def config(family: str, width: int, *, tied: bool) -> PreTrainedConfig:
    """Return a configuration in which no dimension equals another that it could be mistaken for."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": width,
        "intermediate_size": 5 * width // 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6 if family.startswith("qwen") else 1e-5,
    }
    if family == "llama":
        return LlamaConfig(**shape)
    if family == "llama3":
        return LlamaConfig(**shape, rope_parameters=LLAMA3)
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
    if family == "qwen2":
        return Qwen2Config(**shape, **theta)
    return Qwen3Config(**shape, **theta, head_dim=width // 2)


def make(folder: Path, width: int, seed: int) -> None:
    """Write every family, tied and not, in float32 (one file) and bfloat16 (several)."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH))
    for family in ("llama", "llama3", "qwen2", "qwen3"):
        for tied in (True, False):
            for kind in (torch.float32, torch.bfloat16):
                model = AutoModelForCausalLM.from_config(config(family, width, tied=tied))
                with torch.no_grad():
                    for name, values in model.named_parameters():
                        draw(name, values)
                case = folder / f"{family}-{'tied' if tied else 'untied'}-{str(kind).removeprefix('torch.')}"
                size = sum(values.numel() * kind.itemsize for values in model.parameters())
                most = size if kind == torch.float32 else size // FILES
                model.to(kind).save_pretrained(case, max_shard_size=most)
                np.savez(f"{case}.npz", tokens=tokens.numpy().astype(np.int32), logits=logits(case, tokens.numpy()))


def draw(name: str, values: torch.Tensor) -> None:
    """Draw a tensor so that its part in the logits is of the size of the others'."""
    if values.ndim == 1:
        values.normal_(0.0, 0.4).add_(1.0 if name.endswith("weight") else 0.0)
    else:
        values.normal_(0.0, 1.0 if "embed_tokens" in name else values.shape[1] ** -0.5)


def logits(folder: Path, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Return the logits of `tokens` int (B, T), float32 (B, T, V), by the model of a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found: npt.NDArray[np.float32] = model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    return found


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    what, folder, *rest = sys.argv[1:]
    if what == "make":
        make(Path(folder), int(rest[0]), int(rest[1]))
    else:
        np.save(rest[1], logits(Path(folder), np.load(rest[0])))
    print(
        json.dumps(
            f"Transformers {transformers.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        )
    )


if __name__ == "__main__":
    main()
