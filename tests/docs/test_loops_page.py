"""The page about frameworks shows lines of the examples, as the examples have them."""

from __future__ import annotations

import ast
import re

import pytest

from atoll.client.parameters import RULES, rules_of
from atoll.model.layout import TensorSpec
from atoll.model.leaf_conventions import CONVENTIONS, STATISTICS, TYPES
from support.documents import ROOT

RULES_SECTION, *SECTIONS = (ROOT / "docs" / "how-to" / "loops.md").read_text(encoding="utf-8").split("\n## ")[1:]


def shown(section: str) -> tuple[set[str], list[str]]:
    linked = re.findall(r"\.\./\.\./examples/(\w+\.py)", section)
    texts = [(ROOT / "examples" / name).read_text(encoding="utf-8") for name in linked]
    there = {line.removesuffix("# atoll").strip() for text in texts for line in text.splitlines()}
    blocks = re.findall(r"```py\n(.*?)```", section, re.DOTALL)
    return there, [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_shown_lines_are_in_the_example(section: str) -> None:
    there, lines = shown(section)

    assert lines
    assert [line for line in lines if line not in there] == []


def test_leaves_have_the_rules_that_the_page_says() -> None:
    """Its example decides about a tree of that kind, and its table names the parts of names that decide by themselves."""
    names = ("base/w", "head/ema", "head/w")
    [line] = re.findall(r"^options = atoll\.JoinOptions\(merge=(.*)\)$", RULES_SECTION, re.MULTILINE)
    tensors = [TensorSpec(name, (2,), "float32") for name in names]
    told = set(re.findall(r"`(\w+)`", next(row for row in RULES_SECTION.splitlines() if row.startswith("| `mean`"))))

    assert rules_of(tensors, ast.literal_eval(line)).by_name == dict(
        zip(names, ("frozen", "mean", "pseudo_gradient"), strict=True)
    )
    assert told == {"mean", *STATISTICS}
    assert set(re.findall(r"^\| `(\w+)`", RULES_SECTION, re.MULTILINE)) == set(RULES)


def test_the_page_has_every_convention() -> None:
    rows = {
        row.split(" | ")[0].strip("| "): set(re.findall(r"\w+", row))
        for row in RULES_SECTION.splitlines()
        if row[:1] == "|"
    }
    libraries = {"flax": "Flax NNX", "equinox": "Equinox"}
    known = [(row.library, name) for row in CONVENTIONS for name in row.names if row.library in rows]
    known += [(libraries[package], name) for package, name in TYPES if name != "Param"]

    assert [(library, name) for library, name in known if name not in rows[library]] == []
    assert {row.library for row in CONVENTIONS} - {"Flax"} <= set(rows)
