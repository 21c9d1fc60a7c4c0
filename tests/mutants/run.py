"""Mutation testing of the packages that decide and compute: `make mutants`.

Every mutant (`mutations`) of the files in `packages.toml` is tried against the package's quick tests by a fork server, two
at a time. Verdicts go to build/results/mutants.json as they come, and a run that is interrupted goes on where it was: what
is killed stays killed as long as its function stays as it is, what survived is tried again. With SAMPLE=n only every n-th
mutant is tried, with MINUTES=m each package gets m minutes, with ONLY=text only mutants of files that hold the text are tried,
and FRESH=1 forgets what is known.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer, MutantVerdict, read
from mutations import Mutant

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "results" / "mutants.json"
HERE = Path(__file__).parent


class Results:
    """The verdicts so far, on disk."""

    def __init__(self, *, fresh: bool) -> None:
        self.known: dict[str, dict[str, Any]] = {}
        if OUT.exists() and not fresh:
            self.known = json.loads(OUT.read_text(encoding="utf-8"))["mutants"]
        self._said_s = 0.0
        self.tried = 0

    def note(self, package: str, mutant: Mutant, verdict: MutantVerdict) -> None:
        self.tried += 1
        self.known[mutant.name] = {
            "package": package,
            "file": mutant.file,
            "line": mutant.line,
            "function": mutant.scope[0] if mutant.scope else "",
            "change": mutant.change,
            "before": mutant.before,
            "after": mutant.after,
            "fate": verdict.fate,
            "by": verdict.by,
            "took_s": round(verdict.took_s, 3),
        }
        if verdict.fate != "killed":
            _say(f"  {verdict.fate:9} {mutant.file}:{mutant.line} {mutant.before}  ->  {mutant.after}")
        if time.monotonic() - self._said_s > 10.0:
            self._said_s = time.monotonic()
            self.write({})

    def write(self, scores: dict[str, Any]) -> None:
        OUT.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"packages": scores, "mutants": self.known}, indent=1)
        OUT.write_text(text + "\n", encoding="utf-8")


def files_of(package: dict[str, Any]) -> list[str]:
    """Return the files of a package, from the root of the tree."""
    found = [str(path.relative_to(ROOT)) for pattern in package["files"] for path in sorted(ROOT.glob(pattern))]
    return [file for file in found if file not in package["without"]]


def score(results: Results, names: set[str]) -> dict[str, Any]:
    """Return what became of these mutants."""
    verdicts = [results.known[name]["fate"] for name in names if name in results.known]
    killed = verdicts.count("killed")
    return {
        "mutants": len(names),
        "tried": len(verdicts),
        "killed": killed,
        "score": round(killed / max(1, len(verdicts)), 4),
    }


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Try mutants; return 1 where a package's score is below what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1e6, help="stop each package after so long")
    parser.add_argument(
        "--sample", type=int, default=1, choices=range(1, 1001), metavar="N", help="try every N-th mutant"
    )
    parser.add_argument("--only", default="", help="try the mutants of files whose path holds this")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that are tried at a time")
    parser.add_argument("--fresh", action="store_true", help="forget what is known")
    parser.add_argument("--floor", type=float, default=0.85, help="the share that must be killed")
    asked = parser.parse_args()
    results = Results(fresh=asked.fresh)
    scores: dict[str, Any] = {}
    present: set[str] = set()
    packages = tomllib.loads((HERE / "packages.toml").read_text(encoding="utf-8"))
    if not any(asked.only in str(file) for package in packages.values() for file in files_of(package)):
        parser.error(f"--only: no file with mutants has {asked.only!r} in its path")
    for name, package in packages.items():
        every = read(ROOT, files_of(package))
        present |= {mutant.name for mutant in every}
        chosen = [m for m in every if asked.only in m.file][:: asked.sample]
        todo = [m for m in chosen if results.known.get(m.name, {}).get("fate") != "killed"]
        _say(f"{name}: {len(every)} mutants, {len(todo)} to try")
        if todo:
            server = ForkServer(todo, asked.jobs, asked.minutes, partial(results.note, name))
            quiet = ["-p", "no:terminal", "-p", "no:randomly", "-p", "no:cacheprovider"]
            tests = [f"--deselect={slow}" for slow in package["slow"]] + [str(ROOT / test) for test in package["tests"]]
            status = pytest.main([*quiet, "--hypothesis-profile", "mutants", *tests], plugins=[server])
            if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                return 2
        scores[name] = score(results, {mutant.name for mutant in every})
    results.known = {name: verdict for name, verdict in results.known.items() if name in present}
    results.write(scores)
    for name, got in scores.items():
        _say(f"{name}: {got['killed']} of {got['tried']} killed ({100 * got['score']:.1f} %), {got['mutants']} in all")
    return int(any(got["score"] < asked.floor for got in scores.values()))


if __name__ == "__main__":
    sys.exit(main())
