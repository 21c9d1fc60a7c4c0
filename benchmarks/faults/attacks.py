"""What gets through a locked door while a run trains, and what a member can do: `make attacks`.

Runs of three paced learners and two shards: `atoll up` on a locked broker of the bench's own, on a locked cluster of three,
and with the broker that it locks itself; and the services of `docker-compose.yml` as processes (`support.composed_run`). A
learner, a reader and a region's synchronizer with identities of their own, on the roll of the same run, play the whole table of
`support.door_attacks` again and again, and that learner the table of `support.member_attacks`. An operator watches what each
attack aims at. The versions in the heads give the pace before and meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import psutil

from atoll.base.logs import configure
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.keys.identity import HeldIdentity, read_identity
from atoll.keys.rights import Kind
from atoll.keys.roll import KeyFolder
from atoll.run.record import read_run
from atoll.wire.subjects import Subjects
from benchmarks.faults.chaos import FOLDER, prepare
from benchmarks.faults.hostile import PACE_MIN, Seen, Spectator, begun, command
from benchmarks.faults.up_in_storm import BEGIN_MAX_S, END_MAX_S, PACE, SETTINGS, child_name
from benchmarks.lib.arguments import natural, positive
from benchmarks.lib.results import Figure, write
from support.composed_run import BROKERS, ComposedRun, composed_service
from support.composed_run import RUN as COMPOSED
from support.door_attacks import ATTACKS, INTRUDER, PREMERGER, SPY, VICTIM, DoorAttack, witness
from support.locked_brokers import LockedBroker
from support.member_attacks import MEMBER_ATTACKS, Attacker, MemberAttack, honest_refusals

MINUTES = 4.0
RUN = "attacked"
NODES = 3
LAST: Final = 19
"""The lowest priority of a thread."""
SENT_IN_A_ROW: Final = 10
SENT_EVERY_S: Final = 0.1
COMPOSED_LEARNERS = ("learner-a", "learner-b", "learner-c")
INTRUDERS: Final[dict[str, Kind]] = {INTRUDER: "learner", VICTIM: "learner", SPY: "reader", PREMERGER: "premerger"}


@dataclass(slots=True)
class AttackOutcome:
    """What came of the attacks: how often each was tried, what got in, and how often the intruder was told no.

    Those of a member were `sent`, and cost `honest` learners so many token-fragments by reason.
    """

    tried: Counter[DoorAttack] = field(default_factory=Counter)
    got_in: dict[DoorAttack, str] = field(default_factory=dict)
    refused: Counter[DoorAttack] = field(default_factory=Counter)
    sent: Counter[MemberAttack] = field(default_factory=Counter)
    honest: dict[str, int] = field(default_factory=dict)
    began_s: float = 0.0
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AttackedDoor:
    """A locked broker: where it is, its folder of keys, the logs of its nodes, and the run behind it."""

    url: str
    keys: KeyFolder
    logs: tuple[Path, ...]
    run: str = RUN

    @property
    def operator(self) -> HeldIdentity:
        """Return the identity of the operator."""
        return read_identity(self.keys.path / "identities" / "operator.toml")

    def identity(self, name: str) -> HeldIdentity:
        """Return an identity of the run."""
        return read_identity(self.keys.path / "identities" / self.run / f"{name}.toml")

    def admit(self) -> None:
        """Let the intruders and their victim in."""
        for name, kind in INTRUDERS.items():
            self.keys.add(name, kind, self.run, time.time())

    def violations(self) -> int:
        """Return how often the broker's log tells of a violation."""
        return sum(log.read_text(encoding="utf-8", errors="replace").count("Violation") for log in self.logs)


def main() -> int:
    """Attack four runs and write `build/results/attacks.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=positive, default=MINUTES)
    parser.add_argument("--seed", type=natural, default=0)
    options = parser.parse_args()
    configure("console", "error", role="attacks", run=RUN)  # readers name the intruder in each reading
    part_s, corpus = 15.0 * options.minutes, prepare()
    found: list[Figure] = []
    doors = {
        "atoll broker --keys": on_a_broker,
        "atoll broker --cluster --keys": on_a_cluster,
        "atoll up": on_up,
        "compose": on_compose,
    }
    for name, played in doors.items():
        out = FOLDER / RUN
        shutil.rmtree(out, ignore_errors=True)
        seen, outcome, exact, violations = played(corpus, out, options.seed, part_s)
        found += [replace(one, name=f"{name}: {one.name}") for one in figures(seen, outcome, exact, part_s, violations)]
    return write("attacks", options.seed, found)


Played = tuple[Seen, AttackOutcome, bool, int]


def on_a_broker(corpus: Path, out: Path, seed: int, part_s: float, nodes: int = 1) -> Played:
    """Attack a run on a locked broker of the bench's own."""
    with tempfile.TemporaryDirectory() as folder, LockedBroker(Path(folder), nodes) as locked:
        door = AttackedDoor(locked.url, locked.keys, tuple(server.log_path for server in locked.servers))
        door.admit()
        locked.follow()
        mine = {"ATOLL_BROKER__IDENTITY": str(locked.keys.path / "identities" / "operator.toml")}
        words = [*command(RUN, corpus, out, door.url, seed), "--set", f"broker.replicas={nodes}"]
        return play(AttackedUp(subprocess.Popen(words, env={**os.environ, **mine}), out), door, part_s)


