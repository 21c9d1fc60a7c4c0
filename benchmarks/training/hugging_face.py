"""Whether models go to Transformers and come back with the same logits: `make bench-transformers`.

Transformers stands in an environment of its own. *In*: it writes small random folders of every family, tied and not, in float32
and bfloat16, in one file and in several, and Atoll computes their logits. *Out*: `atoll sim train` trains and exports a model
of each family, and `AutoModelForCausalLM.from_pretrained` loads the folder as it is. A figure is the largest difference of a
logit over all positions of one sequence, both sides in float32 on a CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from atoll_learner.export import first_values
from atoll_learner.model import make_forward
from atoll_learner.model_settings import model_settings
from benchmarks.lib.harness import Figure, at_most, run_benchmark
from benchmarks.lib.runs import HERE, environment

PEER: Final = "huggingface"
TOLERANCE: Final = 1e-4
WIDTH: Final = 64
LENGTH: Final = 96
TOKENS: Final = 20_000
TRAINED: Final = {
    "llama": (),
    "llama, untied": ("model.tied=false",),
    "llama, rotations of Llama 3": ("model.rope_factor=8", "model.rope_original_context=64"),
    "qwen2": ("model.qkv_bias=true",),
    "qwen3": ("model.qk_norm=true", "model.head_dim=48"),
    "qwen3, untied": ("model.qk_norm=true", "model.tied=false"),
}
"""Exported models by what is theirs beside the size."""


def main(*, seed: int = 0) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        versions = transformers("make", work / "in", WIDTH, seed)
        figures = [*compare_imports(work / "in", versions), *compare_exports(work / "out", versions, seed)]
    worst = max(figure.value for figure in figures)
    figures.append(difference_figure("largest difference of all", worst, versions))
    return figures


def transformers(*words: object) -> str:
    """Run the program of the other environment; return the versions that it prints."""
    command = [environment(PEER), str(HERE / f"{PEER}.py"), *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return str(json.loads(done.stdout.splitlines()[-1]))


def compare_imports(folder: Path, versions: str) -> Iterator[Figure]:
    """Yield how far our logits are from theirs, for each of their folders."""
    for case in sorted(path for path in folder.iterdir() if path.is_dir()):
        kept = np.load(f"{case}.npz")
        files = len(list(case.glob("*.safetensors")))
        difference = np.abs(ours(case, kept["tokens"]) - kept["logits"]).max()
        how = f"{versions}; {files} files; logits up to {np.abs(kept['logits']).max():.1f}"
        yield difference_figure(f"in: {case.name.replace('-', ', ')}", float(difference), how)


def compare_exports(folder: Path, versions: str, seed: int) -> Iterator[Figure]:
    """Yield how far their logits of our exports are from ours."""
    folder.mkdir()
    for number, (name, settings) in enumerate(TRAINED.items()):
        out, tokens, found = (folder / f"{number}{end}" for end in ("", "-tokens.npy", "-logits.npy"))
        words = [f"--set={text}" for text in ("model.size=xs", f"seed={seed}", *settings)]
        command = ["-m", "atoll.cli", "sim", "train", "--learners", "1", "--shards", "1", "--tokens", str(TOKENS)]
        subprocess.run([sys.executable, *command, "--out", str(out), *words], stderr=subprocess.DEVNULL, check=True)
        np.save(tokens, np.random.default_rng(seed).integers(0, 256, (1, LENGTH)).astype(np.int32))
        transformers("logits", out, tokens, found)
        theirs = np.load(found)
        difference = np.abs(ours(out, np.load(tokens)) - theirs).max()
        how = f"{versions}; after {TOKENS} tokens; logits up to {np.abs(theirs).max():.1f}"
        yield difference_figure(f"out: {name}", float(difference), how)


def ours(folder: Path, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Return our logits of `tokens` int32 (B, T), float32 (B, T, V), with all dimensions from the folder."""
    model = model_settings({"config": str(folder)}, vocab=None)
    return np.asarray(make_forward(model)(first_values(model, 0, folder), tokens))


def difference_figure(name: str, value: float, how: str) -> Figure:
    return at_most(name, value, "of a logit", TOLERANCE, how)


if __name__ == "__main__":
    run_benchmark("bench-transformers", main)
