"""The house rules that a machine can check, over the tree as it is.

Every rule is a function from a text (or a path) to complaints. Each is used twice: over the whole tree, where it must
be silent, and on a sample that breaks it, where it must speak; so no rule can rot into one that never fails.
What ruff, mypy and the import contracts check is not repeated here.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.bus.streams import stream_plan
from atoll.settings import load

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {".git", "build", "dist", "runs", "__pycache__", "node_modules"}
MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
BANNED_STEMS = {"util", "utils", "helper", "helpers", "manager", "misc", "common"}
LOOSE_ENDS = "|".join(word.upper() for word in ("todo", "fixme", "hack", "xxx"))
SOMEBODYS_FOLDER = re.compile(r"(?<![\w.$}~-])/(?:home|Users|root|work|mnt)/\w")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".conf", ".json", ".txt", ""}

# Modules that are reached through another one's tests: here, what the bus contract drives from its public side.
TESTED_BY = {
    "atoll_simulator.planner.command": "test_cli_plan.py",
    "atoll_simulator.train_command": "test_simulated_training.py",
    "atoll.client.peer_recovery": "test_lending.py",
    "atoll.run.record": "test_run_in_memory.py",
    "atoll.bus.nats.blobs": "test_bus_jetstream.py",
    "atoll_synchronizer.commit_attempt": "test_store.py",
    "atoll.wire.limits": "test_bus_jetstream.py",
    "atoll.bus.nats.consumers": "test_bus_jetstream.py",
    "atoll.bus.subscriptions": "test_bus_jetstream.py",
    "atoll.bus.nats.records": "test_bus_jetstream.py",
    "atoll.bus.memory.streams": "test_bus_memory.py",
    "atoll.codec.kernels.compiled": "test_formats.py",
    "atoll.codec.on_device": "test_device_encoding.py",
    "atoll.codec.formats.bf16": "test_formats.py",
    "atoll.codec.formats.e3m0": "test_formats.py",
    "atoll.codec.formats.f32": "test_formats.py",
    "atoll.base.buffer_pool": "test_large_vectors.py",
    "atoll.base.parallel": "test_large_vectors.py",
    "atoll.merge.accumulate": "test_large_vectors.py",
    "atoll.protocol.learners": "test_protocol_rules.py",
    "atoll_simulator.baseline_command": "test_baselines.py",
    "atoll.sim.dst.candidate": "test_sim_schedules.py",
    "atoll.sim.dst.learner": "test_sim_schedules.py",
    "atoll.sim.dst.lease": "test_sim_schedules.py",
    "atoll.sim.dst.owner": "test_sim_schedules.py",
    "atoll.sim.dst.promises": "test_sim_schedules.py",
    "atoll.sim.dst.reader": "test_sim_schedules.py",
    "atoll.sim.dst.store": "test_sim_schedules.py",
    "atoll.sim.dst.storm": "test_sim_schedules.py",
    "atoll.sim.dst.traffic": "test_sim_schedules.py",
    "atoll_learner.commands": "test_up.py",
    "atoll_learner.evaluate": "test_up.py",
    "atoll_learner.feed": "test_up.py",
    "atoll_learner.keeper": "test_recovery.py",
    "atoll_learner.process": "test_up.py",
    "atoll_synchronizer.commands": "test_up.py",
    "atoll_simulator.planner.ways": "test_cli_plan.py",
    "atoll_simulator.fleet.command": "test_fleet_commands.py",
    "atoll_simulator.fleet.hub": "test_fleet_rounds.py",
    "atoll_simulator.fleet.report_text": "test_fleet_commands.py",
    "atoll_simulator.fleet.trainer": "test_fleet_rounds.py",
    "atoll.base.identity": "test_simulated_training.py",
    "atoll.client.step_hook": "test_run_in_memory.py",
    "atoll_simulator.commands": "test_simulated_training.py",
    "atoll_simulator.cores": "test_simulated_training.py",
    "atoll_simulator.evaluator": "test_simulated_training.py",
    "atoll_simulator.interrupting": "test_simulated_training.py",
    "atoll_simulator.learner": "test_simulated_training.py",
    "atoll_simulator.simulation": "test_simulated_training.py",
    "atoll_simulator.world": "test_simulated_training.py",
    "atoll.protocol.pacing": "test_pacing.py",
    "atoll_synchronizer.pending_acknowledgements": "test_takeover.py",
    "atoll_synchronizer.shard_assignment": "test_handover.py",
    "atoll.local.brokers": "test_up.py",
    "atoll.local.defaults": "test_up.py",
    "atoll.local.environment": "test_up.py",
    "atoll.run.folder": "test_up.py",
    "atoll.local.run_probe": "test_up.py",
    "atoll.local.journal": "test_up.py",
    "atoll.local.console": "test_up.py",
    "atoll.local.processes": "test_up.py",
    "atoll.report.collect": "test_up.py",
    "atoll.report.html": "test_up.py",
    "atoll.report.write": "test_up.py",
    "atoll.local.services": "test_up.py",
    "atoll.local.supervisor": "test_up.py",
    "atoll.run.view": "test_up.py",
    "atoll.run.watch": "test_up.py",
    "atoll.cli.fates": "test_takeover.py",
    "atoll.run.ledger": "test_takeover.py",
    "atoll.cli.look": "test_cli.py",
    "atoll.cli.archive": "test_rebuild.py",
    "atoll.local.recovery": "test_rebuild.py",
    "atoll.cli.options": "test_cli.py",
    "atoll.cli.schema": "test_cli.py",
    "atoll.cli.tap": "test_cli.py",
    "atoll.cli.top": "test_up.py",
    "atoll_simulator.planner.systems": "test_plan.py",
    "atoll.settings": "test_cli.py",
    "atoll.local.options": "test_cli.py",
    "atoll.base.logs": "test_cli.py",
    "atoll.base.clock": "test_cli.py",
    "atoll_synchronizer.manifest_validation": "test_run_in_memory.py",
    "atoll_synchronizer.service": "test_run_in_memory.py",
    "atoll_synchronizer.background_tasks": "test_run_in_memory.py",
    "atoll_synchronizer.overrun_monitor": "test_run_in_memory.py",
    "atoll_synchronizer.lease": "test_takeover.py",
    "atoll_synchronizer.store": "test_run_in_memory.py",
    "atoll_synchronizer.event_log": "test_run_in_memory.py",
    "atoll_synchronizer.aggregator": "test_run_in_memory.py",
    "atoll.client.adoption": "test_run_in_memory.py",
    "atoll.client.driver": "test_run_in_memory.py",
    "atoll.client.founding": "test_run_in_memory.py",
    "atoll.client.membership": "test_run_in_memory.py",
    "atoll.client.session": "test_run_in_memory.py",
    "atoll.bus.open": "test_bus_jetstream.py",
    "atoll.bus.nats.connection": "test_bus_jetstream.py",
    "atoll.bus.nats.jetstream_api": "test_bus_jetstream.py",
    "atoll.base.waiting": "test_bus_jetstream.py",
}

Rule = Callable[[str], list[str]]


def project_files(*suffixes: str) -> Iterator[Path]:
    """Yield our files with one of `suffixes`, leaving out environments, caches and what a run writes."""
    for path in sorted(ROOT.rglob("*")):
        folders = path.relative_to(ROOT).parts[:-1]
        foreign = any(part in NOT_OURS or (part.startswith(".") and part != ".ci") for part in folders)
        # In a linked work tree `.git` is a file, which names a folder.
        if not foreign and path.is_file() and path.suffix in suffixes and path.name not in NOT_OURS:
            yield path


def sources() -> list[Path]:
    """Return every module of the kernel and the services."""
    return [path for path in project_files(".py") if path.relative_to(ROOT).parts[0] in {"shared", "services"}]


def module_name(path: Path) -> str:
    """Return the dotted name under which `path`, a file below shared/ or services/<name>/, is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "shared" else parts[2:])


