"""One description becomes files that each target takes, again and again, and each place has its own secrets only."""

from __future__ import annotations

import itertools
import re
import shutil
import stat
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from atoll.base.errors import SettingsError
from atoll.deploy.description import read_description
from atoll.deploy.rendering import render, rendered_texts
from atoll.deploy.services import hosts_of_broker, kinds, leaf_of, nodes, places
from atoll.deploy.texts import yaml as as_yaml
from atoll.keys.certificates import hosts_of
from atoll.keys.identity import read_identity
from atoll.keys.roll import KeyFolder
from atoll.settings import load
from support.command_line import atoll
from support.deployments import PROGRAM, every_target

HUBS = ("compose", "kubernetes", "systemd")
VERSIONS = ("1.28", "1.31", "1.37")
SECRETS = ("identity.toml", "broker.key")
IN_KUBERNETES = ("hub", "eu", "asia")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("every")
    render(read_description(every_target(folder)), folder / "out")
    return folder / "out"


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refused(description: Path, out: Path, *said: str) -> None:
    """Fail unless rendering is refused in one message, which says this, and writes nothing."""
    before = tree(out)
    done = atoll("deploy", "render", str(description), "--out", str(out))

    assert done.returncode == 2, done.stderr
    assert [words for words in said if words not in done.stderr] == []
    assert "Traceback" not in done.stderr
    assert {**tree(out), ".lock": b""} == {**before, ".lock": b""}


def documents(path: Path) -> Iterator[dict[str, Any]]:
    yield from (one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one)


def built(folder: Path) -> list[dict[str, Any]]:
    """Return what a kustomization of ours resolves to, by rules of our own: resources, generated maps and secrets."""
    tree = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    known = {"apiVersion", "kind", "namespace", "labels", "resources", "generatorOptions"}
    assert set(tree) <= known | {"secretGenerator", "configMapGenerator"}
    found: list[dict[str, Any]] = []
    for one in tree.get("resources", ()):
        path = (folder / one).resolve()
        assert path.exists(), f"{folder} names {one}, which is not there"
        found += built(path) if path.is_dir() else documents(path)
    for kind, generator in (("Secret", "secretGenerator"), ("ConfigMap", "configMapGenerator")):
        for one in tree.get(generator, ()):
            files = [folder / name for name in one["files"]]
            assert all(file.is_file() and folder in file.parents for file in files), one
            found.append({"kind": kind, "metadata": {"name": one["name"]}, "data": [file.name for file in files]})
    return found


