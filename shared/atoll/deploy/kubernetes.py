"""A place as a kustomization of Kubernetes (1.28 or later), on top of a base that all places share, and who may speak to whom.

    kubernetes/base/                 nothing passes that no rule names; an account without rights
    PLACE/services/                  kustomization of secrets and run files; the secrets are files, and no YAML holds one
    PLACE/kustomization.yaml         what runs here, over the base

A learner has no liveness probe: one that is cut off from the broker is unhealthy and trains on, and whoever kills it loses its
steps. A Job brings back a learner whose machine was taken, and leaves alone one that has finished. The broker of a region is
not well while the hub is away, and its learners need it then: its probes look at its port alone.

**Rules.** The base closes everything. A learner and a synchronizer open one connection to the broker and take none; the broker
takes clients on one port, its own nodes on another, and the brokers of regions on a third. In a region with a broker of its
own, that one alone reaches the hub. Rules count only where the cluster's network plug-in keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from atoll.bus.options import CLUSTER_PORT, LEAF_PORT, PORT
from atoll.deploy.description import DeploymentDescription
from atoll.deploy.services import (
    CLUSTER,
    DOOR,
    IDENTITY_FILE,
    MONITOR,
    MONITOR_PORT,
    NODES_SERVICE,
    RUN_FILE,
    PlannedLeaf,
    PlannedService,
    broker_environment,
    folders_of_container,
    leaf_command,
    leaf_of,
    nodes,
    services,
    uses_object_store,
)
from atoll.deploy.texts import yaml
from atoll.wire.subjects import HUB

USER: Final = 10001
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
RETRIES: Final = 2**31 - 1
_HEALTH: Final = "/tmp/health"  # noqa: S108  (of a container)
_HEAD: Final = "{run}, {place}: written by `atoll deploy render`; change the description and render again."
_KUSTOMIZATION: Final = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
_BASE_HEAD: Final = "Common to all places: written by `atoll deploy render`; change the description and render again."
_EVERYWHERE: Final = ("0.0.0.0/0", "::/0")
_NAMES: Final = {
    "to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}],
    "ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}],
}


def kubernetes_files(described: DeploymentDescription, place: str) -> dict[str, str]:
    """Return the files of a place by their names."""
    head = _HEAD.format(run=described.run, place=place)
    planned, leaf = services(described, place), leaf_of(described, place)
    if place == HUB:
        namespace = described.hub.namespace
        documents = {
            "brokers.yaml": [
                _brokers(described),
                _nodes_service(),
                *_node_services(described),
                budget(CLUSTER, CLUSTER),
            ],
            "synchronizers.yaml": [
                *(_deployment(described, one, "synchronizer") for one in planned if one.kind == "synchronizer"),
                budget("synchronizers", "synchronizer"),
            ],
            "rules.yaml": rules_of_hub(described),
        }
        if described.hub.monitor:
            documents["monitor.yaml"] = _monitor(described, planned[-1])
    else:
        namespace = described.regions[place].namespace
        learners = [one for one in planned if one.kind == "learner"]
        documents = {}
        if leaf is not None:
            ports = [{"name": "clients", "port": PORT, "targetPort": PORT}]
            reached = _service(leaf.name, {"selector": {"app": leaf.name}, "ports": ports})
            documents["broker.yaml"] = [_leaf(described, leaf), reached]
        if premergers := [_deployment(described, one, one.name) for one in planned if one.kind == "premerger"]:
            documents["synchronizer.yaml"] = premergers
        documents["learners.yaml"] = [_learner(described, place, one) for one in learners]
        documents["rules.yaml"] = rules_of_region(described, place)
    overlay = {
        **_KUSTOMIZATION,
        "namespace": namespace,
        "labels": [{"pairs": {"atoll/run": described.run, "atoll/place": place}}],
        "resources": ["../kubernetes/base", *documents],
    }
    found = {name: yaml(*each, head=head) for name, each in documents.items()}
    found["kustomization.yaml"] = yaml(overlay, head=f"{head}\nFirst: kubectl apply -k {place}/services")
    found["services/kustomization.yaml"] = yaml(_service_files(place, namespace, planned, leaf), head=head)
    return found


def _service_files(
    place: str, namespace: str, planned: list[PlannedService], leaf: PlannedLeaf | None
) -> dict[str, Any]:
    """Return the kustomization of secrets and run files; their names stay, so a change of the roll restarts nobody."""
    secrets = [{"name": one.name, "files": [f"{one.name}/{IDENTITY_FILE}"]} for one in planned]
    door = ("roll.json", "broker.pem", "broker.key", "authority.pem")
    if place == HUB:
        secrets.append({"name": DOOR, "files": [f"{DOOR}/{name}" for name in door]})
    if leaf is not None:
        secrets.append({"name": leaf.name, "files": [f"{leaf.name}/{name}" for name in (*door, IDENTITY_FILE)]})
    return {
        **_KUSTOMIZATION,
        "namespace": namespace,
        "generatorOptions": {"disableNameSuffixHash": True},
        "secretGenerator": secrets,
        "configMapGenerator": [{"name": one.name, "files": [f"{one.name}/{RUN_FILE}"]} for one in planned],
    }


def _pod(role: str, name: str, container: dict[str, Any], volumes: list[dict[str, Any]], **more: Any) -> dict[str, Any]:  # noqa: ANN401
    closed = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    first = {one: {**each, "securityContext": closed} for one, each in more.pop("first", {}).items()}
    spec = {
        "serviceAccountName": "atoll",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 90,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"initContainers": list(first.values())} if first else {}),
        "containers": [{**container, "securityContext": closed}],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "512Mi"}}, *volumes],
        **more,
    }
    return {"metadata": {"labels": {"app": role, "atoll/service": name}}, "spec": spec}


def _service_pod(role: str, service: PlannedService, container: dict[str, Any], **more: Any) -> dict[str, Any]:  # noqa: ANN401
    volumes = [
        {"name": "service", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {
            "name": "given",
            "projected": {
                "defaultMode": 0o440,
                "sources": [{"configMap": {"name": service.name}}, {"secret": {"name": service.name}}],
            },
        },
        *more.pop("volumes", ()),
    ]
    folders = {f"folder-{number}": path for number, path in enumerate(folders_of_container(service))}
    volumes += [{"name": name, "emptyDir": {}} for name in folders]
    copying = _copying(container["image"], "given", IDENTITY_FILE, RUN_FILE)
    mounts = [_mount("tmp", "/tmp"), _mount("service", "/service"), *container["volumeMounts"]]  # noqa: S108
    container = {
        **container,
        "args": [service.verb, "--config", f"/service/{RUN_FILE}"],
        "volumeMounts": [*mounts, *(_mount(name, path) for name, path in folders.items())],
    }
    return _pod(role, service.name, container, volumes, first={"given": copying}, **more)


def _copying(image: str, volume: str, *names: str) -> dict[str, Any]:
    """Return what copies secrets: Kubernetes shows them to the group of the pod, and a copy of our own is ours alone."""
    return {
        "name": "given",
        "image": image,
        "command": ["install", "-m", "0600", *(f"/{volume}/{name}" for name in names), "/service/"],
        "volumeMounts": [_mount(volume, f"/{volume}", read_only=True), _mount("service", "/service")],
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}},
    }


def _mount(name: str, path: str, *, read_only: bool = False) -> dict[str, Any]:
    return {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})


def _probe(age_s: int, failures: int, *words: str) -> dict[str, Any]:
    command = ["atoll", "health", "--age", str(age_s), *words]
    return {"exec": {"command": command}, "periodSeconds": 15, "timeoutSeconds": 10, "failureThreshold": failures}


def _brokers(described: DeploymentDescription) -> dict[str, Any]:
    """Return the nodes; the number of a node is that of its pod, and its volume is its own for good."""
    hub = described.hub
    file = ("--file", _HEALTH)
    args = ["broker", "--host", "0.0.0.0", "--store", "/data", "--keys", "/door"]  # noqa: S104  (of a container)
    if leaves := any(node.leaf_port for node in nodes(described)):
        args += ["--leaf-port", str(LEAF_PORT)]
    if hub.count > 1:
        # Each node names them all, itself too: the server passes over a route to itself.
        routes = [f"nats://{CLUSTER}-{node.number}.{NODES_SERVICE}:{CLUSTER_PORT}" for node in nodes(described)]
        args += ["--cluster", CLUSTER, "--node", "$(NODE)", *(word for one in routes for word in ("--route", one))]
    container = _broker_container(described, args)
    number = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    container["env"].append({"name": "NODE", "valueFrom": number})
    container["ports"].append({"name": "nodes", "containerPort": CLUSTER_PORT})
    container["ports"] += [{"name": "leaves", "containerPort": LEAF_PORT}] if leaves else []
    container |= {
        # A node with much to recover serves late; one that is frozen is started anew by `atoll broker` itself.
        "startupProbe": _probe(15, 80, *file),
        "readinessProbe": _probe(15, 2, *file),
        "livenessProbe": _probe(60, 8, *file),
    }
    door = {"name": "door", "secret": {"secretName": DOOR, "defaultMode": 0o440}}
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    spread["labelSelector"] = {"matchLabels": {"app": CLUSTER}}
    pod = _pod(CLUSTER, CLUSTER, container, [door], topologySpreadConstraints=[spread])
    more = {"replicas": hub.count, "ordinals": {"start": 1}, "podManagementPolicy": "Parallel"}
    return _stateful(CLUSTER, NODES_SERVICE, pod, hub.storage, more)


def _broker_container(described: DeploymentDescription, args: list[str]) -> dict[str, Any]:
    memory = described.hub.memory
    return {
        "name": "broker",
        "image": described.software.hub_image,
        "args": args,
        "env": [{"name": name, "value": value} for name, value in broker_environment(memory, _HEALTH).items()],
        "ports": [{"name": "clients", "containerPort": PORT}],
        "volumeMounts": [_mount("tmp", "/tmp"), _mount("data", "/data"), _mount("door", "/door", read_only=True)],  # noqa: S108
        "resources": {"requests": {"cpu": "1", "memory": memory}, "limits": {"memory": memory}},
    }


def _stateful(name: str, service: str, pod: dict[str, Any], storage: str, more: dict[str, Any]) -> dict[str, Any]:
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": storage}}}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "serviceName": service,
            **more,
            "selector": {"matchLabels": {"app": name}},
            "template": pod,
            "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
        },
    }


def _leaf(described: DeploymentDescription, leaf: PlannedLeaf) -> dict[str, Any]:
    """Return the broker of a region; it follows the door that it is given, and has a copy of its identity."""
    args = list(leaf_command(leaf, store="/data", keys="/door", identity=f"/service/{IDENTITY_FILE}"))
    container = _broker_container(described, args)
    container["volumeMounts"].append(_mount("service", "/service"))
    answers = {"tcpSocket": {"port": PORT}, "periodSeconds": 15, "timeoutSeconds": 10}
    for probe, failures in (("startupProbe", 80), ("readinessProbe", 2), ("livenessProbe", 8)):
        container[probe] = {**answers, "failureThreshold": failures}
    volumes = [
        {"name": "door", "secret": {"secretName": leaf.name, "defaultMode": 0o440}},
        {"name": "service", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
    ]
    copying = _copying(container["image"], "door", IDENTITY_FILE)
    pod = _pod(leaf.name, leaf.name, container, volumes, first={"given": copying})
    return _stateful(leaf.name, leaf.name, pod, described.regions[leaf.place].storage, {"replicas": 1})


def _service(name: str, spec: Mapping[str, Any], **metadata: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, **metadata}, "spec": spec}


def _nodes_service() -> dict[str, Any]:
    """Return the Service that gives each node a name, also before it is ready: the nodes find each other by it."""
    ports = [{"name": "clients", "port": PORT}, {"name": "nodes", "port": CLUSTER_PORT}]
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": CLUSTER}, "ports": ports}
    return _service(NODES_SERVICE, spec)


def _node_services(described: DeploymentDescription) -> list[dict[str, Any]]:
    """Return a Service for each node by which islands of other places reach it, and the name that must lead there."""
    return [
        _service(
            f"{CLUSTER}-{node.number}",
            {
                "type": described.hub.service,
                "selector": {"statefulset.kubernetes.io/pod-name": f"{CLUSTER}-{node.number}"},
                "ports": [
                    {"name": "clients", "port": described.hub.port, "targetPort": PORT},
                    *([{"name": "leaves", "port": node.leaf_port, "targetPort": LEAF_PORT}] if node.leaf_port else []),
                ],
            },
            annotations={"external-dns.alpha.kubernetes.io/hostname": node.host},
        )
        for node in nodes(described)
    ]


def _monitor(described: DeploymentDescription, service: PlannedService) -> list[dict[str, Any]]:
    container = {
        "name": MONITOR,
        "ports": [{"name": "metrics", "containerPort": MONITOR_PORT}],
        "volumeMounts": [_mount("state", "/state")],
    }
    # Its journal goes with its pod: the run's event log has the events, a Prometheus the metrics.
    state = {"name": "state", "emptyDir": {"sizeLimit": "2Gi"}}
    spec = {"selector": {"app": MONITOR}, "ports": [{"name": "metrics", "port": MONITOR_PORT}]}
    return [
        _deployment(described, service, MONITOR, volumes=[state], container=container),
        _service(MONITOR, spec),
    ]


def _deployment(
    described: DeploymentDescription,
    service: PlannedService,
    role: str,
    *,
    container: Mapping[str, Any] = _NOTHING,
    **more: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """Return a service of which there is one, started anew wherever there is room: it holds nothing of its own."""
    config = ("--config", f"/service/{RUN_FILE}")
    container = {
        "name": "synchronizer",
        "image": described.software.hub_image,
        "volumeMounts": [],
        **container,
        "resources": {
            "requests": {"cpu": "1", "memory": described.hub.memory},
            "limits": {"memory": described.hub.memory},
        },
        "startupProbe": _probe(15, 40, *config),
        "readinessProbe": _probe(15, 2, *config),
        # A synchronizer holds nothing that the broker does not have: after minutes without an answer a new one may do better.
        "livenessProbe": _probe(120, 8, *config),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": service.name},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "selector": {"matchLabels": {"app": role, "atoll/service": service.name}},
            "template": _service_pod(role, service, container, **more),
        },
    }


def _learner(described: DeploymentDescription, place: str, service: PlannedService) -> dict[str, Any]:
    region = described.regions[place]
    gpus = {"nvidia.com/gpu": region.gpus} if region.gpus else {}
    container = {
        "name": "learner",
        "image": described.software.learner_image,
        "volumeMounts": [_mount("state", "/state"), _mount("corpus", "/data", read_only=True)],
        "resources": {
            "requests": {"cpu": region.cpus, "memory": region.memory, **gpus},
            "limits": {"memory": region.memory, **gpus},
        },
        "readinessProbe": _probe(15, 2, "--config", f"/service/{RUN_FILE}"),
    }
    volumes = [
        # A learner that comes back on another machine asks a peer for its inner state.
        {"name": "state", "emptyDir": {}},
        {"name": "corpus", "persistentVolumeClaim": {"claimName": region.data, "readOnly": True}},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": service.name},
        "spec": {
            "backoffLimit": RETRIES,
            "completions": 1,
            "parallelism": 1,
            # The former one must be gone: two processes of one learner id refuse each other.
            "podReplacementPolicy": "Failed",
            "template": _service_pod(
                learners_of(described, place), service, container, volumes=volumes, restartPolicy="OnFailure"
            ),
        },
    }


def base_files() -> dict[str, str]:
    """Return the files of the base by their names."""
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "atoll"},
        "automountServiceAccountToken": False,
    }
    closed = _rule("nothing-passes", "")
    kustomization = {**_KUSTOMIZATION, "resources": ["account.yaml", "closed.yaml"]}
    return {
        "kustomization.yaml": yaml(kustomization, head=_BASE_HEAD),
        "account.yaml": yaml(account, head=_BASE_HEAD),
        "closed.yaml": yaml(closed, head=_BASE_HEAD),
    }


def rules_of_hub(described: DeploymentDescription) -> list[dict[str, Any]]:
    """Return the rules of the broker's nodes and of the synchronizers."""
    own_nodes = _pods(CLUSTER)
    watchers = [MONITOR] if described.hub.monitor else []
    roles = {"key": "app", "operator": "In", "values": [*watchers, "synchronizer", "learner"]}
    own = {"podSelector": {"matchExpressions": [roles]}}
    islands = _networks(described.hub.sources)
    leaves = [leaf for place in described.regions if (leaf := leaf_of(described, place)) is not None]
    near = [_pods(leaf.name) for leaf in leaves if _is_beside_the_hub(described, leaf.place)]
    let_in = [_way("from", [own, *islands], PORT), _way("from", [own_nodes], CLUSTER_PORT)]
    let_in += [_way("from", [*near, *islands], LEAF_PORT)] if leaves else []
    to_broker = [_NAMES, _way("to", [own_nodes], PORT)]
    # An object store speaks HTTPS.
    to_archive = [_way("to", _networks(()), 443)] if uses_object_store(described) else []
    # Any pod of the cluster may ask the monitor, which only tells: a Prometheus stands in a namespace of its own.
    asked = [_way("from", [{"namespaceSelector": {}}], MONITOR_PORT)]
    return [
        _rule("broker", CLUSTER, ingress=let_in, egress=[_NAMES, _way("to", [own_nodes], CLUSTER_PORT)]),
        _rule("synchronizer", "synchronizer", egress=[*to_broker, *to_archive]),
        *(_rule(name, name, ingress=asked, egress=to_broker) for name in watchers),
    ]


