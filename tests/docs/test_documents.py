"""Every command and program in the tutorial and the how-to pages does what its page says, from the root of the repository."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.documents import CLUSTER_FAULTS, NETWORK, ROOT, SLOW, Reader, commands, shows, steps

PAGES = sorted([*(ROOT / "docs" / "tutorial").glob("*.md"), *(ROOT / "docs" / "how-to").glob("*.md")])

TIERS = {SLOW: pytest.mark.second_tier, CLUSTER_FAULTS: pytest.mark.cluster_faults}


def marked(path: Path) -> object:
    """Return a page as a parameter: long ones are for the longer tier."""
    text = path.read_text(encoding="utf-8")
    marks = [mark for comment, mark in TIERS.items() if comment in text]
    return pytest.param(path, marks=marks, id=f"{path.parent.name}/{path.stem}")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """Somebody who follows a page; nothing of what it starts outlives the test."""
    reader = Reader(tmp_path / "atoll")
    yield reader
    left = reader.leave()
    assert left == [], "processes were left behind"


@pytest.mark.parametrize("path", [marked(path) for path in PAGES if steps(path.read_text(encoding="utf-8"))])
def test_a_page_does_what_it_says(path: Path, reader: Reader, request: pytest.FixtureRequest) -> None:
    """Its blocks run in order and end well, and what it shows of their output is there.

    A page that installs finds the wheel of this tree in `dist/`, as `make wheel` leaves it, and needs a package index.
    """
    page = path.read_text(encoding="utf-8")
    if NETWORK in page:
        request.getfixturevalue("index")
        wheel: Path = request.getfixturevalue("wheel")
        dist = reader.folder / "dist"
        dist.mkdir()
        shutil.copy(wheel, dist)
    reader.follow(page)


def test_expected_lines_are_looked_for_in_order() -> None:
    assert commands("$ a \\\n  b\n  one … three\n…\nfour\n$ c\n") == [
        ("a \\\n  b", ["  one … three", "four"]),
        ("c", []),
    ]
    assert shows("one two three\nfour\n", ["one … three", "four"]) is None
    assert shows("four\none two three\n", ["one … three", "four"]) == "four"


def test_a_page_that_promises_too_much_fails(reader: Reader) -> None:
    """A wrong exit code, a missing line and a program that raises are all noticed, with the line of the page."""
    with pytest.raises(AssertionError, match="line 2: left with 3"):
        reader.follow("text\n```bash\nexit 3\n```")
    with pytest.raises(AssertionError, match="did not print"):
        reader.follow("```console\n$ echo hello\ngoodbye\n```")
    with pytest.raises(AssertionError, match="left with 1"):
        reader.follow("```python\nraise ValueError\n```")
