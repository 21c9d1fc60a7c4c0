"""What is tried again, after which pauses, and when it is given up."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from atoll.base.errors import BlobGone, BrokerUnavailable, StorageFull
from atoll.base.retry import RETRY_S, RETRY_S_MAX, cancel_all, patiently, pause_s


class PausedClock:
    """Time that passes only in pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []
        monkeypatch.setattr("atoll.base.retry.asyncio.sleep", self._sleep)

    async def _sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now_s += pause_s

    def __call__(self) -> float:
        return self.now_s


class Attempt:
    """Fails with these errors, one after the other, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"


async def test_what_passes_is_tried_again_after_pauses_that_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a bound; and it is tried for ever, because what follows rests on it."""
    clock = PausedClock(monkeypatch)
    attempt = Attempt(*[BrokerUnavailable("away"), StorageFull("full")] * 5)

    assert await patiently(attempt) == "done"
    assert clock.pauses == [min(RETRY_S * 2**n, RETRY_S_MAX) for n in range(10)]


async def test_what_waiting_cannot_mend_gets_through_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PausedClock(monkeypatch)
    with pytest.raises(BlobGone):
        await patiently(Attempt(BlobGone("gone")))

    assert clock.pauses == []


async def test_work_that_does_not_get_on_is_given_up_and_work_that_does_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, left = PausedClock(monkeypatch), 10

    async def slow() -> None:
        nonlocal left
        left -= 1
        if left:
            raise BrokerUnavailable("slow")

    await patiently(slow, "a blob", patience_s=6.0, progress=lambda: left, now_s=clock)
    assert clock.now_s > 6.0
    stuck = Attempt(*[BrokerUnavailable("stuck")] * 99)
    with pytest.raises(BrokerUnavailable, match="stuck"):
        await patiently(stuck, "a blob", patience_s=6.0, progress=lambda: 0, now_s=clock)


def test_jitter_only_shortens_a_pause() -> None:
    """So that many that failed together do not come back together, and a bound stays one."""
    drawn = [pause_s(attempts, 1.0, 4.0, jitter=0.5) for attempts in range(1, 201)]

    assert all(0.5 * full <= got <= full for got, full in zip(drawn, [1.0, 2.0, *[4.0] * 198], strict=True))
    assert len(set(drawn[2:])) > 100


async def test_a_task_that_waits_can_be_cancelled() -> None:
    waiting = asyncio.ensure_future(patiently(Attempt(*[BrokerUnavailable("away")] * 99)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_task_that_loses_a_cancellation_is_ended() -> None:
    async def losing() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def failing() -> None:
        raise ValueError("no")

    tasks = [asyncio.create_task(losing()), asyncio.create_task(failing())]
    await asyncio.sleep(0)
    await cancel_all(tasks)

    assert tasks[0].cancelled()
    assert tasks[1].done()
