"""`atoll report compare RUN RUN…`: the reports of runs that have ended, beside each other. It reads files and no broker.

Runs that are still going are compared in a browser: `atoll dashboard FOLDER FOLDER`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from atoll.base.errors import for_a_terminal
from atoll.base.wording import as_duration, as_share
from atoll.cli.options import Json
from atoll.cli.output import plain_table, print_table, say_json
from atoll.report.comparison import ComparedRun, comparison_row, read_report, with_distinct_names

verbs = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@verbs.callback()
def _group() -> None:
    """Look at the reports that runs have left."""


@verbs.command(name="compare")
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or their report.json.", metavar="RUN...")],
    *,
    json: Json = False,
) -> None:
    """Print optimizer, tokens, time, bits per byte, goodput, bytes, speed, commits and faults of runs."""
    rows = with_distinct_names([comparison_row(*read_report(path)) for path in runs])
    (say_json if json else show)(rows)


def show(rows: Sequence[ComparedRun]) -> None:
    """Print a table; a figure that a report lacks is a dash."""

    def plain(name: str) -> Text:
        # No markup, and one line: the file may be anybody's.
        return Text(for_a_terminal(name).replace("\n", "\\n"))

    figures = ("learners", "tokens", "time", "tokens/s", "bits/byte", "goodput", "bytes/token", "commits", "faults")
    table = plain_table(("run", "ended", "model", "optimizer", "rate", "schedule", *figures), right=("rate", *figures))
    for row in rows:
        time = "-" if row.wall_s is None else as_duration(row.wall_s) + (" (virtual)" if row.clock == "virtual" else "")
        table.add_row(
            plain(row.run),
            plain(row.ended),
            plain(row.model or "-"),
            plain(row.optimizer or "-"),
            _figure(row.rate, ".3g"),
            plain(row.schedule or "-"),
            str(row.learners),
            _figure(row.tokens, ","),
            time,
            _figure(row.tokens_per_s, ",.0f"),
            _figure(row.bits_per_byte, ".3f"),
            "-" if row.goodput is None else as_share(row.goodput),
            _figure(row.bytes_per_token, ",.4g"),
            _figure(row.commits, ","),
            _figure(row.faults, ","),
        )
    print_table(table)


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
