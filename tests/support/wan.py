r"""Hosts in network namespaces and links between them: a rate, a delay, losses; shaped in user space, under the kernel's TCP.

    namespace "hub"                this process: one wire for each host          namespace "eu"
    10.77.0.1 ── TUN device ──►  up: queue, rate, loss, delay  ──►  the same, down  ──►  TUN device ── 10.77.0.2

A TUN device hands every IP packet that is routed into it to whoever holds it open, and takes packets from there as if
they had come in. So segments, acknowledgements, retransmissions and congestion control are the kernel's, and only the
wires are ours. A packet goes up the wire of its sender and down that of its receiver; a host without a wire is reached at
once. Each way of a wire is a virtual clock: a packet is sent when those before it are, as long as its bytes take,

.. math::

    free \leftarrow \max(now, free) + bytes / rate, \qquad due = free + delay

and is dropped if what waits before it is longer than the queue (tail drop), or by chance after it was sent: then it has used
the wire for nothing. The chance has a seed, the order of packets has not: two runs lose other packets. A wire can be cut and
healed; what is sent meanwhile is lost.

Needs Linux, root and /dev/net/tun (`unfit` says what is missing). Nothing outside the namespaces changes, and they end with the
process.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NETWORK = "10.77.0"
HOSTS_MAX = 16
MTU = 1500
DEVICE = "wan0"
_TUN = Path("/dev/net/tun")
_NEW_NET = 0x40000000
_SET_INTERFACE = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_READS_AT_ONCE = 64
_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class Wire:
    """What a wire is like, each way: bits a second, seconds one way, share of packets lost, seconds of queue at most."""

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
    """What one way has done: bytes that used the wire, packets, those lost by chance and those for want of room."""

    sent_bytes: int = 0
    packets: int = 0
    lost: int = 0
    dropped: int = 0


class ShapedWay:
    """One way of a wire; without a wire everything passes at once, and is counted."""

    def __init__(self, wire: Wire | None, seed: int) -> None:
        self._wire = wire
        self._dice = random.Random(seed)  # losses, not secrets
        self._free_s = 0.0
        self._flying: deque[tuple[float, bytes]] = deque()
        self.carried = Carried()
        self.cut = False

    def take(self, packet: bytes, now_s: float) -> None:
        wire = self._wire
        if self.cut or (wire is not None and self._free_s - now_s > wire.queue_s):
            self.carried.dropped += 1
            return
        self.carried.sent_bytes += len(packet)
        self.carried.packets += 1
        if wire is None:
            self._flying.append((now_s, packet))
            return
        self._free_s = max(now_s, self._free_s) + len(packet) / wire.bytes_s
        if self._dice.random() < wire.loss:
            self.carried.lost += 1
        else:
            self._flying.append((self._free_s + wire.delay_s, packet))

    def due(self, now_s: float) -> Iterator[bytes]:
        while self._flying and self._flying[0][0] <= now_s:
            yield self._flying.popleft()[1]

    @property
    def next_s(self) -> float:
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
        probe = multiprocessing.get_context("spawn").Process(target=_namespace, args=(_address(0),))
        probe.start()
        probe.join()
    except OSError as error:
        return str(error)
    return "" if probe.exitcode == 0 else "a namespace with a TUN device cannot be made here"


class Wan:
    """Hosts that are up."""

    def __init__(self, hosts: Mapping[str, Wire | None], namespaces: Mapping[str, str], orders: Connection) -> None:
        self.namespaces = dict(namespaces)
        self.addresses = {name: _address(number) for number, name in enumerate(hosts)}
        self._orders = orders

    def carried(self, host: str) -> tuple[Carried, Carried]:
        """Return what the wire of a host has carried up and down."""
        answer: tuple[Carried, Carried] = self._ordered("carried", host)
        return answer

    def cut(self, host: str) -> None:
        """Lose everything that a host sends or is sent, until `heal`."""
        self._ordered("cut", host)

    def heal(self, host: str) -> None:
        """Have the wire of a host carry again."""
        self._ordered("heal", host)

    def _ordered(self, order: str, host: str) -> Any:  # noqa: ANN401
        self._orders.send((order, host))
        return self._orders.recv()


@contextmanager
def wan(hosts: Mapping[str, Wire | None], seed: int) -> Iterator[Wan]:
    """Yield hosts, each behind its wire or, without one, in the middle; a process of its own shapes."""
    if len(hosts) > HOSTS_MAX:
        raise ValueError(f"at most {HOSTS_MAX} hosts")
    ours, theirs = multiprocessing.Pipe()
    arguments = (dict(hosts), seed, theirs)
    shaper = multiprocessing.get_context("spawn").Process(target=_shape, args=arguments, daemon=True)
    shaper.start()
    theirs.close()
    spaces = ours.recv()
    try:
        yield Wan(hosts, {name: f"/proc/{shaper.pid}/fd/{space}" for name, space in spaces.items()}, ours)
    finally:
        ours.close()
        shaper.join(5.0)
        shaper.kill()


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Be in a namespace for a while, with this thread and what it starts meanwhile."""
    with Path("/proc/thread-self/ns/net").open() as before:
        with Path(namespace).open() as there:
            _called("setns", there.fileno(), _NEW_NET)
        try:
            yield
        finally:
            _called("setns", before.fileno(), _NEW_NET)


