"""The identity of a process: the names that messages show to people, and the nonces that tell it from every other process.

Only this module asks the operating system for either; everything else gets an `Identity`, as it gets a clock. A simulator
hands out its own identities, so that the seed decides every byte.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass


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