@pytest.mark.parametrize("hub", HUBS)
def test_rendering_again_changes_nothing_and_keeps_the_keys(tmp_path: Path, hub: str) -> None:
    """Keys are made once; a second rendering finds everything as it is, and touches no file."""
    description = every_target(tmp_path, hub)
    first = atoll("deploy", "render", str(description), "--out", str(tmp_path / "out"))
    before = tree(tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.toml")}
    again = atoll("deploy", "render", str(description), "--out", str(tmp_path / "out"))

    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert "0 files written, 0 removed" in again.stdout
    assert tree(tmp_path / "out") == before
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_change_of_the_description_changes_what_follows_from_it_and_no_key(tmp_path: Path) -> None:
    """A learner more is one key more; a learner less takes its files away, and the note says who may still enter."""
    description, out = every_target(tmp_path), tmp_path / "out"
    text = description.read_text(encoding="utf-8")
    render(read_description(description), out)
    former = {name: content for name, content in tree(out).items() if name.endswith((".key", "identity.toml"))}
    description.write_text(text.replace("learners = 1", "learners = 2"), encoding="utf-8")
    grown = render(read_description(description), out)
    description.write_text(text, encoding="utf-8")
    shrunk = render(read_description(description), out)
    now = tree(out)

    assert any("new keys: lab-2" in note for note in grown.notes)
    assert "lab/services/lab-2/identity.toml" in grown.written
    assert {
        "lab/services/lab-2/atoll.toml",
        "lab/services/lab-2/identity.toml",
        "lab/atoll-ocean-lab-2.service",
    } == set(shrunk.removed)
    assert any("keys revoke" in note and "lab-2" in note for note in shrunk.notes)
    assert {name: now[name] for name in former} == former


def test_an_edited_file_is_not_overwritten(tmp_path: Path) -> None:
    description, out = every_target(tmp_path), tmp_path / "out"
    render(read_description(description), out)
    edited = out / "desk" / "compose.yml"
    edited.write_text(edited.read_text(encoding="utf-8") + "# mine\n", encoding="utf-8")
    description.write_text(
        description.read_text(encoding="utf-8").replace("learners = 2", "learners = 3"), encoding="utf-8"
    )
    refused(description, out, "desk/compose.yml")


@pytest.mark.parametrize("hub", HUBS)
def test_each_place_has_its_own_identities_and_nothing_of_others(tmp_path: Path, hub: str) -> None:
    """Root key and operator stay in `keys`; a secret is its owner's alone; no text that goes anywhere else holds one."""
    out = tmp_path / "out"
    described = read_description(every_target(tmp_path, hub))
    render(described, out)
    operators = {path for path in (out / "keys").rglob("*") if path.is_file()}
    for place in places(described):
        named = {path.parent.name for path in (out / place).rglob("identity.toml")}
        assert named == set(kinds(described, place)) | ({"asia-broker"} if place == "asia" else set())
        assert ((out / place / "services" / "broker").exists()) == (place == "hub")
        for name, kind in kinds(described, place).items():
            held = read_identity(out / place / "services" / name / "identity.toml")
            assert (held.kind, held.name, held.run) == (kind, name, "ocean")
            assert held.founds == (kind == "learner" and place != "desk")
            entry = KeyFolder(out / "keys").read().of("ocean", name)
            assert entry is not None
            assert entry.region == ("" if kind != "learner" else "asia" if place == "asia" else "hub")
    leaf = read_identity(out / "asia/services/asia-broker/identity.toml")
    assert (leaf.kind, leaf.name, leaf.founds) == ("region", "asia", True)
    assert (out / "asia/services/asia-broker/broker.key").read_bytes() != (
        out / "hub/services/broker/broker.key"
    ).read_bytes()
    seeds = [read_identity(path).seed for path in out.rglob("identity.toml")]
    for path in (path for path in out.rglob("*") if path.is_file() and path not in operators):
        text = path.read_text(encoding="utf-8")
        assert path.name in SECRETS or not any(seed in text for seed in seeds), path
        assert path.name not in SECRETS or stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list(out.rglob("root.key"))[1:]
    certificate = (out / "hub/services/broker/broker.pem").read_text(encoding="utf-8")
    assert set(hosts_of_broker(described)) <= set(hosts_of(certificate))


@pytest.mark.parametrize("hub", HUBS)
def test_every_run_file_is_taken_by_its_service(tmp_path: Path, hub: str) -> None:
    """It loads; its identity lies beside it; it leads to the broker by names of the certificate."""
    out = tmp_path / "out"
    described = read_description(every_target(tmp_path, hub))
    render(described, out)
    for path in out.rglob("atoll.toml"):
        loaded = load(path, environment={})
        settings = loaded.settings
        assert (settings.run, settings.broker.replicas, settings.protocol.fragments) == ("ocean", 3, 4)
        assert settings.broker.identity == path.parent / "identity.toml"
        hosts = {address.removeprefix("tls://").rpartition(":")[0] for address in settings.broker.url.split(",")}
        if path.parent.name.startswith("asia"):
            shown = (out / "asia/services/asia-broker/broker.pem").read_text(encoding="utf-8")
            assert hosts == {"asia-broker"} <= set(hosts_of(shown))
            assert "asia" in (settings.learner.region, settings.synchronizer.region)
            continue
        assert len(settings.broker.url.split(",")) == len(nodes(described))
        assert hosts <= set(hosts_of_broker(described))
        assert settings.learner.region == settings.synchronizer.region == ""
        if path.parent.name.startswith("lab"):
            assert settings.train == load(None, ["train.rate=1e-3"], {}).settings.train


def test_every_kubernetes_object_keeps_the_schema_of_its_version(rendered: Path) -> None:
    found = [one for folder in IN_KUBERNETES for one in built(rendered / folder)]
    kinds_found = {one["kind"] for one in found}
    for one in found:
        for version in VERSIONS:
            kubernetes_validate.validate(one, version, strict=True)

    assert kinds_found == {
        *("StatefulSet", "Deployment", "Job", "Service", "ServiceAccount", "NetworkPolicy", "PodDisruptionBudget")
    }


def test_what_a_pod_mounts_is_given_to_it(rendered: Path) -> None:
    """Secrets and run files by reference: every name in a workload is one that the kustomization of services makes."""
    for place in IN_KUBERNETES:
        given = {(one["kind"], one["metadata"]["name"]): one["data"] for one in built(rendered / place / "services")}
        wanted: set[tuple[str, str]] = set()
        for one in built(rendered / place):
            pod = one.get("spec", {}).get("template", {}).get("spec")
            if pod is None:
                continue
            for volume in pod["volumes"]:
                sources = [volume, *volume.get("projected", {}).get("sources", ())]
                wanted |= {
                    ("Secret", s["secret"].get("secretName") or s["secret"]["name"]) for s in sources if "secret" in s
                }
                wanted |= {("ConfigMap", s["configMap"]["name"]) for s in sources if "configMap" in s}
            mounted = {
                mount["name"]
                for each in (*pod["containers"], *pod.get("initContainers", ()))
                for mount in each["volumeMounts"]
            }
            claims = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
            assert mounted == {volume["name"] for volume in pod["volumes"]} | claims
        assert wanted == set(given)


def test_every_pod_is_closed(rendered: Path) -> None:
    """No root, no capability, nothing to write but volumes, no token of the cluster, and a bound on memory."""
    pods = [
        one["spec"]["template"]["spec"]
        for place in IN_KUBERNETES
        for one in built(rendered / place)
        if "template" in one.get("spec", {})
    ]

    assert len(pods) == (1 + 2 + 1) + 2 + (1 + 1 + 2)
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]
        assert "readinessProbe" in pod["containers"][0]


