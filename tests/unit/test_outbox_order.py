"""What a process of a region writes stays in order, whichever way it goes."""

from __future__ import annotations

import pytest

from atoll.bus.nats.region import OutboxOrder


class Outbox:
    """An outbox that holds what the test says; `asked` runs while it answers."""

    def __init__(self) -> None:
        self.messages: int | None = 0
        self.order = OutboxOrder(self.waiting)
        self.enters_meanwhile = False

    async def waiting(self) -> int | None:
        if self.enters_meanwhile:
            with self.order.entering():
                pass
        return self.messages


async def test_a_manifest_waits_while_its_chunks_are_on_their_way() -> None:
    """Another message of the process asked for the outbox, found it empty, and let the manifest go first."""
    outbox = Outbox()
    with outbox.order.entering():
        assert await outbox.order.must_wait()
    outbox.messages = 3
    assert await outbox.order.must_wait()
    outbox.messages = 0
    assert not await outbox.order.must_wait()


async def test_an_outbox_that_something_entered_while_it_was_asked_is_not_empty() -> None:
    outbox = Outbox()
    outbox.enters_meanwhile = True
    with outbox.order.entering():
        pass
    assert await outbox.order.must_wait()
    outbox.enters_meanwhile = False
    assert not await outbox.order.must_wait()


async def test_a_leaf_that_does_not_say_leaves_all_in_order() -> None:
    outbox = Outbox()
    assert not await outbox.order.must_wait()
    with outbox.order.entering():
        pass
    outbox.messages = None
    assert await outbox.order.must_wait()


async def test_what_could_not_enter_holds_up_nothing_for_good() -> None:
    outbox = Outbox()
    with pytest.raises(ValueError, match="invalid"), outbox.order.entering():
        int("the leaf is away")
    assert not await outbox.order.must_wait()