def on_a_cluster(corpus: Path, out: Path, seed: int, part_s: float) -> Played:
    """Attack a run on a locked cluster of the bench's own."""
    return on_a_broker(corpus, out, seed, part_s, NODES)


def on_up(corpus: Path, out: Path, seed: int, part_s: float) -> Played:
    """Attack a run of `atoll up` at its own broker; the intruders are let in while it trains."""
    up = AttackedUp(subprocess.Popen(command(RUN, corpus, out, None, seed)), out)
    url_file, deadline_s = out / "nats" / "url", time.monotonic() + BEGIN_MAX_S
    while not url_file.exists():
        if up.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit("the run did not begin")
        time.sleep(0.2)
    door = AttackedDoor(
        url_file.read_text(encoding="utf-8"), KeyFolder(out / "keys"), (out / "nats" / "nats-server.log",)
    )
    door.admit()
    return play(up, door, part_s)


def on_compose(corpus: Path, out: Path, seed: int, part_s: float) -> Played:
    """Attack the services of `docker-compose.yml`; the intruders' keys are made where the operator's folder is."""
    told = {f"ATOLL_{name.replace('.', '__').upper()}": value for name, value in (one.split("=") for one in SETTINGS)}
    told |= {"ATOLL_SEED": str(seed), "ATOLL_DATA__DIR": str(corpus.resolve()), "ATOLL_LEARNER__THROTTLE": f"{PACE:g}"}
    with ComposedRun(out, told) as composed:
        composed.begin("keys", *BROKERS, "synchronizer-a", "synchronizer-b", *COMPOSED_LEARNERS)
        keys, stores = KeyFolder(composed.volume("keys")), ("broker-1", "broker-2", "broker-3")
        door = AttackedDoor(
            composed.url, keys, tuple(composed.volume(name) / "nats-server.log" for name in stores), COMPOSED
        )
        door.admit()
        composed.begin("keys")
        return play(AttackedCompose(composed), door, part_s)


class AttackedUp:
    """A run of `atoll up`."""

    def __init__(self, up: subprocess.Popen[bytes], out: Path) -> None:
        """Take it over."""
        self._up, self._out = up, out
        self.parent = psutil.Process(up.pid)
        self.name_of = child_name

    def poll(self) -> int | None:
        """Return with what code it ended, None while it runs."""
        return self._up.poll()

    def end(self) -> bool:
        """End it in good order; return whether its fates are exact."""
        self._up.send_signal(signal.SIGINT)
        if self._up.wait(END_MAX_S):
            raise SystemExit(f"atoll up left with {self._up.returncode}; see {self._out / 'logs'}")
        return bool(json.loads((self._out / "report.json").read_text(encoding="utf-8"))["fates_exact"])

    def kill(self) -> None:
        """End it anyhow."""
        self._up.kill()
        self._up.wait()


class AttackedCompose:
    """The services of `docker-compose.yml`, children of this process."""

    def __init__(self, composed: ComposedRun) -> None:
        """Take them over."""
        self._composed = composed
        self.parent = psutil.Process()

    def name_of(self, child: psutil.Process) -> str:
        """Return the service that a child is."""
        return composed_service(child.environ())

    def poll(self) -> int | None:
        """Return None: who ends is seen by `end`."""
        return None

    def end(self) -> bool:
        """Stop the learners and the synchronizers; return whether every token has one fate."""
        codes = self._composed.stop(*COMPOSED_LEARNERS)
        codes |= self._composed.stop("synchronizer-a", "synchronizer-b")
        if any(codes.values()):
            raise SystemExit(f"services left with {codes}")
        ledger = json.loads(self._composed.ask("watch", "fates", "--json").stdout)
        fates = ledger["fates"]
        return bool(
            sum(fates.values()) == ledger["fragments"] * ledger["trained"] and not fates["queued"] + fates["open"]
        )

    def kill(self) -> None:
        """Leave it to the run."""


