"""Wrong versions of the tree that somebody might have written, each with the quick tests that have to notice.

    python tests/mutants/planted.py [NAME...]

Each mutant of `planted.toml` is one change of one file. It is made in a copy of the tree, the tests of its group are run there
until one fails, and what caught it is printed with the seconds it took. The list is of mistakes that once passed all tests, and
of their kind; a group is there to catch whatever is wrong in its subject, not one of these. Results go to
build/results/planted.json.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "results" / "planted.json"
TREES = ("shared", "services", "tests", "benchmarks", "examples")
LIMIT_S = 600.0
SEEN_TEST = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)


def planted(folder: Path, mutant: dict[str, Any]) -> None:
    """Copy the tree and make the change in it; raise `SystemExit` where its place is not there just once."""
    for tree in TREES:
        shutil.copytree(ROOT / tree, folder / tree, ignore=shutil.ignore_patterns("__pycache__", "*.log"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    file = folder / mutant["file"]
    text = file.read_text(encoding="utf-8")
    if text.count(mutant["old"]) != 1:
        raise SystemExit(f"{mutant['name']}: its place is there {text.count(mutant['old'])} times in {mutant['file']}")
    file.write_text(text.replace(mutant["old"], mutant["new"]), encoding="utf-8")


def tried(mutant: dict[str, Any], tests: list[str]) -> dict[str, Any]:
    """Return what caught a mutant, and how long that took."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        planted(folder, mutant)
        paths = ["shared", *(f"services/{service.name}" for service in (ROOT / "services").iterdir())]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(folder / path) for path in paths), "CI": "1"}
        options = ["-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
        command = [sys.executable, "-m", "pytest", *options, "--hypothesis-profile", "mutants", *tests]
        began_s = time.monotonic()
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        took_s = time.monotonic() - began_s
    seen = SEEN_TEST.search(done.stdout)
    failed = done.returncode == 1 and seen is not None
    return {
        "name": mutant["name"],
        "what": mutant["what"],
        "caught": failed,
        "by": seen.group(1) if seen and failed else "",
        "said": (seen.group(2) or "")[:160] if seen and failed else done.stdout[-400:],
        "took_s": round(took_s, 1),
    }


def main(names: list[str]) -> int:
    """Try the mutants; return 1 where one is not caught."""
    book = tomllib.loads((Path(__file__).parent / "planted.toml").read_text(encoding="utf-8"))
    chosen = [mutant for mutant in book["mutant"] if not names or mutant["name"] in names]
    if not chosen:
        sys.exit(
            f"no planted mistake is called {' or '.join(names)}: one of {', '.join(m['name'] for m in book['mutant'])}"
        )
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda mutant: _shown(tried(mutant, book["groups"][mutant["group"]])), chosen))
    known = {one["name"]: one for one in (json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else [])}
    known |= {one["name"]: one for one in results}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(
        json.dumps([known[m["name"]] for m in book["mutant"] if m["name"] in known], indent=1) + "\n", encoding="utf-8"
    )
    missed = [result["name"] for result in results if not result["caught"]]
    tail = f"; missed: {', '.join(missed)}" if missed else ""
    _say(f"{len(results) - len(missed)} of {len(results)} caught{tail}")
    return int(bool(missed))


def _shown(result: dict[str, Any]) -> dict[str, Any]:
    caught = f"{result['took_s']:5.1f} s  {result['by']}" if result["caught"] else f"MISSED  {result['said']}"
    _say(f"{result['name']:36} {caught}")
    return result


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
