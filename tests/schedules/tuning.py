"""Constants of production as they are in a schedule: the same rules in less virtual time, and in smaller pieces."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from atoll.archive import checkpoint_store, rebuild
from atoll.base.errors import ProtocolMisuse
from atoll.wire.subjects import matches
from atoll_synchronizer import archivist

TUNED: Final[dict[str, float]] = {
    "RESYNC_S": 3.0,
    "FOUNDER_PATIENCE_S": 8.0,
    "LENT_S": 8.0,
    "SNAPSHOT_S": 4.0,
    "PUSH_PATIENCE_S": 8.0,
    "FINISHING_S": 4.0,
    "RETRY_S_MAX": 2.0,
    "LENDING_STEPS_MIN": 3,
    "TOLD_EVERY_S": 9.0,
    "LEAVE_S": 20.0,
    "HOLD_S": 2.0,
    "PAGE_PIECES": 1,
    "LAST_MARK_S": 8.0,
    # Shorter than `LEAVE_S`: where all are told to leave, an owner that leaves must see the silent of its run as overdue.
    "OVERDUE_S": 6.0,
    "PATIENCE_S_MAX": 10.0,
    "KEPT_LIVES": 0,
}
"""Constants by name, wherever production has them, and what they are in a schedule."""

_matches = functools.lru_cache(1 << 16)(matches)


@contextlib.contextmanager
def tuned(chunk_bytes: int, nonce: Callable[[int], str], store: Any) -> Iterator[None]:  # noqa: ANN401  (an object store)
    """Let production run with the constants of a schedule, blobs in pieces of `chunk_bytes`, and chance from its seed.

    Raises:
        ProtocolMisuse: production has no such constant any more.
    """

    class Chance:
        """Stands in for the module `secrets`."""

        token_hex = staticmethod(nonce)

    wanted = {**TUNED, "CHUNK_BYTES": chunk_bytes}
    changed: list[tuple[Any, str, Any]] = [
        (rebuild, "secrets", Chance),
        (checkpoint_store, "time", store),
        (archivist, "open_archive", lambda _: store),
        (archivist, "in_thread", store.in_thread),
    ]
    changed += [(module, "matches", _matches) for module in _production() if getattr(module, "matches", 0) is matches]
    changed += [(module, name, wanted[name]) for module in _production() for name in wanted if hasattr(module, name)]
    missing = wanted.keys() - {name for _, name, _ in changed}
    if missing:
        raise ProtocolMisuse("production has no such constants", got=sorted(missing))
    originals = [(module, name, getattr(module, name)) for module, name, _ in changed]
    try:
        for module, name, value in changed:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in originals:
            setattr(module, name, value)


def _production() -> list[Any]:
    rooms = ("atoll.", "atoll_synchronizer.", "atoll_learner.")
    return [module for name, module in list(sys.modules.items()) if name.startswith(rooms)]
