"""Token shards of a little text, for tests that need some and do not care which."""

from __future__ import annotations

from pathlib import Path

from atoll_learner.data.prepare import prepare


def short_shards(folder: Path) -> Path:
    """Make token shards of forty short documents of digits, plain bytes, and return their folder."""
    for number in range(40):
        (folder / f"{number}.txt").write_text(" ".join(str(number * word) for word in range(120)), encoding="utf-8")
    prepare(sorted(folder.glob("*.txt")), folder / "shards", block_tokens=256, validation=0.3)
    return folder / "shards"
