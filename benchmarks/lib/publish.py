"""Writes the pages of `docs/results/` from `build/results/*.json`: `make results`. No figure of a table is typed by hand.

A page has its summary (`summaries.toml`), where its figures come from, how to read them (`prose.toml`), for some targets tables
of systems beside each other, and all figures. A summary names figures of its page: `{name}` is the value with its unit, `{name
#2}` the second of that name, `{name|%}` in per cent, `{name|number}` without its unit, `{name|verdict}` whether its goal is
met.

A target with kept extracts (`chaos`) has them copied to `docs/results/raw/` and its plots drawn beside the page; the page of an
experiment is made from its raw file as a whole. `make results-check` makes both again from the repository alone and compares.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.experiments import experiment_page
from benchmarks.faults.metrics import Extract, figures, load, plots
from benchmarks.lib.harness import HISTORY, RESULTS, add_history

FOLDER: Final = Path("docs/results")
TEXTS: Final = Path(__file__).parents[2] / FOLDER
RAW: Final = "raw"
SYNC: Final = {name: name for name in ("sync", "processor time", "moved", "training waits", "memory")}
TRAINING: Final = {"wall clock": "whole command", "processor time": "processor time", "loss": "held-out loss"}
LOOPS: Final = {
    "own lines": "own lines",
    "first loss": "first loss",
    "last loss": "last loss",
    "merged measure": "merged model",
    "step": "step",
    "in the island": "of it in the island",
    "overhead": "of the time",
    "one killed, tokens lost": "one killed: tokens lost",
    "one killed, merged measure": "merged model after it",
    "all killed, tokens lost": "all killed: tokens lost",
    "all killed, merged measure": "merged model after it",
}
"""Columns of tables by what names of figures say behind the system's, and their headings."""
Figures = Sequence[Mapping[str, Any]]
_PLACE: Final = re.compile(r"\{(?P<name>[^{}|]+?)(?: #(?P<which>\d+))?(?:\|(?P<form>[^{}]+))?\}")


def main() -> int:
    """Write one page per target that was measured, or compare the pages that can be computed again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compute again from docs/results/raw and compare")
    if parser.parse_args().check:
        return check()
    measured = sorted(RESULTS.glob("*.json"))
    if not measured:
        print(f"nothing was measured yet: {RESULTS} is empty; run make bench or another target of `make help`")
        return 1
    for path in measured:
        publish(path.stem, json.loads(path.read_text(encoding="utf-8")), FOLDER)
    return 0


def publish(target: str, document: dict[str, Any], folder: Path) -> None:
    """Write the page of one target, its raw files and its plots to `folder`."""
    raw = folder / RAW
    raw.mkdir(parents=True, exist_ok=True)
    if target.startswith(experiment_page.PREFIX):
        publish_experiment(target, Path(document["raw"][0]), folder)
        return
    if document.get("raw"):
        for stale in raw.glob(f"{target}-*.json.zst"):
            stale.unlink()
        for path in map(Path, document["raw"]):
            shutil.copyfile(path, raw / f"{target}-{path.name}")
        for name, text in plots(extracts(target, folder)).items():
            (folder / name).write_text(text, encoding="utf-8")
    for path in sorted(RESULTS.glob(f"{target}-*.svg")):
        shutil.copyfile(path, folder / path.name)
    page_path = folder / f"{target}.md"
    page_path.write_text(on_top(page(target, document), target, document["figures"]), encoding="utf-8")
    add_history(target, document, folder / HISTORY.name)
    print(f"written {page_path}")


def publish_experiment(target: str, raw: Path, folder: Path) -> None:
    """Write raw file, page and plots of one experiment."""
    shutil.copyfile(raw, folder / RAW / raw.name)
    kept = experiment_page.load(raw)
    page_text = on_top(experiment_page.page(kept), target, [])
    for name, text in {f"{target}.md": page_text, **experiment_page.svgs(kept)}.items():
        (folder / name).write_text(text, encoding="utf-8")
    print(f"written {folder / target}.md")


# -- pages ------------------------------------------------------------------------------------------------------------


def texts(name: str) -> dict[str, str]:
    """Return the texts of `docs/results/<name>.toml` by target."""
    return tomllib.loads((TEXTS / f"{name}.toml").read_text(encoding="utf-8"))


def page(target: str, document: dict[str, Any]) -> str:
    """Return the page of one target, without its summary."""
    found, prose = document["figures"], texts("prose").get(target)
    origin = f"{document['machine']}; commit `{document['commit'][:12]}`; seed {document['seed']}"
    parts = [f"# make {target}", "", f"Generated by `make results`. {origin}.", ""]
    parts += [prose] if prose else []
    parts += [line for table in tables(target, found) for line in (*table, "")]
    return "\n".join([*parts, "| figure | value | goal | holds | how |", "|---|---|---|---|---|", *map(row, found), ""])


def row(figure: Mapping[str, Any]) -> str:
    """Return a figure as a line of the table."""
    holds = {True: "yes", False: "**no**", None: ""}[figure["holds"]]
    return line(figure["name"], f"{figure['value']:.4g} {figure['unit']}", figure["goal"], holds, figure["how"])


def line(*cells: str) -> str:
    """Return a line of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def on_top(page: str, target: str, figures: Figures) -> str:
    """Return `page` with the summary of `target` below its title; a target without one keeps its page."""
    template = texts("summaries").get(target)
    if template is None:
        return page
    title, _, rest = page.partition("\n\n")
    return f"{title}\n\n{fill(template, figures)}\n\n{rest}"


