r"""Moving averages and the adaptive grace window (Eq. 3 of arXiv 2604.21428).

Let xi_step be the step time of the live learners, xi_quorum the time from call to quorum and xi_sync the time from the
end of collection to a visible head, each an exponential moving average. A round overlaps with tau inner steps, so what
is left for waiting is

.. math::

    \xi_{slack} = \tau \xi_{step} - (\xi_{quorum} + \xi_{sync}), \qquad
    \xi_{grace} = \mathrm{clamp}(\gamma \xi_{slack},\ 0,\ c\,\xi_{step})

with gamma < 1 and a cap of c steps. Until a first round has been timed, xi_quorum and xi_sync are zero: the first grace
is the cap. xi_step is the *median* over live learners, so one slow island cannot lengthen everybody's window.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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


def median(values: Iterable[float]) -> float | None:
    """Return the median (the mean of the middle two for an even count), or None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2.0


def grace_window_s(
    settings: ProtocolSettings, step_s: float, quorum_s: float | None, sync_s: float | None
) -> tuple[float, str]:
    """Return how long a round may wait after its quorum, in seconds, and the sentence that explains it."""
    slack_s = settings.overlap_steps * step_s - (quorum_s or 0.0) - (sync_s or 0.0)
    cap_s = settings.grace_cap_steps * step_s
    wanted_s = settings.grace_gamma * slack_s
    if wanted_s <= 0.0:
        return 0.0, f"no slack: quorum and sync take {(quorum_s or 0) + (sync_s or 0):.3f} s of the overlap"
    if wanted_s >= cap_s:
        return cap_s, f"capped at {settings.grace_cap_steps:g} steps"
    return wanted_s, f"{settings.grace_gamma:g} of {slack_s:.3f} s slack"
