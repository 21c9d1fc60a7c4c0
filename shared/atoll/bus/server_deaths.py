"""What the last words of a nats-server mean that ended at its start, for a person who can change it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from atoll.base.errors import AtollError, BrokerUnavailable, InUse, SettingsError, StorageFull
from atoll.bus.server_log import own_words

_TAKEN: Final = re.compile(r"listen tcp \S*?:(\d+): bind: address already in use")


def cause_of_death(words: str, place: str, store_dir: Path, log_path: Path) -> AtollError:
    """Return the error that the end of its log tells of; `place` is where it was to listen, host:port.

    Only the server's own words count: what clients say of themselves stands in the log, too.
    """
    log, words = words, "\n".join(own_words(words)) or words
    if "address already in use" in words:
        named = _TAKEN.search(words)
        own = place.rpartition(":")[2]
        port = own if named is None else named[1]
        which = "the broker's port" if port == own else "another port of the broker (--leaf-port, --cluster-port)"
        return InUse(
            f"something else listens on {which}",
            got=port,
            allowed="a free port",
            todo="stop that process, choose another port, or give its url if it is a broker",
        )
    if "no space left" in words:
        return StorageFull("the broker's disk is full", got=store_dir, todo="free space or move the store")
    if "no such host" in words or "cannot assign requested address" in words:
        return SettingsError(
            "the broker cannot listen there",
            got=place,
            allowed="an address of this machine, or 0.0.0.0 for all of them",
            todo="correct --host",
        )
    return BrokerUnavailable("the broker ended at start", got=log, todo=f"look at {log_path}")
