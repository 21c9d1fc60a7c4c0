"""Answers that are awaited, and those that JetStream did not give: whoever learns a private inbox may send to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from nats.aio.msg import Msg

from atoll.base.retry import Unanswered
from atoll.bus.nats.connection import OVERTAKEN, AnswerOrder, Answers
from atoll.bus.nats.consumers import _attempts
from atoll.bus.nats.jetstream_api import read_field


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
    with pytest.raises(Unanswered):
        read_field(answer, int, "seq") if "state" not in answer else read_field(answer, int, "state", "last_seq")


def test_an_answers_parts_are_found_by_name() -> None:
    assert read_field({"seq": 7, "state": {"last_seq": 9}}, int, "state", "last_seq") == 9


SOON_S = 120.0
NOBODY: Any = None


def waiting() -> Answers:
    return Answers(asyncio.get_running_loop(), "_INBOX.x")


async def test_each_request_hears_its_own_answer_and_only_the_first() -> None:
    box = waiting()
    (first, one), (second, two) = box.expect(), box.expect()
    for subject, data in ((second, b"2"), (first, b"1"), (first, b"again"), ("_INBOX.x.guessed", b"?")):
        box.hear(Msg(NOBODY, subject, "", data))

    heard = [await box.within(answer, SOON_S, None) for answer in (one, two)]

    assert [message and message.data for message in heard] == [b"1", b"2"]
    assert len({first, second, *(box.expect()[0] for _ in range(600))}) == 602
    assert all(subject.startswith("_INBOX.x.") for subject in (first, second))


async def test_a_lost_connection_fails_what_waits_and_nothing_later() -> None:
    box = waiting()
    _, before = box.expect()
    box.lose()
    after_at, after = box.expect()
    box.hear(Msg(NOBODY, after_at, "", b"there"))

    with pytest.raises(Unanswered):
        await box.within(before, SOON_S, None)
    assert await box.within(after, SOON_S, None) is not None


async def test_an_answer_is_awaited_for_as_long_as_something_moves() -> None:
    box, moves = waiting(), iter([True, True, False])
    subject, answer = box.expect()

    with pytest.raises(TimeoutError):
        await box.within(answer, 0.001, lambda: next(moves))
    assert list(moves) == []
    box.forget(subject)


async def test_what_settles_a_request_that_was_given_up_harms_nobody() -> None:
    """Neither an answer nor the loss of the connection finds it; asyncio reports no error that nobody read."""
    box = waiting()
    subject, answer = box.expect()
    box.lose()
    box.forget(subject)
    box.hear(Msg(NOBODY, subject, "", b"late"))
    box.lose()

    assert answer.done()


def test_a_request_is_overtaken_by_many_later_ones_and_by_no_earlier_one() -> None:
    order = AnswerOrder()
    before = [order.begin() for _ in range(2 * OVERTAKEN)]
    ours = order.begin()
    after = [order.begin() for _ in range(OVERTAKEN)]
    for number in before:
        order.note_answer(number)
    for number in after[:-1]:
        order.note_answer(number)
    assert not order.is_overtaken(ours)
    order.note_answer(after[-1])
    assert order.is_overtaken(ours)
    assert not order.is_overtaken(after[0]), "it has its own answer"
    assert order.answers == len(before) + len(after)


def test_waiting_ends_when_nothing_moves_or_it_is_overtaken() -> None:
    order, moving = AnswerOrder(), [True]
    ours = order.begin()
    due = order.while_due(ours, lambda: moving[0])
    assert due()
    moving[0] = False
    assert not due()
    moving[0] = True
    for _ in range(OVERTAKEN):
        order.note_answer(order.begin())
    assert not due()
