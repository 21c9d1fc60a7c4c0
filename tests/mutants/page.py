"""Write docs/results/mutants.md from what `make mutants` and `make mutants-planted` found, and from `reasons.toml`.

A survivor without a reviewed reason is listed as what it is: a change that no test notices.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "mutants.md"
RESULTS = ROOT / "build" / "results"
UNREVIEWED = "not reviewed yet"
Verdict = dict[str, Any]


def reason_of(verdict: Verdict, reasons: Iterable[dict[str, str]]) -> str:
    """Return why a survivor is harmless, by the first reviewed reason that speaks of it."""
    for reason in reasons:
        here = (
            verdict["file"].endswith(reason["file"])
            and reason.get("function", verdict["function"]) == verdict["function"]
        )
        if here and reason.get("before", "") in verdict["before"] and reason.get("after", "") in verdict["after"]:
            return reason["why"]
    return UNREVIEWED


def package_rows(packages: dict[str, Any]) -> list[str]:
    rows = ["| package | mutants | tried | killed | score |", "|---|---:|---:|---:|---:|"]
    total: dict[str, int] = {"mutants": 0, "tried": 0, "killed": 0}
    for name, got in packages.items():
        total = {key: total[key] + got[key] for key in total}
        rows.append(_row(name, got))
    return [*rows, _row("**together**", total)]


def _row(name: str, got: dict[str, Any]) -> str:
    share = 100.0 * got["killed"] / max(1, got["tried"])
    return f"| {name} | {got['mutants']} | {got['tried']} | {got['killed']} | {share:.1f} % |"


def survivor_rows(verdicts: Iterable[Verdict], reasons: list[dict[str, str]]) -> list[str]:
    """Return the table of survivors, those of one reason together."""
    rows = ["| where | what it was | what it became | why it is harmless |", "|---|---|---|---|"]
    for one in sorted(verdicts, key=lambda verdict: (verdict["file"], verdict["line"], verdict["after"])):
        place = f"{one['file'].removeprefix('shared/atoll/')}, `{one['function'] or 'module'}`"
        before, after = (_code(one[side]) for side in ("before", "after"))
        fate = "no test enters it; " if one["fate"] == "unreached" else ""
        rows.append(f"| {place} | {before} | {after} | {fate}{reason_of(one, reasons)} |")
    return rows


def _code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`"


def planted_rows(results: Iterable[dict[str, Any]]) -> list[str]:
    """Return the table of planted mistakes."""
    rows = ["| mistake | caught by | seconds |", "|---|---|---:|"]
    for one in results:
        by = one["by"].partition("[")[0].rpartition("/")[2]
        rows.append(f"| {one['what']} | {_code(by) if one['caught'] else '**nothing**'} | {one['took_s']:.0f} |")
    return rows


def main() -> int:
    """Write the page; return 1 where a survivor has no reviewed reason."""
    found = json.loads((RESULTS / "mutants.json").read_text(encoding="utf-8"))
    planted = json.loads((RESULTS / "planted.json").read_text(encoding="utf-8"))
    reasons = tomllib.loads((Path(__file__).parent / "reasons.toml").read_text(encoding="utf-8"))["reason"]
    alive = [verdict for verdict in found["mutants"].values() if verdict["fate"] != "killed"]
    open_ones = sum(reason_of(verdict, reasons) == UNREVIEWED for verdict in alive)
    tried = sum(got["tried"] for got in found["packages"].values())
    killed = sum(got["killed"] for got in found["packages"].values())
    caught = sum(one["caught"] for one in planted)
    lines = [
        "# Which wrong versions of the code the tests notice",
        "",
        f"Of {tried} small changes to the packages that decide and compute, the quick tests notice {killed}",
        f"({100.0 * killed / max(1, tried):.1f} %); {open_ones} of the others are not reviewed.",
        f"Of {len(planted)} planted mistakes they catch {caught}.",
        "",
        "Written by `make mutants-page` from `build/results/mutants.json` (`make mutants`) and `build/results/planted.json`",
        "(`make mutants-planted`); the reasons are in `tests/mutants/reasons.toml`.",
        "",
        "## Scores",
        "",
        *package_rows(found["packages"]),
        "",
        "A mutant changes one comparison, operator, constant, condition, return or statement of one function. It is killed",
        "when one of its package's quick tests (`tests/mutants/packages.toml`) fails or hangs.",
        "",
        "## Planted mistakes",
        "",
        "Each is a change that somebody could have written; the first eighteen are of the kinds that once passed every test.",
        "Seconds are those of a whole pytest process, its imports included, on a busy machine.",
        "",
        *planted_rows(planted),
        "",
        "## Survivors",
        "",
        *survivor_rows(alive, reasons),
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(bool(open_ones))


if __name__ == "__main__":
    sys.exit(main())
