"""`atoll fates`: the fate of every token that a run has trained, as the broker knows it now.

The verb reads records only, so it works at any time, even if every process of the run is dead. Of a saved run, which has no
broker, it reads the closing ledgers in the event log of its folder. Token counts are tokens, not
token-fragments: a token whose fragments met different fates counts for each in part. A second table shows the blocks of
data: per epoch how many are finished, leased, returned and untouched, and how much each learner has read.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from atoll.base.errors import SettingsError
from atoll.base.logs import configure
from atoll.cli.options import Assignments, Broker, Config, Out, Run
from atoll.cli.output import plain_table
from atoll.cli.reading import reading_bus, required_agreement, saved_in, settings_of, view_of_saved
from atoll.protocol.data import DataLedger, sums_by_epoch, sums_by_learner
from atoll.protocol.ledger import Ledger, apportion
from atoll.protocol.settings import ProtocolSettings
from atoll.report.collect import believe_the_dead
from atoll.run import ledger
from atoll.run.history import History
from atoll.run.ledger import IncarnationAccount, ended_lives, total, wrong_accounts
from atoll.run.record import founded_run
from atoll.settings import Settings
from atoll.wire.messages import Rebuilt

TABLE_COLUMNS_MAX = 1000


def fates(
    *,
    run: Run = None,
    broker: Broker = None,
    out: Out = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, in token-fragments.")] = False,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Read the ledger of a run and print it."""
    if (saved := saved_in(out, run, broker)) is not None:
        read = _fates_of_saved(view_of_saved(saved), required_agreement(saved.agreement, saved.folder))
    else:
        with settings_of(out, run, broker, config, assignments) as settings:
            configure(settings.log.format, "error", role="fates", run=settings.run)
            read = asyncio.run(_read_fates(settings))
    if json:
        sys.stdout.write(ledger.as_json(read.lives, read.fragments, read.data, read.rebuilt).decode() + "\n")
        return
    show(read.lives, read.fragments, read.rebuilt)
    if read.data is not None:
        show_data(read.data)


@dataclass(frozen=True, slots=True)
class ReadFates:
    """The ledger of a run: its incarnations, its number of fragments, its blocks of data, and whether it was rebuilt."""

    lives: list[IncarnationAccount]
    fragments: int
    data: DataLedger | None = None
    rebuilt: Rebuilt | None = None


async def _read_fates(settings: Settings) -> ReadFates:
    async with reading_bus(settings, "fates") as bus:
        record = await founded_run(bus, settings.run)
        lives = await ledger.read_lives(bus, record)
        data = await ledger.read_data(bus, record)
    return ReadFates(lives, len(record.layout.fragments), data, record.rebuilt)


def _fates_of_saved(view: History, protocol: ProtocolSettings) -> ReadFates:
    whole = Ledger()
    if unclosed := [shard for shard in map("shard-{}".format, range(protocol.shards)) if shard not in view.ledgers]:
        raise SettingsError(
            "the event log does not tell the fates of this run",
            got=f"no closing ledger of {', '.join(unclosed)}",
            todo="report.json has them, if the run came to a report",
        )
    for closed in view.ledgers.values():
        whole.absorb(closed.ledger)
    believe_the_dead(view, whole, view.learners)
    return ReadFates(ended_lives(whole), protocol.fragments)


def show(lives: list[IncarnationAccount], fragments: int, rebuilt: Rebuilt | None = None) -> None:
    """Print a table, a row per incarnation and one for the run, and whether the account is exact."""
    sums = total(lives, fragments)
    due = sum(life.due(fragments) for life in lives)
    table = _fates_table(lives, fragments, sums, due)
    console = wide_console(table)
    console.print(table)
    wrong = wrong_accounts(lives, fragments)
    for fault in wrong:
        console.print(f"wrong: {fault}", soft_wrap=True)
    if not wrong:
        # What a dead life did not settle is lost; less than nothing means that something has two fates.
        once = all(count >= 0 for life in lives for count in life.fates(fragments).values())
        exact = once and sum(sums.values()) == due
        whole = "every token has one fate" if rebuilt is None else "every token that this ledger knows has one fate"
        console.print(whole if exact else "the ledger was read while it changed: ask again")
    if rebuilt is not None:
        console.print(
            f"the run was rebuilt from checkpoint {rebuilt.checkpoint} ({rebuilt.tokens:,} tokens): what was trained after "
            "it is in no ledger; 'lost' includes what was open or queued at the checkpoint",
            soft_wrap=True,
        )


def _fates_table(lives: list[IncarnationAccount], fragments: int, sums: dict[str, int], due: int) -> Table:
    shown = [fate for fate, tokens in sums.items() if tokens]
    table = plain_table(("incarnation", "state", "trained", *shown), right=("trained", *shown))
    for life in lives:
        counts = apportion(life.fates(fragments), fragments)
        row = [f"{counts.get(fate, 0):,}" for fate in shown]
        table.add_row(life.name, life.state, f"{life.account.trained:,}", *row)
    whole = apportion(sums, fragments)
    table.add_row("all", "", f"{due // fragments:,}", *(f"{whole[fate]:,}" for fate in shown))
    return table


def show_data(data: DataLedger) -> None:
    """Print the state of the blocks of each recent epoch, and how much each learner has read."""
    states = ("finished", "leased", "returned", "untouched")
    table = plain_table(("epoch", *states), right=states)
    for sums in sums_by_epoch(data):
        counts = (sums.finished, sums.leased, sums.returned, sums.untouched)
        table.add_row(str(sums.epoch), *(f"{blocks:,}" for blocks in counts))
    console = wide_console(table)
    console.print(f"\nblocks of data, {data.blocks:,} to an epoch")
    console.print(table)
    read = ", ".join(f"{learner} {blocks:,}" for learner, blocks in sums_by_learner(data).items())
    console.print(f"read by: {read or 'nobody'}")


def wide_console(table: Table) -> Console:
    """Return a console in which the table shows every digit, however narrow the terminal is: an account is never cut."""
    terminal = Console()
    needed = Measurement.get(terminal, terminal.options.update(width=TABLE_COLUMNS_MAX), table).maximum
    return Console(width=max(terminal.width, needed))
