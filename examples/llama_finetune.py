"""A Llama as Hugging Face keeps it, fine-tuned by islands in a loop of your own with optax.

    atoll sim train --learners 1 --shards 1 --tokens 60000 --set model.size=xs --out runs/llama   a small Llama; or take yours
    atoll broker --store runs/store                      a broker, if you have none
    atoll synchronizer --run llama                       one shard is enough
    python examples/llama_finetune.py a runs/llama       a learner
    python examples/llama_finetune.py b runs/llama       another; as many as you like

The folder holds `config.json`, `model.safetensors` and, with a byte-pair vocabulary, `tokenizer.json`. The model has learnt
Python's own source; it is tuned on the pages of `docs/`. Every learner writes the merged model beside the folder, as
`runs/llama-by-a`, for `LlamaForCausalLM.from_pretrained`.

Only the lines marked `atoll` differ from the loop you would write for one machine.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.flax import save_file

import atoll  # atoll
from atoll.protocol.settings import ProtocolSettings  # atoll
from atoll_learner.data.tokenizer import BPE_FILE, BpeTokenizer, ByteTokenizer
from atoll_learner.export import GENERATION, first_values
from atoll_learner.model import make_forward
from atoll_learner.model_config import CONFIG
from atoll_learner.model_settings import model_settings
from outcome import print_losses

PROTOCOL = ProtocolSettings(fragments=6, interval_steps=24, shards=1, tokens_target=600_000)  # atoll
BATCH, LENGTH = 32, 128


def tokens_of(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the text to train on and the text held out, as tokens of the folder's vocabulary."""
    vocabulary = folder / BPE_FILE
    tokenizer = BpeTokenizer(vocabulary) if vocabulary.exists() else ByteTokenizer()
    pages = [tokenizer.encode(page.read_bytes()) for page in sorted(Path("docs").rglob("*.md"))]
    return np.concatenate([page for i, page in enumerate(pages) if i % 10]), np.concatenate(pages[::10])


def windows(tokens: np.ndarray, name: str) -> Iterator[np.ndarray]:
    """Yield random windows (BATCH, LENGTH + 1); every learner draws its own."""
    rng = np.random.default_rng(list(name.encode()))
    while True:
        starts = rng.integers(0, len(tokens) - LENGTH, BATCH)
        yield tokens[starts[:, None] + np.arange(LENGTH + 1)]


def main(name: str, folder: Path, url: str) -> float:
    """Tune until the run is over and return the merged model's loss on held-out pages, in nats per token."""
    settings = model_settings({"config": folder}, vocab=None)
    forward = make_forward(settings)
    text, held_out = tokens_of(folder)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    @jax.jit
    def loss_of(params, tokens):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        logits = forward(params, tokens[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    @jax.jit
    def step(params, state, tokens):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        loss, gradient = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    feed, losses = windows(text, name), []
    params = first_values(settings, 0, folder)
    with atoll.join(url, run="llama", learner=name, params=params, protocol=PROTOCOL) as island:  # atoll
        params = island.params  # atoll
        state = optimizer.init(params)
        while not island.done:  # atoll
            params, state, loss = step(params, state, next(feed))
            losses.append(float(loss))
            params = island.step(params, tokens=BATCH * LENGTH, loss=losses[-1])  # atoll
    merged = island.merged().params  # atoll
    tuned = folder.with_name(f"{folder.name}-by-{name}")
    tuned.mkdir(parents=True, exist_ok=True)
    save_file(merged, tuned / "model.safetensors", {"format": "pt"})
    for file in (CONFIG, GENERATION, BPE_FILE):
        if (folder / file).exists():
            shutil.copyfile(folder / file, tuned / file)
    test = np.concatenate([tokens for tokens, _ in zip(windows(held_out, "test"), range(8), strict=False)])
    before, after = (float(loss_of(values, test)) for values in (first_values(settings, 0, folder), merged))
    print_losses(name, losses, island.inside_s, island.overhead)
    print(f"{name}: loss on held-out pages {after:.4f}, before {before:.4f}")
    return after


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "nats://127.0.0.1:4222")
