"""Constants of production as they are in a schedule: the same rules in less virtual time, and in smaller pieces."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from atoll.archive import rebuild, checkpoint_store
from atoll.wire import blobs
from atoll.client import driver, founding, peer_recovery, pushing, session
from atoll_synchronizer import archivist, pending_acknowledgements, shard_assignment

TUNED: tuple[tuple[Any, str, float], ...] = (
    (driver, "RESYNC_S", 3.0),
    (founding, "FOUNDER_PATIENCE_S", 8.0),
    (peer_recovery, "LENT_S", 8.0),
    (peer_recovery, "SNAPSHOT_S", 4.0),
    (pushing, "PUSH_PATIENCE_S", 8.0),
    (pushing, "RETRY_S_MAX", 2.0),
    (session, "LENDING_STEPS_MIN", 3),
    (session, "TOLD_EVERY_S", 9.0),
    (shard_assignment, "TOLD_EVERY_S", 9.0),
    (shard_assignment, "LEAVE_S", 10.0),
    (pending_acknowledgements, "HOLD_S", 2.0),
    (blobs, "PAGE_PIECES", 2),
    (archivist, "LAST_MARK_S", 8.0),
)
"""Module, name, value in a schedule."""


@contextlib.contextmanager
def tuned(chunk_bytes: int, nonce: Callable[[int], str], vault: Any) -> Iterator[None]:  # noqa: ANN401  (an object store)
    """Let production run with the constants of a schedule, blobs in pieces of `chunk_bytes`, and chance from its seed."""

    class Chance:
        """Stands in for the module `secrets`."""

        token_hex = staticmethod(nonce)

    changed: list[tuple[Any, str, Any]] = [(module, name, value) for module, name, value in TUNED]
    changed += [(blobs, "secrets", Chance), (rebuild, "secrets", Chance), (checkpoint_store, "time", vault)]
    changed += [(archivist, "open_vault", lambda _: vault), (archivist, "_in_thread", vault.in_thread)]
    for name, module in list(sys.modules.items()):
        if name.startswith("atoll.") and not name.startswith("atoll.wire") and hasattr(module, "CHUNK_BYTES"):
            changed.append((module, "CHUNK_BYTES", chunk_bytes))
    originals = [(module, name, getattr(module, name)) for module, name, _ in changed]
    try:
        for module, name, value in changed:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in originals:
            setattr(module, name, value)
