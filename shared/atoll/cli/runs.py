"""`atoll runs`: the runs that a broker keeps, how far each is, and its share of the disk; `atoll runs remove` deletes some.

A run's streams stay on the broker when its processes are gone: that is what it goes on from. So nothing removes a run but this
verb. It refuses a run whose processes can still be heard, unless it is told to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import typer

from atoll.base.errors import AtollError, BrokerUnavailable, InUse, SettingsError
from atoll.base.logs import configure
from atoll.base.wording import as_duration, as_size
from atoll.bus.interface import ManagingBus, StoredRun
from atoll.bus.open import open_managing_bus
from atoll.cli.options import Assignments, Broker, Config, Json
from atoll.cli.output import plain_table, print_table, say, say_json
from atoll.cli.reading import check_kind, managing_bus, settings_of
from atoll.run.heads import read_heads
from atoll.run.record import read_members, read_run, recorded_progress
from atoll.settings import Settings, bus_options
from atoll.wire.subjects import Subjects

LISTEN_S: Final = 2.5
"""Learners and synchronizers of usual settings are heard about once a second."""
NAMED: Final = 4
AWAY_S: Final = 2.0
"""A further broker that does not answer within this is away: one that is gone for good must not keep a list waiting."""
ROWS_AT_ONCE: Final = 16
BODIES, HEADERS = "bodies", "headers"


verbs = typer.Typer(add_completion=False, rich_markup_mode=None, invoke_without_command=True)


@dataclass(frozen=True, slots=True)
class RunRow:
    """One line of the list."""

    run: str
    state: str
    wire: int | None
    parameters: int | None
    tokens: int | None
    tokens_target: int | None
    members: int | None
    size_bytes: int
    bounds_bytes: int
    written_ago_s: float | None


@verbs.callback()
def list_runs(
    context: typer.Context,
    *,
    broker: Broker = None,
    json: Json = False,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """List the runs that a broker keeps: how far they are, and what they take of its disk."""
    if context.invoked_subcommand is not None:
        return
    with _settings(broker, config, assignments) as settings:
        rows = asyncio.run(_rows(settings))
    (say_json if json else show)(rows)


@verbs.command(name="remove")
def remove(
    runs: Annotated[list[str], typer.Argument(help="Run ids.")],
    *,
    broker: Broker = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also a run whose processes are still heard.")] = False,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Delete all that the broker keeps of these runs: models, ledgers, events."""
    with _settings(broker, config, assignments) as settings:
        asyncio.run(_remove(settings, list(dict.fromkeys(runs)), yes=yes, force=force))


