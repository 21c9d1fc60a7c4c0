"""The monitor as a process: open the bus, follow the run, serve what is known, until a signal.

It only reads, and nobody waits for it. While the broker is away it serves what it knows (`/healthz` says that it is old) and
tries again. When a run is founded anew, it forgets the former one, whose event log is gone. A run that is not there yet is
awaited; a name that was mistyped would be for ever, so the terminal names the runs that the broker keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from starlette.routing import BaseRoute

from atoll.base.clock import SystemClock
from atoll.base.errors import AtollError, BrokerUnavailable, SettingsError, redact
from atoll.base.files import write_whole
from atoll.base.health import REACH_S, TOUCH_S, show_life
from atoll.base.logs import configure, get
from atoll.base.wording import few
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus, open_managing_bus
from atoll.run.folder import SavedRun
from atoll.run.record import read_run
from atoll.run.watch import Watch
from atoll.settings import Settings, bus_options
from atoll.wire.messages import RunRecord
from atoll.wire.subjects import Subjects
from atoll_monitor.dashboard import Feed, RunScene, SavedScene, page_routes, poll_fates
from atoll_monitor.http_server import allowed_hosts, application, listening_socket, plain_routes, serve, url_of
from atoll_monitor.monitored_run import MonitoredRun
from atoll_monitor.polling import poll_brokers, poll_certificates, poll_disks, poll_nodes, poll_streams
from atoll_monitor.records import RecordKeeper

log = get(__name__)

RECORD_S = 2.0
SOON_S: Final = 2.0
LOOK_S: Final = 0.5
PATIENCE_S: Final = 3.0
RUNS_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class BrokerRun:
    """A run that is reached by its broker; `reached_by` are the options by which a command reads it, too."""

    settings: Settings
    reached_by: str


def reached_by(settings: Settings, folder: Path | None) -> str:
    """Return the options of a command that is to read a run: by its folder, if there is one, else by its broker."""
    if folder is not None:
        return f"--out {shlex.quote(str(folder))}"
    return f"--run {settings.run} --broker {redact(settings.broker.url)}"


def watch_run(settings: Settings) -> None:
    """Watch the run that `settings` names, in a loop of its own."""
    configure(settings.log.format, settings.log.level, role="monitor", run=settings.run)
    mine = settings.monitor
    shown = {settings.run: BrokerRun(settings, reached_by(settings, settings.up.out))}
    asyncio.run(monitor(shown, settings, listening_socket(mine.host, mine.port)))


def show_runs(
    shown: Mapping[str, BrokerRun | SavedRun],
    settings: Settings,
    open_at: Callable[[str], None],
    tell: Callable[[str], None],
    *,
    any_port: bool,
) -> None:
    """Watch these runs for a person; `open_at` gets the address of the page, `tell` what it waits for.

    `settings` say where it is served. With `any_port` a port that is taken is no error: a free one will do.
    """
    configure(settings.log.format, "error", role="dashboard", run=next(iter(shown)))
    mine = settings.monitor
    try:
        listening = listening_socket(mine.host, mine.port)
    except SettingsError:
        if not any_port:
            raise
        listening = listening_socket(mine.host, 0)
    open_at(url_of(listening))
    asyncio.run(monitor(shown, settings, listening, tell))


async def monitor(
    shown: Mapping[str, BrokerRun | SavedRun],
    settings: Settings,
    listening: socket.socket,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Watch these runs, by the names under which they are shown, and serve until SIGTERM or SIGINT.

    Metrics are those of the first that has a broker. A monitor writes records; one that only shows runs to a person does
    not, and uses `tell` to say what it waits for.
    """
    clock, names = SystemClock(), tuple(shown)
    live = {name: each.settings for name, each in shown.items() if isinstance(each, BrokerRun)}
    watched = {name: MonitoredRun(each.run, clock, began_s=clock.monotonic()) for name, each in live.items()}
    scenes = {
        name: RunScene(watched[name], name, names, each.reached_by, each.settings.broker.url)
        for name, each in shown.items()
        if isinstance(each, BrokerRun)
    }
    saved = {name: SavedScene(each, name, names) for name, each in shown.items() if isinstance(each, SavedRun)}
    feed = Feed({name: scenes.get(name) or saved[name] for name in names}, clock)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    keepers = [RecordKeeper(watched[name], each.monitor) for name, each in live.items() if tell is None]
    app = application(
        routes_of(next(iter(watched.values()), None), feed), allowed_hosts(listening, settings.monitor.names)
    )
    log.info("monitor.serving", url=url_of(listening))
    if settings.monitor.url_file is not None:
        write_whole(settings.monitor.url_file, url_of(listening).encode())
    work = [asyncio.create_task(follow(watched[name], each)) for name, each in live.items()]
    work += [
        asyncio.create_task(poll_fates(scenes[name], each, lambda: feed.is_looked_at)) for name, each in live.items()
    ]
    work += [asyncio.create_task(keeper.keep()) for keeper in keepers]
    work.append(asyncio.create_task(feed.run()))
    hints = [
        asyncio.create_task(announce_wait(watched[name], each, tell)) for name, each in live.items() if tell is not None
    ]
    ends = [asyncio.create_task(feed.stop_with(stop)), asyncio.create_task(serve(app, listening, stop))]
    try:
        await _first_of([*work, ends[-1]])
    finally:
        stop.set()
        for task in (*work, *hints):
            task.cancel()
        await asyncio.gather(*work, *hints, *ends, return_exceptions=True)


