"""The simulation finds what it is there to find: every planted bug breaks a promise within a bounded number of schedules."""

from __future__ import annotations

import pytest

from atoll.protocol.shard import Shard
from atoll.sim.dst import campaign
from atoll.sim.dst.planted import BUGS, hunt, planted

pytestmark = pytest.mark.second_tier

SCHEDULES_MAX = 400
LIVENESS = {"lease never expires", "removed reader stays owner", "early timer lost"}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    """With the kind of promise that it breaks."""
    caught = hunt(bug, 0, SCHEDULES_MAX)

    assert caught.violation, f"not caught in {SCHEDULES_MAX} schedules"
    assert caught.kind == ("liveness" if bug in LIVENESS else "safety")


def test_a_planted_bug_is_gone_after_its_block() -> None:
    """The machine is the production machine again."""
    handle = Shard.handle
    with planted("ack before commit"):
        inside = Shard.handle

    assert inside is not handle
    assert Shard.handle is handle


def test_a_failure_is_told_with_the_command_that_shows_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Seed, commit, promise, the end of the log, and one line to type; safety leaves with 1."""
    with planted("head before chunks"):
        left = campaign.main(["--seed", "0"])
        told = campaign.told(campaign.chunk(0, 1)[2] or pytest.fail("not caught"))

    assert left == 1
    assert "seed 0: safety violated: InvariantBroken: what a head names is durable" in capsys.readouterr().out
    assert told.count("  | ") >= 10
    assert "safety violated in seed 0, commit " in told
    assert told.endswith("the whole schedule: .venv/bin/python -m atoll.sim.dst --seed 0")


def test_the_table_of_planted_bugs_names_what_got_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug that is not caught makes the exit code 1."""
    monkeypatch.setattr(campaign, "BUGS", ["no dedupe"])
    assert campaign.main(["--planted", "--schedules", "5"]) == 0
    monkeypatch.setattr(
        campaign, "hunt", lambda bug, first, most: hunt.__globals__["Caught"](bug, most, float(first), "", "")
    )
    assert campaign.main(["--planted", "--schedules", "5"]) == 1
    said = capsys.readouterr().out
    assert "no dedupe" in said
    assert "NOT CAUGHT" in said
