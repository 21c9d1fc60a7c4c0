"""What a run costs as it grows, and whether large fragments leave memory flat: `make bench-scale`.

One machine, real processes: an embedded nats-server, a process for each shard, the monitor, and hosts that hold many learners
each (`scale_host`), which train nothing but push and adopt as any learner does.

    crowds   8, 32 and 128 learners, 96 fragments of 4 kB, four shards; every round waits for all learners. *Busy* learners are
             8 with an interval so short that as many contributions come in a second as from 128
    rounds   two learners, 96 fragments, one shard: what a round costs when there is next to nothing to move
    large    three fragments of 500 MB, two learners, for MINUTES; large arrays lie in scratch files

Processor time is the kernel's, with children; memory is the proportional set size. *Per contribution* is the processor time of
a role over the contributions that entered a commit. A role is *full at* so many contributions per second that its busiest
process would use a whole core; the least saturates first. Memory is *flat* by what a process holds *at rest* in the second half
of a run over that of the first, after a warm-up: the most depends on how many large rounds meet by chance. *Without exactly one
fate* are token-fragments that no fate claims, or two.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import psutil

from atoll.bus.open import open_bus
from atoll.bus.server import EmbeddedBroker
from atoll.bus.streams import GIB
from atoll.local.run_store import close_run
from atoll.protocol.ledger import Ledger
from atoll.protocol.settings import ProtocolSettings
from atoll.run.history import History, RoundLine
from benchmarks.lib.harness import BenchmarkResult, Figure, at_most, fact, run_benchmark, zero
from benchmarks.lib.runs import cpu_s, read_history, start_program
from benchmarks.network.scale_host import HostRequest
from support.regions import free_port

SAMPLE_S: Final = 1.0
POLL_S: Final = 0.2
ANSWER_S: Final = 20.0
JOIN_S: Final = 300.0
END_S: Final = 600.0
ROLES: Final = ("broker", "shard", "monitor", "learners")


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A run to be played: its name, its learners over so many hosts, and what a host needs to know."""

    name: str
    learners: int
    hosts: int
    request: HostRequest
    spill_bytes: int = 1 << 30

    def requests(self, broker: str) -> list[HostRequest]:
        """Return what each host is asked for: learners are dealt out in turn."""
        names = [f"l-{number}" for number in range(self.learners)]
        return [
            msgspec.structs.replace(self.request, broker=broker, learners=names[number :: self.hosts])
            for number in range(self.hosts)
        ]


@dataclass(frozen=True, slots=True)
class FleetMoment:
    """A fleet's use until a moment: processor seconds of each process, and the broker's counts."""

    at_s: float
    cpu_s: Mapping[tuple[str, int], float]
    broker: Mapping[str, float]

    def role_s(self, former: FleetMoment, role: str) -> list[float]:
        """Return the processor seconds of each process of a role since a former moment."""
        return [spent - former.cpu_s.get(key, 0.0) for key, spent in self.cpu_s.items() if key[0] == role]


@dataclass(slots=True)
class FleetSamples:
    """Samples of a fleet, by moment since it began: memory of each process."""

    memory: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))

    def peaks(self, role: str) -> list[int]:
        return [max(size for _, size in found) for key, found in self.memory.items() if key[0] == role]

    def by_name(self) -> dict[str, list[tuple[float, int]]]:
        """Return the samples of memory of each process, by its role; several of a role are numbered."""
        named: dict[str, list[tuple[float, int]]] = {}
        for (role, _), found in sorted(self.memory.items()):
            several = sum(key[0] == role for key in self.memory) > 1
            number = 1 + sum(name.startswith(role) for name in named)
            named[f"{role} {number}" if several else role] = found
        return named

    def describe(self) -> str:
        sizes = ", ".join(f"{name} {found[-1][1] / 1e6:.0f}" for name, found in self.by_name().items())
        return f"MB: {sizes}"


