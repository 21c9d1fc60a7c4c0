"""Writes `report.json` and `report.html` to the run's folder, and a summary of a few lines.

`report.html` is the dashboard's page with the run's frames inside, in one file that loads nothing and opens from a disk. A
monitor serves the files of `static/` and sends frames as the run goes on (`atoll_monitor.dashboard`). Here scripts are `data:`
modules behind an import map, because a page of `file://` may import no neighbour, and the frames are JSON in the page. The
policy allows these scripts by their digests, and no other: what a peer has written stays text.
"""

from __future__ import annotations

import json
import re
import shlex
from base64 import b64encode
from collections.abc import Callable, Mapping
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from atoll.base.errors import AtollError
from atoll.base.files import DOCUMENT_BYTES_MAX, read_file, text_or_empty
from atoll.base.parsing import parsed
from atoll.base.wording import as_size, few
from atoll.report.collect import BrokerFacts, collect
from atoll.report.page_data import PageFacts, causes_of, curves_of, state_of
from atoll.run.curves import first_s
from atoll.run.folder import VALIDATION, RunFile, RunFolder, agreement_of
from atoll.run.history import History

NAMED_MAX = 4
SAMPLE_CHARS_MAX = 20_000
STATIC: Final = Path(__file__).parent / "static"
_ENTRY: Final = 'import "main.js";'
DOUBTS_MAX = 4
"""So many reasons why the fates are not exact are in the summary; the report has all of them."""


def write_report(
    folder: RunFolder, view: History, run: RunFile, last: BrokerFacts, clock: Literal["wall", "virtual"] = "wall"
) -> tuple[dict[str, Any], AtollError | None]:
    """Write both files; return the report, and why one could not be written. Of the run's processes only the broker runs."""
    validation, ended = _read_validation(folder.path(VALIDATION)), [f"learner-{i}" for i in range(1, run.learners + 1)]
    report = collect(view, run, last, validation=validation, ended=ended, clock=clock)
    contents: dict[str, Callable[[], str]] = {
        "report.json": lambda: json.dumps(report, indent=2, allow_nan=False) + "\n",
        "report.html": lambda: page_with(page_frames(report, view, run, last.history, folder.out)),
    }
    unwritten: AtollError | None = None
    for name, content in contents.items():
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
    learners = moved["learners"]
    both = (
        f"{as_size(learners['wire_up'])} up, {as_size(learners['wire_down'])} down on the wire of the learners' links"
    )
    if moved["times_less"] is None:
        return both
    return (
        f"{both}; {moved['bytes_per_token']:,.4g} per token, {moved['times_less']:,.4g} times less than data-parallel"
    )


def _read_validation(path: Path) -> dict[str, Any]:
    try:
        return parsed(read_file(path, DOCUMENT_BYTES_MAX), dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}


def page_with(frames: Mapping[str, Any]) -> str:
    """Return the page that shows these frames, by kind as the feed of a monitor sends them."""
    names = [path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.js")]
    # Each names its neighbours as the import map does: a `data:` module has no place to count from.
    scripts = {name: re.sub(r'\b(from|import) "\./', r'\1 "', _read(name)) for name in names}
    imports = {name: _data("text/javascript", script) for name, script in scripts.items()}
    import_map = msgspec.json.encode({"imports": imports}).decode()
    # No tag can begin inside of it, whatever the run's processes are called.
    data = msgspec.json.encode(frames).decode().replace("<", "\\u003c")
    styles: list[str] = []

    def inline_style(link: re.Match[str]) -> str:
        styles.append(_read(link[1]))
        return f"<style>{styles[-1]}</style>"

    page = re.sub(r'<link rel="stylesheet" href="static/([^"]+)">', inline_style, _read("index.html"))
    policy = (
        f"default-src 'none'; script-src {_digest(import_map)} {_digest(_ENTRY)} data:; "
        f"style-src {' '.join(map(_digest, styles))}; img-src data:; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'"
    )
    replacements = {
        '<meta charset="utf-8">': f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "static/icon.svg": _data("image/svg+xml", _read("icon.svg")),
        '<a href="data.json">data.json</a>': '<a href="report.json">report.json</a>',
        "<title>Atoll</title>": f"<title>{escape(str(frames['state']['run']))} · Atoll</title>",
        '<script type="module" src="static/main.js"></script>': f'<script type="importmap">{import_map}</script>\n'
        f'<script type="application/json" id="frames">{data}</script>\n<script type="module">{_ENTRY}</script>',
    }
    for former, latter in replacements.items():
        page = page.replace(former, latter, 1)
    return page


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _data(kind: str, text: str) -> str:
    return f"data:{kind};base64,{b64encode(text.encode()).decode()}"


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
