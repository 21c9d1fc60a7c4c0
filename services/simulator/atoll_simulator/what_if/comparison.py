"""As it was, beside as it would be: N seeds of both, the check against the recording, and the change with its error bars.

**The check.** Where the mean of the simulations of the run as it was is off by more than `miss_max` in a figure, the simulator
does not know this run well enough, and no what-if of it is believed.

**Error bars.** Each seed draws the recording's stretches of steps, reads and commits anew (a bootstrap), for both settings
alike. The interval of the mean difference is Student's 95 %, and on both sides as much more as the check found the simulator to
be off. A change of a link has none: what joining, resends and a peer's state take over it is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any

from atoll.base.errors import SettingsError
from atoll.base.wording import as_rate, as_share, counted
from atoll.story.goodput import DEFINITION
from atoll_simulator.fleet.cells import SeedSpread, spread
from atoll_simulator.fleet.rounds import NeverAtRest
from atoll_simulator.what_if.recording import (
    SHARES,
    TITLES,
    Miss,
    RecordedLearner,
    RecordedLink,
    Recording,
    RunFigures,
    misses,
)
from atoll_simulator.what_if.replay import AS_IT_WAS, Change, simulate_change

WIDE = 32
INTERVAL = "  ±: its 95 % interval, and as much again as the check finds the simulation to be off in that figure."
NO_INTERVAL = (
    "  no interval is given: what joining, resends and a peer's state take over another link is estimated, and no recording",
    "  bounds that error. Over a slow link most of it is joining; `atoll sim train` plays all of it (`sim.links`).",
)


def fit_lines(recording: Recording) -> list[str]:
    """Return what the recording told of each learner, and what is assumed."""
    s = recording.settings
    commits = recording.outcome.commits
    learners = counted(len(recording.learners), "learner")
    there = f"{recording.time_s:.1f} s recorded, {learners}, {counted(round(commits), 'commit')}"
    told = [f"{there}; K = {s.quorum}, gamma = {s.grace_gamma:g}, {s.codec_up} up, {s.codec_down} down"]
    told += [_learner_line(learner) for learner in recording.learners]
    told += [
        "  measured: presence, steps, upload rate and delay, sizes, reading and committing",
        "  assumed: down as fast as up, no loss, shards always there and as fast for another codec",
    ]
    return told


def check_lines(found: Comparison) -> list[str]:
    """Return the simulated run beside the recording, with the verdict."""
    told = ["", f"  {'as it was':<{WIDE}}{'recording':>12}{'simulated':>12}{'off by':>10}"]
    for miss in found.misses:
        mark = "" if miss.share <= found.miss_max else "  too far"
        figures = f"{miss.recording:>12.4g}{miss.simulated:>12.4g}{_off(miss.name, miss.share):>10}"
        told.append(f"  {TITLES[miss.name]:<{WIDE}}{figures}{mark}")
    told.append(
        "  off by: of the recording's figure; goodput, late share and age: the difference (*); waits: of a fragment's interval"
    )
    told.append(f"  {DEFINITION}")
    if not found.believed:
        worst = max(found.misses, key=lambda miss: miss.share)
        told += [
            "",
            f"no promise: the simulation misses the recording of this run, most in {TITLES[worst.name]} (by {worst.share:.2g},",
            f"allowed {found.miss_max:g}), so it cannot tell what another setting would do. A longer run gives a better fit;",
            "--miss-max allows more.",
        ]
    return told


def change_lines(found: Comparison, change: Change) -> list[str]:
    """Return both settings beside each other, with the change and its interval."""
    if not found.changes:
        return []
    words = [f"protocol.{name}={value}" for name, value in change.settings.items()]
    words += [f"{name}={_link_words(link)}" for name, link in change.links.items()]
    told = ["", f"what if {', '.join(words)}"]
    told.append(f"  {'simulated':<{WIDE}}{'as it was':>12}{'would be':>12}{'change':>22}")
    for each in found.changes:
        verdict = "" if each.half is None or each.significant else "  not significant"
        told.append(
            f"  {TITLES[each.name]:<{WIDE}}{each.was.mean:>12.4g}{each.would_be.mean:>12.4g}{_change(each):>22}{verdict}"
        )
    told += [
        f"  change: mean of the differences of {found.seeds} seeds, each with steps, delays and commits drawn anew for both"
    ]
    told += NO_INTERVAL if change.links else [INTERVAL]
    return told


def as_document(recording: Recording, found: Comparison, change: Change | None) -> dict[str, Any]:
    """Return all of it as JSON; `what_if` is None where nothing was asked, or nothing can be promised."""
    learners = {
        each.name: {
            "step_s": sum(s.steps * s.step_s for s in each.stretches) / sum(s.steps for s in each.stretches),
            "sampled": each.sampled,
            "link": asdict(each.link),
            "lives": [asdict(life) for life in each.lives],
        }
        for each in recording.learners
    }
    asked = (
        None
        if change is None
        else {"settings": change.settings, "links": {k: asdict(v) for k, v in change.links.items()}}
    )
    return {
        "time_s": recording.time_s,
        "over": recording.over,
        "learners": learners,
        "seeds": found.seeds,
        "miss_max": found.miss_max,
        "believed": found.believed,
        "check": [asdict(miss) for miss in found.misses],
        "asked": asked,
        "what_if": [_as_dict(each) for each in found.changes] or None,
    }


def _as_dict(each: FigureChange) -> dict[str, Any]:
    return {**asdict(each), "half": each.half, "significant": each.significant}


def _learner_line(learner: RecordedLearner) -> str:
    steps = sum(each.steps for each in learner.stretches)
    mean_s = sum(each.steps * each.step_s for each in learner.stretches) / steps
    stretches = counted(len(learner.stretches), "stretch", "stretches")
    source = f"{stretches} between samples, with what is between steps" if learner.sampled else "notes of its pushes"
    lives = ", ".join(f"{life.joined_s:.1f}-{life.ended_s:.1f} s" for life in learner.lives)
    assumed = "" if learner.link.measured else " (delay assumed)"
    return f"  {learner.name}: {mean_s:.4g} s a step ({source}), there {lives}, {_link_words(learner.link)}{assumed}"


def _link_words(link: RecordedLink) -> str:
    return f"{as_rate(8.0 * link.bytes_s)},{1000.0 * link.latency_s:.3g}ms"


def _off(name: str, share: float) -> str:
    return f"{share:.3f} *" if name in SHARES else as_share(share)


def _change(each: FigureChange) -> str:
    return f"{each.change.mean:+.4g}" + ("" if each.half is None else f" ± {each.half:.2g}")


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
