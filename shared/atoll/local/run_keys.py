"""The keys of a run on this machine: `atoll up --locked` locks its own broker and gives each program an identity of its own.

Loopback is no lock: every program of every user of a machine reaches a port there. The folder of keys lies in the folder of the
run, which only its owner may look into. A learner of the run can write as no other, and the evaluator can write nothing but its
measurements. Whoever may read the folder is the operator: verbs with `--out` find the identity there.

What a broker has stored belongs to the accounts of its door. So a store that was begun open stays open, and one that was
begun locked stays locked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from atoll.base.errors import SettingsError
from atoll.keys.rights import EVERY_RUN, Kind
from atoll.keys.roll import OPERATOR, KeyFolder

KEYS: Final = "keys"
STORE: Final = "nats"
HOSTS: Final = ("127.0.0.1", "localhost")


def keys_of(out: Path) -> Path | None:
    """Return the folder of keys of the run in `out`, None if its broker is open."""
    keys = out / KEYS
    return keys if KeyFolder(keys).roll_path.exists() else None


def wanted_keys(out: Path, *, locked: bool, nodes: int, aside: bool) -> Path | None:
    """Return where the keys of a run are, or will be if it is to be `locked`; None if its own broker is open.

    `aside`: what lies in `out` is moved away first. Raises `SettingsError` for a broker that cannot be locked.
    """
    if not aside and keys_of(out) is not None:
        return out / KEYS
    if not locked:
        return None
    if nodes > 1:
        # A cluster may forget for ever what a new account imports (nats-server issue 8560); a single server does not.
        raise SettingsError(
            "a broker of several nodes cannot be locked yet",
            got=f"--locked beside --brokers {nodes}",
            allowed="one of them",
            todo="leave one away",
        )
    if not aside and (out / STORE).is_dir() and any((out / STORE).iterdir()):
        raise SettingsError(
            "the broker of this run was begun open, and stays so",
            got="--locked",
            todo="leave --locked away, or start a new run in another --out",
        )
    return out / KEYS


class RunKeys:
    """The identities of one run, by name."""

    def __init__(self, folder: Path, run: str) -> None:
        """Refer to a folder of keys; nothing is read yet."""
        self._folder = KeyFolder(folder.absolute())
        self._run = run

    @property
    def operator(self) -> Path:
        """Return the identity of who runs the run."""
        return self._folder.path / "identities" / f"{OPERATOR}.toml"

    def of(self, name: str) -> Path:
        """Return the identity of a program."""
        return self._folder.path / "identities" / self._run / f"{name}.toml"

    def make(self, kinds: Mapping[str, Kind]) -> None:
        """Make the folder, and the identities that are not on its roll yet. Learners may found the run: any may be first."""
        now_s = time.time()
        if not self._folder.roll_path.exists():
            self._folder.create(HOSTS, now_s)
        roll = self._folder.read()
        for name, kind in kinds.items():
            if roll.of(self._run, name) is None and roll.of(EVERY_RUN, name) is None:
                self._folder.add(name, kind, self._run, now_s, founds=kind == "learner")