def opens_with_a_docstring(text: str) -> list[str]:
    """A module that holds anything begins by saying what it is for."""
    tree = ast.parse(text)
    return ["no module docstring"] if tree.body and not ast.get_docstring(tree) else []


def is_short(text: str) -> list[str]:
    """A module fits a reader's head."""
    lines = text.count("\n")
    return [f"{lines} lines, {MODULE_LINES_MAX} allowed"] if lines > MODULE_LINES_MAX else []


def has_short_functions(text: str) -> list[str]:
    """A function fits one screen."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    spans = [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions]
    return [f"{name} has {span} lines" for name, span in spans if span > FUNCTION_LINES_MAX]


def has_no_loose_ends(text: str) -> list[str]:
    """What is left to do is an issue, not a comment."""
    return re.findall(rf"\b(?:{LOOSE_ENDS})\b.*", text)


def names_nobodys_folder(text: str) -> list[str]:
    """No path of somebody's own machine."""
    return [line for line in text.splitlines() if SOMEBODYS_FOLDER.search(line)]


def has_a_telling_name(name: str) -> list[str]:
    """A module's name says what it is about."""
    return [f"{name} says nothing"] if BANNED_STEMS & set(name.split(".")) else []


def has_help_on_every_target(text: str) -> list[str]:
    """`make help` can list each target."""
    targets = re.findall(r"^([a-z][a-z-]*):(?!=)(.*)$", text, re.MULTILINE)
    return [f"{target} has no help" for target, rest in targets if "## " not in rest]


