"""What the training thread hands to the island's driver after each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat

from atoll.client.adoption import AdoptableFragment


@dataclass(slots=True)
class StepReport:
    """What the training thread reports of its newest step; `loss` may be a JAX scalar on its way (see `losses`)."""

    step_s: float = 0.0
    loss: SupportsFloat | None = None
    overhead: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class StepBoundary:
    """A step boundary: arrays by name as the step `completed` them, and as training `continued` after the adoptions."""

    tokens: int
    completed: Mapping[str, Any]
    continued: Mapping[str, Any]
    adopted: list[AdoptableFragment]
    report: StepReport