def test_a_learner_that_is_cut_off_is_not_killed_and_one_that_has_finished_is_not_started(rendered: Path) -> None:
    jobs = list(documents(rendered / "eu" / "learners.yaml"))

    assert [job["metadata"]["name"] for job in jobs] == ["eu-1", "eu-2"]
    for job in jobs:
        assert job["spec"]["backoffLimit"] == 2**31 - 1
        assert job["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"
        assert "livenessProbe" not in job["spec"]["template"]["spec"]["containers"][0]


def test_learners_reach_the_broker_and_nothing_else(rendered: Path) -> None:
    """Nothing passes that no rule names; nodes take clients on one port, and each other on another."""
    closed = next(one for one in built(rendered / "eu") if one["metadata"]["name"] == "nothing-passes")["spec"]
    rules = {one["metadata"]["name"]: one["spec"] for one in built(rendered / "eu") if one["kind"] == "NetworkPolicy"}
    hub = {one["metadata"]["name"]: one["spec"] for one in built(rendered / "hub") if one["kind"] == "NetworkPolicy"}

    assert closed == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    ways = [(way.get("to"), [port["port"] for port in way["ports"]]) for way in rules["learner"]["egress"]]
    assert ([{"ipBlock": {"cidr": "203.0.113.0/24"}}], [4222]) in ways
    assert sorted(port for _, ports in ways for port in ports) == [53, 53, 4222, 4222]
    assert "ingress" not in rules["learner"]
    taken = {way["ports"][0]["port"]: way["from"] for way in hub["broker"]["ingress"]}
    assert taken[6222] == [{"podSelector": {"matchLabels": {"app": "hub"}}}]
    assert set(taken) == {4222, 6222, 7422}


@pytest.mark.parametrize("hub", HUBS)
def test_a_monitor_is_started_that_can_only_read_and_serves_at_its_port(tmp_path: Path, hub: str) -> None:
    """Its identity is a reader's; a container serves to outside, a machine to itself; a hub without one has none of it."""
    description, out = every_target(tmp_path, hub), tmp_path / "out"
    render(read_description(description), out)
    started = "".join(path.read_text(encoding="utf-8") for path in sorted((out / "hub").glob("*")) if path.is_file())
    settings = load(out / "hub/services/monitor/atoll.toml", environment={}).settings
    description.write_text(description.read_text(encoding="utf-8").replace("monitor = true", "monitor = false"))
    render(read_description(description), out)

    assert read_identity(out / "keys/identities/ocean/monitor.toml").kind == "reader"
    assert settings.monitor.port == 9464
    assert settings.monitor.host == ("127.0.0.1" if hub == "systemd" else "0.0.0.0")  # noqa: S104  (of a container)
    there = [f"monitor.atoll{rest}" for rest in ("", ".svc", ".svc.cluster.local")]
    names = {"systemd": [], "compose": ["monitor"], "kubernetes": ["monitor", *there]}
    assert list(settings.monitor.names) == names[hub], "a Prometheus asks by the name of the service"
    state = "/var/lib/atoll-ocean-monitor" if hub == "systemd" else "/state"
    assert settings.monitor.folder == Path(state, "records")
    words = {"systemd": " monitor --config ", "compose": "127.0.0.1:9464:9464", "kubernetes": "containerPort: 9464"}
    assert words[hub] in started
    assert not list((out / "hub").rglob("*monitor*"))


def test_a_monitor_is_asked_by_any_pod_and_reaches_the_broker_alone(rendered: Path) -> None:
    found = list(built(rendered / "hub"))
    rules = {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "NetworkPolicy"}
    services = {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "Service"}
    [clients] = [way["from"] for way in rules["broker"]["ingress"] if way["ports"][0]["port"] == 4222]

    asked = {"from": [{"namespaceSelector": {}}], "ports": [{"port": 9464, "protocol": "TCP"}]}
    assert rules["monitor"]["ingress"] == [asked]
    assert [way["to"] for way in rules["monitor"]["egress"]][1:] == [[{"podSelector": {"matchLabels": {"app": "hub"}}}]]
    assert "monitor" in clients[0]["podSelector"]["matchExpressions"][0]["values"]
    assert services["monitor"] == {"selector": {"app": "monitor"}, "ports": [{"name": "metrics", "port": 9464}]}


def test_in_a_region_with_a_broker_of_its_own_that_one_alone_reaches_the_hub(rendered: Path) -> None:
    """Its learners and its synchronizer reach it, and nothing else; it takes nobody else."""
    rules = {one["metadata"]["name"]: one["spec"] for one in built(rendered / "asia") if one["kind"] == "NetworkPolicy"}
    hub = {one["metadata"]["name"]: one["spec"] for one in built(rendered / "hub") if one["kind"] == "NetworkPolicy"}
    pods = {
        one["spec"]["template"]["metadata"]["labels"]["app"]
        for one in built(rendered / "asia")
        if "template" in one.get("spec", {})
    }
    broker = {"podSelector": {"matchLabels": {"app": "asia-broker"}}}

    assert pods == {"asia-broker", "asia-learner", "asia-premerge"}
    assert rules.keys() == {"nothing-passes", *pods}
    for role in ("asia-learner", "asia-premerge"):
        assert rules[role]["podSelector"] == {"matchLabels": {"app": role}}
        assert [way["to"] for way in rules[role]["egress"]][1:] == [[broker]]
    [taken] = rules["asia-broker"]["ingress"]
    assert [one["podSelector"]["matchLabels"]["app"] for one in taken["from"]] == ["asia-learner", "asia-premerge"]
    ways = [(way["to"], way["ports"]) for way in rules["asia-broker"]["egress"]][1:]
    assert ways[0] == ([{"ipBlock": {"cidr": "203.0.113.0/24"}}], [{"port": 7422, "protocol": "TCP"}])
    assert ways[1] == ([{"podSelector": {"matchLabels": {"app": "hub"}}}], [{"port": 7422, "protocol": "TCP"}])
    [from_leaves] = [way for way in hub["broker"]["ingress"] if way["ports"][0]["port"] == 7422]
    assert from_leaves["from"][0] == broker


def test_the_broker_of_a_region_is_not_ended_while_the_hub_is_away(rendered: Path) -> None:
    """Its health tells of the hub, and its learners need it during a cut: the probes look at its port."""
    leaf = next(one for one in built(rendered / "asia") if one["kind"] == "StatefulSet")
    [container] = leaf["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["tcpSocket"] == {"port": 4222}
    words = dict(itertools.pairwise(container["args"]))
    assert words["--leaf-of"] == ",".join(f"tls://hub-{n}.example.org:7422" for n in (1, 2, 3))
    assert (words["--keys"], words["--identity"]) == ("/door", "/service/identity.toml")


@pytest.mark.parametrize("target", ["compose", "kubernetes", "systemd"])
def test_every_target_starts_the_broker_of_a_region(tmp_path: Path, target: str) -> None:
    """With its door and its identity, at every node of the hub; its services know its name, and it may be taken away again."""
    description, out = with_leaf(tmp_path, target), tmp_path / "out"
    described = read_description(description)
    render(described, out)
    leaf = leaf_of(described, "far")
    assert leaf is not None
    door = KeyFolder(out / "far/services/far-broker")
    shown = door.shown(time.time()).certificate
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((out / "far").glob("*")) if path.is_file())
    hub = "".join(path.read_text(encoding="utf-8") for path in sorted((out / "hub").glob("*")) if path.is_file())
    settings = load(out / "far/services/far-1/atoll.toml", environment={}).settings
    adds_up = load(out / "far/services/far-premerge/atoll.toml", environment={}).settings

    assert {"far-broker", "127.0.0.1"} <= set(hosts_of(shown)) or "far.example.org" in hosts_of(shown)
    assert settings.broker.url == adds_up.broker.url == leaf.address
    assert (settings.learner.region, adds_up.synchronizer.region, adds_up.synchronizer.restore) == ("far", "far", "")
    assert "tls://hub.example.org:7500" in text
    assert "--leaf-port" in hub
    assert "7500" in hub
    description.write_text(description.read_text(encoding="utf-8").replace(FAR_LEAF[target], ""), encoding="utf-8")
    done = render(read_description(description), out)
    assert "far/services/far-broker/broker.key" in done.removed
    assert not (out / "far/services/far-broker").exists()
    assert any(" far " in note and "revoke" in note for note in done.notes)


FAR_LEAF = {
    "compose": 'broker = "leaf"\npremerge = true\n',
    "kubernetes": 'broker = "leaf"\npremerge = true\n',
    "systemd": 'broker = "leaf"\nhost = "far.example.org"\nport = 4300\npremerge = true\n',
}


def with_leaf(folder: Path, target: str) -> Path:
    """Write a description of a hub and one region with a broker of its own, both of one target."""
    path = folder / "leaf.toml"
    path.write_text(
        f'run = "tides"\n[hub]\nhosts = ["hub.example.org"]\ntarget = "{target}"\nleaf_port = 7500\n'
        f'[regions.far]\nlearners = 2\ntarget = "{target}"\n{FAR_LEAF[target]}'
        '[settings]\nsynchronizer.restore = "s3://bucket/archive"\n',
        encoding="utf-8",
    )
    return path


FOLDERS = ("/srv/archive", "file:///srv/archive", "file://localhost/srv/archive/")


def with_archive(folder: Path, target: str, *settings: str, more: str = "") -> Path:
    """Write a description of a hub and one region of a target, and what all services are told."""
    path = folder / "archived.toml"
    path.write_text(
        f'run = "tides"\n[hub]\nhosts = ["hub.example.org"]\nmonitor = true\ntarget = "{target}"\n{more}\n'
        f'[regions.far]\nlearners = 1\ntarget = "{target}"\n{FAR_LEAF[target]}'
        f'[software]\nprogram = "{PROGRAM}"\n[settings]\n{chr(10).join(settings)}\n',
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize("url", FOLDERS)
def test_units_of_synchronizers_alone_may_write_to_the_folder_of_the_archive(tmp_path: Path, url: str) -> None:
    """A unit writes nowhere else; it makes the folder if nobody has, and leaves one alone that is there."""
    description = with_archive(tmp_path, "systemd", f'archive.url = "{url}"')
    texts = rendered_texts(read_description(description))
    units = {name: text for name, text in texts.items() if name.endswith(".service")}
    makes = "test -d /srv/archive || install -d -o atoll -g atoll -m 0700 /srv/archive"

    assert len(units) == (1 + 2 + 1) + (1 + 1 + 1)
    for name, text in units.items():
        archives = "atoll-tides-synchronizer-" in name
        assert ("ReadWritePaths=-/srv/archive\n" in text) == archives, name
        assert (f'ExecStartPre=-+/bin/sh -c "{makes}"\n' in text) == archives, name
        assert archives or "/srv/archive" not in text


NAMED = (
    'log.dump_dir = "/srv/facts"',
    'learner.scratch_dir = "/scratch"',
    'learner.profile = "/tmp/profile"',
    'synchronizer.scratch_dir = "/scratch/hub"',
)
WRITTEN = {
    "synchronizer-1": ["/srv/facts", "/scratch/hub"],
    "synchronizer-2": ["/srv/facts", "/scratch/hub"],
    "far-1": ["/srv/facts", "/scratch"],
    "far-premerge": ["/srv/facts", "/scratch/hub"],
    "monitor": [],
}
"""The folders of `NAMED` that each service must be given: a container and a unit have a folder for temporary files anyway."""


def test_units_may_write_to_the_folders_that_their_settings_name(tmp_path: Path) -> None:
    """Scratch files and dumps, each service to its own; a dump that no setting places is with the state, which stays."""
    texts = rendered_texts(read_description(with_archive(tmp_path, "systemd", *NAMED)))
    plain = rendered_texts(read_description(with_archive(tmp_path, "systemd")))

    for name, folders in WRITTEN.items():
        (text,) = (text for file, text in texts.items() if file.endswith(f"/atoll-tides-{name}.service"))
        assert re.findall(r"ReadWritePaths=-(.+)", text) == folders, name
        assert re.findall(r"install -d -o atoll -g atoll -m 0700 (\S+?)\"", text) == folders, name
        (run_file,) = (text for file, text in plain.items() if file.endswith(f"/{name}/atoll.toml"))
        assert tomllib.loads(run_file)["log"]["dump_dir"] == f"/var/lib/atoll-tides-{name}/facts"


def test_containers_may_write_to_the_folders_that_their_settings_name(tmp_path: Path) -> None:
    """In compose folders of the host, whose making the head of the file tells; in Kubernetes a volume of the pod's own."""
    composed = rendered_texts(read_description(with_archive(tmp_path, "compose", *NAMED)))
    for place in ("hub", "far"):
        text = composed[f"{place}/compose.yml"]
        for name, service in yaml.safe_load(text)["services"].items():
            assert binds(service) == dict.fromkeys(WRITTEN.get(name, []), False), name
            assert all(f"-m 0700 {folder} " in text for folder in WRITTEN.get(name, []))
    pods = {
        document["metadata"]["name"]: document["spec"]["template"]["spec"]
        for text in rendered_texts(read_description(with_archive(tmp_path, "kubernetes", *NAMED))).values()
        if "kind: " in text
        for document in yaml.safe_load_all(text)
        if document and document["kind"] in ("Deployment", "Job")
    }
    plain = rendered_texts(read_description(with_archive(tmp_path, "kubernetes")))
    (run_file,) = (text for file, text in plain.items() if file.endswith("/far-1/atoll.toml"))
    assert tomllib.loads(run_file)["log"]["dump_dir"] == "/state/facts"
    assert pods.keys() == WRITTEN.keys()
    for name, pod in pods.items():
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert [path for path in mounts if path not in ("/tmp", "/service", "/state", "/data")] == WRITTEN[name]  # noqa: S108
        assert all(volumes[mounts[path]] == {"name": mounts[path], "emptyDir": {}} for path in WRITTEN[name])


@pytest.mark.parametrize("target", ["systemd", "compose", "kubernetes"])
@pytest.mark.parametrize("folder", ["scratch", "~/scratch", "/srv/../scratch", "/srv/my scratch", "/srv/%n"])
def test_a_folder_that_a_service_cannot_be_given_is_refused(tmp_path: Path, target: str, folder: str) -> None:
    """A relative one would be beside the run file, which no service may change."""
    description = with_archive(tmp_path, target, f'learner.scratch_dir = "{folder}"')
    with pytest.raises(SettingsError, match="cannot be let write") as refusal:
        rendered_texts(read_description(description))

    assert refusal.value.got == f"learner.scratch_dir = {folder}"


def binds(service: dict[str, Any]) -> dict[str, bool]:
    """Return the folders of the machine that a service has at the same path, and whether it may only read them."""
    found = [volume for volume in service["volumes"] if isinstance(volume, dict)]
    assert all(one["source"] == one["target"] and one["bind"] == {"create_host_path": False} for one in found)
    return {one["source"]: one.get("read_only", False) for one in found}


@pytest.mark.parametrize("url", FOLDERS)
def test_containers_of_synchronizers_alone_have_the_folder_of_the_archive(tmp_path: Path, url: str) -> None:
    """Where their run files name it. Docker would make it for root, so one that is missing stops the start."""
    restored = 'synchronizer.restore = "/srv/former"'
    described = read_description(with_archive(tmp_path, "compose", f'archive.url = "{url}"', restored))
    for place in ("hub", "far"):
        text = rendered_texts(described)[f"{place}/compose.yml"]
        found = yaml.safe_load(text)
        Draft7Validator(get_builtin_schema("vendor.compose-spec")).validate(found)
        for name, service in found["services"].items():
            archives = name.startswith("synchronizer-")
            assert binds(service) == ({"/srv/archive": False, "/srv/former": True} if archives else {}), name
        assert ("sudo install -d -o 10001 -g 10001 -m 0700 /srv/archive" in text) == (place == "hub")


@pytest.mark.parametrize("target", ["compose", "systemd", "kubernetes"])
@pytest.mark.parametrize(
    "settings",
    [
        ('archive.url = "s3://bucket/archive"',),
        ('archive.url = "/srv/archive"', "archive.every_s = 0"),
        ("archive.every_s = 30",),
    ],
)
def test_a_folder_is_given_only_where_one_is_written_to(tmp_path: Path, target: str, settings: tuple[str, ...]) -> None:
    texts = rendered_texts(read_description(with_archive(tmp_path, target, *settings)))
    started = "".join(text for name, text in texts.items() if not name.endswith("/atoll.toml"))

    assert "ReadWritePaths" not in started
    assert "create_host_path" not in started
    assert "/srv/archive" not in started


@pytest.mark.parametrize("setting", ["archive.url", "synchronizer.restore"])
@pytest.mark.parametrize("url", FOLDERS)
def test_a_folder_of_a_pod_is_refused_as_an_archive(tmp_path: Path, setting: str, url: str) -> None:
    """It would be gone with the pod. The message says what an archive can be there, and nothing is written."""
    description = with_archive(tmp_path, "kubernetes", f'{setting} = "{url}"')
    refused(description, tmp_path / "out", f"{setting} = {url}", "s3://bucket/prefix")


@pytest.mark.parametrize("target", ["compose", "systemd"])
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('archive.url = "archive"', "an absolute path"),
        ('archive.url = "/srv/../archive"', "an absolute path"),
        ('archive.url = "/"', "an absolute path"),
        ('archive.url = "file:///srv/my%20archive"', "an absolute path"),
        ('archive.url = "/srv/%h"', "an absolute path"),
        ('archive.url = "/srv/a:b"', "an absolute path"),
        ('archive.url = "/tmp/archive"', "gone with its service"),
        ('synchronizer.restore = "archive"', "synchronizer.restore = archive"),
        ('archive.url = "ftp://host/archive"', "no place for an archive"),
        ('archive.url = "http://["', "cannot be read"),
        ('archive = "/srv/archive"', "a service would not take its settings"),
        ("archive.url = 3", "a service would not take its settings"),
    ],
)
def test_an_archive_that_not_every_synchronizer_would_find_is_refused(
    tmp_path: Path, target: str, setting: str, said: str
) -> None:
    description = with_archive(tmp_path, target, setting)
    refused(description, tmp_path / "out", said)


