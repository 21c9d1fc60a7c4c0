"""The keys of a run on this machine: `atoll up` locks its own broker and gives each program an identity of its own.

Loopback is no lock: every program of every user of a machine reaches a port there. The folder of keys lies in the folder of the
run, which only its owner may look into. A learner of the run can write as no other, and the evaluator can write nothing but its
measurements. Whoever may read the folder is the operator: verbs with `--out` find the identity there.

What a broker has stored belongs to the accounts of its door. So a store that was begun open (`--open`) stays open, and one that
was begun locked stays locked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from atoll.base.errors import SettingsError
from atoll.keys.handing_out import ensure
from atoll.keys.rights import Kind
from atoll.keys.roll import OPERATOR, KeyFolder

KEYS: Final = "keys"
STORE: Final = "nats"
HOSTS: Final = ("127.0.0.1", "localhost")


def keys_of(out: Path) -> Path | None:
    """Return the folder of keys of the run in `out`, None if its broker is open."""
    keys = out / KEYS
    return keys if KeyFolder(keys).roll_path.exists() else None


def wanted_keys(out: Path, *, told: bool | None, former: bool | None, fresh: bool) -> Path | None:
    """Return where the keys of a run are, or will be; None if its own broker is open.

    Args:
        out: the run's folder.
        told: whether the broker shall be locked, None if nobody said so.
        former: whether the run in `out` that is continued was locked, None for a new run.
        fresh: whether what lies in `out` counts for nothing.

    Raises:
        SettingsError: a broker that was begun open shall be locked, or the other way round.
    """
    keys, store = out / KEYS, out / STORE
    # A locked run whose keys are lost does not become an open one: with new keys its signatures are refused.
    locked = not fresh and (bool(former) or keys_of(out) is not None)
    begun = locked or former is not None or (not fresh and store.is_dir() and any(store.iterdir()))
    if begun and told is not None and told is not locked:
        was, flag = ("locked", "--open") if locked else ("open", "--locked")
        raise SettingsError(
            f"the broker of this run was begun {was}, and stays so",
            got=flag,
            todo=f"leave {flag} away, or start a new run in another --out",
        )
    if begun:
        return keys if locked else None
    return None if told is False else keys


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
        """Make the folder, and the identities that are not on its roll yet."""
        ensure(self._folder, self._run, kinds, HOSTS)
