"""Who may speak to whom in Kubernetes: the base of every place, and the rules of each.

The base closes everything: no pod of the namespace hears or says anything. Each place then opens what its services need, which
is little: a learner and a synchronizer open one connection to the broker and take none; the broker takes clients on one port,
its own nodes on another, and the brokers of regions on a third. In a region with a broker of its own, that one alone reaches
the hub. Names are asked of the cluster's name server. Rules count only where the cluster's network plug-in keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from atoll.bus.addresses import CLUSTER_PORT, LEAF_PORT, PORT
from atoll.deploy.archives import uses_object_store
from atoll.deploy.description import DeploymentDescription
from atoll.deploy.services import (
    CLUSTER,
    MONITOR,
    MONITOR_PORT,
    PlannedLeaf,
    leaf_of,
    nodes,
    services,
)
from atoll.deploy.texts import yaml

_HEAD: Final = "Common to all places: written by `atoll deploy render`; change the description and render again."
_EVERYWHERE: Final = ("0.0.0.0/0", "::/0")
_NAMES: Final = {
    "to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}],
    "ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}],
}


def base_files() -> dict[str, str]:
    """Return the files of the base by their names."""
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "atoll"},
        "automountServiceAccountToken": False,
    }
    closed = _rule("nothing-passes", {}, {"policyTypes": ["Ingress", "Egress"]})
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["account.yaml", "closed.yaml"],
    }
    return {
        "kustomization.yaml": yaml(kustomization, head=_HEAD),
        "account.yaml": yaml(account, head=_HEAD),
        "closed.yaml": yaml(closed, head=_HEAD),
    }


def rules_of_hub(described: DeploymentDescription) -> list[dict[str, Any]]:
    """Return the rules of the broker's nodes and of the synchronizers."""
    own_nodes = _pods(CLUSTER)
    watchers = [MONITOR] if described.hub.monitor else []
    own = {
        "podSelector": {
            "matchExpressions": [{"key": "app", "operator": "In", "values": [*watchers, "synchronizer", "learner"]}]
        }
    }
    islands = [{"ipBlock": {"cidr": cidr}} for cidr in described.hub.sources or _EVERYWHERE]
    to_nodes = {"to": [own_nodes], "ports": [{"port": CLUSTER_PORT, "protocol": "TCP"}]}
    leaves = [leaf for place in described.regions if (leaf := leaf_of(described, place)) is not None]
    near = [_pods(leaf.name) for leaf in leaves if _is_beside_the_hub(described, leaf.place)]
    from_leaves = {"from": [*near, *islands], "ports": [{"port": LEAF_PORT, "protocol": "TCP"}]}
    broker = {
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [own, *islands], "ports": [{"port": PORT, "protocol": "TCP"}]},
            {"from": [own_nodes], "ports": [{"port": CLUSTER_PORT, "protocol": "TCP"}]},
            *([from_leaves] if leaves else []),
        ],
        "egress": [_NAMES, to_nodes],
    }
    synchronizer = {
        "policyTypes": ["Egress"],
        "egress": [
            _NAMES,
            {"to": [own_nodes], "ports": [{"port": PORT, "protocol": "TCP"}]},
            *_archive(described),
        ],
    }
    # Any pod of the cluster may ask the monitor, which only tells: a Prometheus stands in a namespace of its own.
    asked = {"from": [{"namespaceSelector": {}}], "ports": [{"port": MONITOR_PORT, "protocol": "TCP"}]}
    monitor = {
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [asked],
        "egress": [_NAMES, {"to": [own_nodes], "ports": [{"port": PORT, "protocol": "TCP"}]}],
    }
    return [
        _rule("broker", {"app": CLUSTER}, broker),
        _rule("synchronizer", {"app": "synchronizer"}, synchronizer),
        *(_rule(name, {"app": name}, monitor) for name in watchers),
    ]


def rules_of_region(described: DeploymentDescription, place: str) -> list[dict[str, Any]]:
    """Return the rules of a region: its learners reach their broker and nothing else, as far as its addresses are told."""
    leaf = leaf_of(described, place)
    if leaf is not None:
        return _rules_around(described, leaf)
    reached = _hub_reached(described, place, {node.port for node in nodes(described)}, PORT)
    return [_rule("learner", {"app": "learner"}, {"policyTypes": ["Egress"], "egress": [_NAMES, *reached]})]


def budget(name: str, role: str) -> dict[str, Any]:
    """Return the rule that maintenance takes one at a time."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": {"app": role}}}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": name}, "spec": spec}


def learners_of(described: DeploymentDescription, place: str) -> str:
    """Return the label `app` of a region's learners; rules add up, so those behind a leaf have one of their own."""
    return "learner" if leaf_of(described, place) is None else f"{place}-learner"


def _rules_around(described: DeploymentDescription, leaf: PlannedLeaf) -> list[dict[str, Any]]:
    """Return the rules of a region with a broker of its own."""
    place = leaf.place
    roles = [learners_of(described, place)]
    roles += [one.name for one in services(described, place) if one.kind == "premerger"]
    taken = {"from": [_pods(role) for role in roles], "ports": [{"port": PORT, "protocol": "TCP"}]}
    hub = _hub_reached(described, place, {node.leaf_port for node in nodes(described)}, LEAF_PORT)
    broker = {"policyTypes": ["Ingress", "Egress"], "ingress": [taken], "egress": [_NAMES, *hub]}
    to_leaf = {"to": [_pods(leaf.name)], "ports": [{"port": PORT, "protocol": "TCP"}]}
    others = {"policyTypes": ["Egress"], "egress": [_NAMES, to_leaf]}
    return [_rule(leaf.name, {"app": leaf.name}, broker), *(_rule(role, {"app": role}, others) for role in roles)]


def _hub_reached(described: DeploymentDescription, place: str, ports: set[int], inner: int) -> list[dict[str, Any]]:
    """Return the ways from a region to the hub: to `ports` of its hosts, and to port `inner` of its pods beside us."""
    to: list[dict[str, Any]] = [{"ipBlock": {"cidr": cidr}} for cidr in described.hub.addresses or _EVERYWHERE]
    reached = [{"to": to, "ports": [{"port": port, "protocol": "TCP"} for port in sorted(ports)]}]
    if _is_beside_the_hub(described, place):
        # Behind the address of a Service stands a pod, and rules see the pod.
        reached.append({"to": [_pods(CLUSTER)], "ports": [{"port": inner, "protocol": "TCP"}]})
    return reached


def _is_beside_the_hub(described: DeploymentDescription, place: str) -> bool:
    hub, region = described.hub, described.regions[place]
    return hub.target == region.target == "kubernetes" and hub.namespace == region.namespace


def _pods(role: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": {"app": role}}}


def _archive(described: DeploymentDescription) -> list[dict[str, Any]]:
    """Return the way to an archive that is an object store, which speaks HTTPS."""
    if not uses_object_store(described):
        return []
    return [{"to": [{"ipBlock": {"cidr": cidr}} for cidr in _EVERYWHERE], "ports": [{"port": 443, "protocol": "TCP"}]}]


def _rule(name: str, labels: Mapping[str, str], rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rule for the pods with `labels`; without any, for all pods of the namespace."""
    selector = {"matchLabels": dict(labels)} if labels else {}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {"podSelector": selector, **rules},
    }


def named(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return variables as a container has them."""
    return [{"name": name, "value": value} for name, value in environment.items()]