class Fleet:
    """A run that is being played; `played` makes one."""

    def __init__(self, plan: FleetPlan, broker: EmbeddedBroker, web: int, folder: Path) -> None:
        self.plan, self.broker, self.folder = plan, broker, folder
        self._web = f"http://127.0.0.1:{web}"
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._began_s = time.monotonic()
        self._over = threading.Event()
        self.samples = FleetSamples()
        self._sampler = threading.Thread(target=self._keep_sampling, daemon=True)

    def start(self) -> None:
        place = {"ATOLL_RUN": self.plan.request.run, "ATOLL_BROKER__URL": self.broker.url}
        place |= {"ATOLL_SYNCHRONIZER__SPILL_BYTES": str(self.plan.spill_bytes), "ATOLL_LOG__FORMAT": "json"}
        for shard in range(self.plan.request.protocol.shards):
            self._spawn("shard", ["-m", "atoll.cli", "synchronizer", "--shard", str(shard)], **place)
        more = {"ATOLL_MONITOR__PORT": "0", "ATOLL_MONITOR__FOLDER": str(self.folder / "records")}
        self._spawn("monitor", ["-m", "atoll_monitor"], **place, **more)
        for request in self.plan.requests(self.broker.url):
            words = ["-m", "benchmarks.network.scale_host", msgspec.json.encode(request).decode()]
            self._spawn("learners", words)
        self._sampler.start()
        self._until(lambda: len(self._said("joined")) == self.plan.hosts, JOIN_S, "the learners did not join")
        self.say(f"{self.plan.learners} learners have joined")

    def say(self, text: str) -> None:
        print(f"{self.plan.name}: {text}", flush=True)

    def watch(self, for_s: float) -> None:
        """Let time pass, and say now and then how it goes; end the benchmark if a process ends."""
        until_s = time.monotonic() + for_s
        while (left_s := until_s - time.monotonic()) > 0.0:
            time.sleep(min(left_s, 15.0))
            self.check()
            self.say(f"{max(0.0, until_s - time.monotonic()):.0f} s left; {self.samples.describe()}")

    def lived_s(self) -> float:
        """Return how long the fleet has been there; samples are of such moments."""
        return time.monotonic() - self._began_s

    def check(self) -> None:
        self._until(lambda: True, 0.0, "")

    def moment(self) -> FleetMoment:
        spent = {}
        for role, process in self._all():
            with contextlib.suppress(psutil.Error):
                spent[role, process.pid] = cpu_s(process)
        counts = {name: float(value) for name, value in self._ask("varz").items() if name in _COUNTS}
        return FleetMoment(time.time(), spent, counts)

    def close(self) -> None:
        """Close the run: all learners leave, then all shards; returns when they have ended."""
        asyncio.run(_closing(self.broker.url, self.plan.request.run))
        for role in ("learners", "shard"):
            began_s = time.monotonic()
            ended = [process for kind, process in self._processes if kind == role]
            if role == "shard":
                for process in ended:
                    process.send_signal(signal.SIGTERM)  # in good order: all that is queued gets its fate
            self._until(
                lambda ended=ended: all(each.poll() is not None for each in ended),  # type: ignore[misc]
                END_S,
                f"{role} did not end",
                ending=True,
            )
            self.say(f"{role} ended, {time.monotonic() - began_s:.0f} s")

    def history(self) -> History:
        return asyncio.run(read_history(self.broker.url, self.plan.request.run))

    def end(self) -> None:
        self._over.set()
        if self._sampler.is_alive():
            self._sampler.join()
        for _, process in self._processes:
            process.kill()
            process.wait()

    def _spawn(self, role: str, words: list[str], **variables: str) -> None:
        log = self.folder / f"{len(self._processes)}.out"
        self._processes.append((role, start_program([sys.executable, *words], log, **variables)))

    def _said(self, what: str) -> list[str]:
        texts = [(self.folder / f"{n}.out").read_text(encoding="utf-8") for n in range(len(self._processes))]
        return [line for text in texts for line in text.splitlines() if line.startswith(f'{{"host": "{what}"')]

    def _until(self, true: Callable[[], bool], within_s: float, otherwise: str, *, ending: bool = False) -> None:
        """Wait; end the benchmark if a process dies, or if it takes too long."""
        until_s = time.monotonic() + within_s
        while True:
            for number, (role, process) in enumerate(self._processes):
                if process.poll() not in ((None, 0) if ending else (None,)):
                    said = [(self.folder / f"{number}.{end}").read_text(errors="replace") for end in ("out", "err")]
                    raise SystemExit(f"{role} left with {process.returncode}: {said[0][-2000:]}\n{said[1][-2000:]}")
            if true():
                return
            if time.monotonic() > until_s:
                raise SystemExit(f"{otherwise} within {within_s:.0f} s; see {self.folder}")
            time.sleep(POLL_S)

    def _all(self) -> list[tuple[str, psutil.Process]]:
        found = [("broker", psutil.Process(self.broker.pid))]
        for role, process in self._processes:
            with contextlib.suppress(psutil.Error):
                found.append((role, psutil.Process(process.pid)))
        return found

    def _keep_sampling(self) -> None:
        while not self._over.wait(SAMPLE_S):
            now_s = self.lived_s()
            with contextlib.suppress(psutil.Error):
                for role, process in self._all():
                    if size := pss_bytes(process.pid):
                        self.samples.memory[role, process.pid].append((now_s, size))

    def _ask(self, what: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._web}/{what}", timeout=ANSWER_S) as answer:  # noqa: S310  (ours)
            found: dict[str, Any] = json.load(answer)
        return found


