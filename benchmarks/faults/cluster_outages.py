"""Every node of a replicated broker dies, freezes and is cut off while a run trains: `make chaos-cluster`.

Two synchronizers share two shards, and three paced learners train, at a broker of three nodes with three copies of each stream.
Faults come in turn until the time is up; the next one comes when all copies have caught up:

    killed         a node gets SIGKILL and is started again a second later; each node in turn
    frozen         a node gets SIGSTOP for `FROZEN_S`, then SIGCONT if its host has not started another one
    cut off        the routes of the node that leads the stream of heads are cut for `CUT_S`; its clients still reach it

Routes go through relays, one for each direction, so a cut isolates a node from its peers and from nobody else. A pause is the
longest time between two commits that reaches into a fault. The same load runs beside it on a single server, killed and frozen
likewise. No acknowledged contribution may be lost, none merged twice, and every version is there once and in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from atoll.base.background_tasks import LoopThread
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.protocol.ledger import Settlement
from atoll.wire.messages import Beat, Event, decode
from atoll.wire.subjects import Subjects
from benchmarks.lib.harness import Figure, at_least, at_most, fact, run_benchmark, true, zero
from benchmarks.lib.runs import prepare
from support.islands import DEADLINE_S, IslandProcess, unforked
from support.relayed_cluster import RelayedCluster

MINUTES: Final = 30.0
LEARNERS: Final = ("a", "b", "c")
SYNCHRONIZERS: Final = ("east", "west")
NODES: Final = 3
QUIET_S: Final = 20.0
AWAY_S: Final = 1.0
FROZEN_S: Final = 20.0
CUT_S: Final = 20.0
AFTER_S: Final = 4.0
BETWEEN_S: Final = 2.0
PAUSE_GOAL_S: Final = 5.0
STEPS_GOAL: Final = 0.9
SHARE_OF_ONE: Final = 0.25
POLL_S: Final = 0.5
Faults = Callable[[str, "Outages", float], None]
SETTINGS: Final = {
    "ATOLL_PROTOCOL__SHARDS": "2",
    "ATOLL_PROTOCOL__INTERVAL_STEPS": "32",
    "ATOLL_LEARNER__THROTTLE": "12",
}


@dataclass(slots=True)
class Outages:
    """Faults done: kind of fault, its begin and its end, in seconds of the wall clock."""

    began_s: float = 0.0
    done: list[tuple[str, float, float]] = field(default_factory=list)

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        began_s = time.time()
        yield
        self.done.append((kind, began_s, time.time()))
        print(f"{kind}: {time.time() - began_s:.1f} s", flush=True)


# -- faults -----------------------------------------------------------------------------------------------------------


def of_cluster(cluster: RelayedCluster, run: str, found: Outages, until_s: float) -> None:
    """Play rounds of all faults until the time is up, at least one."""
    turn = 0
    while not found.done or time.time() < until_s:
        for node in cluster.nodes:
            caught_up(cluster.url, run)
            with found.of("node killed"):
                node.kill()
                time.sleep(AWAY_S)
                node.restart()
        caught_up(cluster.url, run)
        with found.of("node frozen"):
            frozen(cluster.nodes[turn % NODES].pid)
        with found.of("leader cut off"), cluster.cut_off(caught_up(cluster.url, run)):
            time.sleep(CUT_S)
        turn += 1


def of_one(broker: EmbeddedBroker, run: str, found: Outages, until_s: float) -> None:
    """Kill and freeze a single server in turn until the time is up."""
    del run  # it has no other copies to wait for
    while not found.done or time.time() < until_s:
        with found.of("server killed"):
            broker.kill()
            time.sleep(AWAY_S)
            broker.restart()
        time.sleep(QUIET_S / 2)
        with found.of("server frozen"):
            frozen(broker.pid)
        time.sleep(QUIET_S / 2)


def frozen(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(FROZEN_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def caught_up(url: str, run: str) -> int:
    """Return the node that leads the stream of heads, once all copies of all streams are current for `AFTER_S`."""
    return asyncio.run(_caught_up(url, run))


async def _caught_up(url: str, run: str) -> int:
    bus = await JetStreamBus.open(url, run, name="watch", options=BusOptions(patience_s=60.0, replicas=NODES))
    since_s = float("inf")
    try:
        while True:
            looked_s = time.monotonic()
            names = sorted((plan.name for plan in bus._plans), key=lambda name: not name.endswith("_GL"))  # noqa: SLF001
            told = [await bus._connection.call(bus._jetstream.api(f"STREAM.INFO.{name}")) for name in names]  # noqa: SLF001
            copies = [copy for each in told for copy in each["cluster"].get("replicas") or [{"current": False}]]
            level = all(copy.get("current") and not copy.get("lag", 0) > 64 for copy in copies)
            # A stream without a leader answers late: what was seen while it had none counts for nothing.
            since_s = min(since_s, time.monotonic()) if level and time.monotonic() - looked_s < POLL_S else float("inf")
            if time.monotonic() - since_s > AFTER_S:
                return int(str(told[0]["cluster"]["leader"]).rpartition("-")[2])
            await asyncio.sleep(POLL_S)
    finally:
        await bus.close()


# -- the load ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OutageCourse:
    """The record of a run under faults."""

    outages: Outages
    rounds: list[Event]
    beats: list[Beat]
    settled: Settlement


def train(folder: Path, url: str, corpus: Path, copies: int, seconds: float, faults: Faults) -> OutageCourse:
    folder.mkdir()
    island, home = IslandProcess(folder, url, corpus), LoopThread("ear")
    island.environment |= SETTINGS | {"ATOLL_BROKER__REPLICAS": str(copies)}
    beats: list[Beat] = []
    listening = home.submit(_listened(url, island.run, beats))
    try:
        begin(island)
        time.sleep(QUIET_S / 2)
        found = Outages(began_s=time.time())
        time.sleep(QUIET_S)
        faults(island.run, found, found.began_s + seconds)
        time.sleep(AFTER_S)
        leave(island, *LEARNERS, *SYNCHRONIZERS)
        return OutageCourse(found, asyncio.run(island.events("round")), beats, asyncio.run(island.settlement()))
    finally:
        listening.cancel()
        home.stop()
        island.stop()


def begin(island: IslandProcess) -> None:
    for name in SYNCHRONIZERS:
        island.start(name, "synchronizer")
    for name in LEARNERS:
        island.start(name, "learner", "--id", name)
    for name in LEARNERS:
        island.wait_for(name, "learner.first_step")


def leave(island: IslandProcess, *names: str) -> None:
    """Have processes leave in good order, one after the other."""
    for name in names:
        process = island.process(name)
        process.terminate()
        if process.wait(DEADLINE_S):
            raise SystemExit(f"{name} left with {process.returncode}: {island.log(name).read_text()[-2000:]}")


async def _listened(url: str, run: str, beats: list[Beat]) -> None:
    bus = await open_bus(url, run, name="ear", options=BusOptions(patience_s=60.0))
    try:
        async for core_message in await bus.listen(Subjects(run).beat("*")):
            beats.append(decode(Beat, core_message.data))  # noqa: PERF401  (what was heard counts when this is cancelled)
    finally:
        await bus.close()


def tokens_per_s(beats: list[Beat], began_s: float, ended_s: float) -> float:
    """Return the tokens that all learners trained in a second of a span, by the first and last heartbeats in it and before."""
    rate = 0.0
    for learner in LEARNERS:
        own = [beat for beat in beats if beat.learner == learner]
        before = max((beat for beat in own if beat.at_s <= began_s), key=lambda beat: beat.at_s, default=own[0])
        last = max((beat for beat in own if beat.at_s <= ended_s), key=lambda beat: beat.at_s, default=own[0])
        rate += (last.tokens - before.tokens) / max(last.at_s - before.at_s, 1e-9)
    return rate


def round_s(rounds: list[Event]) -> float:
    """Return the median time between two commits of one fragment."""
    times: dict[int, list[float]] = defaultdict(list)
    for event in rounds:
        times[msgspec.json.decode(event.fields["fragment"])].append(event.at_s)
    return statistics.median(b - a for found in times.values() for a, b in itertools.pairwise(sorted(found)))


def pause(commits: list[float], ended_s: float, back_s: float) -> float:
    """Return the longest time between two commits that reaches into a span, or ends soon after it."""
    near = [pair for pair in itertools.pairwise(commits) if pair[1] > ended_s and pair[0] < back_s + BETWEEN_S]
    return max(b - a for a, b in near)


def main(*, minutes: float = MINUTES) -> list[Figure]:
    corpus, seconds = prepare(), 60.0 * minutes
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with RelayedCluster(folder / "three", watched=True) as cluster:
            three = train(
                folder / "of-three",
                cluster.url,
                corpus,
                NODES,
                seconds * (1.0 - SHARE_OF_ONE),
                partial(of_cluster, cluster),
            )
        with EmbeddedBroker(folder / "one") as broker:
            one = train(
                folder / "of-one",
                broker.url,
                corpus,
                1,
                seconds * SHARE_OF_ONE,
                partial(of_one, broker),
            )
    return [*figures_of("three nodes", three, PAUSE_GOAL_S), *figures_of("one server", one, None)]


def figures_of(broker: str, course: OutageCourse, goal_s: float | None) -> list[Figure]:
    """Return pauses by kind of fault, steps beside those of quiet time, and the fates."""
    outages, commits = course.outages, sorted(event.at_s for event in course.rounds)
    first_s = outages.done[0][1]
    quiet = [event for event in course.rounds if outages.began_s <= event.at_s < first_s]
    told = [fact(f"{broker}: a round", round_s(quiet), "s", "median over fragments before the first fault")]
    pauses: dict[str, list[float]] = defaultdict(list)
    for kind, began_s, ended_s in outages.done:
        pauses[kind].append(pause(commits, began_s, ended_s))
    for kind, found in pauses.items():
        every = ", ".join(f"{each:.1f}" for each in sorted(found))
        told.append(fact(f"{broker}: commits pause, {kind}", statistics.median(found), "s", f"median of {every} s"))
    middle = statistics.median(each for found in pauses.values() for each in found)
    told.append(at_most(f"{broker}: commits pause", middle, "s", goal_s, "median of all faults"))
    calm = tokens_per_s(course.beats, outages.began_s, first_s)
    paces = [tokens_per_s(course.beats, began_s, ended_s + AFTER_S) / calm for _, began_s, ended_s in outages.done]
    pace = statistics.median(paces)
    how = f"tokens a second beside those before the first fault; median of {len(paces)} faults, least {min(paces):.2f}"
    least = None if goal_s is None else STEPS_GOAL
    told.append(at_least(f"{broker}: learners' pace", pace, "x", least, how))
    lost, exact, twice = course.settled.fates["lost"], course.settled.exact, not unforked(course.rounds)
    books = "closing ledgers; " + "; ".join(course.settled.errors)
    return [
        *told,
        zero(f"{broker}: acknowledged contributions lost", lost, "token-fragments", books),
        true(f"{broker}: fates exact", exact, books),
        zero(f"{broker}: versions made twice", twice, "", "event log"),
    ]


if __name__ == "__main__":
    run_benchmark("chaos-cluster", main)
