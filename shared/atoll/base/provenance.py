"""Which Atoll this is and what it runs on: version, commit and machine, for reports and comparisons.

The commit comes from one of two places. A checkout (also an editable installation) is asked itself, so that edits show. A
wheel carries it in `atoll/commit.txt`, which the build writes if it knows the commit (`infra/build_commit.py`).
"""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

from atoll.base.machine import processors
from atoll.base.regular_files import text_or_empty

GIT_S: Final = 5.0
EDITED: Final = "+changes"
COMMIT_FILE: Final = "commit.txt"
UNKNOWN: Final = "unknown (installed from a wheel without one)"
"""The commit of a package that was built where there was no git, from an archive of the sources for example."""


def commit() -> str:
    """Return the commit that this Atoll was made from, `+changes` when its tree had been edited; `UNKNOWN` if nothing tells."""
    package = Path(__file__).resolve().parents[1]
    return _of_checkout(package) or text_or_empty(package / COMMIT_FILE).strip() or UNKNOWN


def version() -> str:
    """Return the version of the installed package; "0" where it was not installed."""
    try:
        return metadata.version("atoll")
    except metadata.PackageNotFoundError:
        return "0"


def machine() -> str:
    """Return what the program runs on, as `Linux x86_64, 2 cores of AMD EPYC with AVX2, Python 3.11.7`."""
    return f"{platform.system()} {platform.machine()}, {processors()}, Python {sys.version.split()[0]}"


def _of_checkout(package: Path) -> str:
    head = _git(package, "rev-parse", "HEAD")
    top = _git(package, "rev-parse", "--show-toplevel")
    # An installed package may lie in somebody else's repository: only our own tree counts.
    if not head or not top or package != Path(top).resolve() / "shared" / "atoll":
        return ""
    return head + (EDITED if _git(package, "status", "--porcelain") else "")


def _git(where: Path, *words: str) -> str:
    command = ["git", "-C", str(where), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=True)  # noqa: S603  # fixed words
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
