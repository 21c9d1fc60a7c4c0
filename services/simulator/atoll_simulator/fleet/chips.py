"""Learners of slices of chips that fail and return: the share of their time that remains for stepping.

    STEPPING --a slice fails--> stalled downscale_s --> STEPPING with a slice less      (failures meanwhile are absorbed)
    failed slice --return time--> waiting --admission--> stalled upscale_s --> STEPPING with all that waited

A failure takes a slice away and stalls the *whole* learner, an elastic data-parallel job. One during a stall takes its slice
and prolongs nothing, except for a share that begin the stall anew (`stall_again`). Until a failure is noticed (`notice_s`) the
other slices step on, and later ones are noticed with it. Returned slices wait, and another stall takes them in together, at
most once per admission interval. Failures are one Poisson process over the fleet; one that strikes a slice that is out, or no
slice, changes nothing (thinning: exact). So a million chips cost as much as their failures, and one seed has the same failures
at the same moments for any division into learners. The closed form is in `atoll_simulator.planner.failures`.

*Goodput* is stepping time times the share of slices that are in, *uptime* the share of time in which some learner steps. Step
speed is separate, `pace` in `cells`: the paper too counts stalls, not slowness (100 % at K = 1, Table 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from atoll_simulator.fleet.chance import Engine, ReturnTimes, stream
from atoll_simulator.fleet.parameters import FleetParameters, split


@dataclass(slots=True)
class Slices:
    """The slices of one learner: how many are in, how many wait to be taken in, and whether it steps."""

    whole: int
    active: int
    waiting: int = 0
    stepping: bool = True
    stalled: bool = False
    asked: bool = False
    admitted_s: float = -math.inf
    noticed_s: float = math.inf
    until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Lived:
    """The use of the time so far: shares of 1, and counts."""

    goodput: float
    uptime: float
    stalled: float
    missing: float
    failures: int
    stalls: int


class Chips:
    """`learners` elastic learners on one engine; `hear` receives each learner whose state changed."""

    def __init__(
        self,
        engine: Engine,
        fleet: FleetParameters,
        chips: int,
        learners: int,
        seed: int,
        hear: Callable[[int], None] | None = None,
    ) -> None:
        self.engine = engine
        self.fleet = fleet
        whole = split(chips, learners, fleet.slice_chips)
        self.learners = [Slices(whole, whole) for _ in range(learners)]
        self.failures = 0
        self.stalls = 0
        self._hear = hear
        self._rate = chips / fleet.mtbi_s
        self._dice = stream(seed, "failures")
        self._again = stream(seed, "stalls begun anew")
        self._returns = ReturnTimes(fleet.return_s, fleet.return_shape, fleet.return_exponent, stream(seed, "returns"))
        self._places = chips / (whole * fleet.slice_chips)
        self._useful = learners * whole
        self._up = learners
        self._sums = [0.0, 0.0, 0.0]
        self._since_s = engine.now_s
        engine.after(self._dice.expovariate(self._rate), self._fail)

    def lived(self) -> Lived:
        """Return the use of the time until now."""
        self._account()
        time_s = max(self.engine.now_s, 1e-300)
        count = len(self.learners)
        useful = self._sums[0] / (count * self.learners[0].whole) / time_s
        stepping = self._sums[2] / count / time_s
        return Lived(
            goodput=useful,
            uptime=self._sums[1] / time_s,
            stalled=1.0 - stepping,
            missing=stepping - useful,
            failures=self.failures,
            stalls=self.stalls,
        )

    # --- failures and returns -------------------------------------------------------------------------------------------

    def _fail(self) -> None:
        """Strike a chip anywhere, and schedule the next failure; places beyond the learners are chips in no slice."""
        self.engine.after(self._dice.expovariate(self._rate), self._fail)
        place = self._dice.random() * self._places
        number = int(place)
        if number >= len(self.learners):
            return
        struck = self.learners[number]
        if (place - number) * struck.whole >= struck.active:
            return
        self._account()
        self.failures += 1
        struck.active -= 1
        self.engine.after(self._returns.draw(), self._is_back, number)
        if struck.stepping:
            self._useful -= 1
            if not self.fleet.notice_s or not struck.active:
                self._stall(number, self.fleet.downscale_s)
            elif struck.noticed_s == math.inf:
                struck.noticed_s = self.engine.now_s + self.fleet.notice_s
                self.engine.after(self.fleet.notice_s, self._notice, number)
        elif struck.stalled and self._again.random() < self.fleet.stall_again:
            struck.until_s = max(struck.until_s, self.engine.now_s + self.fleet.downscale_s)

    def _notice(self, number: int) -> None:
        """Stall for all failures since; a stall that began meanwhile has dealt with them."""
        one = self.learners[number]
        if self.engine.now_s >= one.noticed_s:
            self._account()
            self._stall(number, self.fleet.downscale_s)

    def _is_back(self, number: int) -> None:
        self.learners[number].waiting += 1
        self._admit(number)

    def _admit(self, number: int) -> None:
        one = self.learners[number]
        if not one.waiting or one.stalled or one.asked:
            return
        pause_s = one.admitted_s + self.fleet.admission_s - self.engine.now_s
        if pause_s > 0.0:
            one.asked = True
            self.engine.after(pause_s, self._ask_again, number)
            return
        self._account()
        one.admitted_s = self.engine.now_s
        if one.stepping:
            self._useful += one.waiting
        one.active += one.waiting
        one.waiting = 0
        self._stall(number, self.fleet.upscale_s)

    def _ask_again(self, number: int) -> None:
        self.learners[number].asked = False
        self._admit(number)

    def _stall(self, number: int, for_s: float) -> None:
        one = self.learners[number]
        self.stalls += 1
        one.stalled = True
        one.noticed_s = math.inf
        one.until_s = self.engine.now_s + for_s
        self._set_stepping(number, stepping=False)
        self.engine.after(for_s, self._go_on, number)

    def _go_on(self, number: int) -> None:
        one = self.learners[number]
        if self.engine.now_s < one.until_s:
            self.engine.after(one.until_s - self.engine.now_s, self._go_on, number)
            return
        self._account()
        one.stalled = False
        self._set_stepping(number, stepping=one.active > 0)
        self._admit(number)

    # --- accounts -------------------------------------------------------------------------------------------------------

    def _set_stepping(self, number: int, *, stepping: bool) -> None:
        one = self.learners[number]
        if one.stepping != stepping:
            sign = 1 if stepping else -1
            self._useful += sign * one.active
            self._up += sign
            one.stepping = stepping
            if self._hear is not None:
                self._hear(number)

    def _account(self) -> None:
        """Enter the time since the last change, with the state that it had."""
        now_s = self.engine.now_s
        for_s = now_s - self._since_s
        self._since_s = now_s
        if for_s and self._up:
            self._sums[0] += self._useful * for_s
            self._sums[1] += for_s
            self._sums[2] += self._up * for_s


class Rigid:
    """One data-parallel job that any failure stops.

    This is data-parallel training without elasticity: any failure stops everything for `restart_s`. Spares replace the
    failed chips, so the job always has all its slices. It repeats all work since it last kept its progress. By default
    it keeps progress after every step: with a period of half a minute no restart time comes within four points of both
    figures of the paper, since a fleet that fails every 26 s would replay most of its work (`make bench-goodput` fits
    that too).
    """

    def __init__(self, engine: Engine, fleet: FleetParameters, chips: int, seed: int) -> None:
        self.engine = engine
        self.fleet = fleet
        self.failures = 0
        self.stalls = 0
        self._rate = chips / fleet.mtbi_s
        self._dice = stream(seed, "failures")
        self._began_s: float | None = engine.now_s
        self._again = stream(seed, "stalls begun anew")
        self._unnoticed = False
        self._until_s = 0.0
        self._kept_s = 0.0
        self._stepped_s = 0.0
        engine.after(self._dice.expovariate(self._rate), self._fail)

    def lived(self) -> Lived:
        """Return the use of the time until now; progress not kept yet counts, because no failure has lost it."""
        time_s = max(self.engine.now_s, 1e-300)
        running_s = 0.0 if self._began_s is None else self.engine.now_s - self._began_s
        uptime = (self._stepped_s + running_s) / time_s
        goodput = (self._kept_s + running_s) / time_s
        return Lived(goodput, uptime, 1.0 - uptime, uptime - goodput, self.failures, self.stalls)

    def _fail(self) -> None:
        self.engine.after(self._dice.expovariate(self._rate), self._fail)
        self._dice.random()  # where it strikes: everywhere is the same, and the elastic fleets of this seed draw it too
        self.failures += 1
        if self._began_s is None:
            if self._again.random() < self.fleet.stall_again:
                self._until_s = self.engine.now_s + self.fleet.restart_s
        elif not self._unnoticed:
            self._unnoticed = True
            if self.fleet.notice_s:
                self.engine.after(self.fleet.notice_s, self._stop)
            else:
                self._stop()

    def _stop(self) -> None:
        if self._began_s is None:
            return
        self._unnoticed = False
        ran_s = self.engine.now_s - self._began_s
        every_s = self.fleet.checkpoint_s
        self._stepped_s += ran_s
        self._kept_s += ran_s - math.fmod(ran_s, every_s) if every_s else ran_s
        self._began_s = None
        self.stalls += 1
        self._until_s = self.engine.now_s + self.fleet.restart_s
        self.engine.after(self.fleet.restart_s, self._go_on)

    def _go_on(self) -> None:
        if self.engine.now_s < self._until_s:
            self.engine.after(self._until_s - self.engine.now_s, self._go_on)
            return
        self._began_s = self.engine.now_s
