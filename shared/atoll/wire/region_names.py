"""Names of regions: one rule for all that is named after it.

The name is a level of subjects, the domain of a JetStream, the beginning of names of identities and learners, a folder of a
rendered deployment, and a part of names in Kubernetes, compose and systemd. So the narrowest of them decides: Kubernetes.
"""

from __future__ import annotations

import re
from typing import Final

from atoll.base.errors import SettingsError

HUB: Final = "hub"
RESERVED: Final = frozenset({HUB, "keys", "kubernetes", "broker", "synchronizer", "shard", "monitor"})
"""Names of folders and services beside a region's. A learner `shard-1` would have the subjects of a shard."""
LETTERS_MAX: Final = 32
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
ALLOWED: Final = (
    f"up to {LETTERS_MAX} small letters, digits and '-', a letter first and no '-' last, "
    f"and not {', '.join(sorted(RESERVED))}"
)


def is_region_name(name: object) -> bool:
    """Return whether a region may be called so."""
    return (
        isinstance(name, str)
        and len(name) <= LETTERS_MAX
        and _NAME.fullmatch(name) is not None
        and name not in RESERVED
    )


def region_name(name: str, todo: str) -> str:
    """Return `name` if a region may be called so, else raise `SettingsError`."""
    if not is_region_name(name):
        raise SettingsError("a region cannot have this name", got=repr(name), allowed=ALLOWED, todo=todo)
    return name
