"""What `atoll broker` makes of its options for regions: a hub, or the leaf of one (`atoll.bus.regions`).

A locked hub lets a region in by an identity of kind `region`. The region's broker is locked, too: it has a copy of the hub's
folder of keys, from which its door follows, and lets in learners, readers and evaluators of the run that its identity is of,
and the premerger of this region. The region has the name of its identity: by that the hub knows what it may hear.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.base.errors import SettingsError
from atoll.bus.addresses import LEAF_PORT
from atoll.bus.options import Credentials
from atoll.bus.regions import HubSide, RegionSide, ServerLink, domain_of, hub_addresses
from atoll.cli.look import say
from atoll.keys.identity import HeldIdentity, read_identity
from atoll.keys.locked import LockedDoor, LockedRegion


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """The options as they were given."""

    leaf_port: int | None
    leaf_of: str | None
    region: str | None
    identity: Path | None


@dataclass(frozen=True, slots=True)
class Side:
    """Which side of a link a broker is: the hub's at `port`, or that of a `region`, perhaps with an identity."""

    port: int = LEAF_PORT
    region: RegionSide | None = None
    identity: HeldIdentity | None = None

    def locked_region(self) -> LockedRegion | None:
        """Return the region as the door of its leaf must know it."""
        if self.region is None or self.identity is None:
            return None
        return LockedRegion(self.identity, self.region.domain, self.region.hubs)

    def behind(self, door: LockedDoor | None) -> ServerLink:
        """Return what the server is told, behind its door."""
        if self.region is None:
            return HubSide(self.port, None if door is None else door.leaves)
        if door is None or self.identity is None:
            return self.region
        return RegionSide(self.region.domain, self.region.hubs, door.remote, keeper_of(self.identity))


def keeper_of(identity: HeldIdentity) -> Credentials:
    """Return what the keeper shows at the leaf beside it, which it reaches by an address that no certificate need name."""
    mine = identity.credentials()
    return Credentials(mine.name, mine.seed, mine.public, mine.authority, any_host=True)


def side_of(options: LinkOptions, store: Path, *, is_node: bool, keys: Path | None) -> Side | None:
    """Return the side that the options mean, None for a broker without regions; raise `SettingsError` for nonsense."""
    if options.leaf_of is None:
        for flag, value in (("--region", options.region), ("--identity", options.identity)):
            if value is not None:
                raise SettingsError(
                    f"{flag} is for the broker of a region",
                    got="no --leaf-of",
                    todo=f"give --leaf-of, or leave {flag} away",
                )
        return None if options.leaf_port is None else Side(options.leaf_port)
    if options.leaf_port is not None or is_node:
        raise SettingsError(
            "the broker of a region is a single server, and no hub of others",
            got=f"{'--cluster' if is_node else '--leaf-port'} beside --leaf-of",
            todo="leave one of them away",
        )
    hubs = hub_addresses(options.leaf_of)
    if (options.identity is None) != (keys is None):
        raise SettingsError(
            "a region of a locked hub needs its identity there, and a door of its own",
            got="--keys without --identity" if options.identity is None else "--identity without --keys",
            allowed="both, or none of them for an open hub",
            todo="give --identity (`atoll keys add --kind region`) and --keys, a copy of the hub's folder",
        )
    identity = None if options.identity is None else _region_identity(options.identity)
    if identity is not None and options.region not in (None, identity.name):
        raise SettingsError(
            "the identity is that of another region",
            got=f"--region {options.region} with the identity of {identity.name!r}",
            allowed=f"--region {identity.name}, or no --region",
            todo="give the region the name of its identity, or another identity",
        )
    named = options.region if identity is None else identity.name
    return Side(region=RegionSide(domain_of(store, named), hubs), identity=identity)


def _region_identity(path: Path) -> HeldIdentity:
    held = read_identity(path)
    if held.kind != "region":
        raise SettingsError(
            "this identity is not that of a region",
            got=f"{path}: {held.kind} {held.name!r}",
            allowed="kind region",
            todo="ask the hub's operator for one: atoll keys add FOLDER NAME --kind region --run RUN",
        )
    return held


def say_link(link: ServerLink, host: str) -> None:
    """Say whose leaf this broker is, or where it takes leaves."""
    if isinstance(link, HubSide):
        scheme = "nats" if link.lock is None else "tls"
        say(f"hub of regions: they come to {host}:{link.port} (`atoll broker --leaf-of {scheme}://HOST:{link.port}`)")
    elif isinstance(link, RegionSide):
        say(f"region {link.domain}, a leaf of {', '.join(link.hubs)}: its learners need this broker's address only")
        say("while the hub is away, contributions wait here")
