"""A merged model says of which versions it is, also where heads moved on while it was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.archive.object_store import FolderArchive
from atoll.base.errors import BlobGone
from atoll.bus.interface import Bus
from atoll.run import delta_chain, heads, merged_model
from atoll.run.merged_model import read_merged
from atoll.wire.messages import Head, RunRecord
from support.founded_run import TOKENS, FoundedRun, TurnedClock, run_record


async def test_versions_and_tokens_are_those_of_the_values_that_were_read(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame that is gone is read by the newer head: the measurement of its values must not stand at too few tokens."""
    founded = FoundedRun(run_record(run), FolderArchive(tmp_path), TurnedClock())
    await founded.found()
    seen = await heads.read_heads(founded.bus, founded.record)
    await founded.commit(0)
    read = delta_chain.read_values

    async def former(*_: object) -> dict[int, Head]:
        return dict(seen)

    async def gone(bus: Bus, record: RunRecord, head: Head, *more: Any) -> Any:  # noqa: ANN401  (passed on)
        if (head.fragment, head.version) == (0, 0):
            raise BlobGone("removed")
        return await read(bus, record, head, *more)

    monkeypatch.setattr(merged_model, "read_heads", former)
    monkeypatch.setattr(heads, "read_values", gone)
    merged = await read_merged(founded.bus, founded.record)

    assert (merged.versions_min, merged.versions_max, merged.token_fragments) == (0, 1, TOKENS)