_COUNTS: Final = ("in_msgs", "out_msgs", "in_bytes", "out_bytes", "slow_consumers")


@contextmanager
def running_fleet(plan: FleetPlan, folder: Path) -> Iterator[Fleet]:
    web, more = free_port(), folder / "more.conf"
    more.write_text(f'http: "127.0.0.1:{web}"\n', encoding="utf-8")
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker(folder / "broker", include=more))
        fleet = Fleet(plan, broker, web, folder)
        stack.callback(fleet.end)
        fleet.start()
        yield fleet


def pss_bytes(pid: int) -> int:
    """Return the memory of a process, shared pages in parts; 0 of one that has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


async def _closing(url: str, run: str) -> None:
    bus = await open_bus(url, run, name="closing")
    await close_run(bus, run)
    await bus.close()


RATIO_MAX: Final = 1.25
FLAT_MAX: Final = 1.05
WARM_SHARE: Final = 0.2
"""Of the time of a run: in this beginning, memory may grow."""
REST_SHARE: Final = 0.1
"""Of a process's samples so many are taken as below its memory at rest."""
ROUND_MS_MAX: Final = {"shard": 5.0, "learners": 3.0}
OWN_CORE: Final = ("broker", "shard", "monitor")
"""Of these a run has few, however many learners there are; a learner has a machine of its own."""


@dataclass(frozen=True, slots=True)
class CrowdUse:
    """A crowd's use in a measured time: `cpu_s` has the processor seconds of each process, by role."""

    name: str
    learners: int
    lasted_s: float
    commits: int
    contributions: int
    cpu_s: Mapping[str, Sequence[float]]
    memory: Mapping[str, Sequence[int]]
    broker: Mapping[str, float]

    def each_ms(self, role: str) -> float:
        """Return the processor time of a role per contribution, in milliseconds."""
        return 1e3 * sum(self.cpu_s.get(role, ())) / max(1, self.contributions)

    def busiest(self, role: str) -> float:
        """Return the share of a core that the busiest process of a role used."""
        return max(self.cpu_s.get(role, ()), default=0.0) / self.lasted_s

    def full_at(self, role: str) -> float:
        """Return the contributions per second at which the busiest process of a role would use a whole core."""
        return self.contributions / self.lasted_s / max(1e-9, self.busiest(role))

    def first_full(self) -> str:
        return min(OWN_CORE, key=self.full_at)


