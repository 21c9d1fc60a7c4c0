"""`atoll data prepare`, with a progress bar on a terminal, `atoll data mix`, `atoll data show`; one line each."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import track

from atoll.base.exits import leave_in_order_on_term
from atoll.base.units import as_size
from atoll.base.wording import counted
from atoll_learner.data.mixture import mix, weights_of
from atoll_learner.data.prepare import Meta, prepare
from atoll_learner.data.shards import TokenShards
from atoll_learner.data.sources import PLAIN, Reading, files_of, stdlib_files
from atoll_learner.data.tokenizer import Vocabulary

HELD_OUT_BYTES_FEW: Final = 16 << 10
"""Of less held-out text bits per byte are told with a warning."""


def prepare_command(  # noqa: PLR0913  (one per choice)
    out: Path,
    inputs: list[Path],
    *,
    stdlib: bool,
    vocabulary: int | Vocabulary,
    validation: float,
    block_tokens: int,
    seed: int,
    reading: Reading = PLAIN,
) -> None:
    """Prepare the inputs, or the standard library, and say what came of it and how fast."""
    leave_in_order_on_term()
    console = Console(stderr=True)
    files = [*(stdlib_files() if stdlib else []), *(files_of(inputs, reading) if inputs or not stdlib else [])]
    began_s = time.monotonic()

    def progress(paths: Iterable[Path]) -> Iterable[Path]:
        return track(list(paths), description="preparing", console=console, disable=not sys.stderr.isatty())

    meta = prepare(
        files,
        out,
        vocabulary=vocabulary,
        validation=validation,
        block_tokens=block_tokens,
        seed=seed,
        reading=reading,
        progress=progress,
    )
    console.print(described(meta, out), soft_wrap=True, markup=False)
    size, took_s = sum(file.stat().st_size for file in files), time.monotonic() - began_s
    console.print(f"{as_size(size)} in {took_s:.1f} s, {as_size(round(size / took_s))}/s", soft_wrap=True, markup=False)
    if meta.validation_bytes < HELD_OUT_BYTES_FEW:
        reason = f"only {as_size(meta.validation_bytes)} are held out, so bits per byte say little"
        console.print(f"{reason}; a larger --validation holds out more", soft_wrap=True, markup=False)


def mix_command(parts: list[str], out: Path) -> None:
    """Mix folders of token shards (`folder=weight`) and say what came of it. Raises what `weights_of` and `mix` raise."""
    leave_in_order_on_term()
    Console(stderr=True).print(described(mix(weights_of(parts), out), out), soft_wrap=True, markup=False)


def show_command(folder: Path) -> None:
    """Open the token shards of `folder` as a learner would and say what they hold. Raises what `TokenShards` raises."""
    Console().print(described(TokenShards(folder).meta, folder), soft_wrap=True, markup=False)


def described(meta: Meta, folder: Path) -> str:
    """Return token shards in one line."""
    blocks = sum(part.positions for part in meta.parts)
    shares = [f"{part.positions / blocks:.1%} of {part.fingerprint[:8]}" for part in meta.parts]
    mixed = f"{' and '.join(shares)}: " if shares else ""
    left_out = f" ({counted(meta.empty, 'more is', 'more are')} empty)" if meta.empty else ""
    return (
        f"{mixed}{counted(meta.documents, 'document')}{left_out}: {meta.train_tokens} training "
        f"and {meta.validation_tokens} held-out tokens, vocabulary {meta.vocab}, fingerprint {meta.fingerprint}, in {folder}"
    )
