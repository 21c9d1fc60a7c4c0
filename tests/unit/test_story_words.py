"""A round in one line, as `atoll why` shows the slowest."""

from __future__ import annotations

import msgspec
import pytest

from atoll.protocol.reasons import RoundReasons
from atoll.run.event_fields import RoundView
from atoll.run.view import RoundLine
from atoll.story.telling import one_line


@pytest.mark.parametrize(
    ("met_by", "told"), [("push/a/1/0/1", "(0.250 s to the quorum)"), ("", "(its quorum was never met)")]
)
def test_a_round_that_never_met_its_quorum_does_not_claim_that_it_took_no_time(met_by: str, told: str) -> None:
    """The time to a quorum that was never met is no time."""
    why = RoundReasons(version=1, calls=2, quorum=3, quorum_wait_s=0.25, met_by=met_by, end="nobody left")
    made = msgspec.convert({"fragment": 0, "version": 2, "contributors": [], "quorum_wait_s": 0.25}, RoundView)

    assert told in one_line(RoundLine(1.0, "shard-0", msgspec.structs.replace(made, why=why, waited_s=1.5)))
