"""What a session of `atoll up` says at its end of how the run goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.base.clock import SystemClock
from atoll.local.journal import Journal
from atoll.local.options import UpRequest, plan
from atoll.run.folder import RunFolder
from atoll.run.view import RunView


def journal(out: Path, target: int, broker: str | None = None) -> Journal:
    """Return the journal of a new run in a folder."""
    up = plan(UpRequest(out=out, assignments=(f"protocol.tokens_target={target}",)), {})
    return Journal(replace(up, broker=broker), RunFolder(out), RunView(), SystemClock())


@pytest.mark.parametrize(
    ("target", "tokens", "broker", "said"),
    [
        (1000, 999, None, "atoll up --out {out}"),
        (0, 5000, None, "atoll up --out {out}"),
        (1000, 999, "nats://a:1", "atoll up --out {out} --broker URL"),
        (1000, 1000, None, ""),
    ],
)
def test_a_run_that_is_not_finished_ends_with_the_command_that_continues_it(
    tmp_path: Path, target: int, tokens: int, broker: str | None, said: str
) -> None:
    """Without --out the same command would begin another run. A finished one refuses to go on."""
    out = tmp_path / "a run"
    session = journal(out, target, broker)
    session.file.tokens = tokens

    assert session.continued_by().partition("continue:")[2].strip() == said.format(out=f"'{out}'")
