"""What a benchmark reads from the `report.json` of a run."""

from __future__ import annotations

from typing import Any

import numpy as np


def merged_tokens(report: dict[str, Any]) -> int:
    """Return the tokens that were merged, in time or late."""
    return sum(report["tokens_by_fate"][fate] for fate in ("merged", "merged_late"))


def loss_at(report: dict[str, Any], merged: int) -> float:
    """Return the held-out bits per byte when `merged` tokens were merged, between two points of the curve."""
    curve = report["validation"]["curve"]
    merged_then = [point["tokens_merged"] for point in curve]
    return float(np.interp(merged, merged_then, [point["bits_per_byte"] for point in curve]))


def loss_beside(report: dict[str, Any], plain: dict[str, Any]) -> tuple[float, str]:
    """Return by which share a run's held-out loss is above the plain run's at equal merged tokens, and both in words."""
    equal = min(merged_tokens(plain), merged_tokens(report))
    ours, theirs = loss_at(report, equal), loss_at(plain, equal)
    return ours / theirs - 1.0, f"{ours:.4f} and {theirs:.4f} bits per byte at {equal} merged tokens"