@pytest.mark.parametrize("hub", ["compose"])
def test_compose_files_keep_their_schema_and_are_closed(tmp_path: Path, hub: str) -> None:
    """The schema of compose; nothing is published but the nodes' ports; a volume for each that writes."""
    render(read_description(every_target(tmp_path, hub)), tmp_path / "out")
    for place in ("hub", "desk"):
        found = yaml.safe_load((tmp_path / "out" / place / "compose.yml").read_text(encoding="utf-8"))
        Draft7Validator(get_builtin_schema("vendor.compose-spec")).validate(found)
        for name, service in found["services"].items():
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
            assert ("ports" in service) == name.startswith(("broker-", "monitor"))
            places_of = {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}
            assert places_of.get("/service", f"./services/{name}") == f"./services/{name}"
            assert (service.get("environment", {}).get("GOMEMLIMIT") == "1536MiB") == name.startswith("broker-")
    hub_services = yaml.safe_load((tmp_path / "out/hub/compose.yml").read_text(encoding="utf-8"))["services"]
    assert [hub_services[f"broker-{n}"]["ports"] for n in (1, 2, 3)] == [
        [f"{4221 + n}:4222", f"{7421 + n}:7422"] for n in (1, 2, 3)
    ]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
def test_systemd_takes_every_unit(tmp_path: Path) -> None:
    """Without a word of complaint; and it does complain of a name that it does not know."""
    render(read_description(every_target(tmp_path, "systemd")), tmp_path / "out")
    units = sorted((tmp_path / "out").rglob("*.service"))
    done = _verified(*units)
    wrong = tmp_path / "wrong.service"
    wrong.write_text(units[0].read_text(encoding="utf-8").replace("Restart=", "Restrat="), encoding="utf-8")

    assert [path.name for path in units] == [
        *(f"atoll-ocean-broker-{n}.service" for n in (1, 2, 3)),
        "atoll-ocean-monitor.service",
        *(f"atoll-ocean-synchronizer-{n}.service" for n in (1, 2)),
        "atoll-ocean-lab-1.service",
    ]
    assert (done.returncode, done.stderr) == (0, "")
    assert "Restrat" in _verified(wrong).stderr


