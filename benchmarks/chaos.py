"""A storm over a real run: `make chaos`.

Two runs of `atoll up` with three learners, two shards and a standby for each, on a broker of the bench's own:

    undisturbed
    storm        a Poisson process of faults, seeded: SIGKILL of a shard's owner, of a standby, of a learner, of the
                 broker, and SIGSTOP of an owner for longer than its lease

The model is small and every learner is paced, so that the machine's cores do not decide (see faults.py). `atoll up` starts
again what was killed; the broker is started again here. Nothing is believed that a process says of itself during the storm:
at the end the tape, which the broker kept, is read from its beginning. It must show every version of every fragment
once and in order, and every contribution merged once; the ledgers must settle what was acknowledged, and the report
must give every token one fate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
from reports import loss_beside
from results import Figure, write

from atoll.bus.broker import EmbeddedBroker
from atoll.bus.connect import open_bus
from atoll.bus.subjects import Subjects
from atoll.errors import AtollError
from atoll.protocol.ledger import Ledger
from atoll.wire.messages import Event, Lease, decode

FOLDER = Path("build/chaos")
LEARNERS, SHARDS = 3, 2
PACE = 12.0
SETTINGS = ("model.size=xs", "protocol.interval_steps=16")
STORM_SHARE = 0.65
WARM_UP_S = 45.0
CALM_S = 30.0
FREEZE_S = 6.0
BROKER_AWAY_S = 1.0
WEIGHTS = {"owner": 35, "standby": 5, "learner": 35, "broker": 15, "freeze": 10}
TAKEOVER_MAX_S = 5.0
LOSS_MAX = 0.01


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done at a wall time; `shard` for owners, `over_s` when a killed broker was up again."""

    at_s: float
    kind: str
    shard: int = -1
    over_s: float = 0.0


class Round(msgspec.Struct):
    """A `round` event of the tape, as far as it matters here."""

    fragment: int
    version: int
    contributors: list[dict[str, Any]]
    at_s: float = 0.0
    who: str = ""


@dataclass(slots=True)
class Run:
    """A run that has ended: its report, its rounds in the order of the tape, its ledgers, and what was done to it."""

    report: dict[str, Any]
    rounds: list[Round]
    ledger: Ledger
    faults: list[Fault] = field(default_factory=list)

    def next_round_s(self, at_s: float, who: str = "") -> float:
        """Return how long after a wall time the next commit came, of one shard or of any; infinity when none did."""
        return min(
            (r.at_s - at_s for r in self.rounds if r.at_s > at_s and r.who.startswith(who)), default=float("inf")
        )


