"""What a process has from its machine: clocks, and an identity (names for people, and nonces that no other process draws).

Only this module asks the operating system for either; everything else gets a `Clock` and an `Identity`. A simulator hands out
its own, so that the seed decides every byte.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol


class Clock(Protocol):
    """Two readings, both in seconds."""

    def monotonic(self) -> float:
        """Return a time that never goes back; its zero means nothing."""

    def wall(self) -> float:
        """Return seconds since the Unix epoch."""


class SystemClock:
    """The machine's own clocks."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


def unix_s(text: str) -> float | None:
    """Return a date of RFC 3339, as a broker writes them, in seconds since the Unix epoch; None for another text."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Identity:
    """A process: `name` among its peers, `host` and `pid` for people; `nonce(n)` draws n bytes as hex, never the same twice."""

    name: str
    host: str
    pid: int
    nonce: Callable[[int], str]


def this_process() -> Identity:
    """Return the identity of the running process under a fresh name."""
    return Identity(secrets.token_hex(6), socket.gethostname(), os.getpid(), secrets.token_hex)
