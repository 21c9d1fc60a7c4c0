"""A whole run as processes of this machine, and what each kind of them uses: broker, shards, monitor, hosts of dummy learners.

The broker is an embedded nats-server with its store on disk, asked over its own HTTP port for messages, bytes and the
age of what waits in the work queue of contributions. Shards are `atoll synchronizer --shard N`, the monitor is `atoll
monitor` with its journal. Processor time is the kernel's, of each process with its children. Memory is the kernel's
proportional set size: a page that several processes share counts in parts, and pages of scratch files count while
they are mapped in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from atoll.bus.open import open_bus
from atoll.bus.server import EmbeddedBroker
from atoll.local.run_settings import without_settings
from atoll.local.run_store import close_run
from atoll.run.history import History
from atoll.wire.subjects import Subjects
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

    learners: int
    hosts: int
    request: HostRequest
    monitored: bool = True
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
    """What a fleet had used by a moment: processor seconds of each process, and the broker's counts."""

    at_s: float
    cpu_s: Mapping[tuple[str, int], float]
    broker: Mapping[str, float]

    def role_s(self, former: FleetMoment, role: str) -> list[float]:
        """Return the processor seconds of each process of a role since a former moment."""
        return [spent - former.cpu_s.get(key, 0.0) for key, spent in self.cpu_s.items() if key[0] == role]


@dataclass(slots=True)
class FleetSamples:
    """Samples of a fleet, by moment since it began: memory of each process, the work queue's length and age."""

    memory: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    waiting: list[tuple[float, int, float]] = field(default_factory=list)

    def peaks(self, role: str) -> list[int]:
        """Return the most memory of each process of a role, in bytes."""
        return [max(size for _, size in found) for key, found in self.memory.items() if key[0] == role]

    def by_name(self) -> dict[str, list[tuple[float, int]]]:
        """Return the samples of memory of each process, by its role; several of a role are numbered."""
        named: dict[str, list[tuple[float, int]]] = {}
        for (role, _), found in sorted(self.memory.items()):
            several = sum(key[0] == role for key in self.memory) > 1
            number = 1 + sum(name.startswith(role) for name in named)
            named[f"{role} {number}" if several else role] = found
        return named

    def told(self) -> str:
        sizes = ", ".join(f"{name} {found[-1][1] / 1e6:.0f}" for name, found in self.by_name().items())
        queue, oldest_s = self.waiting[-1][1:] if self.waiting else (0, 0.0)
        return f"MB: {sizes}; {queue} in the queue, the oldest for {oldest_s:.1f} s"


