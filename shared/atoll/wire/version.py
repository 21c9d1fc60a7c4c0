"""The wire version: which messages a process reads and writes.

Every message says its version (`schema`). The run record says that of the run: its founder chose it, and everybody writes it
for as long as the run lives, also those who could write a newer one. A process joins a run if it speaks that version, and
refuses the run record otherwise, before it writes anything. So a run is upgraded process by process, in any order: each release
speaks the version of the release before it (`SCHEMA_OLDEST`), and a newer version comes with a newer founding.

A new field with a default is no new version: who does not know it passes over it, and who misses it takes the default. A
version is new when an old reader would misunderstand: a field whose meaning changes, or one that must not be passed over.
"""

from __future__ import annotations

from typing import Final

from atoll.base.errors import PeerMisbehaved

SCHEMA: Final = 1
"""The version of all messages but the run record, and of one that names none: none has changed its meaning so far."""
SCHEMA_NEWEST: Final = 6
"""The newest version of a run record that it speaks, in which it founds runs."""
SCHEMA_OLDEST: Final = 6
"""The oldest version of a run record that it speaks."""


def spoken_versions() -> str:
    """Return the versions of the runs that it can join, for people."""
    return f"{SCHEMA_NEWEST}" if SCHEMA_OLDEST == SCHEMA_NEWEST else f"{SCHEMA_OLDEST} to {SCHEMA_NEWEST}"


def oldest_of(kind: str) -> int:
    """Return the oldest version that it speaks of a kind of message."""
    return SCHEMA_OLDEST if kind == "RunRecord" else SCHEMA


def check_spoken(kind: str, schema: int) -> None:
    """Raise `PeerMisbehaved` if a message is of a version that this process does not speak."""
    oldest = oldest_of(kind)
    if not oldest <= schema <= SCHEMA_NEWEST:
        newer = schema > SCHEMA_NEWEST
        raise PeerMisbehaved(
            f"a {kind} of a wire version that this Atoll does not speak",
            got=schema,
            allowed=f"{oldest} to {SCHEMA_NEWEST}",
            todo="upgrade this process" if newer else "upgrade who wrote it, or found the run anew",
        )
