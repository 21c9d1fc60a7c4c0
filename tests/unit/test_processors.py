"""What is said of a processor, from lists as kernels write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.base.machine import abilities, processor

XEON = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: sse2 avx2 avx512f\n\nprocessor\t: 1\nmodel name\t: other\n"
EPYC = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: sse2 avx2\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n"
OLD = "processor\t: 0\nmodel name\t: Pentium: the first\nflags\t\t: sse2\n"


@pytest.mark.parametrize(
    ("told", "name", "able"),
    [
        (XEON, "Intel(R) Xeon(R) with AVX-512", {"sse2", "avx2", "avx512f"}),
        (EPYC, "AMD EPYC with AVX2", {"sse2", "avx2"}),
        (ARM, "NEON", {"fp", "asimd"}),
        (OLD, "Pentium: the first", {"sse2"}),
        ("", "", set()),
    ],
    ids=["two processors", "AVX2", "ARM has no name", "no wide vectors", "an empty list"],
)
def test_a_processor_is_told_by_its_name_and_widest_vectors(
    tmp_path: Path, told: str, name: str, able: set[str]
) -> None:
    cpus = tmp_path / "cpuinfo"
    cpus.write_text(told, encoding="utf-8")

    assert processor(cpus) == name
    assert abilities(cpus) == able


def test_where_the_kernel_lists_none_nothing_is_said(tmp_path: Path) -> None:
    assert (processor(tmp_path / "none"), abilities(tmp_path / "none")) == ("", frozenset())
