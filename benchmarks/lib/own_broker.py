"""How a bench reaches the broker of a run of `atoll up`, which is locked: with the identity of the run's operator."""

from __future__ import annotations

from pathlib import Path

from atoll.bus.options import BusOptions
from atoll.keys.identity import read_identity
from atoll.local.own_brokers import RunKeys, keys_of


def as_operator(out: Path, run: str) -> BusOptions:
    """Return what lets us in at the broker of the run in `out`, once its address is there; an open one asks for nothing."""
    keys = keys_of(out)
    if keys is None:
        return BusOptions()
    return BusOptions(credentials=read_identity(RunKeys(keys, run).operator).credentials())
