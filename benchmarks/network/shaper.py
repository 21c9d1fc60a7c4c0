r"""A link with a rate, a delay and losses between two network namespaces, shaped in user space, under the kernel's own TCP.

    near namespace                    this process                      far namespace
    10.77.0.1 ── near TUN device ──►  queue, rate, loss, delay  ──►  far TUN device ── 10.77.0.2
                                  ◄──  the same, the other way   ◄──

A TUN device hands every IP packet that is routed into it to whoever holds it open, and takes packets from there as if
they had come in. So segments, acknowledgements, retransmissions and congestion control are the kernel's, and only the
wire between is ours. Each direction is a virtual clock: a packet is sent when those before it are, as long as its bytes take,

.. math::

    free \leftarrow \max(now, free) + bytes / rate, \qquad due = free + delay

and is dropped if what waits before it is longer than the queue (tail drop), or by chance after it was sent: then it has used
the link for nothing. The chance has a seed, the order of packets has not: two runs lose other packets.

Needs Linux, root and /dev/net/tun (`unfit` says what is missing). Nothing outside the two namespaces changes, and they end with
the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NEAR, FAR = "10.77.0.1", "10.77.0.2"
MTU = 1500
_TUN = Path("/dev/net/tun")
_NEW_NET = 0x40000000
_SET_INTERFACE = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_READS_AT_ONCE = 64
_WAIT_S = 0.05
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclass(frozen=True, slots=True)
class Wire:
    """What a link is like, each way: bits a second, seconds one way, share of packets lost, seconds of queue at most."""

    bits_s: float = 100e6
    delay_s: float = 0.025
    loss: float = 0.01
    queue_s: float = 0.05

    @property
    def bytes_s(self) -> float:
        """Return what passes in a second, IP headers included."""
        return self.bits_s / 8.0


@dataclass(slots=True)
class Carried:
    """What one direction has done: bytes that used the link, packets, those lost by chance and those for want of room."""

    sent_bytes: int = 0
    packets: int = 0
    lost: int = 0
    dropped: int = 0


class ShapedWay:
    """One direction."""

    def __init__(self, wire: Wire, seed: int) -> None:
        """Begin empty."""
        self._wire = wire
        self._dice = random.Random(seed)  # noqa: S311  # losses, not secrets
        self._free_s = 0.0
        self._flying: deque[tuple[float, bytes]] = deque()
        self.carried = Carried()

    def take(self, packet: bytes, now_s: float) -> None:
        """Queue a packet, or drop it."""
        if self._free_s - now_s > self._wire.queue_s:
            self.carried.dropped += 1
            return
        self._free_s = max(now_s, self._free_s) + len(packet) / self._wire.bytes_s
        self.carried.sent_bytes += len(packet)
        self.carried.packets += 1
        if self._dice.random() < self._wire.loss:
            self.carried.lost += 1
        else:
            self._flying.append((self._free_s + self._wire.delay_s, packet))

    def due(self, now_s: float) -> Iterator[bytes]:
        """Yield the packets that have arrived."""
        while self._flying and self._flying[0][0] <= now_s:
            yield self._flying.popleft()[1]

    @property
    def next_s(self) -> float:
        """Return when the next packet arrives."""
        return self._flying[0][0] if self._flying else float("inf")


def unfit() -> str:
    """Return why this machine cannot shape a link; empty where it can."""
    if sys.platform != "linux":
        return "network namespaces and TUN devices are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if not _TUN.exists():
        return f"{_TUN} is not there"
    try:
        probe = multiprocessing.get_context("spawn").Process(target=_namespace, args=("probe", NEAR))
        probe.start()
        probe.join()
    except OSError as error:
        return str(error)
    return "" if probe.exitcode == 0 else "a namespace with a TUN device cannot be made here"


@dataclass(slots=True)
class ShapedLink:
    """A link that is up: where its ends are, and how to ask what it has carried."""

    near: str
    far: str
    _wire: Connection

    def carried(self) -> tuple[Carried, Carried]:
        """Return what went from near to far, and from far to near."""
        self._wire.send("carried")
        answer: tuple[Carried, Carried] = self._wire.recv()
        return answer


@contextmanager
def link(wire: Wire, seed: int, core: int | None = None) -> Iterator[ShapedLink]:
    """Yield a link, shaped by a process of its own, on one core if told so."""
    ours, theirs = multiprocessing.Pipe()
    shaper = multiprocessing.get_context("spawn").Process(target=_shape, args=(wire, seed, core, theirs), daemon=True)
    shaper.start()
    theirs.close()
    near, far = ours.recv()
    try:
        yield ShapedLink(f"/proc/{shaper.pid}/fd/{near}", f"/proc/{shaper.pid}/fd/{far}", ours)
    finally:
        ours.close()
        shaper.join(5.0)
        shaper.kill()


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Be in a namespace for a while, with this thread and what it starts meanwhile."""
    with Path("/proc/thread-self/ns/net").open() as before:
        enter(namespace)
        try:
            yield
        finally:
            _called("setns", before.fileno(), _NEW_NET)


def enter(namespace: str) -> None:
    """Go to a namespace for good, with this thread and those that it starts from now on."""
    with Path(namespace).open() as there:
        _called("setns", there.fileno(), _NEW_NET)


def set_congestion(namespaces: tuple[str, ...], name: str) -> None:
    """Have new connections of namespaces use a congestion control; raises `OSError` where the kernel has none of the name."""
    for namespace in namespaces:
        with inside(namespace):
            _CONGESTION.write_text(name)


def congestion_controls() -> list[str]:
    """Return those that the kernel has."""
    return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()


def _called(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _namespace(device: str, address: str) -> tuple[int, int]:
    """Make a namespace with a TUN device, stay in it, and return the device and the namespace as file descriptors."""
    import fcntl  # noqa: PLC0415  (where there are no TUN devices there need not be one)

    _called("unshare", _NEW_NET)
    tun = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _SET_INTERFACE, struct.pack("16sH", device.encode(), _TUN_WITHOUT_HEADER))
    for command in (
        "link set lo up",
        f"link set {device} mtu {MTU} txqueuelen 1000 up",
        f"address add {address}/24 dev {device}",
    ):
        subprocess.run(["ip", *command.split()], check=True)  # noqa: S607
    return tun, os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _shape(wire: Wire, seed: int, core: int | None, orders: Connection) -> None:
    """Be the shaper until the other end of `orders` is closed."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    near, near_space = _namespace("near", NEAR)
    far, far_space = _namespace("far", FAR)
    orders.send((near_space, far_space))
    up, down = ShapedWay(wire, 2 * seed), ShapedWay(wire, 2 * seed + 1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            now_s = time.monotonic()
            wait_s = min(_WAIT_S, max(0.0, min(up.next_s, down.next_s) - now_s))
            sources: list[Any] = [near, far, orders]
            ready = select.select(sources, [], [], wait_s)[0]
            now_s = time.monotonic()
            for source, way in ((near, up), (far, down)):
                if source in ready:
                    _drain(source, way, now_s)
            for target, way in ((far, up), (near, down)):
                for packet in way.due(now_s):
                    os.write(target, packet)
            if orders in ready:
                orders.recv()
                orders.send((up.carried, down.carried))


def _drain(source: int, way: ShapedWay, now_s: float) -> None:
    """Take the packets that wait in a device."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(_READS_AT_ONCE):
            way.take(os.read(source, MTU), now_s)
