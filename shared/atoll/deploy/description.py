"""The description of a deployment: one TOML file that says where the parts of one run are.

    run = "ocean"

    [hub]                                   # the brokers and the synchronizers
    hosts = ["hub-1.example.org", "hub-2.example.org", "hub-3.example.org"]
    synchronizers = 2
    target = "systemd"

    [regions.eu]                            # learners eu-1 to eu-4, with a broker of their own and a synchronizer that adds up
    learners = 4
    target = "systemd"
    broker = "leaf"
    host = "eu-broker.example.org"
    premerge = true

    [settings]                              # what every process is told, as in any run file
    model.size = "s"
    protocol.fragments = 24

A *place* is the hub or a region. A *service* is one process of a place: a broker's node, a synchronizer, a learner. Each place
has one *target*, which says what starts its services. All that follows from the description (names, addresses, settings of
each service) is in `atoll.deploy.services`. Nothing in it is secret. Amounts of memory and processors are written as Kubernetes
writes them.
"""

from __future__ import annotations

import re
from decimal import Decimal
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from atoll.base import VERSION
from atoll.base.errors import SettingsError
from atoll.base.files import DOCUMENT_BYTES_MAX, read_text
from atoll.base.parsing import parsed_toml
from atoll.bus.options import CLUSTER_PORT, LEAF_PORT, PORT
from atoll.keys.certificates import check_hosts
from atoll.keys.rights import premerger_of
from atoll.settings.sections import Copies, Section
from atoll.wire.subjects import REGION_NAMES, is_region_name, token

SIZE: Final = r"([1-9][0-9]{0,14}(?:\.[0-9]{1,3})?)(Ki|Mi|Gi|Ti|k|M|G|T)?"
PROCESSORS: Final = r"[1-9][0-9]{0,6}m|[1-9][0-9]{0,3}(\.[0-9]{1,3})?|0\.[0-9]{0,2}[1-9]"
MEMORY_MIN: Final = 64 << 20
"""Less is a slip of the pen: a program would not start in it."""
_SIZES: Final = {
    **dict(zip(("", "k", "M", "G", "T"), (1000.0**power for power in range(5)), strict=True)),
    **dict(zip(("Ki", "Mi", "Gi", "Ti"), (1024.0**power for power in range(1, 5)), strict=True)),
}
GO_SHARE: Final = 0.75
"""Of a container's memory, what a program in Go may use before it collects garbage: else the limit ends it first."""
_NAMESPACE: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
HubTarget = Literal["compose", "kubernetes", "systemd"]
RegionTarget = Literal["compose", "kubernetes", "systemd", "skypilot"]
Size = Annotated[str, Field(pattern=f"^{SIZE}$")]
Processors = Annotated[str, Field(pattern=f"^({PROCESSORS})$")]


def size_bytes(quantity: str) -> int:
    """Return a size in bytes.

    Examples:
        >>> size_bytes("2Gi"), size_bytes("1.5G")
        (2147483648, 1500000000)
    """
    found = re.fullmatch(SIZE, quantity)
    if found is None:
        raise ValueError(f"no size: {quantity!r}")
    return round(float(found[1]) * _SIZES[found[2] or ""])


def _normalize_network(text: str) -> str:
    return str(ip_network(text))


def _check_memory(memory: str) -> str:
    if size_bytes(memory) < MEMORY_MIN:
        raise ValueError(f"at least {MEMORY_MIN >> 20}Mi")
    return memory


Network = Annotated[str, AfterValidator(_normalize_network)]


Memory = Annotated[Size, AfterValidator(_check_memory)]


