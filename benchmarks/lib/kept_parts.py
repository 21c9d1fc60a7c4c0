"""A long measurement in parts: what was measured with these sources on this machine lies in a file, and is not measured again.

So hours of a race can be stopped after any part. The folder's name is a digest of what the measurement rests on: the machine,
the programs of the peers, `uv.lock`, and those of our modules that the given packages import, directly or through others,
wherever in a module the import stands. What is found by entry points or by a name in the settings is not followed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from atoll.base.files import write_whole
from atoll.base.machine import machine

ROOT = Path(__file__).resolve().parents[2]


def closure(packages: Iterable[str], root: Path = ROOT) -> dict[str, Path]:
    """Return the modules that `packages` consist of and import, by dotted name."""
    known = modules(root)
    found: dict[str, Path] = {}
    ahead = [name for name in known for package in packages if name == package or name.startswith(f"{package}.")]
    while ahead:
        name = ahead.pop()
        if name in found:
            continue
        found[name] = known[name]
        wanted = {*imported(known[name].read_text(encoding="utf-8")), name.rpartition(".")[0]}
        ahead += [module for module in wanted if module in known]
    return found


def modules(root: Path = ROOT) -> dict[str, Path]:
    found = {}
    tops = [(top, top) for top in (root / "shared", *sorted((root / "services").glob("*")))]
    tops += [
        (root, root / "benchmarks"),
        *((root / "tests", root / "tests" / part) for part in ("schedules", "support")),
    ]
    for top, folder in tops:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(top).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(text: str) -> set[str]:
    """Return the dotted names that a module's imports may mean, also those inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def source_digest(packages: Iterable[str], root: Path = ROOT) -> str:
    """Return 12 hex digits for the content of the closure of `packages` and of the lock file."""
    digest = hashlib.sha256()
    for name, path in sorted(closure(packages, root).items()):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    lock = root / "uv.lock"
    digest.update(lock.read_bytes() if lock.exists() else b"")
    return digest.hexdigest()[:12]


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
