"""`atoll broker status`: which roll each node of a locked broker follows, its versions, its peers; leave with 1 if one differs.

Every address is looked at by itself: a node that nobody reaches, or that has lost the others, is a line of its own. Then one
question goes to all nodes at once (`atoll.bus.nodes`). The newest roll is the one that was changed last: of those that nodes
follow, and with `--keys` also the one of that folder. The broker of a region is no node: look at it by its own address.
"""

from __future__ import annotations

import asyncio
import json as json_text
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

import typer

from atoll.bus.addresses import PORT
from atoll.cli.look import say
from atoll.cli.options import Assignments, Broker, Config
from atoll.cli.reading import check_kind, opened_jetstream, settings_of

if TYPE_CHECKING:
    from atoll.bus.nodes import NodeTold
    from atoll.keys.roll_stamp import RollStamp
    from atoll.settings import Settings

STALE: Final = "old roll"


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node, or an address where none answers; what is not known is empty or None.

    Attributes:
        node: its name.
        address: where clients reach it; empty if none of the addresses that were given leads to it.
        roll_changed_s: when its roll was changed last, in seconds since the epoch.
        roll_digest: a digest of that roll.
        nats_server, atoll: versions.
        peers: the nodes that it is connected to.
        connections: of clients.
        up_s: for how long it has run.
        faults: what is wrong with it, in words; none if all is well.
    """

    node: str
    address: str
    roll_changed_s: int | None = None
    roll_digest: str = ""
    nats_server: str = ""
    atoll: str = ""
    peers: tuple[str, ...] = ()
    connections: int | None = None
    up_s: float | None = None
    faults: tuple[str, ...] = ()


def status(
    *,
    broker: Broker = None,
    keys: Annotated[
        Path | None, typer.Option(help="Your folder of keys: nodes that do not follow its roll are named, too.")
    ] = None,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to wait for nodes.", min=0.5, max=60.0)] = 3.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Print a line per node; leave with 1 if a node is missing or differs from the others."""
    from atoll.base.logs import configure  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.keys.roll import KeyFolder  # noqa: PLC0415
    from atoll.keys.roll_stamp import stamp_of  # noqa: PLC0415

    with settings_of(None, None, broker, config, assignments) as settings:
        check_kind(settings, ("operator",), "`atoll broker status` asks what only an operator may")
        configure(settings.log.format, "error", role="status")
        ours = None if keys is None else stamp_of(KeyFolder(keys).read())
        rows = asyncio.run(_rows(settings, wait_s, ours))
    if json:
        sys.stdout.write(json_text.dumps([asdict(row) for row in rows], indent=2) + "\n")
    else:
        show(rows)
    if any(row.faults for row in rows):
        raise typer.Exit(1)


async def _rows(settings: Settings, wait_s: float, ours: RollStamp | None) -> list[NodeRow]:
    from atoll.bus.addresses import addresses  # noqa: PLC0415

    async with opened_jetstream(settings, "broker status") as bus:
        greeted = await asyncio.gather(*(_greeted(address) for address in addresses(settings.broker.url)))
        told = await bus.nodes(wait_s)
    return rows_of(dict(greeted), told, ours)


async def _greeted(address: str) -> tuple[str, str]:
    """Return an address without its scheme, and the name of the server that greets there; "" if none does."""
    from atoll.bus.greeting import greeting  # noqa: PLC0415

    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or PORT
    said = await asyncio.to_thread(greeting, host, port)
    return f"{host}:{port}", "" if said is None else str(said.get("server_name", ""))


def rows_of(greeted: dict[str, str], told: Sequence[NodeTold], ours: RollStamp | None = None) -> list[NodeRow]:
    """Return a row for each node and for each address that leads to none, by name.

    Args:
        greeted: the name of the server that greets at each address, "" if none does.
        told: what the nodes say.
        ours: the stamp of the operator's roll, if it is known.
    """
    from atoll.keys.roll_stamp import worn  # noqa: PLC0415

    stamps = {node.name: worn(node.tags)[0] for node in told}
    newest = max((stamp for stamp in (*stamps.values(), ours) if stamp is not None), default=None)
    heard = {node.name for node in told}
    # On one machine a name may have several addresses; one is shown.
    address_of = {name: address for address, name in greeted.items() if name}
    everybody = heard.union(address_of, *(node.peers for node in told))
    rows = [_row(node, address_of.get(node.name, ""), everybody, newest) for node in told]
    rows += [NodeRow(name, "", faults=("it does not answer",)) for name in everybody - heard - {*address_of}]
    for address, name in greeted.items():
        if not name:
            rows.append(NodeRow("", address, faults=("nobody answers here",)))
        elif name not in heard:
            rows.append(NodeRow(name, address, faults=("it runs, and the others do not hear it",)))
    return sorted(rows, key=lambda row: (row.node or "~", row.address))


def _row(node: NodeTold, address: str, everybody: Iterable[str], newest: RollStamp | None) -> NodeRow:
    from atoll.keys.roll_stamp import worn  # noqa: PLC0415

    stamp, software = worn(node.tags)
    faults = [f"no route to {name}" for name in sorted({*everybody} - {node.name} - {*node.peers})]
    if stamp is None:
        faults.append("it does not say which roll it has: an Atoll before this command")
    elif newest is not None and stamp != newest:
        faults.append(STALE)
    return NodeRow(
        node=node.name,
        address=address,
        roll_changed_s=None if stamp is None else stamp.changed_s,
        roll_digest="" if stamp is None else stamp.digest,
        nats_server=node.version,
        atoll=software,
        peers=node.peers,
        connections=node.connections,
        up_s=node.up_s,
        faults=tuple(faults),
    )


def show(rows: Sequence[NodeRow]) -> None:
    """Print a table, and below it what to do."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from atoll.base.units import as_duration  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("node", "address", "roll of", "digest", "nats-server", "atoll", "peers"):
        table.add_column(heading)
    for heading in ("clients", "up"):
        table.add_column(heading, justify="right")
    table.add_column("state")
    for row in rows:
        changed = "-" if row.roll_changed_s is None else _as_date(row.roll_changed_s)
        told = [row.node, row.address, changed, row.roll_digest, row.nats_server, row.atoll, ", ".join(row.peers)]
        clients = "-" if row.connections is None else f"{row.connections:,}"
        up = "-" if row.up_s is None else as_duration(row.up_s)
        table.add_row(*(text or "-" for text in told), clients, up, "; ".join(row.faults) or "ok")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 240
    console.print(table)
    if any(STALE in row.faults for row in rows):
        say(
            "to do: copy roll.json of your folder of keys to the nodes with an old roll; they take it over within a second"
        )


def _as_date(seconds: int) -> str:
    """Return a time as a date, in UTC; a roll of nobody has none."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if seconds else "empty"
