"""Huge pages for programs that train on the processor.

XLA asks for the memory of a step's values when the step begins and gives it back at its end. glibc takes pieces of that
size from the kernel each time, and the kernel clears them page by page of 4 kB as they are touched: 22,000 faults in a step
of the demo's model, a quarter of its time. With huge pages there are 600. glibc (from 2.35) asks for them where it is told
to, and a kernel gives them where `/sys/kernel/mm/transparent_hugepage/enabled` says `madvise`, as most do. Elsewhere nothing
changes.

A program cannot tell its own glibc: the variable is read before `main`. So whoever starts the program sets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

VARIABLE: Final = "GLIBC_TUNABLES"
TUNABLE: Final = "glibc.malloc.hugetlb"


def huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that asks for huge pages, beside what else it says in `environment`; empty where that has decided.

    >>> huge_pages({})
    {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
    >>> huge_pages({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})
    {'GLIBC_TUNABLES': 'glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1'}
    >>> huge_pages({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})
    {}
    """
    told = environment.get(VARIABLE, "")
    if TUNABLE in told:
        return {}
    return {VARIABLE: ":".join(filter(None, (told, f"{TUNABLE}=1")))}
