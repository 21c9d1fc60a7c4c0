"""What is logged of a broker's troubles, and how often."""

from __future__ import annotations

import nats.errors
from structlog.testing import capture_logs

from atoll.bus.nats.connection import Complaints

REFUSED = nats.errors.Error("nats: 'Authorization Violation'")


def test_a_trouble_of_all_connections_is_logged_once() -> None:
    """The first that has it says it; the text of each has all, for errors."""
    trunk = Complaints("a")
    branches = [Complaints(f"a-bulk-{number}", trunk) for number in range(2)]
    with capture_logs() as said:
        for _ in range(3):
            for each in (trunk, *branches):
                each.note(nats.errors.UnexpectedEOF())
                each.note(REFUSED)
    assert [(line["event"], line["bus"]) for line in said] == [("bus.error", "a")]
    assert all("EOF" in each.text and "Authorization" in each.text for each in (trunk, *branches))
