"""What was measured before: `docs/results/history.jsonl`, a line for every measurement that was published.

A line has the target, the commit, the machine in words, the seed, and the value of every figure. `make results` writes it with
the page; a target that is measured again at the same commit on the same machine takes the place of its line. Who measures
sees every figure beside the last one that was published from a machine of that kind (`results.write`), so what has become
worse is seen by whoever made it so. Nothing fails for it: machines have neighbours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HISTORY = Path("docs/results/history.jsonl")
COMMIT_DIGITS = 12


def entries(path: Path = HISTORY) -> list[dict[str, Any]]:
    """Return all lines, oldest first; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def entry(target: str, document: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a result as `results.write` makes them."""
    figures = {figure["name"]: [float(f"{figure['value']:.4g}"), figure["unit"]] for figure in document["figures"]}
    return {
        "target": target,
        "commit": document["commit"][:COMMIT_DIGITS],
        "machine": document["machine"],
        "seed": document["seed"],
        "figures": figures,
    }


def add(target: str, document: dict[str, Any], path: Path = HISTORY) -> None:
    """Add the line of a result, or put it in the place of the one of the same commit and machine."""
    new, lines = entry(target, document), entries(path)
    same = [number for number, line in enumerate(lines) if _key(line) == _key(new)]
    if same:
        lines[same[0]] = new
    else:
        lines.append(new)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def before(target: str, machine: str, commit: str, path: Path = HISTORY) -> dict[str, float]:
    """Return the figures that were published last of a target on a machine of that kind, those of this commit left out."""
    for line in reversed(entries(path)):
        if (line["target"], line["machine"]) == (target, machine) and line["commit"] != commit[:COMMIT_DIGITS]:
            return {name: float(value) for name, (value, _) in line["figures"].items()}
    return {}


def _key(line: dict[str, Any]) -> tuple[str, str, str]:
    return line["target"], line["commit"], line["machine"]