async def _first_of(tasks: list[asyncio.Task[None]]) -> None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def routes_of(watched: MonitoredRun | None, feed: Feed) -> list[BaseRoute]:
    """Return all that this process answers on; the page comes last, because it answers what nothing before it does.

    Of saved runs there are no metrics: None of them is watched.
    """
    return [*(() if watched is None else plain_routes(watched)), *page_routes(feed)]


async def follow(watched: MonitoredRun, settings: Settings) -> None:
    """Keep `watched` current until cancelled."""
    mine = settings.monitor
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(poll_streams(watched, settings))
        tasks.create_task(poll_brokers(watched, mine.endpoints))
        tasks.create_task(poll_disks(watched, mine.disks))
        tasks.create_task(poll_certificates(watched, settings.broker.url))
        tasks.create_task(poll_nodes(watched, (settings.broker.url, *settings.broker.bulk)))
        bus = await _open_bus(settings)
        try:
            tasks.create_task(_echo(bus, watched, settings))
            await _follow_foundings(bus, watched)
        finally:
            await bus.close()


async def _open_bus(settings: Settings) -> Bus:
    """Return the bus, however long the broker lets us wait; what trying again cannot heal is raised."""
    while True:
        try:
            return await open_bus(settings.broker.url, settings.run, name="monitor", options=bus_options(settings))
        except BrokerUnavailable as error:
            log.warning("broker.awaited", reason=str(error))


async def _echo(bus: Bus, watched: MonitoredRun, settings: Settings) -> None:
    while True:
        with contextlib.suppress(AtollError):
            if await bus.reach(REACH_S):
                watched.answered_s = watched.clock.monotonic()
                show_life(settings.health_file)
        await asyncio.sleep(TOUCH_S)


async def _follow_foundings(bus: Bus, watched: MonitoredRun) -> None:
    subjects = Subjects(watched.run)
    while True:
        watch = Watch(bus, watched.run, watched.view, watched.clock)
        watched.region_of, watched.read_up_to = watch.region_of, watch.read_up_to
        watching = asyncio.create_task(watch.follow())
        try:
            await _watch_record(bus, subjects, watched, watching)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        log.warning("run.replaced", reason="it was founded anew; what was known of it is forgotten")
        watched.forget()


async def _watch_record(bus: Bus, subjects: Subjects, watched: MonitoredRun, watching: asyncio.Task[None]) -> None:
    """Keep the run record current; return when the run is another one. Raises what ends `watching`."""
    while True:
        record = await _record(bus, subjects)
        if record is not None:
            if watched.record is not None and record.nonce != watched.record.nonce:
                return
            if watched.record is None:
                log.info("run.found", founder=record.founder, fragments=record.protocol.fragments)
            watched.record = record
        done, _ = await asyncio.wait({watching}, timeout=RECORD_S)
        if done:
            watching.result()


async def _record(bus: Bus, subjects: Subjects) -> RunRecord | None:
    try:
        return await read_run(bus, subjects)
    except AtollError as error:
        log.info("run.unreadable", reason=str(error))
        return None


async def announce_wait(watched: MonitoredRun, settings: Settings, tell: Callable[[str], None]) -> None:
    """Tell once what the page waits for, unless the run is found soon, and once more when it is found."""
    await asyncio.sleep(SOON_S)
    if watched.record is not None:
        return
    tell(await describe_founding_wait(settings))
    while watched.record is None:  # noqa: ASYNC110  (whoever follows the run sets no event)
        await asyncio.sleep(LOOK_S)
    tell(f"run {watched.run!r} is there: the page shows it")


async def describe_founding_wait(settings: Settings) -> str:
    """Return what a run that is not founded waits for, in one or two sentences."""
    url = redact(settings.broker.url)
    try:
        options = replace(bus_options(settings), patience_s=PATIENCE_S)
        bus = await open_managing_bus(settings.broker.url, settings.run, name="dashboard", options=options)
    except AtollError:
        return f"no broker lets us in at {url} yet: the page waits for it, and for run {settings.run!r}"
    try:
        known = [stored.run for stored in await bus.stored_runs()]
    except AtollError:  # an identity of one run may not list others
        known = None
    finally:
        await bus.close()
    return f"nobody has founded run {settings.run!r} at {url} yet: the page waits for it. {_describe_stored(known)}".rstrip()


def _describe_stored(known: list[str] | None) -> str:
    if known is None:
        return ""
    if not known:
        return "This broker keeps no run."
    how = " (`atoll runs`)" if len(known) > RUNS_NAMED else ""
    return f"This broker keeps {few(known, RUNS_NAMED)}{how}."
