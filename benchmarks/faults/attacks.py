"""What gets through a locked door while a run trains, and what a member can do: `make attacks`.

Runs of three paced learners and two shards: `atoll up` on a locked broker of the bench's own, on a locked cluster of three, and
with the broker that it locks itself; and the services of `docker-compose.yml` as processes. Intruders on the roll of the run (a
learner, a reader, the synchronizer and the broker of a region) play `support.door_attacks`, while that learner plays
`support.member_attacks`. Then another one fills what the broker keeps for learners, until `atoll keys revoke` ends that. An
operator watches what each attack aims at and the honest learners; the versions in the heads give the pace.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final

import nats.errors
import psutil

from atoll.base.logs import configure
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.keys.identity import HeldIdentity, read_identity
from atoll.keys.rights import Kind
from atoll.keys.roll import KeyFolder
from atoll.run.history import History
from atoll.run.record import read_run
from atoll.story.findings import exceeded_shares
from atoll.wire.subjects import Subjects
from benchmarks.faults.chaos import FOLDER
from benchmarks.faults.hostile import PACE_MIN, Seen, Spectator, begun, command
from benchmarks.faults.up_in_storm import BEGIN_MAX_S, END_MAX_S, PACE, SETTINGS, child_name
from benchmarks.lib.harness import Figure, at_least, at_most, fact, run_benchmark, true, zero
from benchmarks.lib.runs import end_in_order, prepare, read_report, wait_until
from support.composed_run import BROKERS, ComposedRun, composed_service
from support.composed_run import RUN as COMPOSED
from support.door_attacks import (
    ATTACKS,
    INTRUDER,
    LEAF,
    PREMERGER,
    SPY,
    SWALLOWED,
    VICTIM,
    VICTIMS_PLACE,
    DoorAttack,
    DoorWitness,
    connected,
    witness,
)
from support.honest_watch import HonestWatch, unbelievable_lives
from support.locked_brokers import LockedBroker
from support.member_attacks import EVENTS, IDS_KEPT, MEMBER_ATTACKS, Attacker, MemberAttack

MINUTES = 4.0
PART_S: Final = 5.0
"""Of each of these minutes, for each door: before the attacks, and afterwards. The tables take what they take."""
RUN = "attacked"
NODES = 3
LAST: Final = 19
"""The lowest priority of a thread."""
PAUSE_S: Final = 0.05
LOOK_EVERY_S: Final = 1.0
TOLD_LATE_S: Final = 2.0
"""So much later a shard may have read what a row has sent."""
GOES_ON_S: Final = 30.0
FILL_S: Final = 10.0
REST_S: Final = 10.0
"""Within this and the part behind it, the pace is what it was before."""
PACE_AFTER_MIN: Final = 0.9
ID_BYTES_MAX: Final = 100e6
CHUNK: Final = b"x" * (256 << 10)
COMPOSED_LEARNERS = ("learner-a", "learner-b", "learner-c")
FILLER: Final = "filler"
INTRUDERS: Final[dict[str, Kind]] = {
    INTRUDER: "learner",
    VICTIM: "learner",
    FILLER: "learner",
    SPY: "reader",
    PREMERGER: "premerger",
    LEAF: "region",
}
ATTACKERS: Final = frozenset({INTRUDER, FILLER})


@dataclass(slots=True)
class AttackOutcome:
    """The outcome of the attacks: how often each was tried, what got in, and how often the intruder was told no.

    Those of a member were `sent`, each at a moment, and did `harm` to honest learners. `ids_bytes` is by how much the memory of
    a broker grew under long ids. Somebody filled the broker from `filled_s` on, until it was revoked; `named` says whether
    readers of the event log are told who. They show impossible totals of the lives in `swollen`.
    """

    tried: Counter[DoorAttack] = field(default_factory=Counter)
    got_in: dict[DoorAttack, str] = field(default_factory=dict)
    refused: Counter[DoorAttack] = field(default_factory=Counter)
    sent: dict[MemberAttack, float] = field(default_factory=dict)
    harm: dict[MemberAttack, str] = field(default_factory=dict)
    ids_bytes: int = 0
    named: bool = False
    swollen: list[str] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0
    filled_s: float = 0.0
    revoked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AttackedDoor:
    """A locked broker: where it is, its folder of keys, the logs of its nodes, and the run behind it."""

    url: str
    keys: KeyFolder
    logs: tuple[Path, ...]
    run: str = RUN
    follow: Callable[[], None] = lambda: None
    """Has the broker take over a change of the roll, where it does not look for itself."""

    @property
    def operator(self) -> HeldIdentity:
        return read_identity(self.keys.path / "identities" / "operator.toml")

    def identity(self, name: str) -> HeldIdentity:
        return read_identity(self.keys.path / "identities" / self.run / f"{name}.toml")

    def admit(self) -> None:
        for name, kind in INTRUDERS.items():
            place = VICTIMS_PLACE if name == VICTIM else ""
            self.keys.add(name, kind, self.run, time.time(), region=place)

    def revoke(self, name: str) -> None:
        """Let one in no more, as an operator does: with what it has stored."""
        words = [sys.executable, "-m", "atoll.cli", "keys", "revoke", str(self.keys.path), name, "--run", self.run]
        subprocess.run([*words, "--broker", self.url], check=True, capture_output=True)
        self.follow()

    def violations(self) -> int:
        return sum(log.read_text(encoding="utf-8", errors="replace").count("Violation") for log in self.logs)


def main(
    *,
    minutes: float = MINUTES,
    seed: int = 0,
    only: Annotated[list[str] | None, "try this door alone", tuple(DOORS)] = None,
) -> list[Figure]:
    configure("console", "error", role="attacks", run=RUN)  # readers name the intruder in each reading
    part_s, corpus = PART_S * minutes, prepare()
    found: list[Figure] = []
    for name in only or DOORS:
        out = FOLDER / RUN
        shutil.rmtree(out, ignore_errors=True)
        seen, outcome, exact, violations = DOORS[name](corpus, out, seed, part_s)
        found += [replace(one, name=f"{name}: {one.name}") for one in figures(seen, outcome, exact, part_s, violations)]
    return found


Played = tuple[Seen, AttackOutcome, bool, int]


def on_a_broker(corpus: Path, out: Path, seed: int, part_s: float, nodes: int = 1) -> Played:
    """Attack a run on a locked broker of the bench's own."""
    with tempfile.TemporaryDirectory() as folder, LockedBroker(Path(folder), nodes) as locked:
        door = AttackedDoor(
            locked.url, locked.keys, tuple(server.log_path for server in locked.servers), follow=locked.follow
        )
        door.admit()
        locked.follow()
        mine = {"ATOLL_BROKER__IDENTITY": str(locked.keys.path / "identities" / "operator.toml")}
        words = [*command(RUN, corpus, out, door.url, seed), "--set", f"broker.replicas={nodes}"]
        return play(AttackedUp(subprocess.Popen(words, env={**os.environ, **mine}), out), door, part_s)


