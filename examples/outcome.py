"""What the examples print of their training: how many steps, how far the loss fell, and what the island cost."""

from __future__ import annotations

from collections.abc import Sequence

ENDS = 5


def print_losses(name: str, losses: Sequence[float], inside_s: float, overhead: float, steps: int = 0) -> None:
    """Print first and last loss (means of a few), and the time that the loop spent in its island.

    `steps` is how many there were, where `losses` are fewer.
    """
    if not losses:
        print(f"{name}: the run was over, so there was no step to take")
        return
    steps, few = steps or len(losses), min(ENDS, len(losses))
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    cost = f"{1e3 * inside_s / steps:.3f} ms of each in the island, {overhead:.2%} of the time"
    print(f"{name}: loss {first:.4f} to {last:.4f} in {steps} steps, {cost}")
