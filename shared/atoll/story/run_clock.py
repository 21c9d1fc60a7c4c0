"""When something of a run happened, as its stories say it: in time of the run, and by the clock where that is real.

The time of a run begins with the first entry of its event log. The clock is that of the process that wrote the entry. A
simulated run has a time, and no clock: its dates are made up, so nobody is told of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from atoll.base.quantities import MOMENT_MAX


@dataclass(frozen=True, slots=True)
class RunClock:
    """Turns seconds since the Unix epoch into words; `began_s` is when the run began, and `virtual` that it was simulated."""

    began_s: float
    virtual: bool = False

    def at(self, at_s: float) -> str:
        """Return a moment for a person."""
        run_s = f"{at_s - self.began_s:.3f} s"
        return run_s if self.virtual else f"{run_s} ({_date(at_s).isoformat(sep=' ', timespec='milliseconds')})"

    def span(self, from_s: float, until_s: float | None) -> str:
        """Return a stretch of time for a person; `until_s` None: it lasted to the end of the event log."""
        run_s = f"from {from_s - self.began_s:.1f} s to " + (
            "the end of the event log" if until_s is None else f"{until_s - self.began_s:.1f} s"
        )
        if self.virtual:
            return run_s
        since, until = _date(from_s), None if until_s is None else _date(until_s)
        if until is None:
            return f"{run_s} (since {since:%Y-%m-%d %H:%M:%S} UTC)"
        form = "%H:%M:%S" if until.date() == since.date() else "%Y-%m-%d %H:%M:%S"
        return f"{run_s} ({since:%Y-%m-%d %H:%M:%S} to {until.strftime(form)} UTC)"


def _date(at_s: float) -> datetime:
    """Return a date; of a time that no calendar has, which a difference of claims may be, the nearest that it has."""
    return datetime.fromtimestamp(min(max(at_s, 0.0), MOMENT_MAX), UTC)