def rules_of_region(described: DeploymentDescription, place: str) -> list[dict[str, Any]]:
    """Return the rules of a region: its learners reach their broker and nothing else, as far as its addresses are told."""
    leaf = leaf_of(described, place)
    if leaf is None:
        reached = _hub_reached(described, place, {node.port for node in nodes(described)}, PORT)
        return [_rule("learner", "learner", egress=[_NAMES, *reached])]
    roles = [learners_of(described, place)]
    roles += [one.name for one in services(described, place) if one.kind == "premerger"]
    hub = _hub_reached(described, place, {node.leaf_port for node in nodes(described)}, LEAF_PORT)
    taken, to_leaf = _way("from", [_pods(role) for role in roles], PORT), _way("to", [_pods(leaf.name)], PORT)
    broker = _rule(leaf.name, leaf.name, ingress=[taken], egress=[_NAMES, *hub])
    return [broker, *(_rule(role, role, egress=[_NAMES, to_leaf]) for role in roles)]


def budget(name: str, role: str) -> dict[str, Any]:
    """Return the rule that maintenance takes one at a time."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": {"app": role}}}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": name}, "spec": spec}


def learners_of(described: DeploymentDescription, place: str) -> str:
    """Return the label `app` of a region's learners; rules add up, so those behind a leaf have one of their own."""
    return "learner" if leaf_of(described, place) is None else f"{place}-learner"


