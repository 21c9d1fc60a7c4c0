"""The commit that this Atoll was made from and the machine that it runs on, for reports and comparisons.

A checkout (also an editable installation) is asked itself, so that edits show. A wheel carries its commit in
`atoll/commit.txt`, which the build writes if it knows it (`infra/build_commit.py`).

The processor's vectors decide what the arithmetic of merging takes, which library of kernels counts here, and whether a program
that another machine compiled may be run. On Linux the kernel lists all processors; the first speaks for them.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from atoll.base.files import text_or_empty

CPU_LIST: Final = Path("/proc/cpuinfo")
VECTORS: Final = {"avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}
"""Vectors by the kernel's names of them, the widest first."""
VARIABLE: Final = "GLIBC_TUNABLES"
TUNABLE: Final = "glibc.malloc.hugetlb"
GIT_S: Final = 5.0
EDITED: Final = "+changes"
COMMIT_FILE: Final = "commit.txt"
UNKNOWN: Final = "unknown (installed from a wheel without one)"
"""The commit of a package that was built where there was no git, from an archive of the sources for example."""


def processor_facts(cpus: Path = CPU_LIST) -> dict[str, str]:
    """Return what the kernel says of the first processor, by the kernel's own names; nothing where it does not tell."""
    try:
        first = cpus.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def abilities(cpus: Path = CPU_LIST) -> frozenset[str]:
    """Return the kernel's names of what this processor can, on x86 and on ARM."""
    facts = processor_facts(cpus)
    return frozenset(f"{facts.get('flags', '')} {facts.get('Features', '')}".split())


def processor() -> str:
    """Return the processor's name and its widest vectors, as `AMD EPYC with AVX2`; empty where the kernel does not tell."""
    name, able = processor_facts().get("model name", ""), abilities()
    widest = next((word for flag, word in VECTORS.items() if flag in able), "")
    return " with ".join(filter(None, (name, widest)))


def processors() -> str:
    """Return how many cores this machine has, and of what, as `2 cores of AMD EPYC with AVX2`."""
    return " of ".join(filter(None, (f"{os.cpu_count() or 1} cores", processor())))


def commit() -> str:
    """Return the commit that this Atoll was made from, `+changes` when its tree had been edited; `UNKNOWN` if nothing tells."""
    package = Path(__file__).resolve().parents[1]
    return _of_checkout(package) or text_or_empty(package / COMMIT_FILE).strip() or UNKNOWN


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


def huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that asks for huge pages, beside what else it says in `environment`; empty where that has decided.

    XLA takes the memory of a step's values anew in each step, and the kernel clears it page by page of 4 kB: 22,000 faults in
    a step of the demo's model, a quarter of its time. With huge pages there are 600. glibc (from 2.35) asks for them if told,
    and a kernel gives them where `/sys/kernel/mm/transparent_hugepage/enabled` says `madvise`, as most do. glibc reads the
    variable before `main`, so a program's starter sets it.

    >>> huge_pages({})
    {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
    >>> huge_pages({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})
    {'GLIBC_TUNABLES': 'glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1'}
    >>> huge_pages({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})
    {}
    """
    said = environment.get(VARIABLE, "")
    if TUNABLE in said:
        return {}
    return {VARIABLE: ":".join(filter(None, (said, f"{TUNABLE}=1")))}
