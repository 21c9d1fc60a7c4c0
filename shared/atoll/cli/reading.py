"""Access to a run for verbs that read it: its broker, by address or by the folder of a run of `atoll up`, and its event log.

`atoll up` stops its broker at the end, and the broker's store stays in the run's folder. With `--out` a verb asks the broker of
that folder; if none runs, it starts one on the store for as long as it reads. The verb that hosts it writes its address into
the store, so that several verbs can read at a time. A saved run has no broker: its event log is read from its folder.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

import typer

from atoll.base.errors import InUse, SettingsError
from atoll.base.files import DOCUMENT_BYTES_MAX, read_file, read_text, write_whole
from atoll.base.logs import configure
from atoll.bus.interface import Bus, ManagingBus
from atoll.bus.open import open_bus, open_managing_bus
from atoll.bus.options import addresses
from atoll.bus.server import EmbeddedBroker, LocalCluster, greeting, is_cluster
from atoll.cli.options import with_flags
from atoll.keys.identity import read_identity
from atoll.keys.locked import LockedDoor
from atoll.keys.rights import Kind
from atoll.keys.roll import KeyFolder
from atoll.local.own_brokers import RunKeys, keys_of
from atoll.protocol.settings import ProtocolSettings
from atoll.run.folder import EVENTS_FILE, SavedRun, read_run_file, saved_run
from atoll.run.history import History
from atoll.run.record import founded_run
from atoll.settings import Settings, bus_options, load

HINT_S: Final = 2.0
BEGINS_S: Final = 5.0
LOOK_S: Final = 0.1
ADDRESS: Final = "url"
WATCHERS: Final[tuple[Kind, ...]] = ("reader", "evaluator", "synchronizer", "operator")
B = TypeVar("B", bound="Bus")


@contextmanager
def settings_of(
    out: Path | None, run: str | None, broker: str | None, config: Path | None, assignments: list[str] | None
) -> Iterator[Settings]:
    """Yield the settings of a verb that reads; with `out` those lead to the run in that folder, whose broker answers meanwhile.

    Raises:
        SettingsError: the folder holds no run, or `run` or `broker` is given as well.
    """
    if out is None:
        yield load(config, with_flags(assignments, run=run, broker__url=broker)).settings
        return
    if run is not None or broker is not None:
        raise SettingsError(
            "a folder says which run it holds, and where its broker is",
            got=f"the folder {out} beside --run or --broker",
            todo="give the folder alone, or a run on a broker by --run and --broker",
        )
    file = read_run_file(out)
    if file is None:
        raise SettingsError("no run lies in this folder", got=out, todo="name the --out of an `atoll up`")
    if file.broker == "simulated":
        raise SettingsError(
            "a simulated run has no broker",
            got=out,
            todo="`atoll why`, `fates`, `status` and `what-if` read its event log; its logs are in logs/sim.jsonl",
        )
    embedded = file.broker == "embedded"
    keys = keys_of(out) if embedded else None
    identity = None if keys is None else RunKeys(keys, file.run).operator
    with ExitStack() as brokers:
        url, *bulk = (
            [brokers.enter_context(_server_of(store, keys)) for store in _stores(out)] if embedded else [file.broker]
        )
        bulk_told = json.dumps(bulk) if bulk else None
        told = with_flags(assignments, run=file.run, broker__url=url, broker__bulk=bulk_told, broker__identity=identity)
        yield load(config, told).settings


def _stores(out: Path) -> list[Path]:
    store = out / "nats"
    if not store.is_dir():
        raise SettingsError(
            "the broker's store of this run is gone", got=store, todo="restore it, or look at report.html"
        )
    return [store, *sorted(store.glob("bulk-*"))]


@contextmanager
def _server_of(store: Path, keys: Path | None) -> Iterator[str]:
    """Yield the address of the broker that has a store, locked by `keys`; if none runs, start one meanwhile."""
    folder = None if keys is None else KeyFolder(keys)
    here: LocalCluster | EmbeddedBroker
    if is_cluster(store):
        here = LocalCluster(store, door=None if folder is None else lambda node: LockedDoor(folder, node, node=True))
    else:
        here = EmbeddedBroker(store, include=None if folder is None else LockedDoor(folder, store).config)
    try:
        here.start()
    except InUse as error:
        url = _announced_address(store)
        if not url:
            raise error from None
        yield url
        return
    files = [node.store_dir / ADDRESS for node in (here.nodes if isinstance(here, LocalCluster) else [here])]
    former = {file: read_file(file, DOCUMENT_BYTES_MAX) for file in files if file.exists()}
    try:
        for file, address in zip(files, addresses(here.url), strict=True):
            write_whole(file, address.encode())
        yield here.url
    finally:
        for file in files:  # a run that is continued takes its former port
            write_whole(file, former[file]) if file in former else file.unlink(missing_ok=True)
        here.stop()


def _announced_address(store: Path) -> str:
    """Return the address of the broker that has a store, as its host wrote it; of a cluster each node has its own.

    A host writes it once its broker answers. Until then what is there may be the address of a former one.
    """
    until_s = time.monotonic() + BEGINS_S
    while True:
        files = sorted(store.glob(ADDRESS)) or sorted(store.glob(f"node-*/{ADDRESS}"))
        try:
            url = ",".join(read_text(file) for file in files)
        except OSError:  # its host ends just now
            url = ""
        parts = [urlsplit(address) for address in (addresses(url) if url else [])]
        if any(greeting(part.hostname or "", part.port or 0) for part in parts) or time.monotonic() > until_s:
            return url
        time.sleep(LOOK_S)


def check_kind(settings: Settings, kinds: Sequence[Kind], what: str) -> None:
    """Raise `SettingsError` unless our identity, if we have one, is of these kinds; `what` says why it must be."""
    path = settings.broker.identity
    if path is None or (mine := read_identity(path)).kind in kinds:
        return
    raise SettingsError(
        what,
        got=f"the identity of {mine.kind} {mine.name!r} of run {mine.run!r} ({path})",
        allowed=" or ".join(f"that of {'the' if kind == 'operator' else 'a'} {kind}" for kind in kinds),
        todo="name another file (broker.identity or ATOLL_BROKER__IDENTITY); the broker's operator makes them",
    )


@asynccontextmanager
async def reading_bus(settings: Settings, name: str, *, kinds: Sequence[Kind] = WATCHERS) -> AsyncIterator[Bus]:
    """Yield a bus that creates nothing, for identities of these kinds; say so if the broker keeps us waiting.

    The event log is not open to a learner, so only what does not read it has `kinds` of its own.
    """
    check_kind(settings, kinds, f"`atoll {name}` reads what no learner may")
    bus = await _open_patiently(settings, name, open_bus)
    try:
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def managing_bus(settings: Settings, name: str) -> AsyncIterator[ManagingBus]:
    """Yield a bus that also manages the broker's runs, and checks no signatures."""
    bus = await _open_patiently(settings, name, open_managing_bus)
    try:
        yield bus
    finally:
        await bus.close()


