"""This machine's processor as its kernel describes it, and huge pages for programs that train on it.

Vectors decide what the arithmetic of merging takes, which library of kernels counts here, and whether a program that another
machine compiled may be run. On Linux the kernel lists all processors; the first speaks for them. Elsewhere nothing is known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

CPU_LIST: Final = Path("/proc/cpuinfo")
VECTORS: Final = {"avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}
"""Vectors by the kernel's names of them, the widest first."""
VARIABLE: Final = "GLIBC_TUNABLES"
TUNABLE: Final = "glibc.malloc.hugetlb"


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


def processor(cpus: Path = CPU_LIST) -> str:
    """Return the processor's name and its widest vectors, as `AMD EPYC with AVX2`; empty where the kernel does not tell."""
    name, able = processor_facts(cpus).get("model name", ""), abilities(cpus)
    widest = next((word for flag, word in VECTORS.items() if flag in able), "")
    return " with ".join(filter(None, (name, widest)))


def processors() -> str:
    """Return how many cores this machine has, and of what, as `2 cores of AMD EPYC with AVX2`."""
    return " of ".join(filter(None, (f"{os.cpu_count() or 1} cores", processor())))


def huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that asks for huge pages, beside what else it says in `environment`; empty where that has decided.

    XLA asks for the memory of a step's values when the step begins and gives it back at its end. glibc takes pieces of that
    size from the kernel each time, and the kernel clears them page by page of 4 kB as they are touched: 22,000 faults in a step
    of the demo's model, a quarter of its time. With huge pages there are 600. glibc (from 2.35) asks for them where it is told
    to, and a kernel gives them where `/sys/kernel/mm/transparent_hugepage/enabled` says `madvise`, as most do. Elsewhere
    nothing changes. A program cannot tell its own glibc: the variable is read before `main`. So its starter sets it.

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