def is_hardened(text: str) -> list[str]:
    """Each service of a compose text has a health check, a read-only root, an unprivileged user and limits."""
    complaints = []
    for name, service in yaml.safe_load(text)["services"].items():
        wanted = {
            "a health check": bool(service.get("healthcheck", {}).get("test")),
            "read_only": service.get("read_only") is True,
            "a numeric user that is not root": re.match(r"[1-9]\d*:[1-9]", str(service.get("user", ""))) is not None,
            "cap_drop ALL": service.get("cap_drop") == ["ALL"],
            "no-new-privileges": "no-new-privileges:true" in service.get("security_opt", []),
            "limits": "memory" in service.get("deploy", {}).get("resources", {}).get("limits", {}),
        }
        complaints += [f"{name} lacks {what}" for what, present in wanted.items() if not present]
    return complaints


def broken_links(text: str, folder: Path) -> list[str]:
    """Return the relative links of a Markdown text in `folder` that lead nowhere."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose)
    relative = [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    return [target for target in relative if not (folder / target).exists()]


def untested(modules: dict[str, str], tests: dict[str, str]) -> list[str]:
    """Return modules that no test names: not by its file name, not by an import, not in `TESTED_BY`.

    `modules` and `tests` map dotted names and file names to their texts.
    """
    imports = "\n".join(tests.values())
    left = []
    for module, text in modules.items():
        package, _, stem = module.rpartition(".")
        if stem in {"__init__", "__main__"} or not text.strip():
            continue
        files = {f"test_{stem}.py", f"test_{package.rpartition('.')[2]}_{stem}.py", TESTED_BY.get(module, "")}
        imported = rf"(?:from|import) {re.escape(module)}\b|from {re.escape(package)} import .*\b{stem}\b"
        if not files & tests.keys() and not re.search(imported, imports):
            left.append(module)
    return left


SOURCE_RULES: list[Rule] = [opens_with_a_docstring, is_short, has_short_functions]
LONG_FUNCTION = "def slow():\n" + "    pass\n" * FUNCTION_LINES_MAX
BAD_SAMPLES: list[tuple[Rule, str]] = [
    (opens_with_a_docstring, "x = 1\n"),
    (is_short, "x = 1\n" * (MODULE_LINES_MAX + 1)),
    (has_short_functions, LONG_FUNCTION),
    (has_short_functions, "class A:\n" + "".join(f"    {line}\n" for line in LONG_FUNCTION.splitlines())),
    (has_no_loose_ends, f"x = 1  # {'todo'.upper()}: later\n"),
    (names_nobodys_folder, f"open('/{'home'}/ann/atoll')\n"),
    (has_a_telling_name, "atoll.utils"),
    (has_a_telling_name, "atoll.helpers.times"),
    (has_help_on_every_target, "all: build\n\techo\n"),
    (is_hardened, "services: {a: {image: x}}"),
    (is_hardened, "services: {a: {healthcheck: {test: [x]}, read_only: true, user: '0:0'}}"),
]


@pytest.mark.parametrize(("rule", "sample"), BAD_SAMPLES)
def test_every_rule_can_fail(rule: Rule, sample: str) -> None:
    """A rule that accepts what breaks it would guard nothing."""
    assert rule(sample)


@pytest.mark.parametrize("rule", SOURCE_RULES, ids=lambda rule: rule.__name__)
def test_sources_keep_the_rule(rule: Rule) -> None:
    """Every module of the kernel and the services keeps each of the source rules."""
    found = {str(path.relative_to(ROOT)): rule(path.read_text(encoding="utf-8")) for path in sources()}

    assert {path: complaints for path, complaints in found.items() if complaints} == {}


def test_module_names_say_something() -> None:
    """No module is called by what it is (a helper) in place of what it is about."""
    assert [complaint for path in sources() for complaint in has_a_telling_name(module_name(path))] == []


@pytest.mark.parametrize("rule", [has_no_loose_ends, names_nobodys_folder], ids=lambda rule: rule.__name__)
def test_texts_keep_the_rule(rule: Rule) -> None:
    """Code, documents and configuration have no loose ends and name nobody's folders."""
    texts = {path: path.read_text(encoding="utf-8") for path in project_files(*TEXT_SUFFIXES)}
    found = {str(path.relative_to(ROOT)): rule(text) for path, text in texts.items()}

    assert {path: complaints for path, complaints in found.items() if complaints} == {}