def on_a_cluster(corpus: Path, out: Path, seed: int, part_s: float) -> Played:
    return on_a_broker(corpus, out, seed, part_s, NODES)


def on_up(corpus: Path, out: Path, seed: int, part_s: float) -> Played:
    up = AttackedUp(subprocess.Popen(command(RUN, corpus, out, None, seed)), out)
    url_file = out / "nats" / "url"
    wait_until("a broker of the run", url_file.exists, BEGIN_MAX_S, up)
    door = AttackedDoor(
        url_file.read_text(encoding="utf-8"), KeyFolder(out / "keys"), (out / "nats" / "nats-server.log",)
    )
    door.admit()
    return play(up, door, part_s)


def on_compose(corpus: Path, out: Path, seed: int, part_s: float) -> Played:
    """Attack the services of `docker-compose.yml`; the intruders' keys are made where the operator's folder is."""
    told = {f"ATOLL_{name.replace('.', '__').upper()}": value for name, value in (one.split("=") for one in SETTINGS)}
    told |= {"ATOLL_SEED": str(seed), "ATOLL_DATA__DIR": str(corpus), "ATOLL_LEARNER__THROTTLE": f"{PACE:g}"}
    with ComposedRun(out, told) as composed:
        composed.begin("keys", *BROKERS, "synchronizer-a", "synchronizer-b", *COMPOSED_LEARNERS)
        keys, stores = KeyFolder(composed.volume("keys")), ("broker-1", "broker-2", "broker-3")
        door = AttackedDoor(
            composed.url,
            keys,
            tuple(composed.volume(name) / "nats-server.log" for name in stores),
            COMPOSED,
            lambda: composed.begin("keys"),
        )
        door.admit()
        composed.begin("keys")
        return play(AttackedCompose(composed), door, part_s)


class AttackedUp:
    """A run of `atoll up`."""

    def __init__(self, up: subprocess.Popen[bytes], out: Path) -> None:
        self._up, self._out = up, out
        self.parent = psutil.Process(up.pid)
        self.name_of = child_name

    def poll(self) -> int | None:
        return self._up.poll()

    def end(self) -> bool:
        """End it in good order; return whether the fates of all tokens but the attackers' are exact."""
        end_in_order(self._up, self._out, END_MAX_S)
        attackers = tuple(f"{name}/" for name in ATTACKERS)
        return all(error.startswith(attackers) for error in read_report(self._out)["fates_errors"])

    def kill(self) -> None:
        self._up.kill()
        self._up.wait()