def crowd_figures(use: CrowdUse) -> list[Figure]:
    name, first = use.name, use.first_full()
    how = f"{use.contributions} contributions in {use.commits} commits in {use.lasted_s:.0f} s"
    made = fact(f"{name}: commits", use.commits / use.lasted_s, "1/s", how)
    figures = [made, fact(f"{name}: contributions", use.contributions / use.lasted_s, "1/s", how)]
    for role in use.cpu_s:
        spent = ", ".join(f"{seconds:.1f}" for seconds in use.cpu_s[role])
        told = f"{spent} s of its processes, in {use.lasted_s:.0f} s"
        figures.append(fact(f"{name}: {role}, processor time a contribution", use.each_ms(role), "ms", told))
        most = max(use.memory.get(role, ()), default=0)
        told = f"the largest of {len(use.memory.get(role, ()))}, proportional, joining and leaving included"
        figures.append(fact(f"{name}: {role}, memory", most / 1e6, "MB", told))
    for key, unit in (("in_msgs", "messages"), ("out_msgs", "messages"), ("in_bytes", "B"), ("out_bytes", "B")):
        way = f"{unit if unit != 'B' else 'bytes'} {'received' if key.startswith('in') else 'sent'}"
        each = use.broker.get(key, 0.0) / max(1, use.contributions)
        figures.append(fact(f"{name}: broker, {way} a contribution", each, unit, how))
    capacity = ", ".join(f"{role} {use.full_at(role):.0f}" for role in OWN_CORE if use.cpu_s.get(role))
    told = f"contributions a second that fill a core of the busiest process: {capacity}; {first} is first"
    figures.append(fact(f"{name}: first process to fill a core", use.full_at(first), "1/s", told))
    return figures


def growth_figures(small: CrowdUse, large: CrowdUse, most: float | None = RATIO_MAX) -> list[Figure]:
    """Return how much dearer a learner is in a large crowd than in a small one; at most `most` times, if that is a goal."""
    figures = []
    for role in ("broker", "shard"):
        here, there = small.each_ms(role), large.each_ms(role)
        ratio = there / max(here, 1e-9)
        how = f"processor time of a round: {there:.2f} ms a learner beside {here:.2f} ms"
        figures.append(at_most(f"{role}: one of {large.name} beside one of {small.name}", ratio, "ratio", most, how))
    return figures


def round_figures(use: CrowdUse) -> list[Figure]:
    figures = []
    for role, most_ms in ROUND_MS_MAX.items():
        processes = 1 if role == "shard" else use.learners
        each_ms = 1e3 * sum(use.cpu_s[role]) / processes / max(1, use.commits)
        how = f"{use.learners} learners, {use.commits} rounds in {use.lasted_s:.0f} s; heartbeats and steps included"
        name = f"a round of a tiny fragment: {'the shard' if role == 'shard' else 'a learner'}"
        figures.append(at_most(name, each_ms, "ms", most_ms, how))
    each_ms = 1e3 * sum(use.cpu_s["broker"]) / max(1, use.commits)
    figures.append(fact("a round of a tiny fragment: the broker", each_ms, "ms", "of the same rounds"))
    received = use.broker.get("in_msgs", 0.0) / max(1, use.commits)
    figures.append(fact("a round of a tiny fragment: requests", received, "messages", "that the broker received"))
    return figures


def flat_figures(
    memory: Mapping[str, Iterable[tuple[float, int]]], began_s: float, ended_s: float, warm_s: float
) -> list[Figure]:
    """Return whether memory stayed what it was, by process, and the most of each; samples are (moment, bytes).

    The warm-up lasts until `warm_s`, but at least for `WARM_SHARE` of the time.
    """
    warm_s = max(warm_s, began_s + WARM_SHARE * (ended_s - began_s))
    figures = []
    for name, samples in memory.items():
        first, second = halves(samples, warm_s, ended_s)
        before, after = at_rest(first), at_rest(second)
        ratio = after / max(1, before)
        how = f"at rest {after / 1e6:.0f} MB in the second half, {before / 1e6:.0f} MB in the first, after a warm-up"
        figures.append(at_most(f"large fragments: {name}, memory", ratio, "ratio", FLAT_MAX, how))
        how = f"in the second half; {max(first, default=0) / 1e6:.0f} MB in the first"
        most = max(second, default=0) / 1e6
        figures.append(fact(f"large fragments: {name}, most memory", most, "MB", how))
    return figures


def halves(samples: Iterable[tuple[float, int]], warm_s: float, ended_s: float) -> tuple[list[int], list[int]]:
    middle_s = (warm_s + ended_s) / 2.0
    kept = [(at_s, size) for at_s, size in samples if warm_s <= at_s <= ended_s]
    return [size for at_s, size in kept if at_s < middle_s], [size for at_s, size in kept if at_s >= middle_s]


