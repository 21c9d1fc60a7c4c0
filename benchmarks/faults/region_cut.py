"""A region is cut off for minutes, and meanwhile the hub loses its disk: `make bench-cut`.

Four regions in network namespaces train one model, each with one learner behind a wire of its own; the hub has the broker and a
synchronizer that keeps an archive. At a third of the cut the hub is killed and its store deleted; it is rebuilt at once. What
ends is started again, as by an engine for containers: processes that lived through the loss leave, because the run was
replaced.

    current         from the healing to the first version that the cut learner adopts
    counted         from the healing to the first commit that holds a contribution of its
    trained         tokens of the cut learner during the cut, beside as long before it
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from atoll.bus.open import open_bus
from atoll.bus.options import PORT
from atoll.bus.server import EmbeddedBroker
from atoll.protocol.ledger import Settlement
from atoll.wire.messages import Head, decode
from atoll.wire.subjects import Subjects
from benchmarks.lib.harness import Figure, Unfit, above_zero, at_least, at_most, fact, run_benchmark, true
from benchmarks.lib.runs import prepare, wait_until
from support.islands import DEADLINE_S, IslandProcess
from support.wan import Wan, Wire, inside, unfit, wan

HUB: Final = "hub"
REGIONS: Final = ("a", "b", "c", "d")
CUT: Final = "d"
MINUTES: Final = 10.0
QUIET_S: Final = 45.0
EVERY_S: Final = 10
CURRENT_GOAL_S: Final = 120.0
STEPS_GOAL: Final = 0.9
LOOK_S: Final = 0.25
WIRE: Final = Wire(bits_s=50e6, delay_s=0.02, loss=0.001, queue_s=0.1)
SETTINGS: Final = {"ATOLL_LEARNER__THROTTLE": "20", "ATOLL_PROTOCOL__INTERVAL_STEPS": "16"}


@dataclass(slots=True)
class Hosts:
    """The processes of a run on their hosts; whatever ends is started again until `over`."""

    there: Wan
    island: IslandProcess
    words: dict[str, tuple[str, ...]]
    over: threading.Event = field(default_factory=threading.Event)
    lives: dict[str, int] = field(default_factory=dict)

    def begin(self, name: str) -> None:
        """Start a process, with a log of its own for each life."""
        self.lives[name] = self.lives.get(name, 0) + 1
        with inside(self.there.namespaces[name]):
            self.island.start(self.log(name), *self.words[name])

    def log(self, name: str) -> str:
        return f"{name}-{self.lives[name]}"

    def keep(self) -> None:
        while not self.over.wait(LOOK_S):
            for name in self.words:
                if self.island.process(self.log(name)).poll() is not None:
                    self.begin(name)

    def steps(self, name: str) -> list[tuple[float, int]]:
        """Return (seconds of the wall clock, steps of that life) as a learner has told them, over all its lives."""
        logs = [f"{name}-{life}" for life in range(1, self.lives[name] + 1)]
        return [(_at_s(line), line["step"]) for log in logs for line in self.island.lines(log, "learner.progress")]


def _at_s(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()


@contextmanager
def running(there: Wan, folder: Path, corpus: Path) -> Iterator[tuple[Hosts, EmbeddedBroker]]:
    with inside(there.namespaces[HUB]):
        broker = EmbeddedBroker(folder / "nats", PORT, host=there.addresses[HUB]).start()
    island = IslandProcess(folder, broker.url, corpus)
    island.environment |= SETTINGS | {
        "ATOLL_ARCHIVE__URL": str(folder / "archive"),
        "ATOLL_ARCHIVE__EVERY_S": str(EVERY_S),
        "ATOLL_LEARNER__CHECKPOINT_DIR": str(folder / "checkpoints"),
    }
    words: dict[str, tuple[str, ...]] = {HUB: ("synchronizer",)}
    words |= {name: ("learner", "--id", name) for name in REGIONS}
    hosts = Hosts(there, island, words)
    keeper = threading.Thread(target=hosts.keep, daemon=True)
    try:
        for name in words:
            hosts.begin(name)
        keeper.start()
        yield hosts, broker
    finally:
        hosts.over.set()
        keeper.join()
        island.stop()
        broker.stop()


async def heads_with(url: str, run: str, learner: str) -> int:
    bus = await open_bus(url, run, name="bench")
    try:
        heads = [decode(Head, record.data) for record in await bus.get_records(Subjects(run).head("*"))]
    finally:
        await bus.close()
    return sum(learner in {each.learner for each in head.included} for head in heads)


def lose_disk(hosts: Hosts, broker: EmbeddedBroker) -> None:
    """Kill the hub, delete what the broker has stored, and start it anew; its synchronizer rebuilds the run."""
    broker.kill()
    hosts.words[HUB] = ("synchronizer", "--restore", hosts.island.environment["ATOLL_ARCHIVE__URL"])
    hosts.island.process(hosts.log(HUB)).kill()
    shutil.rmtree(broker.store_dir / "js")
    with inside(hosts.there.namespaces[HUB]):
        broker.restart()


@dataclass(frozen=True, slots=True)
class CutOutcome:
    """The outcome of a cut: seconds, a ratio of paces, commits, the run's settlement, and its rows of `atoll fates`."""

    rebuilt_s: float
    current_s: float
    counted_s: float
    pace: float
    commits: int
    settled: Settlement
    own: list[dict[str, Any]]