class AttackedCompose:
    """The services of `docker-compose.yml`, children of this process."""

    def __init__(self, composed: ComposedRun) -> None:
        self._composed = composed
        self.parent = psutil.Process()

    def name_of(self, child: psutil.Process) -> str:
        return composed_service(child.environ())

    def poll(self) -> int | None:
        return None

    def end(self) -> bool:
        """Stop the learners and the synchronizers; return whether every token of an honest one has one fate."""
        codes = self._composed.stop(*COMPOSED_LEARNERS)
        codes |= self._composed.stop("synchronizer-a", "synchronizer-b")
        if any(codes.values()):
            raise SystemExit(f"services left with {codes}")
        ledger = json.loads(self._composed.ask("watch", "fates", "--json").stdout)
        ids = {service.removeprefix("learner-") for service in COMPOSED_LEARNERS}
        honest = [one for one in ledger["incarnations"] if one["incarnation"].rpartition("/")[0] in ids]
        return bool(honest) and all(
            sum(one["fates"].values()) == ledger["fragments"] * one["trained"]
            and not one["fates"]["queued"] + one["fates"]["open"]
            for one in honest
        )

    def kill(self) -> None:
        """Leave it to the run."""


def play(up: AttackedUp | AttackedCompose, door: AttackedDoor, part_s: float) -> Played:
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


async def attack(door: AttackedDoor, part_s: float) -> AttackOutcome:
    """Play both tables at least once, fill the broker, revoke the filler, and let the run train on for a part."""
    outcome = AttackOutcome(began_s=time.monotonic())
    intruders = {name: door.identity(name) for name in (INTRUDER, SPY, PREMERGER, LEAF)}
    async with witness(door.url, door.run, door.operator, intruders) as doors, member_of(door) as member:
        watch = HonestWatch(doors.reader, member.run, ATTACKERS)
        looking = asyncio.create_task(watch.keep_looking(LOOK_EVERY_S))
        kept = [row for row in MEMBER_ATTACKS if row not in EVENTS]
        await asyncio.gather(try_door(doors, outcome), send_rows(member, kept, outcome))
        await send_rows(member, EVENTS, outcome)
        outcome.ended_s = outcome.filled_s = time.monotonic()
        await fill(door, member, for_s=max(FILL_S, part_s / 2))
        outcome.revoked_s = time.monotonic()
        await asyncio.to_thread(door.revoke, FILLER)
        await asyncio.sleep(REST_S + part_s)
        looking.cancel()
        moments = [*outcome.sent.values(), outcome.filled_s]
        for row, sent_s, next_s in zip(outcome.sent, moments, moments[1:], strict=False):
            harm = watch.harm(sent_s, next_s + TOLD_LATE_S) or watch.standing(sent_s, GOES_ON_S)
            outcome.harm |= {row: harm} if harm else {}
        history = History()
        await history.read(doors.reader, member.run.subjects)
        outcome.named = FILLER in {found.culprit for found in exceeded_shares(history)}
        outcome.swollen = await unbelievable_lives(doors.reader, member.run)
    return outcome


async def try_door(doors: DoorWitness, outcome: AttackOutcome) -> None:
    for each in ATTACKS:
        breach = await doors.play(each)
        outcome.tried[each] += 1
        outcome.refused[each] += bool(breach.told)
        if breach.got_in:
            outcome.got_in[each] = breach.got_in


async def send_rows(member: Attacker, rows: Sequence[MemberAttack], outcome: AttackOutcome) -> None:
    light = dict[int, int]()
    for row in rows:
        light = light or (broker_bytes() if row in IDS_KEPT else {})
        outcome.sent[row] = asyncio.get_running_loop().time()
        await member.play(row)
        if row in IDS_KEPT:
            grown = [size - light.get(pid, size) for pid, size in broker_bytes().items()]
            outcome.ids_bytes = max(outcome.ids_bytes, *grown)
        await asyncio.sleep(PAUSE_S)


def broker_bytes() -> dict[int, int]:
    """Return the memory of each broker that this process has begun, or one that it has begun."""
    children = psutil.Process().children(recursive=True)
    return {child.pid: child.memory_info().rss for child in children if child.name().startswith("nats-server")}


async def fill(door: AttackedDoor, member: Attacker, for_s: float) -> None:
    """Store as many manifests and chunks as the filler can."""
    run, until_s, number = member.run, time.monotonic() + for_s, 0
    places = [run.subjects.contribution(run.protocol.shard_of(p), p, FILLER) for p in range(run.protocol.fragments)]
    while time.monotonic() < until_s:
        with contextlib.suppress(nats.errors.Error):  # a broker hangs up who does not read in time
            async with connected(door.url, door.identity(FILLER), []) as client:
                while time.monotonic() < until_s:
                    await client.publish(places[number % len(places)], CHUNK[: 24 << 10])
                    await client.publish(f"{run.subjects.contribution_stem(FILLER, 0, 1, number, '0' * 16)}.0", CHUNK)
                    number += 1
                    if number % 8 == 0:
                        await client.flush()


