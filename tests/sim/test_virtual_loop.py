"""The loop on which production services run in virtual time: order, jumps, deadlines, cancellation, kills."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from atoll.base.errors import ProtocolMisuse
from atoll_simulator.loop import WALL_S, LoopClock, ProcessTasks
from support.clocks import virtually


def test_time_passes_only_when_everybody_waits_and_then_at_once() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        read = [loop.time()]
        await asyncio.sleep(31_536_000.0)
        read.append(loop.time())
        for _ in range(1000):
            await asyncio.sleep(0)
        return [*read, loop.time()]

    assert virtually(main()) == [0.0, 31_536_000.0, 31_536_000.0]


def test_timers_fire_by_time_and_among_equals_in_the_order_they_were_asked_for() -> None:
    """Sixty-four timers of one moment keep their order, which a heap alone would not promise."""

    async def main() -> list[int]:
        loop, fired = asyncio.get_running_loop(), list[int]()
        loop.call_later(2.0, fired.append, -2)
        for number in range(64):
            loop.call_at(1.0, fired.append, number)
        loop.call_later(0.5, fired.append, -1)
        cancelled = loop.call_later(0.7, fired.append, -3)
        cancelled.cancel()
        await asyncio.sleep(3.0)
        return fired

    assert virtually(main()) == [-1, *range(64), -2]


def test_a_deadline_is_met_to_the_instant() -> None:
    """`wait_for` and `timeout` give up exactly when they should, and not a moment before what is awaited is there."""

    async def main() -> list[float]:
        loop, read = asyncio.get_running_loop(), list[float]()
        event = asyncio.Event()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(event.wait(), 0.3)
        read.append(loop.time())
        loop.call_later(0.2, event.set)
        await asyncio.wait_for(event.wait(), 0.3)
        read.append(loop.time())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout_at(1.0):
                await asyncio.sleep(5.0)
        read.append(loop.time())
        return read

    assert virtually(main()) == [0.3, 0.5, 1.0]


def test_what_is_given_to_a_thread_is_done_here_and_now() -> None:
    def fail() -> None:
        raise ValueError("as it should")

    async def main() -> tuple[int, float]:
        where = await asyncio.to_thread(threading.get_ident)
        with pytest.raises(ValueError, match="as it should"):
            await asyncio.to_thread(fail)
        return where, asyncio.get_running_loop().time()

    assert virtually(main()) == (threading.get_ident(), 0.0)


def test_cancelling_ends_a_wait_and_runs_its_finally() -> None:
    async def main() -> tuple[list[float], float]:
        loop, ended = asyncio.get_running_loop(), list[float]()

        async def wait() -> None:
            try:
                await asyncio.sleep(100.0)
            finally:
                ended.append(loop.time())

        task = loop.create_task(wait())
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(200.0)
        return ended, loop.time()

    assert virtually(main()) == ([1.0], 201.0)


def test_waiting_for_nobody_is_an_error_and_no_long_wait() -> None:
    """With nothing ready and no timer left the run would stand still for ever."""

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(ProtocolMisuse, match="nothing is left to happen"):
        virtually(main())


def test_a_kill_ends_a_process_with_all_it_started_and_nobody_else() -> None:
    async def main() -> list[str]:
        loop, seen = asyncio.get_running_loop(), list[str]()

        async def tick(name: str) -> None:
            while True:
                await asyncio.sleep(1.0)
                seen.append(name)

        async def process(name: str) -> None:
            loop.create_task(tick(f"{name}/child"))
            loop.call_later(5.5, lambda: loop.create_task(tick(f"{name}/late")))
            await tick(name)

        doomed, other = ProcessTasks(), ProcessTasks()
        doomed.spawn(process("doomed"))
        other.spawn(process("other"))
        loop.call_later(2.5, doomed.kill)
        await asyncio.sleep(7.0)
        other.kill()
        await asyncio.sleep(1.0)
        assert not doomed.tasks
        assert not other.tasks
        return seen

    seen = virtually(main())

    assert seen.count("doomed") == seen.count("doomed/child") == 2
    assert seen.count("other") == seen.count("other/child") == 6
    assert "doomed/late" not in seen
    assert seen.count("other/late") == 1


def test_an_interrupt_leaves_at_once_and_tasks_still_end_in_order() -> None:
    """Raised in the middle of a task: everybody is cancelled, may await something once more, and the loop closes."""
    said: list[str] = []

    async def main() -> None:
        async def interrupt() -> None:
            await asyncio.sleep(1.0)
            raise KeyboardInterrupt

        try:
            await asyncio.gather(interrupt(), asyncio.sleep(100.0))
        finally:
            await asyncio.sleep(1.0)
            said.append("told")

    with pytest.raises(KeyboardInterrupt):
        virtually(main())
    assert said == ["told"]

    async def at_once() -> None:
        await asyncio.sleep(1.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        virtually(at_once())
    gc.collect()  # the interrupted tasks complain when they are collected: not in the middle of another test


def test_an_error_that_nobody_awaits_is_told() -> None:
    """A callback that fails reaches the handler and ends nothing else."""

    async def main() -> list[str]:
        loop, told = asyncio.get_running_loop(), list[str]()
        loop.set_exception_handler(lambda _, context: told.append(repr(context["exception"])))
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(1.0)
        return told

    assert virtually(main()) == ["ZeroDivisionError('integer division or modulo by zero')"]


def test_the_clock_of_a_loop_reads_its_time() -> None:
    async def main() -> tuple[float, float]:
        clock = LoopClock(asyncio.get_running_loop())
        await asyncio.sleep(2.5)
        return clock.monotonic(), clock.wall()

    assert virtually(main()) == (2.5, WALL_S + 2.5)
