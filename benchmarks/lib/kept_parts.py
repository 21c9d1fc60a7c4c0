"""A long measurement in parts: what was measured with these sources on this machine lies in a file, and is not measured again.

So hours of a race can be stopped after any part, and the next command goes on. A part counts only where the sources that it
rests on, the programs of the peers and the machine are those of today; the name of the folder says so.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from atoll.base.atomic_files import write_whole
from atoll.base.provenance import machine
from benchmarks.lib.source_digest import source_digest

DIGITS: Final = 8


class KeptParts:
    """Parts of a measurement in `folder`, by name; `again` forgets those of today's sources first."""

    def __init__(
        self, folder: Path, packages: Iterable[str], beside: Iterable[Path] = (), *, again: bool = False
    ) -> None:
        """Open the folder of the sources of `packages`, of the files `beside` and of this machine."""
        other = hashlib.sha256(machine().encode())
        for path in sorted(beside):
            other.update(path.read_bytes())
        self.here = folder / f"{source_digest(packages)}-{other.hexdigest()[:DIGITS]}"
        if again:
            shutil.rmtree(self.here, ignore_errors=True)

    def part(self, name: str, measure: Callable[[], Any]) -> Any:  # noqa: ANN401  (whatever JSON carries)
        """Return what `name` came to, from its file or else measured now; it must be what JSON carries."""
        path = self.here / f"{name}.json"
        if path.exists():
            print(f"{name}: measured before, with these sources ({path})", flush=True)
            return json.loads(path.read_text(encoding="utf-8"))
        found = measure()
        self.here.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(found) + "\n").encode())
        return found
