"""Fixtures of the whole suite: one real broker per session, one run id per test, no task left behind."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings

from atoll.base import logs
from atoll.base.background_tasks import LoopThread
from atoll.base.clock import SystemClock
from atoll.base.errors import PeerMisbehaved
from atoll.bus.memory import MemoryBus
from atoll.bus.server import EmbeddedBroker
from atoll.wire.limits import Info
from atoll.wire.messages import Head, decode
from support import caches
from support.clocks import JumpingClock
from support.links import unique_run
from support.reference_machines import HeadModel
from support.scheduling import ModuleScheduling, SuitePart

caches.share()
os.environ["KERAS_BACKEND"] = "jax"  # read when Keras is loaded

pytest_plugins = ["support.islands", "support.installed", "support.simulated_runs", "support.whole_runs"]

# How long an example takes says how busy the machine is, nothing of the code: no profile has a deadline. Where CI=1, examples
# are the same each time; elsewhere new ones are tried. For mutants a few examples must do, and a failure is not made small.
hypothesis_settings.register_profile("atoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.register_profile("ci", hypothesis_settings.get_profile("atoll"), derandomize=True)
hypothesis_settings.register_profile(
    "mutants",
    hypothesis_settings.get_profile("ci"),
    max_examples=8,
    phases=[Phase.explicit, Phase.generate],
    database=None,
)
hypothesis_settings.load_profile("ci" if os.environ.get("CI") else "atoll")

# Who runs the tests in the background of a script has interrupts ignored, and so has every process that tests start and
# interrupt, for children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Until somebody sets a loop, `asyncio.get_event_loop()` of a library makes one in the main thread that nobody closes.
asyncio.set_event_loop(None)


# Every wait of such a test has a bound of its own, the longest that of a page (`support.documents`). One that is not met names
# what was awaited, so it must run out before this does.
LONG_TEST_S = 1200

# Where most tests start processes or wait, and the modules that are long by themselves: one that began last would keep one
# worker, and one core, alone at the end.
FIRST = {
    *("integration", "installed", "contract", "sim", "property", "test_documents.py"),
    *("test_formats.py", "test_kernels.py", "test_learner_model.py", "test_device_encoding.py", "test_former_lives.py"),
    *("test_what_if.py", "test_archives_that_others_write_to.py", "test_deploy_render.py", "test_compiling.py"),
    *("test_keras_callback.py", "test_member_rows.py", "test_uncaught.py", "test_recovery_moments.py"),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ModuleScheduling:  # noqa: ANN401  (xdist has no types)
    return ModuleScheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=SuitePart.of, help="K/N: of every N tests about one, the same in each run")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Say which tests run, in which order, and how long one may take.

    The longest modules and pages come first. Another hook shuffles, so the order is made after all hooks.
    """
    for item in items:
        long = any(item.get_closest_marker(tier) for tier in ("second_tier", "cluster_faults"))
        if long and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TEST_S))
    yield
    part = config.getoption("part")
    if part is not None:
        config.hook.pytest_deselected(items=[item for item in items if not part.has(item.nodeid)])
        items[:] = [item for item in items if part.has(item.nodeid)]
    items.sort(key=lambda item: not FIRST & {*item.path.parts, item.path.name})


def pytest_collection_finish() -> None:
    """Take all that is loaded by now out of the sight of the garbage collector.

    These are millions of objects, which stay; to go through them took a quarter of the time of many tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """One nats-server for all tests that do not break it."""
    with EmbeddedBroker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture
def run() -> str:
    return unique_run()


@pytest.fixture
def home() -> Iterator[LoopThread]:
    """A thread with an event loop, for islands; it ends with the test."""
    thread = LoopThread("world")
    yield thread
    thread.stop()


@pytest.fixture(autouse=True)
def _wall_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the wall clock of this process at every reading: what measures by it waits for ever, or not at all.

    A test that needs a true time of day has a `_wall_jumps` of its own, which does nothing.
    """
    jumping, true = JumpingClock(), SystemClock.wall
    monkeypatch.setattr(SystemClock, "wall", staticmethod(lambda: true() + jumping.jump_s()))


@pytest.fixture(autouse=True)
def _heads_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every head that becomes visible on an in-memory bus against all before it, whatever test writes it."""
    models: dict[tuple[int, str, str], HeadModel] = {}
    put = MemoryBus.put_record

    async def watched(
        bus: MemoryBus,
        subject: str,
        data: bytes,
        *,
        expected: int | None,
        info: Info | None = None,
        **more: Any,  # noqa: ANN401  (as the bus takes it)
    ) -> int:
        revision = await put(bus, subject, data, expected=expected, info=info, **more)
        if ".gl.head." in subject:
            # A test may forge a head that every reader refuses; such a head belongs to no history.
            try:
                head = decode(Head, data)
            except PeerMisbehaved:
                return revision
            run, _, fragment = subject.partition(".gl.head.")
            if fragment != str(head.fragment):
                return revision
            model = models.setdefault((id(bus._broker), run, head.layout), HeadModel())
            tokens = [included.tokens for included in head.included]
            model.see(head.fragment, head.version, head.epoch, head.tokens_merged, tokens)
        return revision

    monkeypatch.setattr(MemoryBus, "put_record", watched)


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    """Keep what one test makes of the process's logging from the next, whatever order they run in."""
    with logs.restore_at_end():
        yield


@pytest.fixture
async def tasks_end() -> AsyncIterator[None]:
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left behind: {left}"


@pytest.fixture(autouse=True)
def _no_task_left(request: pytest.FixtureRequest) -> None:
    """Watch every coroutine test; plain tests get no event loop."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("tasks_end")