def play(up: AttackedUp | AttackedCompose, door: AttackedDoor, part_s: float) -> Played:
    """Train undisturbed for `part_s`, and attacked for as long."""
    ours = BusOptions(credentials=door.operator.credentials())
    spectator = Spectator(door.run, door.url, up.parent, ours, up.name_of)
    try:
        spectator.start()
        begun(spectator, up)
        time.sleep(part_s)
        with ThreadPoolExecutor(1, initializer=step_back) as one:
            outcome = one.submit(lambda: asyncio.run(attack(door, part_s))).result()
        exact = up.end()
    finally:
        spectator.stop()
        up.kill()
    return spectator.seen, outcome, exact, door.violations()


def step_back() -> None:
    """Let this thread take only the processor time that others leave.

    An attacker, and the witness that reads and draws the whole event log after each row, have machines of their own. Here they
    share the run's cores, and the pace is to show what attacks cost a run.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LAST)


async def attack(door: AttackedDoor, for_s: float) -> AttackOutcome:
    """Play the whole table at least once, and again until the time is over."""
    outcome = AttackOutcome(began_s=time.monotonic())
    intruders = {name: door.identity(name) for name in (INTRUDER, SPY, PREMERGER)}
    async with witness(door.url, door.run, door.operator, intruders) as doors, member_of(door) as member:
        while not outcome.tried or time.monotonic() < outcome.began_s + for_s:
            for each in ATTACKS:
                breach = await doors.play(each)
                outcome.tried[each] += 1
                outcome.refused[each] += bool(breach.told)
                if breach.got_in:
                    outcome.got_in[each] = breach.got_in
            for row in MEMBER_ATTACKS:
                for _ in range(SENT_IN_A_ROW):
                    await member.play(row)
                    await asyncio.sleep(SENT_EVERY_S)
                outcome.sent[row] += SENT_IN_A_ROW
        outcome.honest = await honest_refusals(doors.reader, member.run, {INTRUDER})
    outcome.ended_s = time.monotonic()
    return outcome


@contextlib.asynccontextmanager
async def member_of(door: AttackedDoor) -> AsyncIterator[Attacker]:
    """Yield the intruder as a member of the run."""
    options = BusOptions(credentials=door.identity(INTRUDER).credentials())
    bus = await open_bus(door.url, door.run, name=INTRUDER, options=options)
    try:
        run = await read_run(bus, Subjects(door.run))
        if run is None:
            raise SystemExit("there is no run to attack")
        yield await Attacker.join(bus, run, INTRUDER)
    finally:
        await bus.close()


_ALLOWED: Final = {
    "reroute": "allowed, and its answer went to the intruder alone",
    "mislead": "stored, and refused by all who read the event log: panels, page, metrics and stories were drawn each time",
}


def figures(
    seen: Seen,
    outcome: AttackOutcome,
    exact: bool,  # noqa: FBT001  (one of what was found)
    half_s: float,
    violations: int,
) -> list[Figure]:
    """Return, for each attack, how often anything of it got in; and what the attacks cost the run."""
    found = []
    for each, tried in outcome.tried.items():
        got_in = outcome.got_in.get(each, "")
        refused = outcome.refused[each]
        told = f"refused {refused} times" if refused else _ALLOWED.get(each.verb, "")
        how = got_in or f"tried {tried} times by a {INTRUDERS[each.who]}; {told}"
        found.append(Figure(f"{each.verb}: {each.name}", float(bool(got_in)), "got in", "0", not got_in, how))
    cost = ", ".join(f"{whose} {tokens}" for whose, tokens in outcome.honest.items())
    for row, count in outcome.sent.items():
        how = cost or f"sent {count} times for each fragment; nothing of the others was refused but what was late"
        found.append(Figure(f"member: {row.name}", float(bool(cost)), "got in", "0", not cost, how))
    kinds = len(outcome.tried) + len(outcome.sent)
    found.append(
        Figure("kinds of attack", float(kinds), "rows", "", None, "tests/support/door_attacks.py, member_attacks.py")
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
    return [*found, Figure("fates exact", float(exact), "", "1", exact, "its report, or its ledger")]


if __name__ == "__main__":
    os.environ.pop("ATOLL_BROKER__URL", None)
    sys.exit(main())
