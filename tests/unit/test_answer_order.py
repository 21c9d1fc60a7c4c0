"""An answer is lost, and not only late, once enough later requests have theirs."""

from __future__ import annotations

from atoll.bus.nats.connection import OVERTAKEN, AnswerOrder


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
