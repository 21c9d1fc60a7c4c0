"""Files that a person names are opened in one place (`atoll.base.files`), or the list here says why not.

A pipe in the place of a file keeps its reader waiting for ever, and a device or a sparse file fills the memory. So every call
in the product that opens a file to read it must be on the list with its reason: that no person and no peer chooses this file,
or that it was looked at before. The walk knows calls by their names; it cannot see a file that a library opens by another name.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("shared", "services")
READER = "shared/atoll/base/files.py"
OPENERS = {
    *("FileIO", "from_file", "load_file", "safe_open", "ParquetFile"),
    *("memory_map", "fromfile", "memmap", "loadtxt", "genfromtxt"),
}
"""Calls that open a file to read it, by the last part of their names, whatever they are a method of."""
METHODS = {"read_text", "read_bytes"}
"""The same, if they are methods: `read_text` alone is the reader's own."""
LOADERS = {"np.load", "numpy.load", "json.load", "tomllib.load"}
NO_FILES = {"session"}
"""What else has an `open` without arguments."""
OURS = "a process of ours writes this file and gives its name, in a folder that it holds"
INSTALLED = "a part of this installation"
SYSTEM = "a file of the system's kernel"
REASONS = {
    (
        "services/learner/atoll_learner/data/prepare.py",
        "open",
    ): "the files that were just prepared, to make them durable",
    (
        "services/learner/atoll_learner/data/sources.py",
        "ParquetFile",
    ): "looked at before (`check_regular`); it reads a part",
    (
        "services/learner/atoll_learner/data/sources.py",
        "memory_map",
    ): "looked at before (`check_regular`); it is mapped",
    ("services/learner/atoll_learner/export.py", "open"): "the model that was just written, in its draft",
    (
        "services/learner/atoll_learner/export.py",
        "safe_open",
    ): "looked at before (`check_header`); values are read if they fit",
    ("services/learner/atoll_learner/profiling.py", "read_bytes"): "what JAX's profiler has just written",
    ("services/monitor/atoll_monitor/records.py", "FileIO"): "opened to be written, with its lock held",
    ("services/monitor/atoll_monitor/records.py", "open"): OURS,
    ("shared/atoll/archive/object_store.py", "os.open"): "a folder, to make a name in it durable",
    ("shared/atoll/base/machine.py", "read_text"): SYSTEM,
    ("shared/atoll/report/write.py", "read_text"): OURS,
    ("shared/atoll/base/user_cache.py", "os.open"): "a lock: it waits for no pipe, and reads nothing",
    ("shared/atoll/bus/server.py", "open"): OURS,
    ("shared/atoll/bus/server.py", "read_text"): OURS,
    ("shared/atoll/codec/kernels/compiled.py", "read_bytes"): INSTALLED,
    ("shared/atoll/deploy/checks.py", "read_text"): SYSTEM,
    ("shared/atoll/local/brokers.py", "read_text"): SYSTEM,
    ("shared/atoll/local/processes.py", "open"): OURS,
    ("shared/atoll/local/program_cache.py", "open"): "looked at before (`lstat`)",
}
"""Why a call of a module need not go through the reader."""


def opening_calls(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        whole = ast.unparse(node.func)
        last = whole.rpartition(".")[2]
        if last in OPENERS or (last in METHODS and last != whole):
            yield last
        elif whole in LOADERS or (whole == "os.open" and re.search(r"O_RD(ONLY|WR)", ast.unparse(node))):
            yield whole
        elif last == "open" and whole != "os.open" and _is_reading(node, whole):
            yield "open"


def _is_reading(call: ast.Call, whole: str) -> bool:
    """Return whether an `open` reads a file: that of a bus, say, has an argument that is no mode."""
    is_method = whole != "open"
    given = call.args if is_method else call.args[1:]
    named = {word.arg: word.value for word in call.keywords}
    mode = given[0] if given else named.get("mode")
    if mode is None:
        return not is_method or whole.split(".")[-2].lstrip("_") not in NO_FILES
    text = mode.value if isinstance(mode, ast.Constant) and isinstance(mode.value, str) else ""
    return 0 < len(text) <= 3 and ("r" in text or "+" in text)


def found() -> set[tuple[str, str]]:
    """Return the modules of the product, each with the calls in it that open a file to read it."""
    there = set()
    for path in (path for top in PRODUCT for path in (ROOT / top).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name != READER:
            there |= {(name, call) for call in opening_calls(path.read_text(encoding="utf-8"))}
    return there


def test_files_are_opened_by_the_reader_or_for_a_reason() -> None:
    """A new place that opens a file takes the reader; a reason whose place is gone goes, too."""
    there = found()

    assert there - REASONS.keys() == set(), "take `atoll.base.files`, or say here why this file is nobody's"
    assert REASONS.keys() - there == set()


def test_the_walk_sees_each_way_to_open_a_file() -> None:
    """It would be silent for ever if it saw none; what is written, and what only sounds like it, is not meant."""
    opens = """
        open(path)
        open(path, "rb")
        path.open()
        path.open("rb")
        path.open(encoding="utf-8")
        Path("a").read_text(encoding="utf-8")
        (folder / "a").read_bytes()
        os.open(path, os.O_RDONLY)
        np.load(path)
        safetensors.safe_open(path, framework="numpy")
        library.Tokenizer.from_file(str(path))
    """
    others = """
        open(path, "w")
        path.open("ab")
        bus.open(epoch)
        session.open()
        read_text(path)
        os.open(path, os.O_WRONLY | os.O_CREAT)
    """

    assert list(opening_calls(textwrap.dedent(opens))) == [
        *["open"] * 5,
        *("read_text", "read_bytes", "os.open", "np.load", "safe_open", "from_file"),
    ]
    assert list(opening_calls(textwrap.dedent(others))) == []
