"""Options of a JetStream bus: addresses, credentials, patience, and how much it keeps in flight; every bound of the adapter.

The address of a broker is `nats://host:port`, or several separated by commas for the nodes of a cluster. A client knows those
that it was given and no other: our nodes advertise none, because an address that a node believes to have may lead nowhere from
where the client is, or past a relay that somebody has put there on purpose.
"""

from __future__ import annotations

import ssl
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import urlsplit

from atoll.base.errors import SettingsError
from atoll.bus.interface import Signatures

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
    return all(is_single_address(each) for each in addresses(url))


def is_single_address(address: str, schemes: Collection[str] = SCHEMES, default_port: int = PORT) -> bool:
    """Return whether this is scheme, host and port, and nothing that no URL is; a `default_port` of 0 demands the port."""
    try:
        parts = urlsplit(address)
        port = default_port if parts.port is None else parts.port
    except ValueError:
        return False
    return parts.scheme in schemes and bool(parts.hostname) and port != 0


def bracketed(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of a bus at a locked door (`atoll.keys`).

    `seed` and `public` are the halves of the key, as nkeys write them; `authority` is the certificate (PEM) of who vouches
    for the broker. Without `signatures` messages are neither signed nor checked. With `any_host` the broker's certificate may
    name another host.
    """

    name: str
    seed: str = field(repr=False)
    public: str
    authority: str = field(repr=False)
    signatures: Signatures | None = field(repr=False, default=None)
    any_host: bool = False

    @property
    def inbox(self) -> str:
        """Return the prefix of the subjects on which we receive answers; the broker lets nobody else hear them."""
        return f"_INBOX.{self.public}"

    def tls(self) -> ssl.SSLContext:
        """Return TLS that believes this authority and no other."""
        if not self.authority.strip():
            raise SettingsError(
                "an identity without an authority would believe every public one",
                got=f"identity {self.name!r}",
                todo="ask the operator of the broker for its file again",
            )
        context = ssl.create_default_context(cadata=self.authority)
        context.check_hostname = not self.any_host
        return context


WATCH_OF_NODES_S, ECHO_OF_NODES_S = 1.0, 3.0
SHORT_TRIES = 6
"""An election takes 4 to 9 seconds: so many tries of two seconds go by before a slow link may be the reason."""
COPIES = (1, 3, 5)
"""Numbers of copies that a stream may have: of an odd number, more than half are left when one less than half are lost."""


@dataclass(frozen=True, slots=True)
class BusOptions:
    """Bounds of one bus; times in seconds.

    Attributes:
        connect_s: one attempt to reach a broker.
        patience_s: how long `open` keeps trying before `BrokerUnavailable`.
        try_s: how long one request waits for its answer before it is sent again under the same id.
        first_try_s: the same for the first `SHORT_TRIES` tries where the broker is a cluster; then twice as long each time.
        total_s: how long one call of the bus survives an outage in all.
        full_s: how long a call waits for room in a stream or queue before `StorageFull` or `QueueFull`.
        gone_s: how long a reader waits for missing chunks (a mirror may lag) before `BlobGone`.
        ack_wait_s: when a delivery that is neither settled nor held is delivered again. A shard that leaves serves its queue
            for longer than that.
        reconnect_s: pause between attempts to reconnect.
        watch_s: interval of the watchdog's echo; at most `WATCH_OF_NODES_S` where another node can be had.
        echo_s: how long an echo may take; three slow ones in a row cut the connection. At most `ECHO_OF_NODES_S` likewise.
        bulk_connections: number of connections that carry only chunks, for writing and again for reading; 0 sends chunks over
            the main connection. More than one helps only where loss limits what one connection carries.
        bulk_congestion: the congestion control that these request from the kernel, if it is permitted; empty for the system's
            own. Those that take loss for a full link (cubic, reno) move a fortieth of 100 Mbit/s over 50 ms where one packet
            in a hundred is lost. It concerns what we send; the broker's host decides for the broker.
        window: pieces in flight while writing a blob, at most.
        ack_pending_max: deliveries a durable consumer may hold unsettled; more than a quorum of every fragment needs.
        replicas: copies of each stream that this process creates, on as many nodes of one cluster.
        taps: whether the taps of streams that this process creates have "bodies", or "headers" only.
        peers_s: how long a founder waits for so many nodes.
        region: the region whose synchronizer folds what this process sends, or for which it folds; empty for none.
        bulk: where this process reaches the further brokers of a run (`atoll.bus.spread`); empty for the founder's addresses.
        credentials: who we are, for a broker that asks; with them nothing is sent but over TLS.
        own_thread: whether the connection has a thread of its own, so that a caller who blocks its loop for seconds loses no
            connection. Without one a small request costs half as much.
    """

    connect_s: float = 2.0
    patience_s: float = 5.0
    try_s: float = 10.0
    first_try_s: float = 2.0
    total_s: float = 60.0
    full_s: float = 5.0
    gone_s: float = 0.5
    ack_wait_s: float = 15.0
    reconnect_s: float = 0.25
    watch_s: float = 10.0
    echo_s: float = 5.0
    bulk_connections: int = 1
    bulk_congestion: str = "bbr"
    window: int = 8
    ack_pending_max: int = 1 << 16
    replicas: int = 1
    taps: Literal["bodies", "headers"] = "bodies"
    peers_s: float = 15.0
    region: str = ""
    bulk: tuple[str, ...] = ()
    credentials: Credentials | None = None
    own_thread: bool = True

    def watch_of(self, nodes: int) -> tuple[float, float]:
        """Return the interval and the bound of echoes to a broker of so many nodes: a frozen one is left soon."""
        one = self.watch_s, self.echo_s
        return one if nodes == 1 else (min(self.watch_s, WATCH_OF_NODES_S), min(self.echo_s, ECHO_OF_NODES_S))

    def tries_s(self, attempts: int, nodes: int) -> float:
        """Return how long a request waits that was made `attempts` times before, to a broker of so many nodes.

        A node of a cluster that dies takes requests with it, and nobody says so: there the first tries are short.
        """
        if nodes == 1:
            return self.try_s
        return min(self.try_s, self.first_try_s * 2.0 ** max(0, min(attempts, 16) - SHORT_TRIES))


DEFAULTS = BusOptions()