def main() -> int:
    """Do both runs and write `build/results/chaos.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="about this long for both runs")
    parser.add_argument("--per-minute", type=float, default=12.0, help="faults per minute of the storm")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    minutes = options.minutes * STORM_SHARE
    plain = run("undisturbed", options.minutes - minutes, options.seed, 0.0)
    storm = run("storm", minutes, options.seed, options.per_minute)
    return write("chaos", options.seed, [*safety(storm), *recovery(storm), *cost(plain, storm)])


# --- what the tape shows ------------------------------------------------------------------------------------------------


def safety(storm: Run) -> list[Figure]:
    """Return what must be zero or exact whatever happens."""
    by_kind = Counter(fault.kind for fault in storm.faults)
    versions: dict[int, list[int]] = {}
    pushes: Counter[tuple[Any, ...]] = Counter()
    for made in storm.rounds:
        versions.setdefault(made.fragment, []).append(made.version)
        pushes.update((c["learner"], c["incarnation"], made.fragment, c["push"]) for c in made.contributors)
    forks = sum(len(made) - len(set(made)) + (made != sorted(made)) for made in versions.values())
    twice = sum(count - 1 for count in pushes.values())
    unsettled = sum(max(0, account.pushed - account.settled) for account in storm.ledger.accounts.values())
    exact = storm.report["fates_exact"] and not storm.report["fates_errors"]
    fates = json.dumps(storm.report["tokens_by_fate"])
    return [
        Figure("faults", float(len(storm.faults)), "faults", "", None, json.dumps(by_kind)),
        Figure(
            "versions made twice or out of order",
            float(forks),
            "versions",
            "0",
            forks == 0,
            f"{len(storm.rounds)} rounds",
        ),
        Figure(
            "contributions merged twice", float(twice), "pushes", "0", twice == 0, f"{len(pushes)} pushes on the tape"
        ),
        Figure(
            "acknowledged and without a fate",
            float(unsettled),
            "token-fragments",
            "0",
            unsettled == 0,
            "by the ledgers",
        ),
        Figure("every token has one fate", float(exact), "exact", "1", bool(exact), fates),
    ]


def recovery(storm: Run) -> list[Figure]:
    """Return how soon after each kind of fault something was committed again."""
    owners = [storm.next_round_s(f.at_s, f"shard-{f.shard}") for f in storm.faults if f.kind == "owner"]
    frozen = [storm.next_round_s(f.at_s, f"shard-{f.shard}") for f in storm.faults if f.kind == "freeze"]
    learners = [storm.next_round_s(f.at_s) for f in storm.faults if f.kind == "learner"]
    brokers = [storm.next_round_s(f.over_s) for f in storm.faults if f.kind == "broker"]
    return [
        *times("the shard after its owner was killed", owners, TAKEOVER_MAX_S),
        *times("the shard after its owner froze", frozen, None),
        *times("any shard after a learner was killed", learners, None),
        *times("any shard after the broker was up again", brokers, TAKEOVER_MAX_S),
    ]


def times(what: str, found: list[float], goal_s: float | None) -> list[Figure]:
    """Return the median time to the next commit, and how it is spread."""
    if not found:
        return []
    median = statistics.median(found)
    spread = f"{len(found)} faults; longest {max(found):.1f} s"
    holds = None if goal_s is None else median <= goal_s
    return [Figure(f"next commit of {what}", median, "s", f"<= {goal_s:g}" if goal_s else "", holds, spread)]


def cost(plain: Run, storm: Run) -> list[Figure]:
    """Return what the storm cost in steps and in quality."""
    loss, losses = loss_beside(storm.report, plain.report)
    lost = storm.report["tokens_by_fate"]["lost"] / storm.report["tokens_trained"]
    return [
        Figure("held-out loss in the storm", loss, "ratio", f"<= {LOSS_MAX}", loss <= LOSS_MAX, losses),
        Figure("tokens lost with killed learners", lost, "ratio", "", None, "open when an incarnation died"),
        Figure("goodput in the storm", storm.report["goodput"], "ratio", "", None, "stepping over present time"),
        Figure("goodput undisturbed", plain.report["goodput"], "ratio", "", None, "stepping over present time"),
    ]


# --- running ------------------------------------------------------------------------------------------------------------


def run(name: str, minutes: float, seed: int, per_minute: float) -> Run:
    """Run `atoll up` for some minutes under so many faults, and read what is left of it."""
    out = FOLDER / name
    shutil.rmtree(out, ignore_errors=True)
    print(f"run {name}: {minutes:.1f} minutes", flush=True)
    with tempfile.TemporaryDirectory() as store, EmbeddedBroker(Path(store)) as broker:
        up = subprocess.Popen(command(name, out, broker.url, seed))
        try:
            storm = Storm(name, broker, psutil.Process(up.pid), random.Random(seed))  # noqa: S311  (reproducible)
            until_s = time.monotonic() + 60 * minutes
            time.sleep(WARM_UP_S)
            if per_minute:
                asyncio.run(storm.rage(until_s - CALM_S, per_minute))
            time.sleep(max(0.0, until_s - time.monotonic()))
            up.send_signal(signal.SIGINT)
            if up.wait():
                raise SystemExit(f"atoll up left with {up.returncode}")
        finally:
            up.kill()
            up.wait()
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        return Run(report, *asyncio.run(read_tape(name, broker.url)), storm.faults)


def command(name: str, out: Path, url: str, seed: int) -> list[str]:
    """Return the command of a run."""
    words = [sys.executable, "-m", "atoll.cli", "up", "--out", str(out), "--broker", url, "--seed", str(seed)]
    words += ["--learners", str(LEARNERS), "--shards", str(SHARDS), "--standbys", "1", "--tokens", "0"]
    words += [word for setting in (*SETTINGS, f"run={name}") for word in ("--set", setting)]
    return words + [word for i in range(1, LEARNERS + 1) for word in ("--throttle", f"learner-{i}={PACE:g}")]


async def read_tape(name: str, url: str) -> tuple[list[Round], Ledger]:
    """Return all rounds in order, and the ledgers that the shards closed with, added together."""
    bus, subjects = await open_bus(url, name, name="chaos", provision=False), Subjects(name)
    try:
        rounds = [
            round_of(decode(Event, e.data)) for e in await bus.replay(subjects.event("round", "*"), limit=1 << 30)
        ]
        closed = [decode(Event, e.data) for e in await bus.replay(subjects.event("ledger", "*"), limit=1 << 30)]
    finally:
        await bus.close()
    total = Ledger()
    for event in {event.who: event for event in closed}.values():
        total.absorb(msgspec.json.decode(event.fields["ledger"], type=Ledger))
    return rounds, total


def round_of(event: Event) -> Round:
    """Return a `round` event with its time and its shard."""
    found = msgspec.convert({name: msgspec.json.decode(raw) for name, raw in event.fields.items()}, Round)
    return msgspec.structs.replace(found, at_s=event.at_s, who=event.who)


class Storm:
    """Draws faults and does them to the processes under one `atoll up`."""

    def __init__(self, name: str, broker: EmbeddedBroker, up: psutil.Process, dice: random.Random) -> None:
        """Do nothing yet."""
        self._name = name
        self._broker = broker
        self._up = up
        self._dice = dice
        self._waking: set[asyncio.Task[None]] = set()
        self.faults: list[Fault] = []

    async def rage(self, until_s: float, per_minute: float) -> None:
        """Do faults until a monotonic time; then let all sleepers wake."""
        kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
        while True:
            await asyncio.sleep(self._dice.expovariate(per_minute / 60.0))
            if time.monotonic() > until_s:
                break
            kind = self._dice.choices(kinds, weights)[0]
            fault = await self._do(kind)
            if fault is not None:
                self.faults.append(fault)
                print(f"fault {len(self.faults)}: {kind}", flush=True)
        await asyncio.gather(*self._waking)

    async def _do(self, kind: str) -> Fault | None:
        """Do one fault; None when there is nobody to do it to."""
        if kind == "broker":
            return await self._kill_broker()
        owners = await self._owners()
        children = [child for child in self._up.children() if child.status() != psutil.STATUS_STOPPED]
        if kind == "learner":
            chosen = [child for child in children if "atoll_learner" in words_of(child)]
        else:
            synchronizers = [child for child in children if "atoll_synchronizer" in words_of(child)]
            chosen = [child for child in synchronizers if (child.pid in owners) == (kind != "standby")]
        if not chosen:
            return None
        target = self._dice.choice(chosen)
        if kind == "freeze":
            target.suspend()
            self._waking.add(asyncio.create_task(wake(target)))
        else:
            target.kill()
        return Fault(time.time(), kind, owners.get(target.pid, -1))

    async def _kill_broker(self) -> Fault:
        at_s = time.time()
        self._broker.kill()
        await asyncio.sleep(BROKER_AWAY_S)
        await asyncio.to_thread(self._broker.start)
        return Fault(at_s, "broker", over_s=time.time())

    async def _owners(self) -> dict[int, int]:
        """Return the shards' owners by process id, as the leases say."""
        found: dict[int, int] = {}
        with contextlib.suppress(AtollError):
            bus = await open_bus(self._broker.url, self._name, name="chaos", provision=False)
            try:
                for shard in range(SHARDS):
                    record = await bus.get_record(Subjects(self._name).lease(shard))
                    if record is not None:
                        found[decode(Lease, record.data).pid] = shard
            finally:
                await bus.close()
        return found


async def wake(process: psutil.Process) -> None:
    """Let a stopped process go on after longer than its lease."""
    await asyncio.sleep(FREEZE_S)
    with contextlib.suppress(psutil.Error):
        process.resume()


def words_of(process: psutil.Process) -> list[str]:
    """Return a process's command line, empty when it is gone."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


if __name__ == "__main__":
    os.environ.pop("ATOLL_BROKER__URL", None)
    sys.exit(main())