class Fleet:
    """A run that is being played; `played` makes one."""

    def __init__(self, plan: FleetPlan, broker: EmbeddedBroker, web: int, folder: Path) -> None:
        """Know the broker; `start` adds the rest."""
        self.plan, self.broker, self.folder = plan, broker, folder
        self._web = f"http://127.0.0.1:{web}"
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._began_s = time.monotonic()
        self._over = threading.Event()
        self.samples = FleetSamples()
        self._sampler = threading.Thread(target=self._keep_sampling, daemon=True)

    def start(self, say: Callable[[str], None]) -> None:
        """Start all processes, and return when every learner has joined."""
        place = {"ATOLL_RUN": self.plan.request.run, "ATOLL_BROKER__URL": self.broker.url}
        place |= {"ATOLL_SYNCHRONIZER__SPILL_BYTES": str(self.plan.spill_bytes), "ATOLL_LOG__FORMAT": "json"}
        for shard in range(self.plan.request.protocol.shards):
            self._spawn("shard", ["-m", "atoll.cli", "synchronizer", "--shard", str(shard)], **place)
        if self.plan.monitored:
            more = {"ATOLL_MONITOR__PORT": "0", "ATOLL_MONITOR__FOLDER": str(self.folder / "records")}
            self._spawn("monitor", ["-m", "atoll_monitor"], **place, **more)
        for request in self.plan.requests(self.broker.url):
            words = ["-m", "benchmarks.network.scale_host", msgspec.json.encode(request).decode()]
            self._spawn("learners", words)
        self._sampler.start()
        self._until(lambda: len(self._told("joined")) == self.plan.hosts, JOIN_S, "the learners did not join")
        say(f"{self.plan.learners} learners have joined")

    def lived_s(self) -> float:
        """Return how long the fleet has been there; samples are of such moments."""
        return time.monotonic() - self._began_s

    def check(self) -> None:
        self._until(lambda: True, 0.0, "")

    def moment(self) -> FleetMoment:
        spent = {}
        for role, process in self._all():
            with contextlib.suppress(psutil.Error):
                family = (process, *process.children(recursive=True))
                spent[role, process.pid] = sum(sum(each.cpu_times()[:2]) for each in family)
        counts = {name: float(value) for name, value in self._ask("varz").items() if name in _COUNTS}
        return FleetMoment(time.time(), spent, counts)

    def close(self, say: Callable[[str], None]) -> None:
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
            say(f"{role} ended, {time.monotonic() - began_s:.0f} s")

    def history(self) -> History:
        return asyncio.run(_read(self.broker.url, self.plan.request.run))

    def end(self) -> None:
        self._over.set()
        if self._sampler.is_alive():
            self._sampler.join()
        for _, process in self._processes:
            process.kill()
            process.wait()

    def _spawn(self, role: str, words: list[str], **variables: str) -> None:
        number = len(self._processes)
        with (self.folder / f"{number}.out").open("wb") as out, (self.folder / f"{number}.err").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, *words],
                env={**without_settings(os.environ), **variables},
                stdout=out,
                stderr=errors,
            )
        self._processes.append((role, process))

    def _told(self, what: str) -> list[str]:
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
            with contextlib.suppress(OSError, LookupError, ValueError):
                self.samples.waiting.append((now_s, *queue_of(self._ask("jsz?streams=true"), time.time())))

    def _ask(self, what: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._web}/{what}", timeout=ANSWER_S) as answer:  # noqa: S310  (ours)
            found: dict[str, Any] = json.load(answer)
        return found


_COUNTS: Final = ("in_msgs", "out_msgs", "in_bytes", "out_bytes", "slow_consumers")


@contextmanager
def played(plan: FleetPlan, folder: Path, say: Callable[[str], None]) -> Iterator[Fleet]:
    web, more = free_port(), folder / "more.conf"
    more.write_text(f'http: "127.0.0.1:{web}"\n', encoding="utf-8")
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker(folder / "broker", include=more))
        fleet = Fleet(plan, broker, web, folder)
        stack.callback(fleet.end)
        fleet.start(say)
        yield fleet


def pss_bytes(pid: int) -> int:
    """Return the memory of a process, shared pages in parts; 0 of one that has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


def queue_of(told: Mapping[str, Any], now_s: float) -> tuple[int, float]:
    """Return how many messages wait in the work queue of contributions, and how long the oldest does, from `jsz`."""
    streams = [stream for account in told.get("account_details", []) for stream in account.get("stream_detail", [])]
    state = next((stream["state"] for stream in streams if stream["name"].endswith("_UPM")), None)
    if state is None or not state["messages"]:
        return 0, 0.0
    first = state["first_ts"].rstrip("Z")[:26]
    began_s = datetime.fromisoformat(first).replace(tzinfo=UTC).timestamp()
    return int(state["messages"]), max(0.0, now_s - began_s)


async def _closing(url: str, run: str) -> None:
    bus = await open_bus(url, run, name="closing")
    await close_run(bus, run)
    await bus.close()


async def _read(url: str, run: str) -> History:
    bus = await open_bus(url, run, name="reader")
    history = History()
    await history.read(bus, Subjects(run))
    await bus.close()
    return history
