"""What gets through a locked door while a run trains: `make attacks`.

One `atoll up` (three paced learners, two shards) on a locked broker of the bench's own, and one that locks its own broker. A
learner and a reader with identities of their own, on the roll of the same run, play the whole table of `support.door_attacks`
again and again. An operator watches what each attack aims at. The versions in the heads give the pace before and meanwhile.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil

from atoll.bus.options import BusOptions
from atoll.keys.identity import HeldIdentity, read_identity
from atoll.keys.rights import Kind
from atoll.keys.roll import KeyFolder
from benchmarks.faults.chaos import FOLDER, prepare
from benchmarks.faults.hostile import PACE_MIN, Seen, Spectator, begun, command
from benchmarks.faults.up_in_storm import BEGIN_MAX_S, END_MAX_S
from benchmarks.lib.arguments import natural, positive
from benchmarks.lib.results import Figure, write
from support.door_attacks import ATTACKS, INTRUDER, SPY, VICTIM, DoorAttack, witness
from support.locked_brokers import LockedBroker

MINUTES = 4.0
RUN = "attacked"
INTRUDERS: Final[dict[str, Kind]] = {INTRUDER: "learner", VICTIM: "learner", SPY: "reader"}


@dataclass(slots=True)
class AttackOutcome:
    """What came of the attacks: how often each was tried, what got in, and how often the intruder was told no."""

    tried: Counter[DoorAttack] = field(default_factory=Counter)
    got_in: dict[DoorAttack, str] = field(default_factory=dict)
    refused: Counter[DoorAttack] = field(default_factory=Counter)
    began_s: float = 0.0
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AttackedDoor:
    """A locked broker: where it is, its folder of keys and its log."""

    url: str
    keys: KeyFolder
    log: Path

    @property
    def operator(self) -> HeldIdentity:
        """Return the identity of the operator."""
        return read_identity(self.keys.path / "identities" / "operator.toml")

    def identity(self, name: str) -> HeldIdentity:
        """Return an identity of the run."""
        return read_identity(self.keys.path / "identities" / RUN / f"{name}.toml")

    def admit(self) -> None:
        """Let the intruders and their victim in."""
        for name, kind in INTRUDERS.items():
            self.keys.add(name, kind, RUN, time.time())

    def violations(self) -> int:
        """Return how often the broker's log tells of a violation."""
        return self.log.read_text(encoding="utf-8", errors="replace").count("Violation")


def main() -> int:
    """Attack two runs and write `build/results/attacks.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=positive, default=MINUTES)
    parser.add_argument("--seed", type=natural, default=0)
    options = parser.parse_args()
    part_s, corpus = 15.0 * options.minutes, prepare()
    found: list[Figure] = []
    for name, played in (("atoll broker --keys", on_a_broker), ("atoll up --locked", on_up)):
        out = FOLDER / RUN
        shutil.rmtree(out, ignore_errors=True)
        seen, outcome, report, violations = played(corpus, out, options.seed, part_s)
        found += [
            replace(one, name=f"{name}: {one.name}") for one in figures(seen, outcome, report, part_s, violations)
        ]
    return write("attacks", options.seed, found)


Played = tuple[Seen, AttackOutcome, dict[str, Any], int]


def on_a_broker(corpus: Path, out: Path, seed: int, part_s: float) -> Played:
    """Attack a run on a locked broker of the bench's own."""
    with tempfile.TemporaryDirectory() as folder, LockedBroker(Path(folder)) as locked:
        door = AttackedDoor(locked.server.url, locked.keys, locked.server.log_path)
        door.admit()
        locked.follow()
        mine = {"ATOLL_BROKER__IDENTITY": str(locked.keys.path / "identities" / "operator.toml")}
        up = subprocess.Popen(command(RUN, corpus, out, door.url, seed), env={**os.environ, **mine})
        return play(up, door, out, part_s)


def on_up(corpus: Path, out: Path, seed: int, part_s: float) -> Played:
    """Attack a run of `atoll up --locked` at its own broker; the intruders are let in while it trains."""
    up = subprocess.Popen(command(RUN, corpus, out, None, seed))
    url_file, deadline_s = out / "nats" / "url", time.monotonic() + BEGIN_MAX_S
    while not url_file.exists():
        if up.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit("the run did not begin")
        time.sleep(0.2)
    door = AttackedDoor(url_file.read_text(encoding="utf-8"), KeyFolder(out / "keys"), out / "nats" / "nats-server.log")
    door.admit()
    return play(up, door, out, part_s)


def play(up: subprocess.Popen[bytes], door: AttackedDoor, out: Path, part_s: float) -> Played:
    """Train undisturbed for `part_s`, and attacked for as long."""
    ours = BusOptions(credentials=door.operator.credentials())
    spectator = Spectator(RUN, door.url, psutil.Process(up.pid), ours)
    try:
        spectator.start()
        begun(spectator, up)
        time.sleep(part_s)
        outcome = asyncio.run(attack(door, part_s))
        up.send_signal(signal.SIGINT)
        if up.wait(END_MAX_S):
            raise SystemExit(f"atoll up left with {up.returncode}; see {out / 'logs'}")
    finally:
        spectator.stop()
        up.kill()
        up.wait()
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return spectator.seen, outcome, report, door.violations()


async def attack(door: AttackedDoor, for_s: float) -> AttackOutcome:
    """Play the whole table at least once, and again until the time is over."""
    outcome = AttackOutcome(began_s=time.monotonic())
    intruders = {name: door.identity(name) for name in (INTRUDER, SPY)}
    async with witness(door.url, RUN, door.operator, intruders) as doors:
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