def _called(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _address(number: int) -> str:
    return f"{NETWORK}.{number + 1}"


def _namespace(address: str) -> tuple[int, int]:
    """Make a namespace with a TUN device, stay in it, and return the device and the namespace as file descriptors."""
    import fcntl  # noqa: PLC0415  (where there are no TUN devices there need not be one)

    _called("unshare", _NEW_NET)
    tun = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _SET_INTERFACE, struct.pack("16sH", DEVICE.encode(), _TUN_WITHOUT_HEADER))
    for command in (
        "link set lo up",
        f"link set {DEVICE} mtu {MTU} txqueuelen 1000 up",
        f"address add {address}/24 dev {DEVICE}",
    ):
        subprocess.run(["ip", *command.split()], check=True)  # noqa: S607
    return tun, os.open("/proc/thread-self/ns/net", os.O_RDONLY)


class _Shaper:
    """The hosts' devices and wires, in the process that shapes them."""

    def __init__(self, hosts: Mapping[str, Wire | None], seed: int) -> None:
        self.names = list(hosts)
        made = [_namespace(_address(number)) for number in range(len(hosts))]
        self.devices = [device for device, _ in made]
        self.spaces = {name: space for name, (_, space) in zip(hosts, made, strict=True)}
        self.up = [ShapedWay(wire, 2 * (seed + number)) for number, wire in enumerate(hosts.values())]
        self.down = [ShapedWay(wire, 2 * (seed + number) + 1) for number, wire in enumerate(hosts.values())]

    @property
    def next_s(self) -> float:
        """Return when the next packet arrives somewhere."""
        return min(way.next_s for way in (*self.up, *self.down))

    def drain(self, number: int, now_s: float) -> None:
        """Take the packets that wait in a device."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_READS_AT_ONCE):
                self.up[number].take(os.read(self.devices[number], MTU), now_s)

    def forward(self, now_s: float) -> None:
        """Hand on what has come through a wire."""
        for way in self.up:
            for packet in way.due(now_s):
                # An IPv4 packet has its receiver in bytes 16 to 19; other traffic (router solicitations) goes nowhere.
                receiver = packet[19] - 1 if len(packet) >= 20 and packet[0] >> 4 == 4 else -1
                if 0 <= receiver < len(self.down):
                    self.down[receiver].take(packet, now_s)
        for device, way in zip(self.devices, self.down, strict=True):
            for packet in way.due(now_s):
                with contextlib.suppress(BlockingIOError):
                    os.write(device, packet)

    def answer(self, order: str, host: str) -> tuple[Carried, Carried]:
        """Carry out an order about a host's wire."""
        number = self.names.index(host)
        ways = self.up[number], self.down[number]
        if order != "carried":
            for way in ways:
                way.cut = order == "cut"
        return ways[0].carried, ways[1].carried


def _shape(hosts: Mapping[str, Wire | None], seed: int, orders: Connection) -> None:
    """Be the shaper until the other end of `orders` is closed."""
    shaper = _Shaper(hosts, seed)
    orders.send(shaper.spaces)
    sources: list[Any] = [*shaper.devices, orders]
    with contextlib.suppress(EOFError, OSError):
        while True:
            wait_s = min(_WAIT_S, max(0.0, shaper.next_s - time.monotonic()))
            ready = select.select(sources, [], [], wait_s)[0]
            now_s = time.monotonic()
            for number, device in enumerate(shaper.devices):
                if device in ready:
                    shaper.drain(number, now_s)
            shaper.forward(now_s)
            if orders in ready:
                orders.send(shaper.answer(*orders.recv()))