def play(hosts: Hosts, broker: EmbeddedBroker, cut_s: float) -> CutOutcome:
    """Cut a region off, lose the hub's disk, heal, and let the run end in good order."""
    island, there = hosts.island, hosts.there
    for region in REGIONS:
        wait_until(
            f"the first step of {region}", partial(island.lines, f"{region}-1", "learner.first_step"), DEADLINE_S
        )
    wait_until("a checkpoint of the run", lambda: island.lines(f"{HUB}-1", "archive.checkpointed"), DEADLINE_S)
    quiet_s = time.time()
    time.sleep(QUIET_S)
    there.cut(CUT)
    began_s = time.time()
    print(f"cut off: {CUT}", flush=True)
    time.sleep(cut_s / 3.0)
    lose_disk(hosts, broker)
    rebuilt_s = wait_until(
        "a commit of the rebuilt run", lambda: hosts.lives[HUB] > 1 and commits_of(hosts), DEADLINE_S
    )
    print(f"the hub is rebuilt, and commits after {rebuilt_s:.1f} s", flush=True)
    time.sleep(max(0.0, began_s + cut_s - time.time()))
    commits = commits_of(hosts)
    there.heal(CUT)
    healed_s = time.time()

    def adopted() -> bool:
        lines = [*island.lines(hosts.log(CUT), "fragment.adopted"), *island.lines(hosts.log(CUT), "learner.joined")]
        return any(_at_s(line) > healed_s for line in lines)

    def counted() -> bool:
        with inside(there.namespaces[HUB]):
            return bool(asyncio.run(heads_with(broker.url, island.run, CUT)))

    current_s = wait_until("a version", adopted, DEADLINE_S)
    counted_s = current_s + wait_until("a commit with its contribution", counted, DEADLINE_S)
    pace = steps_per_s(hosts.steps(CUT), began_s, healed_s) / steps_per_s(hosts.steps(CUT), quiet_s, began_s)
    hosts.over.set()
    for name in (*REGIONS, HUB):
        island.process(hosts.log(name)).terminate()
    for name in (*REGIONS, HUB):
        island.process(hosts.log(name)).wait(DEADLINE_S)
    with inside(there.namespaces[HUB]):
        settled, fates = asyncio.run(island.settlement()), json.loads(island.answer("fates", "--json"))
    own = [row for row in fates["incarnations"] if row["incarnation"].split("/")[0] == CUT]
    return CutOutcome(rebuilt_s, current_s, counted_s, pace, commits, settled, own)


def commits_of(hosts: Hosts) -> int:
    return len(hosts.island.lines(hosts.log(HUB), "round.committed"))


def figures_of(found: CutOutcome, minutes: float) -> list[Figure]:
    how = f"after the healing; cut off for {minutes:g} min, the hub's disk lost at a third of it and rebuilt from the archive"
    fates, own = json.dumps(dict(found.settled.fates)), json.dumps(found.own)
    others = "of the rebuilt run, before the healing"
    return [
        at_most("current again", found.current_s, "s", CURRENT_GOAL_S, how),
        fact("counted again", found.counted_s, "s", "a head holds a contribution of its"),
        at_least("pace of the cut learner", found.pace, "x", STEPS_GOAL, "steps a second beside those before"),
        fact("the hub commits again", found.rebuilt_s, "s", "from the loss of its disk"),
        above_zero("commits of the others", found.commits, "commits", others),
        true("fates exact", found.settled.exact, f"token-fragments of the rebuilt run: {fates}"),
        fact("lives of the cut learner", float(len(found.own)), "", own),
    ]


def steps_per_s(steps: list[tuple[float, int]], began_s: float, ended_s: float) -> float:
    """Return the steps a second between the first and the last word of a span; each life counts from one."""
    told = [(at_s, step) for at_s, step in steps if began_s <= at_s <= ended_s]
    pairs = [(later[0] - former[0], later[1] - former[1]) for former, later in itertools.pairwise(told)]
    whole = [(seconds, made) for seconds, made in pairs if made > 0]
    return sum(made for _, made in whole) / max(1e-9, sum(seconds for seconds, _ in whole))


def main(*, minutes: Annotated[float, "of the cut"] = MINUTES, seed: int = 0) -> list[Figure]:
    if reason := unfit():
        raise Unfit(reason)
    corpus = prepare()
    with (
        tempfile.TemporaryDirectory() as name,
        wan({HUB: None, **dict.fromkeys(REGIONS, WIRE)}, seed) as there,
        running(there, Path(name), corpus) as (hosts, broker),
    ):
        found = play(hosts, broker, 60.0 * minutes)
    return figures_of(found, minutes)


if __name__ == "__main__":
    run_benchmark("bench-cut", main)