def at_rest(sizes: Sequence[int]) -> int:
    """Return what a process holds between rounds: the tenth part of its samples is below that. 0 for no samples."""
    return sorted(sizes)[int(REST_SHARE * len(sizes))] if sizes else 0


def fate_figures(name: str, ledgers: Iterable[Ledger], rounds: Iterable[RoundLine], fragments: int) -> list[Figure]:
    """Return whether everything has exactly one fate, and whether anything was refused; `ledgers` are the shards' last ones."""
    whole = Ledger()
    for ledger in ledgers:
        whole.absorb(ledger)
    accounts = whole.accounts.values()
    unsettled = sum(abs(one.pushed - one.settled) + abs(one.fates(fragments)["lost"]) for one in accounts)
    pushes = Counter(
        (line.round.fragment, share.learner, share.incarnation, share.push)
        for line in rounds
        for share in line.round.contributors
    )
    twice = sum(count - 1 for count in pushes.values())
    reasons = sum((Counter(one.refused) + Counter(local=one.refused_local) for one in accounts), Counter[str]())
    late = sum(one.merged_late for one in accounts)
    settled = sum(one.settled for one in accounts)
    how = f"{settled} token-fragments settled for {len(whole.accounts)} learners, {late} of them late"
    return [
        zero(f"{name}: token-fragments without exactly one fate", unsettled, "token-fragments", how),
        zero(f"{name}: contributions merged twice", twice, "pushes", f"{len(pushes)} pushes in commits"),
        zero(f"{name}: refused", reasons.total(), "token-fragments", ", ".join(reasons) or how),
    ]


MINUTES: Final = 30.0
LEARNERS_MAX: Final = 128
CROWDS: Final = ((8, False), (8, True), (32, False), (LEARNERS_MAX, False))
"""How many learners, and whether they are busy."""
FRAGMENTS: Final = 96
ELEMENTS: Final = 1024
SHARDS: Final = 4
HOSTS: Final = 4
INTERVAL_STEPS: Final = 24
INTERVAL_S: Final = 192.0
"""Of 128 learners, this is 64 contributions a second."""
MEASURED_S: Final = 90.0
WARM_S: Final = 15.0
ROUNDS_S: Final = 8.0
"""The interval of the two learners: twelve rounds a second."""
LARGE_FRAGMENTS: Final = 3
LARGE_ELEMENTS: Final = 125_000_000
LARGE_INTERVAL_S: Final = 60.0
LARGE_SPILL_BYTES: Final = 64 << 20
LARGE_STEP_S: Final = 1.0
STREAM_BYTES: Final = 24 * GIB
PARTS: Final = ("crowds", "rounds", "large")


def main(
    *,
    minutes: Annotated[float, "of the large fragments; the rest shrinks with it"] = MINUTES,
    only: Annotated[str, "one part alone, for a look", PARTS] = "",
) -> BenchmarkResult:
    measured_s = MEASURED_S * min(1.0, max(0.4, 2.0 * minutes / MINUTES))
    figures = []
    if only in ("", "crowds"):
        figures += crowds(measured_s)
    if only in ("", "rounds"):
        figures += rounds(measured_s)
    if only in ("", "large"):
        figures += large(60.0 * minutes)
    return BenchmarkResult(figures, target=f"bench-scale-{only}" if only else "")


# -- the parts --------------------------------------------------------------------------------------------------------


def crowds(measured_s: float) -> list[Figure]:
    figures, uses = list[Figure](), list[CrowdUse]()
    for learners, busy in CROWDS:
        name = f"{learners} busy learners" if busy else f"{learners} learners"
        interval_s = learners * INTERVAL_S / LEARNERS_MAX if busy else INTERVAL_S
        plan = small_plan(name, learners, interval_s, shards=SHARDS, hosts=min(HOSTS, learners))
        use, fates = crowd(plan, measured_s)
        uses.append(use)
        figures += [*crowd_figures(use), *fates]
    few, busy_few, *_, many = uses
    return [*figures, *growth_figures(few, many), *growth_figures(busy_few, many, None)]


def rounds(measured_s: float) -> list[Figure]:
    plan = small_plan("2 learners", 2, ROUNDS_S, shards=1, hosts=2)
    use, fates = crowd(plan, measured_s)
    return [*round_figures(use), *fates]


