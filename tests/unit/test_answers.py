"""Answers that JetStream did not give: whoever learns a private inbox may send to it."""

from __future__ import annotations

import pytest

from atoll.base.retry import Unanswered
from atoll.bus.nats.consumers import _attempts
from atoll.bus.nats.jetstream_api import told


@pytest.mark.parametrize(
    ("reply", "attempts"),
    [
        ("$JS.ACK.S.C.3.10.11.12.0", 3),
        ("$JS.ACK.hub.hash.S.C.2.10.11.12.0.x", 2),
        ("$JS.ACK.S.C.x.10.11.12.0", None),
        ("$JS.ACK.S.C.²", None),
        ("_INBOX.x", None),
        ("", None),
    ],
)
def test_a_delivery_is_known_by_the_subject_on_which_it_is_settled(reply: str, attempts: int | None) -> None:
    """Everything else is dropped; nats-py raised errors of its own for it."""
    assert _attempts(reply) == attempts


@pytest.mark.parametrize("answer", [{}, {"seq": "7"}, {"seq": None}, {"state": 5}, {"state": {"last_seq": -1.5}}])
def test_an_answer_that_lacks_its_parts_is_no_answer(answer: dict[str, object]) -> None:
    """The request is sent again, as if nothing had come."""
    with pytest.raises(Unanswered):
        told(answer, int, "seq") if "state" not in answer else told(answer, int, "state", "last_seq")


def test_an_answers_parts_are_found_by_name() -> None:
    """At any depth."""
    assert told({"seq": 7, "state": {"last_seq": 9}}, int, "state", "last_seq") == 9
