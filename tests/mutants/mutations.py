"""Small wrong versions of a module: what the operators of mutation testing make of a syntax tree.

One mutant changes one place. Line numbers stay, so a function of the mutant is found by its name and line. What cannot
change behaviour that anybody relies on is left alone: docstrings, annotations, decorators, log lines, the texts and values
inside a `raise`, and f-strings. Numbers outside of functions are decisions, not rules: no test repeats a constant or a
default, so none is changed here either.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FLIPPED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
QUIET = ("log", "warnings")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Path = tuple[tuple[str, int | None], ...]
"""The way from the root of a tree to a node: fields, and places in their lists."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong version of a file: where, and what became of what.

    `scope` is the outermost function that holds the change, as (name, first line), None for a module or class body.
    """

    file: str
    line: int
    column: int
    change: str
    before: str
    after: str
    scope: tuple[str, int] | None
    source: str
    path: Path
    replacement: ast.AST

    @property
    def name(self) -> str:
        """Return what names it as long as its function stays as it is, wherever that stands in the file."""
        name, first = self.scope or ("", 1)
        lines = self.source.splitlines()
        inside = _function_text(lines, first) if self.scope else lines[self.line - 1]
        place = (self.file, name, self.line - first if self.scope else 0, self.column, self.change, self.after, inside)
        return hashlib.blake2b(repr(place).encode(), digest_size=6).hexdigest()

    def tree(self) -> ast.Module:
        """Return the whole module with the change."""
        mutated = ast.parse(self.source)
        _put(mutated, self.path, self.replacement)
        return ast.fix_missing_locations(mutated)


def _function_text(lines: Sequence[str], first: int) -> str:
    """Return the text of the function that begins at a line: to the next line that is indented no further."""
    depth = _indent(lines[first - 1])
    kept = [lines[first - 1]]
    for line in lines[first:]:
        opens = line.strip().startswith((")", "def ", "async def "))
        if line.strip() and (_indent(line) < depth or (_indent(line) == depth and not opens)):
            break
        decorated = all(one.strip().startswith("@") for one in kept)
        if _indent(line) == depth and line.strip().startswith(("def ", "async def ")) and not decorated:
            break
        kept.append(line)
    return "\n".join(kept)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Return every mutant of a module."""
    tree = ast.parse(source)
    made = []
    for path, scope in _places(tree):
        for change, replacement in _replacements(_at(tree, path)):
            if change == "constant" and scope is None:
                continue
            target = _at(tree, path)
            before, after = (_shown(node) for node in (target, replacement))
            line, column = getattr(target, "lineno", 0), getattr(target, "col_offset", 0)
            made.append(Mutant(file, line, column, change, before, after, scope, source, path, replacement))
    return made


def _places(tree: ast.Module) -> Iterator[tuple[Path, tuple[str, int] | None]]:
    """Yield the way to every node that may be changed, with the outermost function around it."""

    def walk(node: ast.AST, path: Path, scope: tuple[str, int] | None) -> Iterator[tuple[Path, tuple[str, int] | None]]:
        if path:
            yield path, scope
        if isinstance(node, Function) and scope is None:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            scope = node.name, first
        for name, value in ast.iter_fields(node):
            said_only = isinstance(node, ast.Raise) and name in ("exc", "cause")
            if name in _UNTOUCHED or said_only or (isinstance(node, ast.ClassDef) and name == "keywords"):
                continue
            for number, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST) and not _is_quiet(child):
                    yield from walk(child, (*path, (name, number)), scope)

    yield from walk(tree, (), None)


_UNTOUCHED = frozenset({"annotation", "returns", "decorator_list", "type_params", "format_spec", "bases"})


def _is_quiet(node: ast.AST) -> bool:
    """Return whether a node is a text that only people read: a docstring, a log line, an f-string, an import."""
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Constant):
            return True
        called = node.value.func if isinstance(node.value, ast.Call) else None
        while isinstance(called, ast.Attribute):
            called = called.value
        return isinstance(called, ast.Name) and called.id in QUIET
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what may stand in the place of `node`."""
    if isinstance(node, ast.Compare):
        yield from _compared(node)
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in SWAPPED:
        if not (isinstance(node, ast.BinOp) and _is_text(node)):
            yield "arithmetic", _changed(node, op=SWAPPED[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield "boolean", _changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield ("not" if isinstance(node.op, ast.Not) else "sign"), node.operand
    elif isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.Return) and node.value is not None:
        # Who asks `if reason` cannot tell an empty text from None, nor False from it.
        empty = isinstance(node.value, ast.Constant) and not node.value.value
        if not empty:
            yield "return", _changed(node, value=ast.Constant(None))
        elif isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield "return", _changed(node, value=ast.Constant("mutant"))
    yield from _conditions(node)
    yield from _deletions(node)


def _compared(node: ast.Compare) -> Iterator[tuple[str, ast.AST]]:
    for number, operator in enumerate(node.ops):
        for flipped in FLIPPED[type(operator)]:
            yield "comparison", _changed(node, ops=[*node.ops[:number], flipped(), *node.ops[number + 1 :]])


def _constants(node: ast.Constant) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node.value, bool):
        yield "constant", ast.Constant(not node.value)
    elif isinstance(node.value, int | float):
        yield "constant", ast.Constant(node.value + 1)
        if node.value not in (0, 1):
            yield "constant", ast.Constant(node.value - 1)


def _conditions(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Negate what is asked; comparisons have mutants of their own."""
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield "not", _changed(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.comprehension):
        for number in range(len(node.ifs)):
            yield "not", _changed(node, ifs=[*node.ifs[:number], *node.ifs[number + 1 :]])


def _deletions(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    stored = node.targets[0] if isinstance(node, ast.Assign) else None
    stored = node.target if isinstance(node, ast.AugAssign) else stored
    kept = isinstance(stored, ast.Attribute | ast.Subscript | ast.Tuple) or isinstance(node, ast.AugAssign)
    if kept or isinstance(node, ast.Expr | ast.Raise | ast.Break | ast.Continue | ast.Delete):
        yield "delete", ast.Pass()


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (node.left, node.right))


def _changed(node: ast.AST, **fields: object) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def _at(tree: ast.AST, path: Path) -> ast.AST:
    for name, number in path:
        value = getattr(tree, name)
        tree = value if number is None else value[number]
    return tree


def _put(tree: ast.AST, path: Path, node: ast.AST) -> None:
    parent = _at(tree, path[:-1])
    name, number = path[-1]
    if hasattr(node, "lineno") or isinstance(node, ast.expr | ast.stmt):
        old = _at(tree, path)
        node = ast.copy_location(copy.deepcopy(node), old)
    if number is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[number] = node


def _shown(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else f"{text[:97]}..."
