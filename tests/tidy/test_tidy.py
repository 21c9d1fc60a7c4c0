"""The house rules that a machine can check, over the tree as it is.

Every rule is a function from a text (or a path) to complaints. Each is used twice: over the whole tree, where it must
be silent, and on a sample that breaks it, where it must speak; so no rule can rot into one that never fails.
What ruff, mypy and the import contracts check is not repeated here.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sysconfig
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.bus.streams import stream_plan
from atoll.model.layout import TensorSpec, plan_layout
from atoll.protocol.settings import ProtocolSettings
from atoll.run.stream_room import stream_bytes_max
from atoll.settings import load

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {".git", "build", "dist", "runs", "__pycache__", "node_modules"}
FUNCTION_LINES_MAX = 70
SOMEBODYS_FOLDER = re.compile(r"(?<![\w.$}~-])/(?:home|Users|root|work|mnt)/\w")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".conf", ".json", ".txt", ""}

Rule = Callable[[str], list[str]]


def is_ours(folder: str) -> bool:
    """Return whether a folder of this name holds files of ours, not an environment, a cache or what a run writes."""
    return folder not in NOT_OURS and (not folder.startswith(".") or folder == ".ci")


@functools.cache
def all_files() -> list[Path]:
    found = []
    for at, folders, names in os.walk(ROOT):
        folders[:] = filter(is_ours, folders)
        # In a linked work tree `.git` is a file, which names a folder.
        found += [Path(at, name) for name in names if name not in NOT_OURS]
    return sorted(path for path in found if path.is_file())


def project_files(*suffixes: str) -> Iterator[Path]:
    """Yield our files with one of `suffixes`."""
    yield from (path for path in all_files() if path.suffix in suffixes)


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def parsed(text: str) -> ast.Module:
    """Return the syntax tree of a module; every rule asks for it."""
    return ast.parse(text)


@functools.cache
def nodes_of(text: str) -> list[ast.AST]:
    return list(ast.walk(parsed(text)))


def sources() -> list[Path]:
    return [path for path in project_files(".py") if path.relative_to(ROOT).parts[0] in {"shared", "services"}]


def has_short_functions(text: str) -> list[str]:
    functions = [node for node in nodes_of(text) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    spans = [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions]
    return [f"{name} has {span} lines" for name, span in spans if span > FUNCTION_LINES_MAX]


def names_nobodys_folder(text: str) -> list[str]:
    """No path of somebody's own machine."""
    return [line for line in text.splitlines() if SOMEBODYS_FOLDER.search(line)]


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


def shared_class_names(texts: dict[str, str]) -> dict[str, list[str]]:
    """Return the class names that more than one module defines, with those modules."""
    # Trees are made only of modules that may share a name; a line of a docstring can look like a class, too.
    named = {path: set(re.findall(r"^[ \t]*class (\w+)", text, re.MULTILINE)) for path, text in texts.items()}
    counted = Counter(name for names in named.values() for name in names)
    found: dict[str, list[str]] = {}
    for path, text in texts.items():
        if not any(counted[name] > 1 for name in named[path]):
            continue
        for node in nodes_of(text):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


LONG_FUNCTION = "def slow():\n" + "    pass\n" * FUNCTION_LINES_MAX
BAD_SAMPLES: list[tuple[Rule, str]] = [
    (has_short_functions, LONG_FUNCTION),
    (has_short_functions, "class A:\n" + "".join(f"    {line}\n" for line in LONG_FUNCTION.splitlines())),
    (names_nobodys_folder, f"open('/{'home'}/ann/atoll')\n"),
    (is_hardened, "services: {a: {image: x}}"),
    (is_hardened, "services: {a: {healthcheck: {test: [x]}, read_only: true, user: '0:0'}}"),
]


@pytest.fixture(scope="module", autouse=True)
def _trees_forgotten() -> Iterator[None]:
    """Free the syntax trees of the whole tree; the tests of other modules need the memory."""
    yield
    parsed.cache_clear()
    nodes_of.cache_clear()


@pytest.mark.parametrize(("rule", "sample"), BAD_SAMPLES)
def test_every_rule_can_fail(rule: Rule, sample: str) -> None:
    """A rule that accepts what breaks it would guard nothing."""
    assert rule(sample)