def _verified(*units: Path) -> subprocess.CompletedProcess[str]:
    words = ["systemd-analyze", "--man=no", "verify", *map(str, units)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('run = "ocean"', 'run = "an ocean"', "run id"),
        ("learners = 1", "learners = 0", "regions.lab.learners"),
        ("learners = 1", "learnres = 1", "learners"),
        ("[regions.lab]", "[regions.hub]", "no name of a region"),
        ("[regions.lab]", "[regions.Lab]", "no name of a region"),
        ('target = "systemd"', 'target = "nomad"', "regions.lab.target"),
        ("gpus = 1", 'broker = "sea"', "regions.eu.broker"),
        ("gpus = 1", "premerge = true", "premerge needs broker"),
        ("gpus = 1", 'host = "eu.example.org"', "host is that of a leaf with systemd"),
        ('accelerators = "H100:1"', 'broker = "leaf"', "machines come and go"),
        ("learners = 1", 'learners = 1\nbroker = "leaf"', "give its host"),
        ("learners = 1", 'learners = 1\nbroker = "leaf"\nhost = "a b"', "no name of a host"),
        ("synchronizers = 2", "leaf_port = 4222", "leaf_port 4222 of the hub meet"),
        ("[regions.asia]", "[regions.eu-1]", "two services would have one name: eu-1"),
        ("protocol.fragments = 4", 'learner.region = "eu"', "decides this setting"),
        ('"hub-3.example.org"]', '"hub-3.example.org", "d"]', "1, 3 or 5"),
        ('"hub-3.example.org"]', '"hub-1.example.org"]', "two nodes have one host"),
        ('["203.0.113.0/24"]', '["203.0.113.0/33"]', "hub.addresses"),
        ("protocol.fragments = 4", "protocol.fragments = 0", "fragments"),
        ("protocol.fragments = 4", 'broker.url = "nats://x:1"', "decides this setting"),
        ("settings.train.rate = 1e-3", "settings.learner.id = 'x'", "decides this setting"),
        ("protocol.fragments = 4", 'synchronizer = "x"', "this is a table of settings"),
        ('data = "/srv/corpus"', 'data = "/srv/${x}"', "compose cannot mount"),
        ("model.size", "modle.size", "modle"),
        ("[settings]", "[settings", "not TOML"),
        ("gpus = 1", 'memory = "0"', "regions.eu.memory"),
        ("gpus = 1", 'memory = "63Mi"', "at least 64Mi"),
        ("gpus = 1", f'memory = "{"9" * 400}"', "regions.eu.memory"),
        ("gpus = 1", 'cpus = "0"', "regions.eu.cpus"),
        ("gpus = 1", f"settings.{'a.' * 1500}a = 1", "not TOML"),
        ("protocol.fragments = 4", f"protocol.fragments = {'9' * 5000}", "not TOML"),
    ],
)
def test_a_mistake_in_the_description_is_one_message(tmp_path: Path, before: str, after: str, said: str) -> None:
    description = every_target(tmp_path)
    text = description.read_text(encoding="utf-8")
    assert before in text
    description.write_text(text.replace(before, after), encoding="utf-8")
    refused(description, tmp_path / "out", said)


