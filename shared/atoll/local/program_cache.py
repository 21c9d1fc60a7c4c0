"""Where runs of this machine keep compiled programs, if nobody says where: in the user's cache folder, for all runs.

    $XDG_CACHE_HOME/atoll/programs/<machine>     ($XDG_CACHE_HOME is ~/.cache unless it is set)

A program depends on the model and the batch, not on the run. So the second run of a model begins to train as soon as its
processes are up. JAX names an entry by all that it was compiled from, JAX's own version among it, but not by the processor's
abilities: a home folder may be shared by unlike machines, so each kind of processor has a folder of its own.

The folder never holds much more than `CACHE_BYTES_MAX`: each run removes the oldest entries first. An entry that vanishes
under a reader is compiled again. Where the user has no cache folder that can be written, the run's own folder serves.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Final

CACHE_BYTES_MAX: Final = 1 << 30
CPU_FACTS: Final = ("model name", "flags", "CPU implementer", "CPU part", "Features")
"""What the kernel's list of processors says of what one can do, on x86 and on ARM."""
CPU_LIST: Final = Path("/proc/cpuinfo")


def program_cache(run: Path, cpus: Path = CPU_LIST) -> Path:
    """Return the folder in which processes of the run in folder `run` keep compiled programs; it exists."""
    told = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(told) if Path(told).is_absolute() else Path.home() / ".cache"
        folder = home / "atoll" / "programs" / machine(cpus)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        usable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):  # a user without a home
        usable = False
    if not usable:
        folder = run / "cache" / "jax"
        folder.mkdir(parents=True, exist_ok=True)
    prune(folder, CACHE_BYTES_MAX)
    return folder


def machine(cpus: Path = CPU_LIST) -> str:
    """Return a name that machines share whose processors can do the same."""
    facts = [platform.machine(), platform.processor()]
    try:
        first = cpus.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
        facts += [line for line in first.splitlines() if line.partition(":")[0].strip() in CPU_FACTS]
    except OSError:
        pass
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()


def prune(folder: Path, bytes_max: int) -> None:
    """Remove the oldest files of a folder of more than `bytes_max` until half of that is left."""
    found = []
    for path in folder.iterdir():
        try:
            about = path.stat()
        except OSError:
            continue
        found.append((about.st_mtime, about.st_size, path))
    total = sum(size for _, size, _ in found)
    if total <= bytes_max:
        return
    for _, size, path in sorted(found):
        if total <= bytes_max // 2:
            return
        path.unlink(missing_ok=True)
        total -= size
