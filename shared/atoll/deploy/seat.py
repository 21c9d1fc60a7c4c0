"""A seat: the machine and the identity where a check is run, and what is known of the deployment around it.

There are three ways to take one: a run file (on an island's machine there is no more), the description and the name of one of
its services (at the operator's), or the description alone, where the operator's own identity asks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.base.errors import SettingsError
from atoll.base.regular_files import text_or_empty
from atoll.deploy.description import DeploymentDescription
from atoll.deploy.rendering import KEYS, SERVICES
from atoll.deploy.services import (
    DOOR,
    IDENTITY_FILE,
    RUN_FILE,
    PlannedLeaf,
    PlannedService,
    broker_url,
    leaf_of,
    nodes,
    places,
    services,
    unit_name,
)
from atoll.keys.rights import Kind
from atoll.settings import LoadedSettings, load
from atoll.wire.region_names import HUB

OPERATORS: Path = Path(KEYS) / "identities" / "operator.toml"


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a check is run.

    Attributes:
        name: how the seat is called.
        settings: what its service is told; where values came from.
        role: what its service does; None if only the identity tells.
        certificate: the certificate (PEM) that the broker must show; empty if that is not known here.
        authority: the authority (PEM) that a node of the broker shows; services have that of their identity.
        secrets: files that nobody but their owner may read.
        store: folder of a node's data; None for what is no node.
        hubs: where the broker of a region reaches the hub.
        hub_certificate: the certificate (PEM) that the hub must show there.
        region: the region whose broker this is; empty for what is none.
        region_identity: who that broker is at the hub.
    """

    name: str
    loaded: LoadedSettings
    role: Kind | None = None
    certificate: str = ""
    authority: str = ""
    secrets: tuple[Path, ...] = ()
    store: Path | None = None
    hubs: tuple[str, ...] = ()
    hub_certificate: str = ""
    region: str = ""
    region_identity: Path | None = None


def seat_of_file(config: Path | None, assignments: list[str]) -> Seat:
    """Return the seat that a run file describes."""
    loaded = load(config, assignments)
    return Seat(str(config or "the environment"), loaded, secrets=_secrets(loaded))


def seat_of_service(described: DeploymentDescription, out: Path, service: str | None, assignments: list[str]) -> Seat:
    """Return the seat of a rendered service; without a name that of the operator.

    Raises:
        SettingsError: the description has no such service, or it is not rendered in `out`.
    """
    if service is None:
        return _seat_of_operator(described, out, assignments)
    for node in nodes(described):
        if node.name == service:
            return _seat_of_broker(described, out / HUB / SERVICES / DOOR, (node.name, node.address), assignments)
    for place in places(described):
        leaf = leaf_of(described, place)
        if leaf is not None and leaf.name == service:
            return _seat_of_leaf(described, out, leaf, assignments)
        for planned in services(described, place):
            if planned.name == service:
                return _seat_of_planned(out, place, planned, leaf, assignments)
    raise SettingsError(
        "the description has no such service",
        got=service,
        allowed=", ".join(_service_names(described)),
        todo="correct --service",
    )


def _service_names(described: DeploymentDescription) -> list[str]:
    names = [node.name for node in nodes(described)]
    names += [leaf.name for place in places(described) if (leaf := leaf_of(described, place)) is not None]
    return names + [planned.name for place in places(described) for planned in services(described, place)]


def _seat_of_operator(described: DeploymentDescription, out: Path, assignments: list[str]) -> Seat:
    url, identity = broker_url(described, ""), out / OPERATORS
    own = [f"run={described.run}", f"broker.url={url}", f"broker.identity={identity}"]
    own += [f"broker.replicas={described.hub.count}"]
    own += [f"{name}={json.dumps(value)}" for name, value in described.settings.items() if name == "protocol"]
    secrets = (identity, *(out / KEYS / name for name in ("root.key", "authority.key", "broker.key")))
    shown = text_or_empty(out / HUB / SERVICES / DOOR / "broker.pem")
    return Seat("operator", load(None, [*own, *assignments], {}), "operator", shown, secrets=secrets)


def _seat_of_planned(
    out: Path, place: str, service: PlannedService, leaf: PlannedLeaf | None, assignments: list[str]
) -> Seat:
    """Return the seat of a service with a run file, in a place with the broker `leaf`, or with that of the hub."""
    file = out / place / SERVICES / service.name / RUN_FILE
    if not file.is_file():
        raise SettingsError("this service is not rendered", got=f"no {file}", todo="atoll deploy render")
    loaded = load(file, assignments)
    door = out / HUB / SERVICES / DOOR if leaf is None else out / place / SERVICES / leaf.name
    return Seat(service.name, loaded, service.kind, text_or_empty(door / "broker.pem"), secrets=_secrets(loaded))


def _seat_of_broker(
    described: DeploymentDescription, door: Path, named: tuple[str, str], assignments: list[str]
) -> Seat:
    """Return the seat of a broker with its name and address: it has a door, and is nobody."""
    name, address = named
    loaded = load(None, [f"run={described.run}", f"broker.url={address}", *assignments], {})
    shown, authority = (text_or_empty(door / name) for name in ("broker.pem", "authority.pem"))
    store = Path(f"/var/lib/{unit_name(described, name)}")
    return Seat(name, loaded, None, shown, authority, (door / "broker.key",), store)


def _seat_of_leaf(described: DeploymentDescription, out: Path, leaf: PlannedLeaf, assignments: list[str]) -> Seat:
    """Return the seat of the broker of a region, which is somebody at the hub."""
    door, hub = out / leaf.place / SERVICES / leaf.name, out / HUB / SERVICES / DOOR
    seat = _seat_of_broker(described, door, (leaf.name, leaf.address), assignments)
    identity = door / IDENTITY_FILE
    return replace(
        seat,
        secrets=(*seat.secrets, identity),
        hubs=leaf.hubs,
        hub_certificate=text_or_empty(hub / "broker.pem"),
        region=leaf.place,
        region_identity=identity,
    )


def _secrets(loaded: LoadedSettings) -> tuple[Path, ...]:
    identity = loaded.settings.broker.identity
    return () if identity is None else (identity,)