async def _open_patiently(settings: Settings, name: str, opening: Callable[..., Awaitable[B]]) -> B:
    broker = settings.broker
    hint = asyncio.get_running_loop().call_later(
        HINT_S,
        lambda: typer.echo(f"no broker answers at {broker.url} yet; trying for {broker.patience_s:g} s", err=True),
    )
    try:
        return await opening(broker.url, settings.run, name=name, options=bus_options(settings))
    finally:
        hint.cancel()


def history_of(
    verb: str,
    out: Path | None,
    run: str | None,
    broker: str | None,
    config: Path | None = None,
    assignments: list[str] | None = None,
) -> tuple[History, ProtocolSettings | None]:
    """Return the event log of a run, and what its processes agreed on, None if nothing says it; nothing is changed.

    Raises:
        SettingsError: the folder holds no run, or its event log cannot be read.
    """
    if (saved := saved_in(out, run, broker)) is not None:
        history = History(virtual=saved.simulated)
        history.read_file(saved.folder / EVENTS_FILE)
        return history, saved.agreement
    with settings_of(out, run, broker, config, assignments) as settings:
        configure(settings.log.format, "error", role=verb, run=settings.run)
        return asyncio.run(_read_log(settings, verb))


async def _read_log(settings: Settings, verb: str) -> tuple[History, ProtocolSettings]:
    history = History()
    async with reading_bus(settings, verb) as bus:
        record = await founded_run(bus, settings.run)
        await history.read(bus, record.subjects)
    return history, record.protocol


def recording_of(verb: str, out: Path | None, run: str | None, broker: str | None) -> tuple[History, ProtocolSettings]:
    """Return what `history_of` does; raise `SettingsError` if nothing says what was agreed on."""
    history, agreement = history_of(verb, out, run, broker)
    return history, required_agreement(agreement, out)


def saved_in(out: Path | None, run: str | None, broker: str | None) -> SavedRun | None:
    """Return the saved run in a folder; None for a run that has a broker, or one that is not named by its folder."""
    return None if out is None or run is not None or broker is not None else saved_run(out)


def view_of_saved(saved: SavedRun) -> History:
    """Return the view of a saved run at its end.

    Raises:
        SettingsError: its event log cannot be read.
    """
    view = History()
    view.read_file(saved.folder / EVENTS_FILE)
    return view


def required_agreement(agreement: ProtocolSettings | None, where: Path | None) -> ProtocolSettings:
    """Return what the processes of a run agreed on; raise `SettingsError` if nothing says it."""
    if agreement is None:
        raise SettingsError(
            "nothing says what the processes of this run agreed on",
            got=f"{where} without run.json",
            todo="put the run.json of the run beside its event log",
        )
    return agreement
