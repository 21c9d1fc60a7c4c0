"""Hold branch coverage against the floors of packages that have one: `make coverage` measures, and this reads what was found.

A floor is a point or two below what the tests reached when it was set. It may rise; to lower it is a decision.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.lib.harness import Figure, write

FLOORS = {
    "shared/atoll/protocol": 98,
    "shared/atoll/client": 95,
    "services/synchronizer/atoll_synchronizer": 93,
    "shared/atoll/merge": 93,
    "shared/atoll/codec": 77,
    "shared/atoll/bus": 93,
}
ROOMS = ("base", "model", "wire", "run", "archive", "keras", "local", "deploy", "report", "cli")
UNBOUND = [*(f"shared/atoll/{room}" for room in ROOMS), "services/learner", "services/simulator", "services/monitor"]


def figures(measured: dict[str, dict[str, dict[str, int]]]) -> list[Figure]:
    """Return one figure per package, of the files that `coverage json` reports."""
    made = []
    for package in (*FLOORS, *UNBOUND):
        found = [report["summary"] for path, report in measured.items() if path.startswith(f"{package}/")]
        met = sum(one["covered_lines"] + one["covered_branches"] for one in found)
        whole = sum(one["num_statements"] + one["num_branches"] for one in found)
        share, floor = 100.0 * met / max(whole, 1), FLOORS.get(package)
        how = f"{met} of {whole} statements and branches, by the tests of make test"
        goal, holds = ("", None) if floor is None else (f"at least {floor} %", share >= floor)
        made.append(Figure(package, round(share, 2), "%", goal, holds, how))
    return made


if __name__ == "__main__":
    document = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.exit(write("coverage", 0, figures(document["files"])))