@contextlib.asynccontextmanager
async def member_of(door: AttackedDoor) -> AsyncIterator[Attacker]:
    """Yield the intruder as a member of the run, with the key of a region's synchronizer."""
    mine, region = door.identity(INTRUDER), door.identity(PREMERGER)
    bus, regions = [
        await open_bus(door.url, door.run, name=one.name, options=BusOptions(credentials=one.credentials()))
        for one in (mine, region)
    ]
    try:
        run = await read_run(bus, Subjects(door.run))
        if run is None:
            raise SystemExit("there is no run to attack")
        yield await Attacker.join(bus, run, INTRUDER, lambda: connected(door.url, mine, []), regions)
    finally:
        await bus.close()
        await regions.close()


_SILENT: Final = "its link may carry that, and the hub takes it from no region"
_ALLOWED: Final = {
    "reroute": "allowed, and its answer went to the intruder alone",
    "mislead": "stored, and refused by all who read the event log: panels, page, metrics and stories were drawn each time",
}


def figures(
    seen: Seen,
    outcome: AttackOutcome,
    exact: bool,  # noqa: FBT001  (one of what was found)
    part_s: float,
    violations: int,
) -> list[Figure]:
    """Return, for each attack, how often anything of it got in; and what the attacks cost the run."""
    found = []
    for each, tried in outcome.tried.items():
        got_in = outcome.got_in.get(each, "")
        refused = outcome.refused[each]
        told = f"refused {refused} times" if refused else _SILENT if each in SWALLOWED else _ALLOWED.get(each.verb, "")
        how = got_in or f"tried {tried} times by a {INTRUDERS[each.who]}; {told}"
        found.append(zero(f"{each.verb}: {each.name}", bool(got_in), "got in", how))
    for row in outcome.sent:
        harm = outcome.harm.get(row, "")
        how = harm or "nothing of the others was refused but what was late, and each fragment and learner went on"
        found.append(zero(f"member: {row.name}", bool(harm), "got in", how))
    kinds = len(outcome.tried) + len(outcome.sent)
    found.append(fact("kinds of attack", float(kinds), "rows", "tests/support/door_attacks.py, member_attacks.py"))
    before = seen.commits_per_minute(outcome.began_s - part_s, outcome.began_s)
    pace = seen.commits_per_minute(outcome.began_s, outcome.ended_s) / before
    how = f"{kinds} attacks in {outcome.ended_s - outcome.began_s:.0f} s; {before:.0f} commits a minute before"
    found.append(at_least("pace under attack", pace, "ratio", PACE_MIN, how))
    pace = seen.commits_per_minute(outcome.filled_s, outcome.revoked_s) / before
    how = f"manifests and chunks for {outcome.revoked_s - outcome.filled_s:.0f} s"
    found.append(at_least("pace while filled", pace, "ratio", PACE_MIN, how))
    from_s = outcome.revoked_s + REST_S
    pace = seen.commits_per_minute(from_s, from_s + part_s) / before
    how = f"from {REST_S:.0f} s after the filler was revoked, for {part_s:.0f} s"
    found.append(at_least("pace afterwards", pace, "ratio", PACE_AFTER_MIN, how))
    found.append(true("filler named", outcome.named, "by its name, as `atoll why` does"))
    how = "; ".join(outcome.swollen) or "no reader of the event log shows of a learner more than it can have trained"
    found.append(zero("impossible totals shown", len(outcome.swollen), "lives", how))
    grown, most = outcome.ids_bytes / 1e6, ID_BYTES_MAX / 1e6
    how = "the most that any broker's memory grew while long ids were sent"
    found.append(at_most("broker memory under the ids", grown, "MB", most, how))
    refusals = sum(outcome.refused.values())
    named = f"{refusals} refusals told to the intruders"
    logged = violations >= refusals
    found.append(Figure("refusals in the broker's log", float(violations), "lines", f">= {refusals}", logged, named))
    ended = sum(len(pids) - 1 for pids in seen.pids.values())
    found.append(zero("processes that ended", ended, "processes", "learners and shards"))
    return [
        *found,
        true("fates exact", exact, "of all but the attackers: its report, or its ledger"),
    ]


DOORS: Final[dict[str, Callable[[Path, Path, int, float], Played]]] = {
    "atoll broker --keys": on_a_broker,
    "atoll broker --cluster --keys": on_a_cluster,
    "atoll up": on_up,
    "compose": on_compose,
}


if __name__ == "__main__":
    run_benchmark("attacks", main)
