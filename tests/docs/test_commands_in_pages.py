"""Commands that pages only show are at least possible: the verbs, options and targets in them exist."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import docs_commands
import pytest
from docs_links import prose

import atoll

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
HISTORY = {"lab", "results"}
"""What was run once, as it was written then."""


def fenced(text: str) -> Iterator[str]:
    block = "\n".join("" if is_prose else line for line, is_prose in prose(text)).replace("\\\n", " ")
    for line in block.split("\n"):
        command = line.strip().removeprefix("$ ").split(" #")[0].split("||")[0].split(" > ")[0]
        if re.match(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:atoll|make) ", command):
            yield re.sub(r"^(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?", "", command)


def trouble(command: str, options: dict[str, set[str]], targets: set[str]) -> str | None:
    """Return what is wrong with a command, or None."""
    words = shlex.split(command)
    if words[0] == "make":
        unknown = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"no target {unknown}" if unknown else None
    verb = "atoll"
    for word in words[1:]:
        if f"{verb} {word}" not in options:
            break
        verb = f"{verb} {word}"
    if verb == "atoll" and len(words) > 1 and not words[1].startswith("-"):
        return f"no verb {words[1]}"
    given = {word.split("=")[0] for word in words if word.startswith("--")}
    return f"{verb} has no {sorted(given - options[verb])}" if given - options[verb] else None


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    return {verb: docs_commands.options_of(command) | {"--help"} for verb, command in docs_commands.verbs()}


@pytest.fixture(scope="module")
def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_shown_commands_exist(path: Path, options: dict[str, set[str]], targets: set[str]) -> None:
    """Every `atoll` verb and option, and every `make` target in a fenced block is there."""
    if HISTORY & set(path.relative_to(ROOT).parts):
        return
    found = {command: trouble(command, options, targets) for command in fenced(path.read_text(encoding="utf-8"))}

    assert {command: why for command, why in found.items() if why} == {}


def test_a_command_that_is_not_there_is_found(options: dict[str, set[str]], targets: set[str]) -> None:
    """A wrong verb, option or target is named; comments, prompts and variables are passed over."""
    page = (
        "```\n$ ATOLL_RUN=x .venv/bin/atoll up --out x  # as\nmake no-such A=1\natoll plant\n"
        "atoll sim train --nope\n```\natoll no"
    )

    assert [trouble(command, options, targets) for command in fenced(page)] == [
        None,
        "no target ['no-such']",
        "no verb plant",
        "atoll sim train has no ['--nope']",
    ]


def test_the_loop_of_the_readme_is_that_of_the_library() -> None:
    """The README's few lines compile, and use what `atoll.join` and its handle have."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    compile(block, "README.md", "exec")
    named = set(re.findall(r"island\.(\w+)", block))

    assert named == {"params", "done", "step", "merged"}
    assert named <= set(dir(atoll.IslandHandle))
    assert {"run", "learner", "params"} <= inspect.signature(atoll.join).parameters.keys()
