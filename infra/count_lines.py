"""Count lines of code: what training needs, what else is shipped, and what is around it.

A line of code is one that holds a token other than a comment or a docstring. All lines are counted beside it.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOMS = ("base", "model", "codec", "merge", "protocol", "wire", "bus", "run", "client")
NEEDED = [*(f"shared/atoll/{room}" for room in ROOMS), "services/synchronizer"]
REST = ["shared/atoll", "services", "benchmarks", "tests", "examples"]
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Return how many lines hold code."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            held |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(held)


def counted(folders: list[str], root: Path, taken: set[Path]) -> list[tuple[str, int, int, int]]:
    """Return (folder, modules, lines of code, lines) of each, without what was `taken` before; and take it."""
    rows = []
    for folder in folders:
        files = [path for path in sorted((root / folder).rglob("*.py")) if path not in taken]
        taken |= set(files)
        texts = [path.read_text(encoding="utf-8") for path in files]
        rows.append((folder, len(files), sum(map(code_lines, texts)), sum(text.count("\n") for text in texts)))
    return rows


def main(root: Path) -> None:
    """Print the table of the tree at `root`."""
    taken: set[Path] = set()
    for title, folders in (("needed to train", NEEDED), ("the rest", REST)):
        rows = counted(folders, root, taken)
        total = (title, *(sum(row[column] for row in rows) for column in (1, 2, 3)))
        for name, files, code, lines in (*rows, total):
            print(f"{name:<28} {files:>5} modules {code:>7} of code {lines:>7} lines")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])