@pytest.mark.parametrize(
    ("broken", "said"), [('{"run": "other", "files": {}}', "another run is rendered"), ("{", "is damaged")]
)
def test_a_folder_of_another_run_is_left_alone(tmp_path: Path, broken: str, said: str) -> None:
    """Its keys would be mixed with ours."""
    description, out = every_target(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "rendered.json").write_text(broken, encoding="utf-8")
    refused(description, out, said)


def test_a_host_that_the_certificate_lacks_is_told_with_its_remedy(tmp_path: Path) -> None:
    description, out = every_target(tmp_path, "systemd"), tmp_path / "out"
    render(read_description(description), out)
    before = KeyFolder(out / "keys").certificate_path.read_text(encoding="utf-8")
    description.write_text(description.read_text(encoding="utf-8").replace("hub-3.", "hub-9."), encoding="utf-8")
    done = render(read_description(description), out)
    [note] = [note for note in done.notes if "certificate" in note]
    words = note.rpartition("atoll ")[2].split()

    assert "hub-9.example.org" in note
    assert KeyFolder(out / "keys").certificate_path.read_text(encoding="utf-8") == before
    assert atoll(*words).returncode == 0
    assert not [note for note in render(read_description(description), out).notes if "certificate" in note]


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20)
)
keys = st.text(min_size=1, max_size=8)
trees = st.dictionaries(
    keys,
    st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)),
    max_size=4,
)


@given(trees)
@example({"a": ["no", "y", "1e3", "0o17", "null", "~", "1:30", "2026-11-25"], "b": "a\n b\n", "c": " a\n", "d": "a: b"})
def test_whatever_is_written_as_yaml_is_read_back(tree: dict[str, Any]) -> None:
    assert yaml.safe_load(as_yaml(tree)) == tree
