"""What may go wrong in a schedule: a list of timed happenings, drawn from its seed before anything happens.

A happening is data, so a part of the list can be played again: `--only 3,7,12` is how a failure is made small. How many
kinds a schedule has is drawn first, then which, then how often (swarm testing): a world in which everything goes wrong at
once hides bugs, because nothing gets far enough to break.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of happening: how often per minute, how long it lasts (mean seconds), how strong it is, of these choices.

    With `within_s` it lasts for any time between these bounds, in seconds.
    """

    per_min: tuple[float, ...]
    for_s: tuple[float, ...] = (2.5,)
    strength: tuple[float, ...] = (0.0,)
    within_s: tuple[float, float] | None = None


KINDS: Final[dict[str, Kind]] = {
    "messages late": Kind((4.0, 12.0), (3.0, 8.0), (0.05, 0.2)),
    "messages lost": Kind((4.0, 12.0), (3.0, 10.0), (0.1, 0.4)),
    "requests lost": Kind((4.0, 12.0), (3.0, 8.0), (0.05, 0.2)),
    "answers lost": Kind((4.0, 12.0), (3.0, 10.0), (0.05, 0.3)),
    "messages doubled": Kind((4.0, 12.0), (3.0, 10.0), (0.05, 0.3)),
    "messages slow": Kind((4.0, 12.0), (3.0, 8.0), (0.05, 0.2)),
    "cut both ways": Kind((3.0, 10.0), (1.0, 4.0)),
    "cut up": Kind((3.0, 10.0), (1.0, 4.0)),
    "cut down": Kind((3.0, 10.0), (1.0, 4.0)),
    "broker away": Kind((2.0, 6.0), (0.5, 2.5)),
    "power cut": Kind((2.0, 8.0), (0.5, 1.5), (1.0, 4.0)),
    "disk full": Kind((2.0, 8.0), (1.0, 4.0)),
    "crash": Kind((3.0, 10.0)),
    "crash at an await": Kind((6.0, 15.0), strength=(30.0, 100.0, 400.0)),
    "freeze": Kind((3.0, 10.0), (1.0, 4.0, 10.0)),
    "freeze at an await": Kind((6.0, 15.0), (1.0, 4.0, 10.0), (30.0, 100.0, 400.0)),
    "clock ahead": Kind((3.0, 10.0), strength=(3.0, 20.0)),
    "wall clock set": Kind((3.0, 10.0), strength=(5.0, 4000.0)),
    "join": Kind((4.0, 12.0)),
    "leave": Kind((2.0, 6.0)),
    "id taken over": Kind((3.0, 8.0), (3.0, 8.0)),
    "host told to leave": Kind((2.0, 6.0)),
    "host added": Kind((2.0, 6.0)),
    "not finite": Kind((3.0, 10.0)),
    "chunk damaged": Kind((3.0, 15.0)),
    "archive away": Kind((3.0, 8.0), (2.0, 6.0)),
    "store lost": Kind((1.5,), (0.5,)),
    "hostile messages": Kind((3.0, 10.0), (3.0, 10.0), (5.0, 40.0)),
    "hostile learner": Kind((3.0, 10.0), (3.0, 10.0), (2.0, 10.0)),
    "hostile records": Kind((3.0, 10.0), (3.0, 10.0), (0.5, 2.0)),
}
"""Every kind there is. `store lost` happens once at most, and only where there is an archive to rebuild from.

The hostile kinds last to the end of the schedule once they have begun: what must happen must happen while they are there.
Their strength is how many messages come a second.
"""

REPLICATED: Final[dict[str, Kind]] = {"leader lost": Kind((6.0, 20.0), (0.5, 2.0, 5.0))}
"""Of a broker of several nodes alone: a stream has no leader for a while; the other streams and all messages go on."""

OUTAGES: Final[dict[str, Kind]] = {
    "broker gone": Kind((4.0,), within_s=(1.0, 20.0)),
    "synchronizer cut off": Kind((4.0,), within_s=(3.0, 20.0)),
    "learner cut off": Kind((4.0,), within_s=(3.0, 40.0)),
    "store set back": Kind((2.0,), within_s=(3.0, 10.0)),
}
"""Absences of the broker, and of a process alone, that mostly outlast a lease or a silence, and a store that is restored from a
copy of that age. No seed draws them, a test asks for them."""

Beside = Literal["", "hostile", "replicated"]
"""What every schedule of a campaign has beside what is drawn: hostile peers, or a broker whose streams lose their leaders."""

_Timed = tuple[float, str, float, float, float]
ALWAYS: Final = ("join",)
HOSTILE: Final = ("hostile messages", "hostile learner", "hostile records")


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that goes wrong: at `at_s`, for `for_s`, as `strong` as its kind means it; `who` picks among those there."""

    number: int
    kind: str
    at_s: float
    for_s: float
    strong: float
    who: float

    def told(self) -> str:
        return f"{self.number:>3} at {self.at_s:6.2f} s: {self.kind} for {self.for_s:.2f} s, {self.strong:g}, {self.who:.2f}"


def drawn(
    dice: random.Random, storm_s: float, rates: Mapping[str, float] | None = None, *, beside: Beside = ""
) -> list[Happening]:
    """Return the happenings of one schedule, in order of time; `rates` gives them by kind instead of drawing them.

    With "hostile" all kinds of hostile peers are there before the storm is over. With "replicated" streams lose their leaders;
    all else is as the seed draws it without.
    """
    rates = _rates(dice, (*ALWAYS, *HOSTILE) if beside == "hostile" else ALWAYS) if rates is None else dict(rates)
    found: list[_Timed] = []
    for name, per_min in rates.items():
        found += _times(dice, name, per_min, storm_s, surely=beside == "hostile" and name in HOSTILE)
    if beside == "replicated":
        for name, kind in REPLICATED.items():
            found += _times(dice, name, dice.choice(kind.per_min), storm_s)
    found.sort()
    return [Happening(number, name, at_s, *rest) for number, (at_s, name, *rest) in enumerate(found)]


def _rates(dice: random.Random, always: tuple[str, ...]) -> dict[str, float]:
    share = dice.choice((0.08, 0.2, 0.4))
    return {name: dice.choice(kind.per_min) for name, kind in KINDS.items() if name in always or dice.random() < share}


def _times(dice: random.Random, name: str, per_min: float, storm_s: float, *, surely: bool = False) -> list[_Timed]:
    """Return when a kind happens, for how long, how strongly and to whom; `surely`: once at least."""
    kind, found = (KINDS | REPLICATED | OUTAGES)[name], []
    for_s, strength = dice.choice(kind.for_s), dice.choice(kind.strength)
    # Some begin with the run: to be founded takes no longer than a moment.
    at_s = 0.0 if dice.random() < 0.3 else dice.expovariate(per_min / 60.0)
    if surely:
        at_s = min(at_s, dice.random() * storm_s)
    while at_s < storm_s:
        lasts_s = dice.expovariate(1.0 / for_s) if kind.within_s is None else dice.uniform(*kind.within_s)
        found.append((at_s, name, lasts_s, strength * (0.25 + dice.random()), dice.random()))
        at_s += dice.expovariate(per_min / 60.0)
    return found