def test_functions_of_the_product_fit_a_screen() -> None:
    found = {str(path.relative_to(ROOT)): has_short_functions(text_of(path)) for path in sources()}

    assert {path: complaints for path, complaints in found.items() if complaints} == {}


def test_no_text_names_somebodys_folder() -> None:
    found = {path: names_nobodys_folder(text_of(path)) for path in project_files(*TEXT_SUFFIXES)}

    assert {path: complaints for path, complaints in found.items() if complaints} == {}


def test_a_class_name_means_one_thing() -> None:
    texts = {str(path.relative_to(ROOT)): text_of(path) for path in project_files(".py")}

    assert shared_class_names(texts) == {}


def test_a_class_name_that_means_two_things_is_found() -> None:
    assert shared_class_names({"a": "class A: ...\nclass B: ...", "b": "def f():\n    class A: ..."}) == {
        "A": ["a", "b"]
    }


def test_every_make_target_is_a_verb_and_no_file() -> None:
    """A folder called `docs` would make `make docs` do nothing, unless the target is phony."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = {name for line in re.findall(r"^\.PHONY:(.*)$", text, re.MULTILINE) for name in line.split()}

    assert set(re.findall(r"^([a-z][a-z-]*):(?!=)", text, re.MULTILINE)) == phony


def test_every_decision_is_in_the_index() -> None:
    """docs/adr/README.md links every ADR, and numbers are used once."""
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text(encoding="utf-8")
    decisions = sorted(path.name for path in folder.glob("[0-9]*.md"))

    assert [name for name in decisions if f"({name})" not in index] == []
    assert len({name[:4] for name in decisions}) == len(decisions)


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    return document


def test_every_compose_service_is_hardened() -> None:
    assert is_hardened((ROOT / "docker-compose.yml").read_text(encoding="utf-8")) == []


def test_compose_targets_exist_in_the_dockerfile() -> None:
    """Every `target:` is a stage."""
    stages = re.findall(
        r"^FROM \S+ AS (\S+)$", (ROOT / "infra/docker/Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    targets = {service["build"]["target"] for service in compose()["services"].values() if "build" in service}

    assert targets
    assert targets <= set(stages)


def test_compose_sets_only_settings_that_exist() -> None:
    """What the services are told by ATOLL_ variables loads without complaint, and every shard of the run is wanted."""
    services = compose()["services"]
    loaded = {name: load(environment=service.get("environment", {})).settings for name, service in services.items()}
    wanted = [loaded[name].synchronizer.shard for name in services if name.startswith("synchronizer-")]

    assert wanted == [None, None]
    assert len({loaded[name].learner.id for name in services if name.startswith("learner-")}) == 6


def test_every_planted_mistake_has_its_place() -> None:
    """Just one, in the file as it is now: a mistake that cannot be made shows nothing (`make mutants-planted`)."""
    mutants = tomllib.loads((ROOT / "tests/mutants/planted.toml").read_text(encoding="utf-8"))["mutant"]
    places = {each["name"]: (ROOT / each["file"]).read_text(encoding="utf-8").count(each["old"]) for each in mutants}

    assert len(places) > 50
    assert {name: count for name, count in places.items() if count != 1} == {}


def test_the_hub_has_room_for_the_bounds_of_many_runs() -> None:
    """JetStream counts bounds against max_file, though they take no disk: twenty runs of a billion parameters fit."""
    hub = (ROOT / "infra/nats/hub.conf").read_text(encoding="utf-8")
    store = re.search(r"max_file: (\d+)TB", hub)
    layout = plan_layout([TensorSpec("w", (1 << 20, 1 << 10), "float32")], 24)
    wanted = sum(plan.bytes_max for plan in stream_plan("r", stream_bytes_max(layout, ProtocolSettings())))

    assert store is not None
    assert 20 * wanted < int(store[1]) * 10**12


def test_the_hub_accepts_its_configuration() -> None:
    server = Path(sysconfig.get_path("scripts")) / "nats-server"
    result = subprocess.run(
        [server, "-t", "-c", ROOT / "infra/nats/hub.conf"], capture_output=True, text=True, timeout=240, check=False
    )

    assert result.returncode == 0, result.stderr
