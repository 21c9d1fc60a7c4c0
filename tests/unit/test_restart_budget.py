"""The restart budget of a child of `atoll up` over hours in virtual time: absences of the broker cost none of it, faults do.

No process runs: a child is its ends, drawn from a seed. One that finds no broker, or loses it for longer than its patience,
ends and says so, as a learner does.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import EnvironmentFault
from atoll.local import processes
from atoll.local.processes import PROVEN_S, ChildPlan, Exit, ProcessGroup
from support.clocks import HandClock

PATIENCE_S = 30.0
RESTARTS_MAX = 2
HOUR_S = 3600.0


class DrawnBroker:
    """A broker that is away again and again, for up to ten minutes at a time."""

    def __init__(self, dice: random.Random) -> None:
        self.away: list[tuple[float, float]] = []
        at_s = dice.uniform(30.0, 200.0)
        while at_s < 2.0 * HOUR_S:
            self.away.append((at_s, at_s + dice.choice((5.0, 60.0, 600.0)) * dice.random()))
            at_s = self.away[-1][1] + dice.uniform(5.0, 400.0)

    def away_s(self, now_s: float) -> float:
        return sum(max(0.0, min(last_s, now_s) - first_s) for first_s, last_s in self.away)

    def gives_up_at(self, born_s: float) -> float:
        """Return when a child that is born now has been without it for longer than its patience."""
        return next(
            max(first_s, born_s) + PATIENCE_S
            for first_s, last_s in [*self.away, (1e9, 2e9)]
            if last_s - max(first_s, born_s) > PATIENCE_S
        )


class DrawnChild:
    """One life of a child: it ends for want of the broker, or of itself."""

    def __init__(self, clock: HandClock, log: Path, ends_s: float, *, absent: bool, reached: bool) -> None:
        self.pid = 1 << 30
        self.ends_s, self.absent, self.reached = ends_s, absent, reached
        self._clock, self._log = clock, log

    def poll(self) -> int | None:
        """Return its exit code once it has ended, with its last words in its log."""
        if self._clock.now_s < self.ends_s:
            return None
        kind = "BrokerUnavailable" if self.absent else "AtollError"
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps({"event": "process.failed", "kind": kind, "what": "it ended"}) + "\n")
        return EnvironmentFault.exit_code if self.absent else 1


def lives(
    folder: Path, seed: int, fault_s: float, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Exit, bool, bool]]:
    """Yield the ends of a child's lives over two hours, with whether it had done its work and whether the broker was away."""
    dice, clock = random.Random(seed), HandClock()
    broker, group, born = DrawnBroker(dice), ProcessGroup(folder, clock), list[DrawnChild]()

    def start(*_: object, **__: object) -> Any:  # noqa: ANN401  (in place of a process)
        faulty_s = clock.now_s + dice.expovariate(1.0 / fault_s)
        away_s = broker.gives_up_at(clock.now_s)
        absent, reached = away_s < faulty_s, away_s > clock.now_s + PATIENCE_S
        log = group.log_path("child")
        born.append(DrawnChild(clock, log, min(faulty_s, away_s), absent=absent, reached=reached))
        return born[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(processes, "_signal_group", lambda *_, **__: None)
    group.proven = lambda _: born[-1].reached
    group.away_s = lambda: broker.away_s(clock.now_s)
    group.start(ChildPlan("child", ("child",), {}, restarts_max=RESTARTS_MAX))
    began_s = clock.now_s
    while clock.now_s < 2.0 * HOUR_S and group.alive(["child"]):
        clock.now_s += 0.5
        before = len(born)
        for end in group.poll():
            yield end, born[-1].reached and clock.now_s - began_s >= PROVEN_S, born[-1].absent
        if len(born) > before:
            began_s = clock.now_s


@pytest.mark.parametrize("fault_s", [4.0, 20.0, 40.0, 1e9])
def test_only_faults_in_a_row_use_the_budget_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault_s: float
) -> None:
    """A child is given up after one fault more than it has restarts, with no proven life between, and never for an absence."""
    absences = given_up = 0
    for seed in range(12):
        folder, faults = tmp_path / str(seed), 0
        folder.mkdir()
        for end, worked, absent in lives(folder, seed, fault_s, monkeypatch):
            faults = (0 if worked else faults) + (not absent)
            absences += absent
            assert end.absent == absent, seed
            assert end.restarting == (absent or faults <= RESTARTS_MAX), (seed, faults)
            given_up += not end.restarting

    assert fault_s < PATIENCE_S or absences > 20
    assert (given_up > 0) == (fault_s < HOUR_S)
