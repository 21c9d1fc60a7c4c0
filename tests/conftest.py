"""Fixtures of the whole suite: one real broker per session, one run id per test, no task left behind."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from atoll.base import logs
from atoll.bus.server import EmbeddedBroker
from support import caches
from support.links import unique_run

caches.share()

pytest_plugins = ["support.islands"]

# Who runs the tests in the background of a script has interrupts ignored, and so has every process that tests start and
# interrupt, for children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that start processes on one worker, one after the other, while the rest runs on another."""
    for item in items:
        if "integration" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """One nats-server for all tests that do not break it."""
    with EmbeddedBroker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture
def run() -> str:
    """A run id of this test's own."""
    return unique_run()


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    """Keep what one test makes of the process's logging from the next, whatever order they run in."""
    with logs.restored():
        yield


@pytest.fixture
async def tasks_end() -> AsyncIterator[None]:
    """Fail a test after which an asyncio task still runs."""
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left behind: {left}"


@pytest.fixture(autouse=True)
def _no_task_left(request: pytest.FixtureRequest) -> None:
    """Watch every coroutine test; plain tests get no event loop."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("tasks_end")
