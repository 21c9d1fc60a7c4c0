"""A short form of `make bench-monitor`: every figure comes from a real monitor."""

from __future__ import annotations

import pytest

from benchmarks.faults.crowd import FRAGMENTS
from benchmarks.faults.monitored import measured

pytestmark = [pytest.mark.connected, pytest.mark.second_tier]


async def test_the_benchmark_of_the_monitor_measures_a_monitor() -> None:
    """Seconds at its pace, then more commits than the monitor keeps: it reads all of them and stays as it was."""
    figures = {one.name: one for one in await measured(3.0, 1200 // FRAGMENTS)}

    assert 0.0 < figures["core for the monitor"].value < 4.0
    assert figures["a scrape"].value > 0.0
    assert figures["memory after a day"].value > 30.0
    # The goal is for a whole day: in seconds an allocator that has not settled is worth a tenth.
    assert 0.5 < figures["memory after a day over half a day"].value < 1.5
    assert figures["commits read in a second"].value > 0.0
