"""The addresses of a broker: `nats://host:port`, or several separated by commas for the nodes of a cluster.

A client tries the addresses in an order of its own choice, and goes on at another when its node dies. It knows those that it
was given and no other: our nodes advertise none, because an address that a node believes to have may lead nowhere from where
the client is, or past a relay that somebody has put there on purpose.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

PORT: Final = 4222
CLUSTER_PORT: Final = 6222
LEAF_PORT: Final = 7422
"""Where a server of ours listens for clients, for the nodes of its cluster and for brokers of regions, if nothing else is said;
in a container always there."""
SCHEMES = ("nats", "tls")
ONE_ADDRESS = " or ".join(f"{scheme}://host:port" for scheme in SCHEMES)
ADDRESSES = f"{ONE_ADDRESS}; those of a cluster's nodes separated by commas"


def addresses(url: str) -> list[str]:
    """Return the single addresses in `url`, in their order."""
    return [each.strip() for each in url.split(",")]


def is_address(url: str) -> bool:
    """Return whether `url` can be the address of a broker, or those of its nodes."""
    return all(_is_one(each) for each in addresses(url))


def _is_one(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
