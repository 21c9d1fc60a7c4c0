"""What the kernel says of this machine's processor: its name, and what it can do.

Vectors decide what the arithmetic of merging takes, which library of kernels counts here, and whether a program that another
machine compiled may be run. On Linux the kernel lists all processors; the first speaks for them. Elsewhere nothing is known.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

CPU_LIST: Final = Path("/proc/cpuinfo")
VECTORS: Final = {"avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}
"""Vectors by the kernel's names of them, the widest first."""


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
