"""What a driver does with the bus, as generators: requests with bounded retries, records that are read back, patience.

The same rules as the JetStream adapter: a request without an answer is sent again until `TOTAL_S` have passed; after a
compare-and-set that was refused or not answered the writer reads back, and only a foreign value is a conflict.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from atoll.sim.dst.broker import Broker, Full, Record, WrongRevision
from atoll.sim.dst.network import Network, Unanswered
from atoll.sim.dst.process import Process, Task, Wish, Work

TOTAL_S = 5.0
RETRY_S = 0.2
RETRY_S_MAX = 2.0


class Unavailable(Exception):
    """The broker is away."""


class Conflict(Exception):
    """Somebody else wrote first: this candidate is not the owner."""


class Ask:
    """One request, sent once: a wish for its answer."""

    __slots__ = ("_arguments", "_call", "_network")

    def __init__(self, network: Network, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        """Wish for `call(*arguments)` to happen at the broker."""
        self._network = network
        self._call = call
        self._arguments = arguments

    def arrange(self, task: Task, turn: int) -> None:
        """Send it."""
        self._network.ask(task, turn, self._call, self._arguments)


class Line:
    """One process's connection to the broker."""

    def __init__(self, process: Process, network: Network, broker: Broker) -> None:
        """Be connected."""
        self.process = process
        self.network = network
        self.broker = broker
        self._nonces = 0

    def ask(self, call: Callable[..., object], *arguments: Any) -> Work:  # noqa: ANN401  (passed on)
        """Return the broker's answer; raise what it refused with, or `Unavailable`."""
        began_s = self.process.clock.now_s
        while True:
            try:
                return (yield Ask(self.network, call, arguments))
            except Unanswered:
                if self.process.clock.now_s - began_s > TOTAL_S:
                    raise Unavailable from None
                yield RETRY_S

    def put_record(self, name: str, value: object, expected: int) -> Work:
        """Write a record by compare-and-set and return its revision; raise `Conflict`."""
        self._nonces += 1
        nonce = f"{self.process.name}#{self._nonces}"
        began_s = self.process.clock.now_s
        while True:
            refused = False
            try:
                return (yield Ask(self.network, self.broker.put, (name, value, expected, nonce)))
            except WrongRevision:
                refused = True
            except Unanswered:
                pass
            there: Record = yield from self.ask(self.broker.get, name)
            if there.nonce == nonce:
                self.network.tally["lost writes found"] += 1
                return there.revision
            if refused or there.revision != expected:
                raise Conflict(name)
            if self.process.clock.now_s - began_s > TOTAL_S:
                raise Unavailable
            yield RETRY_S

    def tell(self, subject: str, body: object) -> None:
        """CoreMessage."""
        self.network.up(self.process, self.broker.tell, subject, body)


def patiently(attempt: Callable[..., Work], *arguments: Any) -> Generator[float | Wish, Any, Any]:  # noqa: ANN401
    """Return what `attempt(*arguments)` returns; while the broker is away or full, wait and try again."""
    pause_s = RETRY_S
    while True:
        try:
            return (yield from attempt(*arguments))
        except (Unavailable, Full):
            yield pause_s
            pause_s = min(2.0 * pause_s, RETRY_S_MAX)
