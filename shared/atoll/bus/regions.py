"""A hub and its regions: what two nats-servers are told so that one of them is a leaf of the other.

A region is a group of learners with a broker of its own beside them, a *leaf node*: it opens one connection to the hub, where
the run is. One TCP connection carries everything between the two.

    learners ──► leaf (domain eu) ══ one connection over the WAN ══► hub (domain hub) ◄── synchronizers

Both have JetStream, so each needs a *domain*: by its name a client says whose streams it means. A client that is greeted with
any domain but `hub` knows that it is in a region (`is_region`), and finds the run's streams behind the leaf under
`$JS.hub.API`. A region keeps its part of a run at its leaf: a mirror of the global stream, and an outbox
(`atoll.bus.nats.region_keeper`).
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, TypeVar

import msgspec

from atoll.base.errors import EnvironmentFault, SettingsError
from atoll.base.files import DOCUMENT_BYTES_MAX, read_file, write_whole
from atoll.base.parsing import parsed
from atoll.bus.options import LEAF_PORT, Credentials, bracketed, is_single_address
from atoll.wire.subjects import HUB, region_name

T = TypeVar("T")
HUB_DOMAIN: Final = HUB
REGION_FILE: Final = "region.json"
_SCHEMES: Final = ("nats", "tls", "nats-leaf")
_WIRE: Final = "compression: off"
"""Without compression: all that passes is compressed already."""


def is_region(domain: str) -> bool:
    """Return whether a server of this JetStream domain is the leaf of a region; empty is none."""
    return domain not in ("", HUB_DOMAIN)


@dataclass(frozen=True, slots=True)
class HubSide:
    """The hub's side: it lets leaves in at a port."""

    domain: ClassVar[str] = HUB_DOMAIN
    port: int
    lock: Path | None = None
    """A file with more lines of the block: TLS."""

    def config(self, host: str, store_dir: Path) -> str:
        """Return the block of the leaves' port."""
        listen = json.dumps(f"{bracketed(host)}:{self.port}")
        # An address that the hub believes to have may lead past a relay, or nowhere.
        more = include_line(self.lock, store_dir)
        return f'leafnodes {{ listen: {listen}, no_advertise: true, {_WIRE}, write_deadline: "30s"\n{more}}}\n'


@dataclass(frozen=True, slots=True)
class RegionSide:
    """The region's side: a leaf that connects to the hub at one of its addresses, and tries for ever."""

    domain: str
    hubs: tuple[str, ...]
    lock: Path | None = None
    """A file with the connections, for a hub that is locked: who the region is there."""
    keeper: Credentials | None = field(repr=False, default=None)
    """Credentials of the region's keeper at the leaf, if that is locked."""

    def config(self, host: str, store_dir: Path) -> str:
        """Return the block of the connection to the hub."""
        del host
        urls = ", ".join(json.dumps(url) for url in self.hubs)
        remotes = include_line(self.lock, store_dir) or f"remotes: [{{ urls: [{urls}], {_WIRE} }}]\n"
        return f'leafnodes {{ reconnect: "1s"\n{remotes}}}\n'


ServerLink = HubSide | RegionSide
"""The link of a server: it makes it a hub or a leaf."""


def pings(link: ServerLink | None) -> str:
    """Return how a server notices that a connection is cut: with the default pings it would stay unseen for minutes."""
    return f'ping_interval: "3s"\nping_max: {2 if link is None else 9}\n'


def include_line(file: Path | None, store_dir: Path) -> str:
    """Return the line that adds a file to a configuration in a folder, empty for none."""
    return "" if file is None else f"include {json.dumps(os.path.relpath(file, store_dir))}\n"


def hub_addresses(text: str) -> tuple[str, ...]:
    """Return the addresses at which a hub lets leaves in; raise `SettingsError` for anything else."""
    found = tuple(each.strip() for each in text.split(","))
    if not all(is_single_address(each, _SCHEMES, 0) for each in found):
        raise SettingsError(
            "this is not where a hub lets leaves in",
            got=repr(text),
            allowed=f"nats://host:{LEAF_PORT} or tls://host:{LEAF_PORT}; those of a cluster's nodes separated by commas",
            todo="correct --leaf-of; the port is the hub's --leaf-port",
        )
    return found


class _KeptRegion(msgspec.Struct):
    domain: str


def read_kept(path: Path, kind: type[T]) -> T | None:
    """Return what a file in a broker's store says, None without one; raise `EnvironmentFault` if it cannot be read."""
    try:
        return parsed(read_file(path, DOCUMENT_BYTES_MAX), kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise EnvironmentFault(f"{path} cannot be read", got=error, todo="restore it") from error


def domain_of(store_dir: Path, wanted: str | None) -> str:
    """Return the domain of the leaf with this store: the one it had, else `wanted`, else a new one; it is kept there.

    Raises `SettingsError` if `wanted` cannot be a domain, or is another one than the store's; `EnvironmentFault` if the store
    cannot be used.
    """
    if wanted is not None:
        region_name(wanted, "correct --region")
    path = store_dir / REGION_FILE
    kept = read_kept(path, _KeptRegion)
    there = kept.domain if kept is not None else wanted or f"region-{secrets.token_hex(4)}"
    if kept is None:
        try:
            store_dir.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({"domain": there}).encode())
        except OSError as error:
            raise EnvironmentFault("the broker's directory cannot be used", got=f"{path}: {error.strerror}") from error
    if wanted not in (None, there):
        raise SettingsError(
            "this directory is of another region",
            got=f"{store_dir} holds {there!r}",
            allowed=f"--region {there}, or an empty directory",
            todo="choose another directory (--store), or leave --region away",
        )
    return there
