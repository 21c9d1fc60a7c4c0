"""As it was, beside as it would be: N seeds of both, the check against the recording, and the change with its error bars.

**The check.** The mean of the simulations of the run as it was, beside the recording. Where a figure is off by more than
`miss_max`, the simulator does not know this run well enough, and no what-if of it is believed (`Comparison.believed`).

**Error bars.** Each seed draws the recording's stretches of steps, reads and commits anew (a bootstrap), for both
settings alike. The change is the mean of the N differences. Its interval is Student's 95 % interval over the seeds, which holds
what chance in pace does, and on both sides as much as the check found the simulator to be off in that figure. A change of a
link has none: what joining, resends and the state of a peer take over it is an estimate that no recording bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from statistics import fmean

from atoll.base.errors import SettingsError
from atoll_simulator.fleet.cells import SeedSpread, spread
from atoll_simulator.fleet.rounds import NeverAtRest
from atoll_simulator.what_if.outcome import Miss, RunFigures, misses
from atoll_simulator.what_if.recording import Recording
from atoll_simulator.what_if.replay import AS_IT_WAS, Change, simulate_change


@dataclass(frozen=True, slots=True)
class FigureChange:
    """One figure: as simulated with the recording's settings and with others, and the difference, each over all seeds.

    `off` is how far the simulation of the run as it was is from the recording, in the figure's own unit; None where the
    recording bounds no error of the change.
    """

    name: str
    was: SeedSpread
    would_be: SeedSpread
    change: SeedSpread
    off: float | None

    @property
    def half(self) -> float | None:
        """Return half the interval of the change: chance, and what the simulation is off; None for no interval."""
        return None if self.change.half is None or self.off is None else self.change.half + self.off

    @property
    def significant(self) -> bool:
        """Return whether no change is outside the interval."""
        return self.half is not None and abs(self.change.mean) > self.half


@dataclass(frozen=True, slots=True)
class Comparison:
    """The check, and the changes: empty where none was asked for, or where the check failed."""

    misses: tuple[Miss, ...]
    miss_max: float
    seeds: int
    changes: tuple[FigureChange, ...]

    @property
    def believed(self) -> bool:
        """Return whether the simulation of the run as it was is close enough to its recording."""
        return all(miss.share <= self.miss_max for miss in self.misses)


def compare(
    recording: Recording,
    change: Change | None,
    seeds: int,
    miss_max: float,
    progress: Callable[[int], None] = lambda _: None,
) -> Comparison:
    """Simulate a recording as it was with seeds 0, 1, ..., check that, and simulate the change with the same seeds.

    `progress` hears after each simulation how many are done.
    """
    was = [_simulate_one(recording, AS_IT_WAS, seed, progress, seed + 1) for seed in range(seeds)]
    mean = RunFigures(**{each.name: fmean(getattr(one, each.name) for one in was) for each in fields(RunFigures)})
    checked = Comparison(tuple(misses(recording.outcome, mean, recording.interval_s)), miss_max, seeds, ())
    if change is None or not checked.believed:
        return checked
    would_be = [_simulate_one(recording, change, seed, progress, seeds + seed + 1) for seed in range(seeds)]
    changes = tuple(_figure_change(miss, was, would_be, bounded=not change.links) for miss in checked.misses)
    return Comparison(checked.misses, miss_max, seeds, changes)


def _simulate_one(
    recording: Recording, change: Change, seed: int, progress: Callable[[int], None], count: int
) -> RunFigures:
    try:
        found = simulate_change(recording, change, seed)
    except NeverAtRest as error:
        # Of a log that processes wrote there is always an end; one that somebody has edited need not have one.
        raise SettingsError(
            "the recording of this run cannot be simulated to its end",
            got=error.what + ": it never does",
            todo="restore the event log, or ask with other settings",
        ) from error
    progress(count)
    return found


def _figure_change(miss: Miss, was: list[RunFigures], would_be: list[RunFigures], *, bounded: bool) -> FigureChange:
    one, other = ([getattr(each, miss.name) for each in outcomes] for outcomes in (was, would_be))
    difference = spread([b - a for a, b in zip(one, other, strict=True)])
    off = abs(miss.simulated - miss.recording) if bounded else None
    return FigureChange(miss.name, spread(one), spread(other), difference, off)
