"""Calls into a connection's loop, in a thread of its own or in the caller's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import nats.errors
import pytest
from structlog.testing import capture_logs

from atoll.base.errors import BrokerUnavailable
from atoll.bus.nats.connection import Admission, Complaints, ConnectionLoop

SOON_S = 120.0


@pytest.fixture(params=[True, False], ids=["own_thread", "callers_loop"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[ConnectionLoop]:
    place = ConnectionLoop("x", own_thread=request.param)
    yield place
    await place.close(nothing_left, SOON_S)


async def nothing_left() -> None:
    """Shut down what was never there."""


async def running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


async def test_a_call_runs_in_the_loop_of_the_connection(place: ConnectionLoop) -> None:
    async def failing() -> None:
        raise ValueError("no")

    assert await place.call(running_loop()) is place.loop
    with pytest.raises(ValueError, match="no"):
        await place.call(failing())


async def test_a_connection_without_a_thread_lives_where_it_was_opened() -> None:
    here, there = ConnectionLoop("x", own_thread=False), ConnectionLoop("y", own_thread=True)

    assert here.loop is asyncio.get_running_loop()
    assert there.loop is not asyncio.get_running_loop()
    await there.close(nothing_left, SOON_S)


async def test_closing_ends_what_is_under_way_and_leaves_its_caller_alive(place: ConnectionLoop) -> None:
    began = asyncio.Event()

    async def caller() -> str:
        loop = asyncio.get_running_loop()

        async def waiting() -> None:
            loop.call_soon_threadsafe(began.set)
            await asyncio.Event().wait()

        try:
            await place.call(waiting())
        except BrokerUnavailable as error:
            await asyncio.sleep(0)  # a cancellation that is not taken back would end this
            return str(error)
        return "went on"

    calling = asyncio.create_task(caller())
    await began.wait()
    await place.close(nothing_left, SOON_S)

    assert "the bus was closed during the call" in await asyncio.wait_for(calling, SOON_S)
    with pytest.raises(BrokerUnavailable, match="the bus is closed"):
        await place.call(running_loop())


async def test_a_caller_that_is_cancelled_is_cancelled(place: ConnectionLoop) -> None:
    calling = asyncio.create_task(place.call(asyncio.sleep(SOON_S)))
    await asyncio.sleep(0.01)
    calling.cancel()

    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_closing_goes_on_when_its_caller_is_cancelled(place: ConnectionLoop) -> None:
    """Nobody calls it again, so it would stay half open; a second caller waits for the same end."""
    began, may_end, ends = asyncio.Event(), asyncio.Event(), 0

    async def shut_down() -> None:
        nonlocal ends
        began.set()
        await may_end.wait()
        ends += 1

    async def here() -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(shut_down(), test_loop))

    test_loop = asyncio.get_running_loop()
    closing = asyncio.create_task(place.close(here, SOON_S))
    await began.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert ends == 0
    may_end.set()
    await place.close(here, SOON_S)

    assert ends == 1


REFUSED = nats.errors.Error("nats: 'Authorization Violation'")


def test_a_trouble_of_all_connections_is_logged_once() -> None:
    trunk = Complaints("a")
    branches = [Complaints(f"a-bulk-{number}", trunk) for number in range(2)]
    with capture_logs() as said:
        for _ in range(3):
            for each in (trunk, *branches):
                each.note(nats.errors.UnexpectedEOF())
                each.note(REFUSED)
    assert [(line["event"], line["bus"]) for line in said] == [("bus.error", "a")]
    assert all("EOF" in each.text and "Authorization" in each.text for each in (trunk, *branches))


async def test_a_server_that_takes_over_a_new_roll_refuses_nobody_for_good() -> None:
    """It hangs up on a client that is just coming in; one that is refused again is refused by its own fault."""
    admission = Admission("nats://h:4222", None, asyncio.get_running_loop())
    violation = nats.errors.Error("nats: 'Authorization Violation'")
    admission.take_error(violation)
    assert not admission.shut.done()
    admission.note_entry()
    for _ in range(2):
        assert not admission.shut.done()
        admission.take_error(violation)
    assert admission.shut.done()