def test_every_module_is_named_by_a_test() -> None:
    """Somewhere under tests/ a file is named for the module or imports it."""
    modules = {module_name(path): path.read_text(encoding="utf-8") for path in sources()}
    files = [path for path in project_files(".py") if ROOT / "tests" in path.parents and path != Path(__file__)]
    tests = {path.name: path.read_text(encoding="utf-8") for path in files}

    assert untested(modules, tests) == []
    assert TESTED_BY.keys() <= modules.keys()


def test_a_module_without_a_test_is_found() -> None:
    """The rule above speaks when neither a name nor an import mentions the module."""
    modules = {"atoll.base.clock": "x = 1", "atoll.base.logs": "x = 1", "atoll.merge.outer": "x = 1"}

    assert untested(modules, {"test_clock.py": "", "test_a.py": "from atoll.merge.outer import x"}) == [
        "atoll.base.logs"
    ]


def test_every_make_target_has_a_help_line() -> None:
    """`make help` hides nothing, and the README's targets are there."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")

    assert has_help_on_every_target(text) == []
    assert {"setup", "demo", "test", "check"} <= set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))


def test_every_decision_is_in_the_index() -> None:
    """docs/adr/README.md links every ADR, and numbers are used once."""
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text(encoding="utf-8")
    decisions = sorted(path.name for path in folder.glob("[0-9]*.md"))

    assert [name for name in decisions if f"({name})" not in index] == []
    assert len({name[:4] for name in decisions}) == len(decisions)


def test_relative_links_lead_somewhere() -> None:
    """Every relative link in a Markdown file resolves."""
    found = {
        str(path.relative_to(ROOT)): broken_links(path.read_text(encoding="utf-8"), path.parent)
        for path in project_files(".md")
    }

    assert {path: links for path, links in found.items() if links} == {}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    """Anchors, addresses and code are no links to files; a missing file is reported."""
    (tmp_path / "there.md").touch()
    text = "[a](there.md#x) [b](https://example.org) [c](#here) `[d](code.md)` [e](gone.md)"

    assert broken_links(text, tmp_path) == ["gone.md"]


def compose() -> dict[str, Any]:
    """Return docker-compose.yml with its anchors resolved."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    return document


def test_every_compose_service_is_hardened() -> None:
    """Non-root, read-only, without capabilities, bounded, and watched."""
    assert is_hardened((ROOT / "docker-compose.yml").read_text(encoding="utf-8")) == []


def test_compose_learners_share_no_network() -> None:
    """Islands meet only at the broker, so cutting one network cuts one island."""
    services = compose()["services"]
    learners = [set(service["networks"]) for name, service in services.items() if name.startswith("learner-")]

    assert len(learners) == len(set().union(*learners)) == 3
    assert set().union(*learners) < set(services["nats"]["networks"])


def test_compose_targets_exist_in_the_dockerfile() -> None:
    """Every `target:` is a stage."""
    stages = re.findall(
        r"^FROM \S+ AS (\S+)$", (ROOT / "infra/docker/Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    targets = {service["build"]["target"] for service in compose()["services"].values()}

    assert targets <= set(stages)


def test_compose_sets_only_settings_that_exist() -> None:
    """What the services are told by ATOLL_ variables loads without complaint, and every shard of the run is wanted."""
    services = compose()["services"]
    loaded = {name: load(environment=service.get("environment", {})).settings for name, service in services.items()}
    wanted = [loaded[name].synchronizer.shard for name in services if name.startswith("synchronizer-")]

    assert wanted == [None, None]
    assert len({loaded[name].learner.id for name in services if name.startswith("learner-")}) == 3


def test_compose_streams_fit_the_hub() -> None:
    """The bounds of all streams together stay below what the hub may store."""
    hub = (ROOT / "infra/nats/hub.conf").read_text(encoding="utf-8")
    store = re.search(r"max_file: (\d+)GB", hub)
    settings = load(environment=compose()["services"]["synchronizer-a"]["environment"]).settings
    wanted = sum(plan.bytes_max for plan in stream_plan(settings.run, settings.broker.stream_bytes_max))

    assert store is not None
    assert wanted < int(store[1]) * 10**9


def test_the_hub_accepts_its_configuration() -> None:
    """nats-server itself reads infra/nats/hub.conf and finds nothing wrong."""
    server = Path(sysconfig.get_path("scripts")) / "nats-server"
    result = subprocess.run(
        [server, "-t", "-c", ROOT / "infra/nats/hub.conf"], capture_output=True, text=True, timeout=240, check=False
    )

    assert result.returncode == 0, result.stderr