class HubPlace(Section):
    """The hub.

    Attributes:
        hosts: the names or addresses by which learners reach the nodes of the broker: one for each node, or one for all.
        nodes: nodes of the broker; without it as many as there are hosts. On one host each has the next port.
        port: TCP port for clients, of the first node.
        cluster_port: TCP port for the other nodes, of the first node.
        leaf_port: TCP port for the brokers of regions, of the first node; opened if there are any.
        synchronizers: how many synchronizers share the shards.
        monitor: whether a monitor of the run is here, which serves its metrics and pages at port 9464.
        target: what starts the services.
        namespace: of Kubernetes.
        service: how Kubernetes shows each node outside: the type of its Service.
        storage: size of each node's volume in Kubernetes.
        memory: memory of a node, and of a synchronizer; in regions, too.
        sources: networks (CIDR) from which islands come; empty for everywhere.
        addresses: networks (CIDR) in which the hosts are; empty for everywhere. Rules of Kubernetes know no names.
    """

    hosts: tuple[str, ...] = Field(min_length=1, max_length=5)
    nodes: Copies | None = None
    port: int = Field(default=PORT, ge=1, le=65000)
    cluster_port: int = Field(default=CLUSTER_PORT, ge=1, le=65000)
    leaf_port: int = Field(default=LEAF_PORT, ge=1, le=65000)
    synchronizers: int = Field(default=2, ge=1, le=64)
    monitor: bool = False
    target: HubTarget = "systemd"
    namespace: str = "atoll"
    service: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "LoadBalancer"
    storage: Size = "100Gi"
    memory: Memory = "2Gi"
    sources: tuple[Network, ...] = ()
    addresses: tuple[Network, ...] = ()

    @property
    def count(self) -> int:
        """Return the number of nodes."""
        return self.nodes or len(self.hosts)

    @model_validator(mode="after")
    def _check_relations(self) -> HubPlace:
        if self.count not in (1, 3, 5):
            raise ValueError(f"{self.count} nodes; 1, 3 or 5 can elect a leader without waste")
        if len(self.hosts) not in (1, self.count):
            raise ValueError(f"{len(self.hosts)} hosts for {self.count} nodes; name one for each, or one for all")
        if len(set(self.hosts)) < len(self.hosts):
            raise ValueError("two nodes have one host; for several nodes on one host name it once, and say `nodes`")
        if self.target == "compose" and len(self.hosts) > 1:
            raise ValueError("compose runs on one host; for several choose systemd or kubernetes")
        if self.target == "kubernetes" and len(self.hosts) != self.count:
            raise ValueError(
                f"in Kubernetes each of {self.count} nodes is reached at an address of its own; name as many"
            )
        if len(self.hosts) < self.count and abs(self.port - self.cluster_port) < self.count:
            raise ValueError(
                f"port {self.port} and cluster_port {self.cluster_port} meet: {self.count} nodes are on one host"
            )
        check_hosts(self.hosts)
        _check_namespace(self.namespace)
        return self


class RegionPlace(Section):
    """One region: machines that have learners.

    Attributes:
        learners: how many learners; their ids are REGION-1, REGION-2 and so on.
        target: what starts them.
        broker: where they find the broker: at the `hub`, or a `leaf` of their own, which is a service of the region.
        host: by which name or address learners reach the leaf, with systemd; in containers its name is REGION-broker.
        port: TCP port of the leaf, with systemd.
        storage: size of the leaf's volume in Kubernetes.
        premerge: whether a synchronizer beside the leaf adds up what the learners send.
        data: the token shards: a folder on the machines; in Kubernetes the name of a PersistentVolumeClaim; for SkyPilot also a
            bucket (s3://bucket/corpus).
        founds: whether these learners may found the run; a founder is trusted as a synchronizer is.
        namespace: of Kubernetes.
        gpus: accelerators of each learner, in Kubernetes.
        accelerators: of each learner, in SkyPilot's words: "H100:8".
        spot: whether SkyPilot takes machines that may be taken back.
        memory: memory of a learner, in Kubernetes and compose.
        cpus: processors of a learner, in Kubernetes and compose: "4", "0.5" or "500m".
        settings: what these learners are told beside the settings of all.
    """

    learners: int = Field(ge=1, le=1000)
    target: RegionTarget = "systemd"
    broker: Literal["hub", "leaf"] = "hub"
    host: str = ""
    port: int = Field(default=PORT, ge=1, le=65535)
    storage: Size = "100Gi"
    premerge: bool = False
    data: str = Field(default="corpus", min_length=1)
    founds: bool = True
    namespace: str = "atoll"
    gpus: int = Field(default=0, ge=0, le=64)
    accelerators: str = ""
    spot: bool = True
    memory: Memory = "8Gi"
    cpus: Processors = "4"
    settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_relations(self) -> RegionPlace:
        _check_namespace(self.namespace)
        if self.target == "kubernetes" and not _NAMESPACE.fullmatch(self.data):
            raise ValueError(f"data is the name of a PersistentVolumeClaim in Kubernetes, got {self.data!r}")
        if self.broker == "leaf" and self.target == "skypilot":
            raise ValueError(
                "SkyPilot's machines come and go, and a broker stays; take another target, or the hub's broker"
            )
        if self.premerge and self.broker == "hub":
            raise ValueError(
                'premerge needs broker = "leaf": without one, what is to be added up crosses the link first'
            )
        if self.broker == "leaf" and self.target == "systemd" and not self.host:
            raise ValueError("learners reach the broker of their region by a name; give its host")
        if self.host and (self.broker == "hub" or self.target != "systemd"):
            raise ValueError("host is that of a leaf with systemd; in containers a leaf has the name REGION-broker")
        check_hosts([self.host] if self.host else [])
        return self