def _hub_reached(described: DeploymentDescription, place: str, ports: set[int], inner: int) -> list[dict[str, Any]]:
    """Return the ways from a region to the hub: to `ports` of its hosts, and to port `inner` of its pods beside us."""
    reached = [_way("to", _networks(described.hub.addresses), *sorted(ports))]
    if _is_beside_the_hub(described, place):
        # Behind the address of a Service stands a pod, and rules see the pod.
        reached.append(_way("to", [_pods(CLUSTER)], inner))
    return reached


def _is_beside_the_hub(described: DeploymentDescription, place: str) -> bool:
    hub, region = described.hub, described.regions[place]
    return hub.target == region.target == "kubernetes" and hub.namespace == region.namespace


def _pods(role: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": {"app": role}}}


def _networks(cidrs: Sequence[str]) -> list[dict[str, Any]]:
    return [{"ipBlock": {"cidr": cidr}} for cidr in cidrs or _EVERYWHERE]


def _way(direction: str, peers: list[dict[str, Any]], *ports: int) -> dict[str, Any]:
    return {direction: peers, "ports": [{"port": port, "protocol": "TCP"} for port in ports]}


def _rule(name: str, app: str, **ways: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a rule for the pods of `app`, for all of the namespace if it is empty; without `ways` nothing passes."""
    types = [way.capitalize() for way in ways or ("ingress", "egress")]
    selector = {"matchLabels": {"app": app}} if app else {}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {"podSelector": selector, "policyTypes": types, **ways},
    }
