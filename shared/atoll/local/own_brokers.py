"""Brokers of its own that a run of `atoll up` may have, who may enter them, and which of them a continued run must have again.

The home is one server or a cluster of some. Beside a home of one server further ones may keep fragments (`atoll.bus.spread`).
Streams lie in the stores of these servers, so their number is that of the founding.

`atoll up` locks its own broker and gives each program an identity of its own. Loopback is no lock: every program of every user
of a machine reaches a port there. The folder of keys lies in the folder of the run, which only its owner may look into. A
learner of the run can write as no other, and the evaluator can write nothing but its measurements. Any process that may read
the folder is the operator: verbs with `--out` find the identity there. A store belongs to the accounts of its door, so one that
was begun open (`--open`) stays open, and one that was begun locked stays locked.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Final

from atoll.base.errors import SettingsError, redact
from atoll.keys.rights import Kind
from atoll.keys.roll import OPERATOR, KeyFolder, ensure
from atoll.run.folder import EMBEDDED, RunFile
from atoll.settings import GivenValues, Settings

BROKERS: Final = {"up.brokers": 1, "up.bulk_brokers": 0}
"""The settings of its own brokers that a continued run keeps, and their defaults."""
KEYS: Final = "keys"
STORE: Final = "nats"
HOSTS: Final = ("127.0.0.1", "localhost")


def copies_of(settings: Settings, origins: Mapping[str, str], stated: Container[str]) -> int:
    """Return how many copies of each stream the run has: as many as its own broker has nodes, or as was given."""
    nodes, copies, bulk = settings.up.brokers, settings.broker.replicas, settings.up.bulk_brokers
    if bulk and (nodes > 1 or "broker.url" in stated):
        raise SettingsError(
            "only a run's own broker of one node has further brokers beside it",
            got=f"up.bulk_brokers {bulk} beside {'--broker' if 'broker.url' in stated else f'--brokers {nodes}'}",
            todo="leave one away; brokers that run already are given by broker.bulk",
        )
    if "broker.url" in stated:
        if "up.brokers" in stated and nodes > 1:
            raise SettingsError(
                "--brokers and --broker contradict each other",
                got=f"{nodes} nodes of our own, and {redact(settings.broker.url)}",
                todo="give one of the two; for a cluster that runs give the addresses of its nodes and broker.replicas",
            )
        return copies
    if "broker.replicas" not in origins or ("up.brokers" in stated and "broker.replicas" not in stated):
        return nodes
    if copies > nodes:
        raise SettingsError(
            "there are fewer brokers than copies of each stream",
            got=f"broker.replicas {copies}, up.brokers {nodes}",
            allowed=f"broker.replicas up to {nodes}",
            todo="give more --brokers, or leave broker.replicas away",
        )
    return copies


def keys_for(settings: Settings, out: Path, stated: GivenValues, former: RunFile | None, *, fresh: bool) -> Path | None:
    """Return where the keys of our own broker are, or will be; None for an open one or somebody else's.

    `former` is the run in `out` that is continued. If it is `fresh`, what lies in `out` counts for nothing. A setting that is
    true says no more than the default, but for the flag: a printed file has it beside every broker.

    Raises:
        SettingsError: a broker that was begun open shall be locked, or the other way round; or it is not our own.
    """
    flag = settings.up.locked if stated.get("up.locked", ("", ""))[1] == "--locked" else None
    if "broker.url" in stated:
        if flag:
            raise SettingsError(
                "--locked and --broker contradict each other",
                got=f"{redact(settings.broker.url)} is not our own broker",
                todo="leave --locked away; lock that broker where it is started (`atoll broker --keys`)",
            )
        return None
    told = flag if flag is not None or settings.up.locked else False
    keys, store = out / KEYS, out / STORE
    was_locked = former is not None and bool(former.settings.get("up.locked", False))
    # A locked run whose keys are lost does not become an open one: with new keys its signatures are refused.
    locked = not fresh and (was_locked or keys_of(out) is not None)
    begun = locked or former is not None or (not fresh and store.is_dir() and any(store.iterdir()))
    if not begun:
        return None if told is False else keys
    if told is not None and told is not locked:
        was, flagged = ("locked", "--open") if locked else ("open", "--locked")
        raise SettingsError(
            f"the broker of this run was begun {was}, and stays so",
            got=flagged,
            todo=f"leave {flagged} away, or start a new run in another --out",
        )
    return keys if locked else None


def check_same_brokers(former: RunFile, settings: Settings, out: Path) -> None:
    """Refuse another number of brokers than `former` has: its streams are in the stores of those."""
    for name, wanted in (("up.brokers", settings.up.brokers), ("up.bulk_brokers", settings.up.bulk_brokers)):
        there = former.settings.get(name, BROKERS[name])
        if former.broker == EMBEDDED and wanted != there:
            raise SettingsError(
                "the brokers of a run cannot change",
                got=f"{name} {wanted}",
                allowed=f"{there}, as {out / 'run.json'} says",
                todo=f"leave {name} away, or start a new run in another --out",
            )


def keys_of(out: Path) -> Path | None:
    """Return the folder of keys of the run in `out`, None if its broker is open."""
    keys = out / KEYS
    return keys if KeyFolder(keys).roll_path.exists() else None


class RunKeys:
    """The identities of one run, by name."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = KeyFolder(folder.absolute())
        self._run = run

    @property
    def operator(self) -> Path:
        """Return the identity of who runs the run."""
        return self._folder.path / "identities" / f"{OPERATOR}.toml"

    def identity_of(self, name: str) -> Path:
        """Return the identity of a program."""
        return self._folder.path / "identities" / self._run / f"{name}.toml"

    def make(self, kinds: Mapping[str, Kind]) -> None:
        """Make the folder, and the identities that are not on its roll yet."""
        ensure(self._folder, self._run, kinds, HOSTS)
