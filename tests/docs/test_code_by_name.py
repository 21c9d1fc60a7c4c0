"""The page of the locked door lists every module in which something that we did not write selects what runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "explanation" / "locked-door.md"
HEADING: Final = "## What selects code"
RUNS: Final = frozenset(
    {
        *("__import__", "import_module", "run_module", "run_path", "spec_from_file_location", "exec_module"),
        *("exec", "eval", "entry_points", "execv", "execve", "execvp", "posix_spawn", "popen"),
        *("Popen", "check_output", "check_call", "create_subprocess_exec", "create_subprocess_shell"),
        *("CDLL", "LoadLibrary", "dlopen"),
    }
)
"""Calls that import, run or load what a name or a file says, whatever has them."""
RUNS_IN: Final = {"subprocess": "run call", "webbrowser": "open get", "os": "system", "torch": "load"}
"""Calls that do so as attributes of one module only."""
UNSAFE_MODULES: Final = frozenset(
    {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "code", "runpy"}
)
"""Modules that make code, or any object, of what they read."""
WRITES_ALONE: Final = frozenset({"SafeDumper", "dump_all"})
"""What of such modules only writes text."""
KEEPS_CODE: Final = frozenset({"jax_compilation_cache_dir"})
"""Settings of libraries that name a folder from which compiled code is run."""
LOOKED_UP: Final = "an attribute by a variable"
OUR_NAMES: Final = {
    "atoll.archive.replay": "fields of `Included`",
    "atoll.base.parsing": "fields of the struct that was parsed",
    "atoll.client.checkpoints": "fields of a checkpoint's note",
    "atoll.client.join": "options of `JoinOptions`",
    "atoll.client.options": "options of `JoinOptions`",
    "atoll.model.tree_walk": "the attributes of JAX's keys",
    "atoll.protocol.ledger": "the fates of an account; a reason from outside is a key of a table",
    "atoll.protocol.settings": "fields of `ProtocolSettings`",
    "atoll.run.taps": "levels of our own subjects",
    "atoll.settings.errors": "bounds of pydantic's rules",
    "atoll_learner.data.mixture": "fields of the meta file",
    "atoll_learner.export": "fields of `ModelSettings`",
    "atoll_learner.model_settings": "fields of `ModelSettings`",
    "atoll_simulator.fleet.parameters": "fields of `FleetParameters`",
    "atoll_simulator.fleet.cells": "columns of the report",
    "atoll_simulator.planner.answer": "fields of `ProtocolSettings`",
    "atoll_simulator.planner.failures": "fields of the failures",
    "atoll_simulator.scenario": "fields of `Scenario`",
    "atoll_simulator.what_if.comparison": "fields of `RunFigures`",
    "atoll_simulator.what_if.recording": "fields of `RunFigures`",
    "atoll_simulator.what_if.replay": "fields of `RunFigures`, `codec_up` and `codec_down`",
    "atoll.codec.frames": "the compressors of a thread",
}
"""Modules that look attributes up by names which they or their structs write down; nothing outside chooses among them."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for source in (ROOT / "shared", *sorted((ROOT / "services").iterdir())):
        for path in sorted(source.rglob("*.py")):
            name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def selects(tree: ast.Module) -> set[str]:
    """Return what in a module imports, runs or loads code by a name or from a file, or looks an attribute up by a variable."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & UNSAFE_MODULES
        elif isinstance(node, ast.ImportFrom):
            reads = {alias.name for alias in node.names} - WRITES_ALONE
            found |= {node.module or ""} & UNSAFE_MODULES if reads else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & KEEPS_CODE
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "cache", "shell"):
            found |= {node.arg} if isinstance(node.value, ast.Constant) and node.value.value is True else set()
        elif isinstance(node, ast.Call):
            found |= _called(node)
    return found


def _called(node: ast.Call) -> set[str]:
    called = node.func
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
    home = called.value.id if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) else ""
    if name in RUNS or name in RUNS_IN.get(home, "").split():
        return {name}
    if name == "vars" and node.args:
        return {LOOKED_UP}
    named = {"attrgetter": node.args, "methodcaller": node.args[:1]}
    names = node.args[1:2] if name in ("getattr", "setattr", "delattr") else named.get(name, [])
    return set() if all(isinstance(one, ast.Constant) for one in names) else {LOOKED_UP}


def listed() -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    assert HEADING in text
    section = text.split(HEADING, 1)[1].split("\n## ", 1)[0]
    return [
        name for row in re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)
    ]


def test_every_place_that_selects_code_is_on_the_page() -> None:
    found = {name: what for name, tree in modules() if (what := selects(tree))}
    ours = {name for name, what in found.items() if what == {LOOKED_UP} and name in OUR_NAMES}

    assert sorted(set(found) - ours) == sorted(listed()), found
    assert sorted(ours) == sorted(OUR_NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "import importlib\nimportlib.import_module(told)",
        "from importlib import import_module\nimport_module(told)",
        "import pickle",
        "from pickle import loads",
        "getattr(module, told)()",
        "getattr(module, told, None)()",
        "getattr(self, f'_on_{told}')",
        "operator.attrgetter(told)",
        "setattr(self, told, 1)",
        "eval(told)",
        "subprocess.run([told])",
        "subprocess.Popen(told, shell=True)",
        "os.execv(told, [])",
        "ctypes.CDLL(told)",
        "numpy.load(told, allow_pickle=True)",
        "vars(module)[told]",
        "import yaml",
        "torch.load(told)",
        "webbrowser.open(told)",
        "update('jax_compilation_cache_dir', told)",
    ],
)
def test_a_place_that_nobody_has_judged_is_found(text: str) -> None:
    assert selects(ast.parse(text))


@pytest.mark.parametrize(
    "text", ["getattr(error, 'errno', None)", "re.compile('a')", "loop.run(work)", "data.load(told)"]
)
def test_other_calls_are_none(text: str) -> None:
    assert selects(ast.parse(text)) == set()
