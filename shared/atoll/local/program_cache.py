"""Where runs of this machine keep compiled programs, if nobody says where: in the user's cache folder, for all runs.

    $XDG_CACHE_HOME/atoll/programs/<machine>     ($XDG_CACHE_HOME is ~/.cache unless it is set)

A program depends on the model and the batch, not on the run. JAX names an entry by all that it was compiled from but the
processor's abilities, and a home folder may be shared by unlike machines: each kind of processor has a folder of its own. Where
the user has no such folder of its own (`atoll.base.user_cache`), the run's own folder does. Each run removes the oldest entries
beyond `CACHE_BYTES_MAX`, and those that a full disk or a killed process has cut, which JAX would find and refuse in every run.
Nothing that goes wrong here keeps a run from starting.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import stat
from pathlib import Path
from typing import Final

import zstandard

from atoll.base.machine import CPU_LIST, processor_facts
from atoll.base.user_cache import user_cache

CACHE_BYTES_MAX: Final = 1 << 30
CPU_FACTS: Final = ("model name", "flags", "CPU implementer", "CPU part", "Features")
"""The abilities of a processor in the kernel's list, on x86 and on ARM."""
PROGRAM: Final = "-cache"
"""The end of the name of a program's file, by JAX; its content is compressed by zstd."""
LOOKED: Final = ".looked"
"""Its time is that of the last look at all entries."""
FRAME_HEAD_BYTES: Final = 18
PIECE_BYTES: Final = 1 << 20


def program_cache(run: Path, cpus: Path = CPU_LIST) -> Path:
    """Return the folder in which processes of the run in folder `run` keep compiled programs; it exists."""
    folder = user_cache("programs", machine(cpus))
    if folder is None:
        folder = run / "cache" / "jax"
        folder.mkdir(parents=True, exist_ok=True)
    tidy(folder, CACHE_BYTES_MAX)
    return folder


def machine(cpus: Path = CPU_LIST) -> str:
    """Return a name that machines share whose processors can do the same."""
    facts = [platform.machine(), platform.processor()]
    facts += [f"{name}: {value}" for name, value in processor_facts(cpus).items() if name in CPU_FACTS]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()


def tidy(folder: Path, bytes_max: int) -> None:
    """Remove entries that are cut, and of more than `bytes_max` the oldest until half of that is left.

    Entries that were looked at before are not looked at again.
    """
    found, looked_s = [], _mtime_s(folder / LOOKED)
    with contextlib.suppress(OSError):
        (folder / LOOKED).touch()
    for path in _entries(folder):
        try:
            about = path.lstat()
            if not stat.S_ISREG(about.st_mode):
                continue
            if about.st_mtime >= looked_s and not _is_whole(path):
                path.unlink()
                continue
        except OSError:
            continue
        found.append((about.st_mtime, about.st_size, path))
    total = sum(size for _, size, _ in found)
    if total <= bytes_max:
        return
    for _, size, path in sorted(found):
        if total <= bytes_max // 2:
            return
        with contextlib.suppress(OSError):
            path.unlink()
            total -= size


def _entries(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []


def _mtime_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _is_whole(path: Path) -> bool:
    """Return whether an entry can be decompressed to its end; only programs are compressed."""
    if not path.name.endswith(PROGRAM):
        return True
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
        try:
            size = zstandard.frame_content_size(file.read(FRAME_HEAD_BYTES))
            file.seek(0)
            there = 0
            while piece := reader.read(PIECE_BYTES):
                there += len(piece)
        except zstandard.ZstdError:
            return False
        return size in (there, -1) and there > 0
