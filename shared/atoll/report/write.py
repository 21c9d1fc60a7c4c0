"""Writes `report.json` and `report.html` to the run's folder, and a summary of a few lines."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from atoll.base.errors import AtollError
from atoll.base.parsing import parsed
from atoll.base.regular_files import DOCUMENT_BYTES_MAX, read_file, text_or_empty
from atoll.base.units import as_size
from atoll.base.wording import few
from atoll.protocol.ledger import Ledger
from atoll.report.collect import Facts, collect
from atoll.report.page import page_with
from atoll.report.page_data import PageFacts, causes_of, curves_of, state_of
from atoll.run.curves import first_s
from atoll.run.folder import VALIDATION, RunFile, RunFolder
from atoll.run.history import History
from atoll.run.saved import agreement_of

NAMED_MAX = 4
SAMPLE_CHARS_MAX = 20_000
DOUBTS_MAX = 4
"""So many reasons why the fates are not exact are in the summary; the report has all of them."""


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """Facts that a report reads from a run's broker beside the view; the defaults stand for a broker that did not answer.

    `data_hash` is the fingerprint of the token shards. `ledger` is the ledger from the fragments' heads, for a run in
    which a shard did not close its own. `history` is the event log as stories read it.
    """

    data_hash: str = ""
    ledger: Ledger | None = None
    history: History | None = None


def write_report(
    folder: RunFolder, view: History, run: RunFile, last: BrokerFacts, clock: Literal["wall", "virtual"] = "wall"
) -> tuple[dict[str, Any], AtollError | None]:
    """Write both files; return the report, and why one could not be written. Of the run's processes only the broker runs."""
    facts = Facts(
        run=run.run,
        settings=run.settings,
        sessions=run.sessions,
        validation=_exported(folder.path(VALIDATION)),
        data_hash=last.data_hash,
        ended=[f"learner-{i}" for i in range(1, run.learners + 1)],
        clock=clock,
        ledger=last.ledger,
        history=last.history,
    )
    report = collect(view, facts)

    def page() -> str:
        return page_with(page_frames(report, view, run, last.history, folder.out))

    def document() -> str:
        return json.dumps(report, indent=2, allow_nan=False) + "\n"

    unwritten: AtollError | None = None
    for name, content in (("report.json", document), ("report.html", page)):
        try:
            folder.write(name, content().encode())
        except AtollError as error:  # the other one may go well, and the report is there to be told
            unwritten = unwritten or error
    return report, unwritten


def page_frames(
    report: Mapping[str, Any], view: History, run: RunFile, history: History | None, out: Path
) -> dict[str, Any]:
    """Return what the page shows of a run that is over; without its event log there are no causes."""
    began_s = None if history is not None else first_s(view)
    newest_s = max((line.at_s for line in view.rounds), default=0.0) if history is None else history.newest_s
    facts = PageFacts(
        run=run.run,
        now_s=0.0,
        wall_s=newest_s,
        agreement=agreement_of(run),
        founded_at_s=began_s,
        over=True,
        saved=True,
        clock=report["clock"],
        fates=report["tokens_by_fate"],
        reached_by=f"--out {shlex.quote(str(out))}",
    )
    return {
        "state": state_of(view, facts),
        "curves": curves_of(view, facts),
        "causes": None if history is None else causes_of(history, facts),
        "report": {
            **{name: value for name, value in report.items() if name not in ("curves", "slow")},
            "sample": text_or_empty(out / "sample.txt")[:SAMPLE_CHARS_MAX],
        },
    }


def summary(report: Mapping[str, Any], out: Path, following: str = "") -> str:
    """Return the report in a few lines for people; `following` is the last one, if there is something to say."""
    validation, fates = report["validation"], report["tokens_by_fate"]
    shown = ", ".join(f"{name} {count:,}" for name, count in fates.items() if count)
    goodput = "unknown" if report["goodput"] is None else f"{100 * report['goodput']:.1f}%"
    ends = [validation["initial_bits_per_byte"], validation["final_bits_per_byte"]]
    bits = " to ".join("?" if end is None else f"{end:.3f}" for end in ends)
    if validation["validation_bytes"] is not None:
        bits += f", both on the first {as_size(validation['validation_bytes'])} held out"
    idle = [each["learner"] for each in report["learners"] if not each["tokens"]]
    late = [f"  trained nothing: {few(idle, NAMED_MAX)}, ready too late or never"] if idle else []
    doubts = [f"                 {error}" for error in report["fates_errors"][:DOUBTS_MAX]]
    of_what = " of virtual time" if report["clock"] == "virtual" else ""
    return "\n".join(
        [
            f"{report['ended']}: {report['tokens_trained']:,} tokens in {report['wall_s']:,.0f} s{of_what}",
            f"  fates:         {shown or 'none'} ({'exact' if report['fates_exact'] else 'NOT EXACT'})",
            *doubts,
            *late,
            f"  bits per byte: {bits}",
            f"  goodput:       {goodput}, {report['commits']:,} commits",
            f"  bytes:         {_moved(report['moved'])}",
            f"  report:        {out / 'report.html'}",
            *([following] if following else []),
        ]
    )


def _moved(moved: Mapping[str, Any]) -> str:
    """Return what the learners' links carried, and how much less that is than data-parallel training would have moved."""
    learners = moved["learners"]
    both = (
        f"{as_size(learners['wire_up'])} up, {as_size(learners['wire_down'])} down on the wire of the learners' links"
    )
    if moved["times_less"] is None:
        return both
    return (
        f"{both}; {moved['bytes_per_token']:,.4g} per token, {moved['times_less']:,.4g} times less than data-parallel"
    )


def _exported(path: Path) -> dict[str, Any]:
    try:
        return parsed(read_file(path, DOCUMENT_BYTES_MAX), dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}
