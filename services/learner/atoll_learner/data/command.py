"""`atoll data prepare`, with a progress bar on a terminal, and `atoll data show`; one line of result from either."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import track

from atoll_learner.data.prepare import Meta, prepare
from atoll_learner.data.shards import TokenShards
from atoll_learner.data.sources import files_of, stdlib_files


def prepare_command(  # noqa: PLR0913  (one per flag)
    out: Path, inputs: list[Path], *, stdlib: bool, bpe: int, validation: float, block_tokens: int, seed: int
) -> None:
    """Prepare the inputs, or the standard library, and say what came of it."""
    console = Console(stderr=True)
    files = [*(stdlib_files() if stdlib else []), *(files_of(inputs) if inputs or not stdlib else [])]

    def progress(paths: Iterable[Path]) -> Iterable[Path]:
        return track(list(paths), description="preparing", console=console, disable=not sys.stderr.isatty())

    meta = prepare(files, out, bpe=bpe, validation=validation, block_tokens=block_tokens, seed=seed, progress=progress)
    console.print(described(meta, out), soft_wrap=True)


def show_command(folder: Path) -> None:
    """Open the token shards of `folder` as a learner would and say what they hold. Raises what `TokenShards` raises."""
    Console().print(described(TokenShards(folder).meta, folder), soft_wrap=True)


def described(meta: Meta, folder: Path) -> str:
    """Return token shards in one line."""
    return (
        f"{meta.documents} documents: {meta.train_tokens} training and {meta.validation_tokens} held-out tokens, "
        f"vocabulary {meta.vocab}, fingerprint {meta.fingerprint}, in {folder}"
    )
