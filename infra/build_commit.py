"""A build hook of hatchling: puts the commit that a wheel or a source archive is made from into it, as `atoll/commit.txt`.

The commit is that of the git checkout whose root this is, or the one that the variable SOURCE_COMMIT names where the sources
came without git (an image's build). If neither tells, a file that a source archive brought along stays; else there is none.
An editable installation gets none: it asks its checkout.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACES = {"wheel": "atoll/commit.txt", "sdist": "shared/atoll/commit.txt"}


class CommitHook(BuildHookInterface[Any]):
    """Adds one file to what is built."""

    PLUGIN_NAME = "custom"
    _file = ""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the commit to a temporary file and have it packed."""
        commit = os.environ.get("SOURCE_COMMIT", "").strip() or commit_of(Path(self.root))
        if not commit or version == "editable":
            return
        descriptor, self._file = tempfile.mkstemp(suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{commit}\n")
        build_data["force_include"][self._file] = PLACES[self.target_name]

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary file."""
        del version, build_data, artifact_path
        if self._file:
            Path(self._file).unlink(missing_ok=True)


def commit_of(root: Path) -> str:
    """Return the commit of the checkout whose top folder is `root`, with `+changes` if it was edited; empty if it is none."""
    top, head = _git(root, "rev-parse", "--show-toplevel"), _git(root, "rev-parse", "HEAD")
    # Sources unpacked inside somebody else's repository are not of that repository's commit.
    if not top or not head or Path(top).resolve() != root.resolve():
        return ""
    return head + ("+changes" if _git(root, "status", "--porcelain") else "")


def _git(where: Path, *words: str) -> str:
    """Return what git answers, empty when there is none."""
    try:
        done = subprocess.run(["git", "-C", str(where), *words], capture_output=True, text=True, check=True)  # noqa: S603, S607
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
