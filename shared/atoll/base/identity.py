"""Who a process is: what messages show of it to people, and the nonces that tell it from every other.

The only place that asks the operating system for either; everything else is handed an `Identity`, as it is handed a
clock. A simulator hands out identities of its own, so that a seed decides every byte.
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
