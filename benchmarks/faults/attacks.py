"""What gets through a locked door while a run trains: `make attacks`.

One `atoll up` (three paced learners, two shards) on a locked broker of the bench's own. A learner and a reader with identities
of their own, on the roll of the same run, play the whole table of `support.door_attacks` again and again. An operator watches
what each attack aims at. The versions in the heads give the pace before and meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from atoll.bus.options import BusOptions
from benchmarks.faults.chaos import FOLDER, prepare
from benchmarks.faults.hostile import PACE_MIN, Seen, Spectator, begun, command
from benchmarks.faults.up_in_storm import END_MAX_S
from benchmarks.lib.arguments import natural, positive
from benchmarks.lib.results import Figure, write
from support.door_attacks import ATTACKS, INTRUDER, SPY, VICTIM, DoorAttack, witness
from support.locked_brokers import LockedBroker

MINUTES = 4.0
RUN = "attacked"


@dataclass(slots=True)
class AttackOutcome:
    """What came of the attacks: how often each was tried, what got in, and how often the intruder was told no."""

    tried: Counter[DoorAttack] = field(default_factory=Counter)
    got_in: dict[DoorAttack, str] = field(default_factory=dict)
    refused: Counter[DoorAttack] = field(default_factory=Counter)
    began_s: float = 0.0
    ended_s: float = 0.0


def main() -> int:
    """Attack a run and write `build/results/attacks.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=positive, default=MINUTES)
    parser.add_argument("--seed", type=natural, default=0)
    options = parser.parse_args()
    half_s, corpus, out = 30.0 * options.minutes, prepare(), FOLDER / RUN
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        locked = LockedBroker(Path(folder))
        for name in (INTRUDER, VICTIM):
            locked.add(RUN, name)
        locked.add(RUN, SPY, "reader")
        with locked:
            seen, outcome, report = play(locked, corpus, out, options.seed, half_s)
            violations = locked.said().count("Violation")
    return write("attacks", options.seed, figures(seen, outcome, report, half_s, violations))


def play(
    locked: LockedBroker, corpus: Path, out: Path, seed: int, half_s: float
) -> tuple[Seen, AttackOutcome, dict[str, Any]]:
    """Train undisturbed for `half_s`, and attacked for as long."""
    mine = {"ATOLL_BROKER__IDENTITY": str(locked.keys.path / "identities" / "operator.toml")}
    up = subprocess.Popen(command(RUN, corpus, out, locked.server.url, seed), env={**os.environ, **mine})
    ours = BusOptions(credentials=locked.operator.credentials())
    spectator = Spectator(RUN, locked.server.url, psutil.Process(up.pid), ours)
    try:
        spectator.start()
        begun(spectator, up)
        time.sleep(half_s)
        outcome = asyncio.run(attack(locked, half_s))
        up.send_signal(signal.SIGINT)
        if up.wait(END_MAX_S):
            raise SystemExit(f"atoll up left with {up.returncode}; see {out / 'logs'}")
    finally:
        spectator.stop()
        up.kill()
        up.wait()
    return spectator.seen, outcome, json.loads((out / "report.json").read_text(encoding="utf-8"))


async def attack(locked: LockedBroker, for_s: float) -> AttackOutcome:
    """Play the whole table at least once, and again until the time is over."""
    outcome = AttackOutcome(began_s=time.monotonic())
    intruders = {name: locked.identity(RUN, name) for name in (INTRUDER, SPY)}
    async with witness(locked.server.url, RUN, locked.operator, intruders) as doors:
        while not outcome.tried or time.monotonic() < outcome.began_s + for_s:
            for each in ATTACKS:
                breach = await doors.play(each)
                outcome.tried[each] += 1
                outcome.refused[each] += bool(breach.told)
                if breach.got_in:
                    outcome.got_in[each] = breach.got_in
    outcome.ended_s = time.monotonic()
    return outcome


def figures(seen: Seen, outcome: AttackOutcome, report: dict[str, Any], half_s: float, violations: int) -> list[Figure]:
    """Return, for each attack, how often anything of it got in; and what the attacks cost the run."""
    found = []
    for each, tried in outcome.tried.items():
        got_in = outcome.got_in.get(each, "")
        refused = outcome.refused[each]
        told = f"refused {refused} times" if refused else "allowed, and its answer went to the intruder alone"
        how = got_in or f"tried {tried} times by a {'reader' if each.who == SPY else 'learner'}; {told}"
        found.append(Figure(f"{each.verb}: {each.name}", float(bool(got_in)), "got in", "0", not got_in, how))
    kinds = len(outcome.tried)
    found.append(
        Figure("kinds of attack", float(kinds), "rows", "", None, "the table of tests/support/door_attacks.py")
    )
    before = seen.commits_per_minute(outcome.began_s - half_s, outcome.began_s)
    pace = seen.commits_per_minute(outcome.began_s, outcome.ended_s) / before
    tried_in_all = sum(outcome.tried.values())
    how = f"{tried_in_all} attacks in {outcome.ended_s - outcome.began_s:.0f} s; {before:.0f} commits a minute before"
    found.append(Figure("pace under attack", pace, "ratio", f">= {PACE_MIN}", pace >= PACE_MIN, how))
    refusals = sum(outcome.refused.values())
    named = f"{refusals} refusals told to the intruders"
    logged = violations >= refusals
    found.append(Figure("refusals in the broker's log", float(violations), "lines", f">= {refusals}", logged, named))
    ended = sum(len(pids) - 1 for pids in seen.pids.values())
    found.append(Figure("processes that ended", float(ended), "processes", "0", ended == 0, "learners and shards"))
    exact = bool(report["fates_exact"])
    return [*found, Figure("fates exact", float(exact), "", "1", exact, "its report")]


if __name__ == "__main__":
    os.environ.pop("ATOLL_BROKER__URL", None)
    sys.exit(main())