class Software(Section):
    """The software that is installed.

    Attributes:
        learner_image: image of learners, for Kubernetes and compose.
        hub_image: image of brokers and synchronizers.
        program: the `atoll` command on machines with systemd.
        package: what pip installs on SkyPilot's machines: a requirement, or the address of a wheel.
    """

    learner_image: str = f"atoll-learner:{VERSION}"
    hub_image: str = f"atoll-synchronizer:{VERSION}"
    program: str = Field(default="/opt/atoll/bin/atoll", pattern=r"^/[\w./-]+$")
    package: str = "atoll[learner]"


class DeploymentDescription(Section):
    """The whole description.

    Attributes:
        run: id of the run.
        hub: the brokers and the synchronizers.
        regions: the regions by name.
        software: what is installed.
        settings: what every process is told: the tables of a run file.
    """

    run: str
    hub: HubPlace
    regions: dict[str, RegionPlace] = Field(min_length=1, max_length=64)
    software: Software = Software()
    settings: dict[str, Any] = Field(default_factory=dict)

    @field_validator("regions")
    @classmethod
    def _check_names(cls, regions: dict[str, RegionPlace]) -> dict[str, RegionPlace]:
        for name in regions:
            if not is_region_name(name):
                raise ValueError(f"{name!r} is no name of a region: {REGION_NAMES}")
        return regions

    @model_validator(mode="after")
    def _check_relations(self) -> DeploymentDescription:
        names = [name for place in self.regions for name in self._names(place)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two services would have one name: {', '.join(twice)}; rename a region")
        hub, leaves = self.hub, any(region.broker == "leaf" for region in self.regions.values())
        apart = hub.count if len(hub.hosts) < hub.count else 1
        for name, port in (("port", hub.port), ("cluster_port", hub.cluster_port)):
            if leaves and abs(port - hub.leaf_port) < apart:
                raise ValueError(
                    f"{name} {port} and leaf_port {hub.leaf_port} of the hub meet: one host has {apart} of each"
                )
        return self

    def _names(self, place: str) -> list[str]:
        region = self.regions[place]
        learners = [f"{place}-{number}" for number in range(1, region.learners + 1)]
        leaf = [place, leaf_name(place)] if region.broker == "leaf" else []
        return [*learners, *leaf, *([premerger_of(place)] if region.premerge else [])]


def leaf_name(place: str) -> str:
    """Return the name of the service that is the broker of a region."""
    return f"{place}-broker"


def read_description(path: Path) -> DeploymentDescription:
    """Return the description in a file.

    Raises:
        SettingsError: it cannot be read, is not TOML, has a name that does not exist or a value that cannot be.
    """
    try:
        table = parsed_toml(read_text(path))
    except OSError as error:
        raise SettingsError(
            "cannot read the description",
            got=f"{path}: {error.strerror}",
            allowed=f"a file of TOML in UTF-8, of at most {DOCUMENT_BYTES_MAX:,} bytes",
            todo="check its path",
        ) from error
    except ValueError as error:
        raise SettingsError("the description is not TOML", got=f"{path}: {error}", todo="correct the file") from error
    try:
        found = DeploymentDescription(**table)
    except ValidationError as error:
        raise _description_error(path, error) from error
    token(found.run, "run id")
    return found


def _check_namespace(name: str) -> None:
    if not _NAMESPACE.fullmatch(name):
        raise ValueError(f"{name!r} is no namespace of Kubernetes: small letters, digits and '-'")


def _description_error(path: Path, error: ValidationError) -> SettingsError:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    todo = "see docs/how-to/deploy.md for what a description holds"
    if first["type"] == "extra_forbidden":
        return SettingsError(f"{path} has a name that no description has", got=name, todo=todo)
    if first["type"] == "missing":
        return SettingsError(f"{path} lacks what every description has", got=f"no {name}", todo=todo)
    why = first["msg"].removeprefix("Value error, ")
    got = first["input"] if not isinstance(first["input"], dict) else None
    return SettingsError(f"{name or path} is wrong: {why}", got=got, todo=todo)


def go_memory(quantity: str) -> str:
    """Return the GOMEMLIMIT of a container with so much memory.

    Examples:
        >>> go_memory("2Gi")
        '1536MiB'
    """
    return f"{max(1, int(GO_SHARE * size_bytes(quantity)) >> 20)}MiB"


def processors(quantity: str) -> str:
    """Return processors as a decimal number, which is all that compose takes.

    Examples:
        >>> processors("500m"), processors("4"), processors("1000")
        ('0.5', '4', '1000')
    """
    return f"{(Decimal(quantity.removesuffix('m')) / (1000 if quantity.endswith('m') else 1)).normalize():f}"