def large(lasting_s: float) -> list[Figure]:
    """Return how memory goes while large fragments are merged."""
    interval_steps = max(2, int(LARGE_INTERVAL_S / LARGE_STEP_S))
    protocol = ProtocolSettings(fragments=LARGE_FRAGMENTS, shards=1, interval_steps=interval_steps, quorum=2).check()
    request = HostRequest(
        broker="",
        run="large",
        learners=[],
        elements=LARGE_ELEMENTS,
        step_s=LARGE_STEP_S,
        protocol=protocol,
        spill_bytes=LARGE_SPILL_BYTES,
        stream_bytes_max=STREAM_BYTES,
    )
    plan = FleetPlan("large fragments", learners=2, hosts=2, request=request, spill_bytes=LARGE_SPILL_BYTES)
    with tempfile.TemporaryDirectory() as folder, running_fleet(plan, Path(folder)) as fleet:
        began_s = fleet.lived_s()
        fleet.watch(lasting_s)
        ended_s, ended_at_s = fleet.lived_s(), time.time()
        fleet.close()
        history, memory = fleet.history(), fleet.samples.by_name()
        # What a process keeps of a fragment it has after the first commit of it.
        firsts = [line.at_s for line in history.rounds if line.round.version == 1]
        warm_s = ended_s - (ended_at_s - max(firsts, default=ended_at_s))
    commits = [line for line in history.rounds if line.round.version > 0]
    how = (
        f"{LARGE_FRAGMENTS} fragments of {4 * LARGE_ELEMENTS / 1e6:.0f} MB, 2 learners, {lasting_s / 60.0:.0f} minutes"
    )
    took = sorted(line.round.merge_s + line.round.commit_s for line in commits)
    figures = [
        fact("large fragments: commits", float(len(commits)), "commits", how),
        fact("large fragments: merging and storing", took[len(took) // 2], "s", "median of a commit"),
        *flat_figures(memory, began_s, ended_s, warm_s),
    ]
    return figures + fate_figures(
        "large fragments", (each.ledger for each in history.ledgers.values()), history.rounds, LARGE_FRAGMENTS
    )


# -- what they share --------------------------------------------------------------------------------------------------


def small_plan(name: str, learners: int, interval_s: float, *, shards: int, hosts: int) -> FleetPlan:
    """Return a run of many tiny fragments, of which each is called once per interval."""
    protocol = ProtocolSettings(fragments=FRAGMENTS, shards=shards, interval_steps=INTERVAL_STEPS, quorum=learners)
    step_s = interval_s / INTERVAL_STEPS
    request = HostRequest("", "scale", [], elements=ELEMENTS, step_s=step_s, protocol=protocol.check())
    return FleetPlan(name, learners=learners, hosts=hosts, request=request)


def crowd(plan: FleetPlan, measured_s: float) -> tuple[CrowdUse, list[Figure]]:
    """Play a run of small fragments; return what it used in the measured time, and figures of its fates."""
    with tempfile.TemporaryDirectory() as folder, running_fleet(plan, Path(folder)) as fleet:
        fleet.watch(WARM_S)
        before = fleet.moment()
        fleet.watch(measured_s)
        after = fleet.moment()
        fleet.close()
        history, samples = fleet.history(), fleet.samples
    made = [line for line in history.rounds if before.at_s <= line.at_s < after.at_s]
    use = CrowdUse(
        name=plan.name,
        learners=plan.learners,
        lasted_s=after.at_s - before.at_s,
        commits=len(made),
        contributions=sum(len(line.round.contributors) for line in made),
        cpu_s={role: after.role_s(before, role) for role in ROLES},
        memory={role: samples.peaks(role) for role in ROLES},
        broker=broker_counts(before, after),
    )
    fleet.say(f"{use.commits} commits of {use.contributions} contributions in {use.lasted_s:.0f} s")
    fragments = plan.request.protocol.fragments
    return use, fate_figures(plan.name, (each.ledger for each in history.ledgers.values()), history.rounds, fragments)


def broker_counts(before: FleetMoment, after: FleetMoment) -> dict[str, float]:
    return {name: after.broker[name] - former for name, former in before.broker.items()}


if __name__ == "__main__":
    run_benchmark("bench-scale", main)
