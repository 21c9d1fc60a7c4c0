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
"""The version of a message that names none, and of all messages in the beginning."""
SCHEMA_OF_BULK: Final = 2
"""A run record that spreads fragments over several brokers; all other messages are as in version 1."""
SCHEMA_OF_DERIVED_STATE: Final = 3
"""A run record whose shards store outer state with keyframes alone (`Head.state`); fragments may be spread, too."""
SCHEMA_OF_INLINE_FRAMES: Final = 4
"""A run record whose manifests carry small frames (`atoll.run.inline_frames`)."""
SCHEMA_OF_FORMER_LIVES: Final = 5
"""A run record whose shards fold the accounts of lives that are over (`atoll.protocol.ledger`)."""
SCHEMA_OF_FIRST_WRITERS: Final = 6
"""A run record whose learners draw a nonce for the chunks of each push, where the first writer wins (`RunRecord`)."""
SCHEMA_NEWEST: Final = SCHEMA_OF_FIRST_WRITERS
"""The newest version that it speaks, in which it founds runs."""
SCHEMA_OLDEST: Final = 1
"""The oldest version that it speaks."""


def check_spoken(kind: str, schema: int) -> None:
    """Raise `PeerMisbehaved` if a message is of a version that this process does not speak."""
    if not SCHEMA_OLDEST <= schema <= SCHEMA_NEWEST:
        newer = schema > SCHEMA_NEWEST
        raise PeerMisbehaved(
            f"a {kind} of a wire version that this Atoll does not speak",
            got=schema,
            allowed=f"{SCHEMA_OLDEST} to {SCHEMA_NEWEST}",
            todo="upgrade this process" if newer else "upgrade who wrote it, or found the run anew",
        )
