"""Streams as data, and as JetStream writes them."""

from __future__ import annotations

import pytest

from atoll.bus.nats.provision import stream_config
from atoll.bus.streams import live_plan, stream_of, stream_plan
from atoll.wire.subjects import Subjects, matches

EVERY = (*stream_plan("r"), live_plan("r"))


@pytest.mark.parametrize("bodies", [True, False])
def test_taps_lead_to_a_tree_no_stream_keeps(*, bodies: bool) -> None:
    """A republish that a stream kept would loop. Without bodies a tap is as those of a release before, to the letter."""
    for plan in stream_plan("r"):
        tap = stream_config(plan, "atoll.r", bodies=bodies).get("republish")
        if tap:
            ends = {"src": f"atoll.r.{plan.tap}.>", "dest": f"atoll.r.tap.{plan.tap}.>"}
            assert tap == (ends if bodies else {**ends, "headers_only": True})
            assert matches(plan.subjects[0], tap["src"])
            assert not any(matches(kept, tap["dest"]) for other in EVERY for kept in other.subjects)


def test_no_tap_covers_tensors_or_leases() -> None:
    s = Subjects("r")
    stems = (
        s.global_stem(0, 1, "1.n"), s.delta_stem(0, 1, "1.n"), s.contribution_stem("a", 0, 1, 1, "0" * 16),
        s.state_stem(0, 1, "1.n"), s.ledger_stem(0, "1.n"), s.lent_stem("a", 1, "n"),
    )  # fmt: skip
    for subject in (*(f"{stem}.0" for stem in stems), s.lease(0), s.data):
        keeper = stream_of(EVERY, subject)
        assert keeper.tap is None or not matches(f"atoll.r.{keeper.tap}.>", subject), subject
