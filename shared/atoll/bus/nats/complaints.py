"""What nats-py complains of, said once.

A bus has several connections to one broker, and whatever happens to the broker happens to all of them. So a complaint is logged
by the first connection that has it, and not again until one of them is connected. A socket that ended is no complaint of its
own: the line `bus.disconnected` says it.
"""

from __future__ import annotations

from typing import Self

import nats.errors

from atoll.base import logs

_log = logs.get(__name__)


class Complaints:
    """The complaints of one connection since it was connected last; `text` has them all."""

    def __init__(self, bus: str, of_trunk: Self | None = None) -> None:
        """Begin with none; branches of a connection know what their trunk has said."""
        self._bus = bus
        self.said: set[str] = set() if of_trunk is None else of_trunk.said
        self.text = ""

    def note(self, error: Exception) -> None:
        """Keep a complaint, and log it if nobody has."""
        said = f"{type(error).__name__}: {error}".strip()
        if said in self.text:
            return
        self.text = f"{self.text}; {said}".removeprefix("; ")
        if said not in self.said and not isinstance(error, nats.errors.UnexpectedEOF):
            self.said.add(said)
            _log.warning("bus.error", bus=self._bus, error=said)

    def forget(self) -> None:
        """Begin anew: the connection stands."""
        self.text = ""
        self.said.clear()
