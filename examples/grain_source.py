r"""Grain (github.com/google/grain) as the token source of learners: bytes of text files, shuffled, for each learner its own.

    PYTHONPATH=examples TEXTS=docs atoll up --tokens 60000 --set model.size=xs \
      --set data.source=grain_source:windows --out runs/grain

`TEXTS` names the folder of the text files. Grain shuffles by a seed and finds any window by its number, so a learner that
starts again goes on where its checkpoint says.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import grain
import numpy as np

from atoll_learner.data.token_source import SourceRequest


def windows(request: SourceRequest) -> Iterable[np.ndarray]:
    """Return the windows of one learner, over and over in new orders, from number `request.start` on."""
    texts = sorted(Path(os.environ["TEXTS"]).rglob("*.md"))
    tokens = np.frombuffer(b"\0".join(text.read_bytes() for text in texts), dtype=np.uint8)
    starts = range(0, len(tokens) - request.sequence - 1, request.sequence)
    own_seed = zlib.crc32(f"{request.seed}/{request.learner}".encode())
    dataset = (
        grain.MapDataset.source(starts)
        .shuffle(seed=own_seed)
        .repeat()
        .map(lambda start: tokens[start : start + request.sequence + 1])
    )
    rest: Iterable[np.ndarray] = dataset[request.start :].to_iter_dataset()
    return rest
