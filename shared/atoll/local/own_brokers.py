"""What brokers of its own a run of `atoll up` may have, and which of them a continued run must have again.

The home is one server or a cluster of some. Beside a home of one server further ones may keep fragments (`atoll.bus.spread`).
Streams lie in the stores of these servers, so their number is that of the founding.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Final

from atoll.base.errors import SettingsError
from atoll.base.redacting import redacted
from atoll.local.run_keys import wanted_keys
from atoll.run.folder import EMBEDDED, RunFile
from atoll.settings import Settings

BROKERS: Final = {"up.brokers": 1, "up.bulk_brokers": 0}
"""What a continued run keeps of its own brokers, and what a run has that says nothing."""


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
                got=f"{nodes} nodes of our own, and {redacted(settings.broker.url)}",
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


def keys_for(
    settings: Settings, out: Path, stated: Container[str], former: RunFile | None, *, flag: bool | None, fresh: bool
) -> Path | None:
    """Return the folder of keys of our own broker, None for an open one or somebody else's.

    `former` is the run in `out` that is continued. If it is `fresh`, what lies in `out` counts for nothing. `flag` is --locked,
    --open or neither. A setting that is true says no more than the default: a printed file has it beside every broker.
    """
    told = flag if flag is not None or settings.up.locked else False
    if "broker.url" not in stated:
        was = None if former is None else bool(former.settings.get("up.locked", False))
        return wanted_keys(out, told=told, former=was, fresh=fresh)
    if flag:
        raise SettingsError(
            "--locked and --broker contradict each other",
            got=f"{redacted(settings.broker.url)} is not our own broker",
            todo="leave --locked away; lock that broker where it is started (`atoll broker --keys`)",
        )
    return None


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
