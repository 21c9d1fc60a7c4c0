"""The tables of the race are made from its figures by name."""

from __future__ import annotations

from typing import Any

from benchmarks.network.peers_tables import SYNC, TRAINING, peers_tables


def figure(name: str, value: float, unit: str, *, holds: bool | None = None) -> dict[str, Any]:
    """Return a figure as a result file has it."""
    return {"name": name, "value": value, "unit": unit, "goal": "", "holds": holds, "how": ""}


def test_systems_stand_beside_each_other() -> None:
    """One that lacks a figure is left to the list below; a missed goal is bold."""
    figures = [figure(f"{system}: {what}", 1985.0, "MB") for system in ("gloo", "Atoll") for what in SYNC]
    figures += [figure("four bits: sync", 0.5, "s"), figure("broker: processor time per learner", 0.7, "x")]
    figures += [figure(f"0.6M tokens: Atoll, {what}", 2.2644, "bits/byte", holds=False) for what in TRAINING]
    figures += [figure("0.6M tokens: Atoll's loss over DiLoCo's", 0.8, "x")]

    syncs, budget = (block.splitlines() for block in "\n".join(peers_tables(figures)).strip().split("\n\n"))

    assert [line.split(" | ")[0] for line in syncs] == ["| a sync of 64 MiB", "| ---", "| gloo", "| Atoll"]
    assert syncs[2] == "| gloo" + " | 1,985 MB" * len(SYNC) + " |"
    assert budget[0].startswith("| 0.6M tokens | ")
    assert budget[2] == "| Atoll" + " | **2.264 bits/byte**" * len(TRAINING) + " |"
    assert len(budget) == 3
