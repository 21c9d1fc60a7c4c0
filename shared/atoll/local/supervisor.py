"""`atoll up`: the sequence of a run on this machine, from an empty folder to a report.

    broker ─► data ─► shards, learners, evaluator ─► watch … ─► drain ─► evaluator exports ─► report

A run ends by itself (all learners have left at the token target), by the clock (`--minutes`) or by a signal. The first
signal drains: learners push what they have and leave, shards merge it and close their ledgers, the model is exported and
the report written. The folder can be continued later. The second signal kills everything at once. However a run ends, also
by an error, no child is left: `run_up` kills what still runs as its last act, and `atoll.local.processes` covers the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from atoll.base.clock import Clock, SystemClock
from atoll.base.errors import INTERRUPTED, AtollError, ProtocolMisuse
from atoll.base.files import read_text
from atoll.base.logs import logging_to
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.local.brokers import check_broker_at
from atoll.local.console import ConsolePicture, RunConsole, make_face, open_page
from atoll.local.journal import Journal, continuation
from atoll.local.options import UpPlan
from atoll.local.processes import ProcessGroup
from atoll.local.run_store import (
    close_run,
    continue_run,
    describe_rebuilt,
    describe_unarchived,
    explain_loss,
    find_loss,
    last_facts,
    lost_commits,
    move_store_aside,
    newest_is_exported,
    rebuild_at,
    try_archive,
)
from atoll.local.services import DASHBOARD, DATA, EVALUATOR, EXPORT, RESTARTS_MAX, Services
from atoll.report.collect import BrokerFacts
from atoll.report.write import summary, write_report
from atoll.run.folder import VALIDATION, RunFolder, move_aside
from atoll.run.history import History
from atoll.run.watch import Watch
from atoll.settings import bus_options
from atoll.wire.messages import Control, encode
from atoll.wire.subjects import Subjects

POLL_S: Final = 0.1
SHOW_S: Final = 0.5
BROKER_PATIENCE_S: Final = 5.0
BROKER_START_S: Final = 30.0
PREPARE_S: Final = 3600.0
SHARDS_FINISH_S: Final = 60.0
SHARDS_LEAVE_S: Final = 30.0
SHARD_SETTLES_S: Final = 5.0
EXPORT_S: Final = 900.0
BROKER_LEAVE_S: Final = 10.0
PAGE_LEAVE_S: Final = 5.0
CLOSE_S: Final = 5.0


class _Stopped(Exception):
    """A signal came before there was anything to drain."""


def run_up(up: UpPlan) -> int:
    """Carry `up` out and return the exit code: 0, or 130 when it was stopped before it trained or killed.

    Raises `AtollError` for anything that kept the run from working; nothing is left running then either.
    """
    clock = SystemClock()
    if up.aside:
        move_aside(up.out)
    level, run = up.settings.log.level, up.settings.run
    with RunFolder(up.out) as folder, logging_to(folder.path("logs", "up.jsonl"), level, role="up", run=run):
        fleet = ProcessGroup(folder.path("logs"), clock)
        try:
            return asyncio.run(Supervisor(up, folder, fleet, make_face(clock), clock).run())
        finally:
            fleet.kill_all()


class Supervisor:
    """One session of a run: starts it, watches it, ends it."""

    def __init__(self, up: UpPlan, folder: RunFolder, fleet: ProcessGroup, face: RunConsole, clock: Clock) -> None:
        self._up = up
        self._folder = folder
        self._fleet = fleet
        self._face = face
        self._clock = clock
        self._view = History()
        self._services = Services(up, folder)
        self._page = DashboardPage(self._services, fleet, face)
        self._journal = Journal(up, folder, self._view, clock)
        fleet.proven = self._journal.note_end
        self._stopping = False

    async def run(self) -> int:
        """Run the session and return the exit code; see `run_up`."""
        loop, main = asyncio.get_running_loop(), asyncio.current_task()
        if main is None:
            raise ProtocolMisuse("a supervisor runs as a task", todo="await it, or give it to asyncio.run")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, main)
        self._journal.save()
        try:
            return await self._from_broker_to_report()
        except _Stopped:
            self._journal.end("stopped")
            with contextlib.suppress(asyncio.CancelledError):  # by a second signal
                await self._end([DATA], PAGE_LEAVE_S)  # it removes what it has half made
            self._face.say(
                "stopped before anything was trained; no settings were kept: to begin again, give the same command"
            )
            return INTERRUPTED
        except asyncio.CancelledError:
            self._journal.end("killed")
            self._face.say("killed; what the broker has is kept, `atoll up --out` continues from there")
            return INTERRUPTED
        except BaseException:
            self._journal.fail()
            raise
        finally:
            self._face.rest()
            self._fleet.kill_all()
            self._journal.keep(self._face.say)

    def _on_signal(self, main: asyncio.Task[int]) -> None:
        """The first signal asks for a good end; the second ends everything here and now."""
        if self._stopping:
            self._fleet.kill_all()
            main.cancel()
            return
        self._stopping = True
        self._face.rest()
        self._face.say("draining; once more kills everything at once")

    # --- the sequence ---------------------------------------------------------------------------------------------

    async def _from_broker_to_report(self) -> int:
        self._say(await asyncio.to_thread(try_archive, self._up))
        for difference in self._up.like.differences() if self._up.like is not None else ():
            self._face.say(difference)
        preparing = self._start_data()
        url = await self._check_store(await self._start_broker())
        self._services = Services(self._up, self._folder, url)
        self._page = DashboardPage(self._services, self._fleet, self._face)
        await self._finish(preparing, DATA, PREPARE_S, needed=True)
        if self._up.like is not None:
            self._say(self._up.like.text_difference(self._services.data_dir))
        run = self._up.settings.run
        bus = await open_bus(url, run, name="up", options=self._bus_options())
        self._fleet.away_s = lambda: bus.stats.away_s(self._clock.monotonic())
        watch = Watch(bus, run, self._view, self._clock)
        following = asyncio.create_task(watch.follow())
        try:
            if self._up.former is not None:
                await continue_run(bus, run, self._up.settings.protocol.tokens_target)
            self._start_services()
            failure = await self._train_and_end(bus, watch, following)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)  # a run that has ended well has
            with contextlib.suppress(TimeoutError, AtollError):
                async with asyncio.timeout(CLOSE_S):
                    await bus.close()
        try:
            await self._end([DASHBOARD], PAGE_LEAVE_S)
            await self._end(self._services.brokers, BROKER_LEAVE_S)
        finally:
            if failure is not None:
                raise failure
        return 0 if self._view.trained_tokens > 0 else INTERRUPTED

    async def _train_and_end(self, bus: Bus, watch: Watch, following: asyncio.Task[None]) -> AtollError | None:
        failure: AtollError | None = None
        try:
            how = await self._watch(bus, watch, following)
            self._face.rest()
            await self._drain(bus)
            self._journal.end(how)
            failure = await self._export(bus)
        except AtollError as error:
            failure = error
            self._journal.fail()
            self._fleet.kill([*self._up.learners, *self._services.shards, *self._services.standbys, EVALUATOR, EXPORT])
        self._face.rest()
        if self._view.trained_tokens > 0 and (failure is None or self._view.present_s > 0):
            await self._report(bus, watch)
        elif failure is None:
            self._face.say("nothing was trained, so there is nothing to report")
        return failure

    def _bus_options(self) -> BusOptions:
        return replace(bus_options(self._up.settings), patience_s=BROKER_PATIENCE_S)

    async def _start_broker(self) -> str:
        if self._up.broker is not None:
            with self._face.stage("looking for the broker"):
                await check_broker_at(self._up.broker, self._bus_options())
            return self._up.broker
        self._services.make_keys()
        hosts, files = self._services.brokers, self._services.url_files
        for file in files:
            file.unlink(missing_ok=True)
        with self._face.stage("starting the broker" if len(hosts) == 1 else f"starting {len(hosts)} brokers"):
            for broker in self._services.broker():
                self._fleet.start(broker)
            await self._until(
                lambda: all(file.exists() for file in files) or len(self._fleet.alive(hosts)) < len(hosts),
                BROKER_START_S,
            )
        for name, file in zip(hosts, files, strict=True):
            if not file.exists() and (
                name not in self._fleet.alive(hosts) or len(self._fleet.alive(hosts)) == len(hosts)
            ):
                raise self._fleet.failure(name, "the broker did not start")
            self._fleet.allow(name, RESTARTS_MAX)
        url, bulk = self._services.addresses()
        self._up = self._up.with_bulk(bulk)
        return url

    async def _check_store(self, url: str) -> str:
        if (loss := await find_loss(url, self._up)) is None:
            return url
        if not self._up.resume:
            raise explain_loss(loss, self._up)
        if self._up.broker is None:
            await self._end(self._services.brokers, BROKER_LEAVE_S)
            self._face.say(f"the broker's store has lost the run; it is kept in {move_store_aside(self._folder)}")
            url = await self._start_broker()
        with self._face.stage("rebuilding the run from its archive"):
            rebuilt = await rebuild_at(url, self._up, self._clock)
        self._journal.note_rebuilt(rebuilt)
        self._face.say(describe_rebuilt(rebuilt))
        return url

    def _start_data(self) -> str:
        """Make token shards, or check those that are there, beside the start of the broker; return which, in words.

        A half-made folder has no meta.json and is made anew. A run that has not begun may have another corpus.
        """
        there = self._up.former is not None and (self._services.data_dir / "meta.json").exists()
        makes = self._up.prepare and not there
        self._fleet.start(self._services.prepare() if makes else self._services.check_data())
        return "preparing data" if makes else "checking data"

    def _start_services(self) -> None:
        """Start everything that trains; an earlier session's measurements of the model are out of date now."""
        self._journal.begin()
        self._folder.remove(VALIDATION)
        shards = {name: number for number, name in enumerate(self._services.shards)}
        for name, number in (shards | self._services.standbys).items():
            self._fleet.start(self._services.synchronizer(name, number))
        for learner in self._up.learners:
            self._fleet.start(self._services.learner(learner))
        self._fleet.start(self._services.evaluator())
        if self._up.settings.up.dashboard:
            self._page.start()
        for line in self._services.greeting():
            self._face.say(line)

    async def _watch(self, bus: Bus, watch: Watch, following: asyncio.Task[None]) -> str:
        first_s: float | None = None
        merging_s = self._clock.monotonic()
        reconnects = bus.stats.reconnects
        while True:
            self._reap()
            if following.done():
                following.result()
            now_s = self._clock.monotonic()
            if first_s is None and self._view.present_s > 0:
                first_s = now_s
            if bus.stats.reconnects > reconnects:
                reconnects = bus.stats.reconnects
                self._face.say("the broker was away and answers again")
            if self._fleet.alive(self._services.shards) or not self._view.trained_tokens:
                merging_s = now_s
            if why := self._reason_to_end(now_s, first_s, merging_s):
                return why
            self._journal.look(self._face.say)
            self._page.look()
            # Of a run that goes on nothing is known before its event log is read: its picture would begin at nothing.
            if self._up.former is None or watch.answered_s is not None:
                self._face.show(self._picture(now_s))
            await asyncio.sleep(SHOW_S)

    def _reason_to_end(self, now_s: float, first_s: float | None, merging_s: float) -> str:
        """Return why the run ends now, "" if it goes on; it trained first at `first_s`, and shards ran last at `merging_s`."""
        if self._stopping:
            return "stopped"
        # Shards that have closed their ledgers wait for nobody: a learner that no longer answers keeps nothing open.
        if not self._fleet.alive(self._up.learners) or now_s - merging_s > self._services.learners_leave_s:
            return "finished"
        minutes = self._up.settings.up.minutes
        if minutes and first_s is not None and now_s - first_s >= 60 * minutes:
            return "minutes"
        return ""

    async def _drain(self, bus: Bus) -> None:
        """End what trains and merges in good order: learners, then shards.

        When the broker is ours it ends too, so learners that others have started are told to leave as well.
        """
        learners, shards = self._up.learners, [*self._services.shards, *self._services.standbys]
        if self._up.broker is None:
            with contextlib.suppress(AtollError):
                await close_run(bus, run := self._up.settings.run)
                await bus.tell(Subjects(run).control("all"), encode(Control(verb="drain", sender="up")))
        with self._face.stage("learners push what they have"):
            await self._end(learners, self._services.learners_leave_s)
        with self._face.stage("shards close their ledgers"):
            protocol = self._up.settings.protocol
            settle_s = protocol.lease_s + SHARD_SETTLES_S  # a former life's lease runs out
            await self._until(lambda: not self._fleet.begun_again(shards, settle_s), settle_s, draining=True)
            if 0 < protocol.tokens_target <= self._view.run_tokens:
                # At the target shards end by themselves; being asked would put a bound on what they still may merge.
                await self._until(lambda: not self._fleet.alive(shards), SHARDS_FINISH_S, draining=True)
            await self._end(shards, SHARDS_LEAVE_S)

    async def _export(self, bus: Bus) -> AtollError | None:
        """Have the evaluator, which has its program ready, write the model, or else a process of its own. Return why not."""
        if self._view.trained_tokens <= 0:
            self._fleet.kill([EVALUATOR])
            return None
        with self._face.stage("measuring and writing the model"):
            await self._end([EVALUATOR], EXPORT_S)
        # Somebody else may have told it to leave before the run was over, so it may have written a former model.
        if not await newest_is_exported(bus, self._up.settings.run, self._folder):
            self._folder.remove(VALIDATION)
            self._fleet.start(self._services.export())
            if (failure := await self._finish("exporting the model", EXPORT, EXPORT_S, needed=False)) is not None:
                return failure
        return await lost_commits(bus, self._up.settings.run, self._journal.commits)

    async def _report(self, bus: Bus, watch: Watch) -> None:
        last = BrokerFacts()
        try:
            await watch.catch_up()
            last = await last_facts(bus, self._up.settings.run, self._view)
        except AtollError as error:
            self._face.say(f"the event log could not be read to its end: {error}")
        self._journal.keep(self._face.say)
        report, unwritten = write_report(self._folder, self._view, self._journal.file, last)
        self._face.say(summary(report, self._folder.out, continuation(self._journal.file, self._folder.out)))
        if unwritten is not None:
            raise unwritten
        self._say(await asyncio.to_thread(describe_unarchived, self._up))

    def _say(self, text: str) -> None:
        if text:
            self._face.say(text)

    # --- the means ------------------------------------------------------------------------------------------------

    async def _finish(self, what: str, name: str, patience_s: float, *, needed: bool) -> AtollError | None:
        with self._face.stage(what):
            done = await self._until(lambda: not self._fleet.alive([name]), patience_s, draining=not needed)
            self._fleet.kill([name])
        if done and self._fleet.codes(name)[-1] == 0:
            return None
        failure = self._fleet.failure(name, f"{what} failed" if done else f"{what} took too long")
        if needed:
            raise failure
        return failure

    async def _end(self, names: Sequence[str], patience_s: float) -> None:
        self._fleet.ask(names)
        if not await self._until(lambda: not self._fleet.alive(names), patience_s, draining=True):
            late = sorted(self._fleet.alive(names))
            self._face.say(f"{', '.join(late)} did not leave within {patience_s:g} s: killed")
            self._fleet.kill(late)

    async def _until(self, done: Callable[[], bool], patience_s: float, *, draining: bool = False) -> bool:
        """Return True once `done`, False after `patience_s`; a signal ends the wait unless we are draining."""
        deadline_s = self._clock.monotonic() + patience_s
        while not done():
            self._reap(raising=not draining)
            if draining:
                self._journal.look(self._face.say)
            elif self._stopping:
                raise _Stopped
            if self._clock.monotonic() > deadline_s:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def _reap(self, *, raising: bool = True) -> None:
        for end in self._fleet.poll():
            if end.is_good:
                if end.name == EVALUATOR and not end.asked:
                    self._face.say("the evaluator was told to leave: the model is measured once more, at the end")
                continue
            self._face.say(end.news)
            if raising and not end.restarting and not end.asked and self._services.needs(end.name, self._fleet):
                raise self._fleet.failure(end.name, f"the run cannot go on without {end.name}")

    def _picture(self, now_s: float) -> ConsolePicture:
        settings = self._up.settings
        return ConsolePicture(self._view, settings.run, settings.protocol, self._journal.began_s, now_s)


class DashboardPage:
    """The page of one session."""

    def __init__(self, services: Services, fleet: ProcessGroup, face: RunConsole) -> None:
        self._services = services
        self._fleet = fleet
        self._face = face
        self._awaited = False

    def start(self) -> None:
        """Start the monitor."""
        self._services.page_url.unlink(missing_ok=True)
        self._fleet.start(self._services.dashboard())
        self._awaited = True

    def look(self) -> None:
        """Say where the page is and open it, once it is there."""
        if not self._awaited:
            return
        try:
            url = read_text(self._services.page_url)
        except OSError:
            # A monitor that has left told why by its exit, which `up` reports.
            self._awaited = bool(self._fleet.alive([DASHBOARD]))
            return
        self._awaited = False
        opened = open_page(url)
        self._face.say(f"dashboard: {url}{' (opened in the browser)' if opened else ''}")