def fill(template: str, figures: Figures) -> str:
    """Return a summary with its figures; one that was not measured this time is said to be so."""

    def value(place: re.Match[str]) -> str:
        named = [figure for figure in figures if figure["name"] == place["name"]]
        which = int(place["which"] or 1) - 1
        return word(named[which], place["form"] or "") if which < len(named) else "(not measured)"

    return _PLACE.sub(value, template)


def word(figure: Mapping[str, Any], form: str) -> str:
    """Return one figure as a sentence has it."""
    number, unit = float(figure["value"]), str(figure["unit"])
    if form == "%":
        return f"{100.0 * number:.3g} %"
    if form == "verdict":
        return "met" if figure["holds"] else "missed"
    digits = f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"
    return digits if unit in ("ratio", "") or form == "number" else f"{digits} {unit}"


def tables(target: str, found: Figures) -> list[list[str]]:
    """Return the tables that stand above the list of all figures of a page."""
    if target == "bench-loops":
        return [beside(found, "loop", LOOPS)]
    if target != "bench-peers":
        return []
    budgets = dict.fromkeys(name for figure in found if "tokens" in (name := figure["name"].partition(": ")[0]))
    return [
        beside(found, "a sync of 64 MiB", SYNC),
        *(beside(found, budget, TRAINING, f"{budget}: ", ", ") for budget in budgets),
    ]


def beside(
    found: Figures, heading: str, columns: Mapping[str, str], before: str = "", between: str = ": "
) -> list[str]:
    """Return a table of the systems that have a figure for all columns; `before` is what their names begin with."""
    by_name = {figure["name"]: figure for figure in found}
    ending = between + next(iter(columns))
    named = [name.removesuffix(ending) for name in by_name if name.startswith(before) and name.endswith(ending)]
    systems = [name for name in named if all(f"{name}{between}{what}" in by_name for what in columns)]
    cells = {name: [cell(by_name[f"{name}{between}{what}"]) for what in columns] for name in systems}
    head = [line(heading, *columns.values()), line(*["---"] * (1 + len(columns)))]
    return head + [line(name.removeprefix(before), *row) for name, row in cells.items()]


def cell(figure: Mapping[str, Any]) -> str:
    """Return a figure as a cell has it; a missed goal is bold."""
    value, unit = float(figure["value"]), figure["unit"]
    digits = f"{value:,.0f}" if value >= 1000 else f"{value:.3f}" if unit.endswith("/byte") else f"{value:.3g}"
    text = f"{100 * value:.2g} %" if unit == "ratio" else f"{digits} {unit}".rstrip()
    return f"**{text}**" if figure["holds"] is False else text


# -- the check --------------------------------------------------------------------------------------------------------


def extracts(target: str, folder: Path) -> list[Extract]:
    """Return the raw files of a target in the order of their runs."""
    found = [load(path) for path in sorted((folder / RAW).glob(f"{target}-*.json.zst"))]
    return sorted(found, key=lambda extract: (extract.course.seed, extract.course.system, extract.course.per_minute))


def check() -> int:
    """Return 0 when the pages say what their raw files say."""
    wrong = differences("chaos", FOLDER)
    for raw in sorted((FOLDER / RAW).glob(f"{experiment_page.PREFIX}*.json.zst")):
        wrong += page_differences(raw, FOLDER)
    for text in wrong:
        print(text)
    print("a page differs from its raw files" if wrong else "the pages say what their raw files say")
    return int(bool(wrong))


def page_differences(raw: Path, folder: Path) -> list[str]:
    """Return the lines in which an experiment's page differs from what its raw file gives."""
    target = raw.name.removesuffix(".json.zst")
    path = folder / f"{target}.md"
    published = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    again = on_top(experiment_page.page(experiment_page.load(raw)), target, []).splitlines()
    return [f"{path.name}: {text}" for text in difflib.ndiff(published, again) if text[:2] in {"- ", "+ "}]


def differences(target: str, folder: Path) -> list[str]:
    """Return the lines of a target's table that its raw files do not give, and those that it lacks."""
    again = {row(asdict(figure)) for figure in figures(extracts(target, folder))}
    path = folder / f"{target}.md"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    published = {text for text in lines if text.startswith("| ") and not text.startswith("| figure |")}
    return [f"not by the raw files: {text}" for text in sorted(published - again)] + [
        f"not on the page: {text}" for text in sorted(again - published)
    ]


if __name__ == "__main__":
    sys.exit(main())
