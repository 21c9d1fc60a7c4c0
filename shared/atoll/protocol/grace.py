r"""Moving averages and the adaptive grace window (Eq. 3 of arXiv 2604.21428).

Let xi_step be the step time of the live learners, xi_quorum the time from call to quorum and xi_sync the time from the
end of collection to a visible head, each an exponential moving average. A round overlaps with tau inner steps, so what
is left for waiting is

.. math::

    \xi_{slack} = \tau \xi_{step} - (\xi_{quorum} + \xi_{sync}), \qquad
    \xi_{grace} = \mathrm{clamp}(\gamma \xi_{slack},\ 0,\ c\,\xi_{step})

with gamma < 1 and a cap of c steps. The average of xi_quorum holds the present round already, since its quorum is met;
xi_sync is zero until a first version is visible. xi_step is the *median* over live learners, so one slow island cannot
lengthen everybody's window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from atoll.base.quantities import Figure
from atoll.protocol.settings import ProtocolSettings


@dataclass(slots=True)
class MovingAverage:
    """`value <- (1 - decay) * value + decay * sample`; the first sample is taken whole. `value` is None before it."""

    decay: float
    value: float | None = None

    def add(self, sample: float) -> float:
        """Fold in `sample` and return the new value."""
        self.value = sample if self.value is None else (1.0 - self.decay) * self.value + self.decay * sample
        return self.value


class GraceWindow(msgspec.Struct, frozen=True):
    """How long a round may wait after its quorum, and the terms of Eq. 3 that say so, all in seconds.

    `bound` names the term that decided: "none" (no slack is left), "slack" (gamma times the slack) or "cap".
    """

    granted_s: Figure
    bound: Literal["none", "slack", "cap"]
    step_s: Figure
    quorum_s: Figure
    sync_s: Figure
    overlap_s: Figure
    slack_s: Figure
    cap_s: Figure


def grace_window(
    settings: ProtocolSettings, step_s: float, quorum_s: float | None, sync_s: float | None
) -> GraceWindow:
    """Return how long a round may wait after its quorum, by Eq. 3, with its terms."""
    quorum_s, sync_s = quorum_s or 0.0, sync_s or 0.0
    overlap_s = settings.overlap_steps * step_s
    slack_s = overlap_s - quorum_s - sync_s
    cap_s = settings.grace_cap_steps * step_s
    wanted_s = settings.grace_gamma * slack_s
    bound: Literal["none", "slack", "cap"] = "slack"
    if wanted_s <= 0.0:
        wanted_s, bound = 0.0, "none"
    elif wanted_s >= cap_s:
        wanted_s, bound = cap_s, "cap"
    return GraceWindow(wanted_s, bound, step_s, quorum_s, sync_s, overlap_s, slack_s, cap_s)