@verbs.command(name="taps")
def taps(
    run: Annotated[str, typer.Argument(help="Run id.")],
    content: Annotated[
        str, typer.Argument(help="What its taps are to have: bodies or headers.", metavar="bodies|headers")
    ],
    *,
    broker: Broker = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Give the taps of a run bodies, or take them away (`atoll tap --bodies`)."""
    if content not in (BODIES, HEADERS):
        raise SettingsError("taps have either", got=content, allowed=f"{BODIES} or {HEADERS}", todo="correct it")
    with _settings(broker, config, assignments) as settings:
        asyncio.run(_switch_taps(settings, run, bodies=content == BODIES))


def show(rows: list[RunRow]) -> None:
    """Print a table."""
    figures = ("wire", "parameters", "tokens", "of", "members", "on disk", "at most", "last written")
    table = plain_table(("run", "state", *figures), right=figures)
    for row in rows:
        numbers = (row.wire, row.parameters, row.tokens, row.tokens_target, row.members)
        counts = ["-" if number is None else f"{number:,}" for number in numbers]
        written = "-" if row.written_ago_s is None else f"{as_duration(row.written_ago_s)} ago"
        table.add_row(row.run, row.state, *counts, as_size(row.size_bytes), as_size(row.bounds_bytes), written)
    print_table(table if rows else "no runs")


@contextmanager
def _settings(broker: str | None, config: Path | None, assignments: list[str] | None) -> Iterator[Settings]:
    with settings_of(None, None, broker, config, assignments) as settings:
        check_kind(settings, ("operator",), "`atoll runs` looks at every run of a broker")
        configure(settings.log.format, "error", role="runs")
        yield settings


async def _rows(settings: Settings) -> list[RunRow]:
    async with managing_bus(settings, "runs") as bus:
        places = asyncio.Semaphore(ROWS_AT_ONCE)

        async def row(stored: StoredRun) -> RunRow:
            async with places:
                return await _row(settings, bus.beside(stored.run), stored)

        return await asyncio.gather(*(row(stored) for stored in await bus.stored_runs()))


async def _row(settings: Settings, bus: ManagingBus, stored: StoredRun) -> RunRow:
    state, wire, parameters, tokens, target, members = "not founded", None, None, None, None, None
    try:
        record = await read_run(bus, Subjects(stored.run))
        if record is not None:
            wire = record.schema
            progress = await recorded_progress(bus, record)
            parameters, tokens = sum(record.layout.fragment_sizes()), progress.tokens
            target = record.protocol.tokens_target or None
            members = len(await read_members(bus, record.subjects))
            state = "a broker is away"
            async with _further_brokers(settings, bus) as further:
                heads = [len(await read_heads(each, record)) for each in (bus, *further)]
                elsewhere = [other for each in further for other in await each.stored_runs() if other.run == stored.run]
            for other in elsewhere:
                stored = stored.beside(other)
            complete = sum(heads) == len(record.layout.fragments)
            state = "over" if progress.over else "closing" if record.closing else "open" if complete else "founding"
    except BrokerUnavailable:
        pass
    except AtollError:
        state = "unreadable"
    ago_s = None if stored.written_s is None else max(0.0, time.time() - stored.written_s)
    sizes = stored.size_bytes, stored.bounds_bytes
    return RunRow(stored.run, state, wire, parameters, tokens, target, members, *sizes, ago_s)


async def _remove(settings: Settings, runs: list[str], *, yes: bool, force: bool) -> None:
    async with managing_bus(settings, "runs") as bus:
        there = await _kept_runs(bus, runs)
        if not force:
            await _check_silent(bus, runs)
        if not yes:
            sizes = ", ".join(f"{run} ({as_size(there[run].size_bytes)})" for run in runs)
            typer.confirm(f"remove {sizes} from {settings.broker.url}, for good?", abort=True)
        for run in runs:
            size_bytes = there[run].size_bytes + await _remove_elsewhere(settings, bus.beside(run), run, force=force)
            await bus.beside(run).remove_run()
            say(f"removed {run}: {as_size(size_bytes)}")


async def _kept_runs(bus: ManagingBus, runs: list[str]) -> dict[str, StoredRun]:
    there = {stored.run: stored for stored in await bus.stored_runs()}
    if absent := [run for run in runs if run not in there]:
        raise SettingsError(
            "the broker keeps no such run", got=", ".join(absent), allowed=", ".join(there) or "it keeps none"
        )
    return there


async def _check_silent(bus: ManagingBus, runs: list[str]) -> None:
    heard = await asyncio.gather(*(_listen_for_processes(bus.beside(run)) for run in runs))
    if alive := [f"{run} ({', '.join(names)})" for run, names in zip(runs, heard, strict=True) if names]:
        raise InUse(
            "processes of this run are still heard",
            got="; ".join(alive),
            todo="stop them, then remove the run; --force removes it all the same, and they end with an error",
        )


async def _remove_elsewhere(settings: Settings, home: ManagingBus, run: str, *, force: bool) -> int:
    size_bytes = 0
    try:
        async with _further_brokers(settings, home) as further:
            for each in further:
                size_bytes += sum(stored.size_bytes for stored in await each.stored_runs() if stored.run == run)
                await each.remove_run()
    except BrokerUnavailable as away:
        if not force:
            raise BrokerUnavailable(
                f"a broker that keeps fragments of run {run!r} is away",
                got=f"{away.what}: {away.got}",
                todo="start it, or set broker.bulk; --force removes what the other brokers keep",
            ) from away
        say(f"left on a broker that is away: fragments of {run}")
    return size_bytes


async def _switch_taps(settings: Settings, run: str, *, bodies: bool) -> None:
    async with managing_bus(settings, "runs") as bus:
        await _kept_runs(bus, [run])
        async with _further_brokers(settings, bus.beside(run)) as further:
            changed = [await each.switch_taps(bodies=bodies) for each in (bus.beside(run), *further)]
    have = BODIES if bodies else f"{HEADERS} only"
    say(f"the taps of {run} have {have}; {sum(changed) or 'no'} streams changed")


@asynccontextmanager
async def _further_brokers(settings: Settings, home: ManagingBus) -> AsyncIterator[list[ManagingBus]]:
    """Yield buses to the further brokers that keep fragments of a run, as its record says.

    Raises `BrokerUnavailable` if one of them does not answer within `AWAY_S`.
    """
    try:
        record = await read_run(home, home.subjects)
    except AtollError:  # of a record that cannot be read nobody knows where its fragments are
        record = None
    options = replace(bus_options(settings), patience_s=AWAY_S)
    async with AsyncExitStack() as opened:
        buses = []
        for url in () if record is None else settings.broker.bulk or record.bulk:
            buses.append(await open_managing_bus(url, home.subjects.run, name="runs", options=options))
            opened.push_async_callback(buses[-1].close)
        yield buses


async def _listen_for_processes(bus: ManagingBus) -> list[str]:
    subjects, names = bus.subjects, set[str]()
    feeds = [await bus.listen(subject) for subject in (subjects.beat("*"), subjects.presence("*"))]
    deadline_s = time.monotonic() + LISTEN_S
    for feed in feeds:
        while (left_s := deadline_s - time.monotonic()) > 0.0 or len(names) < NAMED:
            core_message = await feed.next(max(0.0, left_s))
            if core_message is None:
                break
            names.add(core_message.subject.rpartition(".")[2])
        await feed.close()
    return sorted(names)[:NAMED]
