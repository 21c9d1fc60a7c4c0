"""A pytest plugin that tries mutants: tests are collected once, and every mutant is a fork of the process that holds them.

In the fork the code objects of one function are exchanged for the mutant's, and the tests that run that function are
played, the quickest first, until one fails. Nothing is imported twice, so a mutant that a unit test catches costs some
20 ms. First all tests are played once, in a fork of their own: which functions each of them enters, and how long it takes.

What stands outside functions (constants, defaults of fields) is made anew in a fork that imports the package's modules
again: see `anew`.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType

import pytest
from mutations import Mutant, mutants_of

PATIENCE_FACTOR = 4.0
PATIENCE_S = 4.0
Place = tuple[str, int]
"""A function: its file and its first line."""


@dataclass(slots=True)
class Trial:
    """A mutant that is being tried in a fork."""

    mutant: Mutant
    pid: int
    pipe: int
    began_s: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class MutantVerdict:
    """What became of a mutant: killed by a test, out of time (killed, too), survived, or run by no test at all."""

    fate: str
    by: str
    took_s: float


class ForkServer:
    """Tries mutants in forks of a pytest session; `done` are the names of those with a verdict."""

    def __init__(
        self, mutants: Sequence[Mutant], jobs: int, minutes: float, tell: Callable[[Mutant, MutantVerdict], None]
    ) -> None:
        """Prepare; the work is done when the session would run its tests."""
        self._mutants = list(mutants)
        self._jobs = jobs
        self._until_s = time.monotonic() + 60.0 * minutes
        self._tell = tell
        self._failed = ""
        self._functions: dict[tuple[str, int, str], list[FunctionType]] = {}
        self._tests_of: dict[Place, list[int]] = {}
        self._took_s: list[float] = []

    # --- pytest -------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try all mutants instead of running the tests."""
        if session.testsfailed:
            raise session.Interrupted("tests could not be collected")
        self._learn(session)
        self._functions = _functions({mutant.file for mutant in self._mutants})
        running: dict[int, Trial] = {}
        waiting = iter(self._mutants)
        while True:
            while len(running) < self._jobs and time.monotonic() < self._until_s:
                mutant = next(waiting, None)
                if mutant is None:
                    break
                trial = self._begin(session, mutant)
                if trial is not None:
                    running[trial.pipe] = trial
            if not running:
                return True
            self._end_some(running)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failed:
            self._failed = report.nodeid

    # --- what each test enters ----------------------------------------------------------------------------------------

    def _learn(self, session: pytest.Session) -> None:
        """Play all tests once in a fork and note what they enter and how long they take."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _hush()
            files = {str(Path(mutant.file).resolve()) for mutant in self._mutants}
            with os.fdopen(writer, "w") as out:
                json.dump(self._played(session, files), out)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            played = json.load(answer)
        os.waitpid(pid, 0)
        if played["failed"]:
            raise session.Interrupted(f"a test fails without any mutant: {played['failed']}")
        self._took_s = played["took_s"]
        for number, entered in enumerate(played["entered"]):
            for file, line in entered:
                self._tests_of.setdefault((file, line), []).append(number)
        for tests in self._tests_of.values():
            tests.sort(key=self._took_s.__getitem__)
        sys.stdout.write(f"{len(session.items)} tests take {sum(self._took_s):.1f} s\n")

    def _played(self, session: pytest.Session, files: set[str]) -> dict[str, object]:
        entered: set[Place] = set()

        def enter(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename in files:
                entered.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

        took_s, seen = [], []
        for item, following in _with_next(session.items):
            entered.clear()
            began_s = time.monotonic()
            sys.setprofile(enter)
            threading.setprofile(enter)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            sys.setprofile(None)
            took_s.append(time.monotonic() - began_s)
            seen.append(sorted(entered))
            if self._failed:
                break
        return {"failed": self._failed, "took_s": took_s, "entered": seen}

    # --- one mutant ---------------------------------------------------------------------------------------------------

    def _begin(self, session: pytest.Session, mutant: Mutant) -> Trial | None:
        """Fork for a mutant; None where no test enters its function."""
        file = str(Path(mutant.file).resolve())
        entering = self._tests_of.get((file, mutant.scope[1]), []) if mutant.scope else self._tests_of_file(file)
        if not entering:
            self._tell(mutant, MutantVerdict("unreached", "", 0.0))
            return None
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            self._try(mutant, [session.items[number] for number in entering], writer)
        os.close(writer)
        limit_s = PATIENCE_S + PATIENCE_FACTOR * sum(self._took_s[number] for number in entering)
        return Trial(mutant, pid, reader, time.monotonic(), limit_s)

    def _tests_of_file(self, file: str) -> list[int]:
        """Return the tests that enter a function of a file, or none of any: those look at constants; the quickest first."""
        entering = {number for (where, _), tests in self._tests_of.items() if where == file for number in tests}
        somewhere = {number for tests in self._tests_of.values() for number in tests}
        chosen = entering | (set(range(len(self._took_s))) - somewhere)
        return sorted(chosen if entering else range(len(self._took_s)), key=self._took_s.__getitem__)

    def _try(self, mutant: Mutant, items: list[pytest.Item], writer: int) -> None:
        os.setsid()
        _hush()
        said = "survived\n"
        try:
            problem = self._exchange(mutant)
            for item, following in _with_next(items):
                if problem:
                    break
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self._failed:
                    problem = self._failed
            said = f"killed\n{problem}" if problem else said
        except BaseException as error:  # noqa: BLE001  (a mutant may break anything, pytest included)
            said = f"killed\n{error!r}"
        os.write(writer, said.encode())
        os.killpg(0, signal.SIGKILL)

    def _end_some(self, running: dict[int, Trial]) -> None:
        """Wait until a trial ends or its time is up."""
        now_s = time.monotonic()
        soonest_s = min(trial.began_s + trial.limit_s for trial in running.values())
        ready, _, _ = select.select(list(running), [], [], max(0.0, soonest_s - now_s))
        for pipe, trial in list(running.items()):
            took_s = time.monotonic() - trial.began_s
            if pipe in ready:
                fate, _, by = os.read(pipe, 65536).decode(errors="replace").partition("\n")
                # A fork that ends without a word was ended by its mutant.
                verdict = MutantVerdict(fate or "killed", by or ("" if fate else "the process died"), took_s)
            elif took_s >= trial.limit_s:
                os.killpg(trial.pid, signal.SIGKILL)
                verdict = MutantVerdict("killed", "time is up", took_s)
            else:
                continue
            del running[pipe]
            os.close(pipe)
            os.waitpid(trial.pid, 0)
            self._tell(trial.mutant, verdict)

    # --- the change itself --------------------------------------------------------------------------------------------

    def _exchange(self, mutant: Mutant) -> str:
        """Put a mutant in the place of what it is one of; return how that failed at once, which catches it, too."""
        tree = mutant.tree()
        file = str(Path(mutant.file).resolve())
        try:
            code = compile(tree, file, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            return f"no program any more: {error}"
        if mutant.scope is None:
            return _made_anew(file, tree)
        name, line = mutant.scope
        new = next(one for one in _codes(code) if (one.co_name, one.co_firstlineno) == (name, line))
        for function in self._functions.get((file, line, name), []):
            if len(new.co_freevars) != len(function.__code__.co_freevars):
                return "another number of free variables"
            function.__code__ = new
            _set_defaults(function, tree, line)
        return ""


def _made_anew(file: str, tree: ast.Module) -> str:
    """Make the constants of a module and of its classes' bodies anew, wherever they are known by name.

    A dataclass keeps its identity and gets the new defaults of its fields. Other classes are exchanged like constants, also in
    the tables of modules and classes that dispatch by them.
    """
    module = next(one for one in list(sys.modules.values()) if getattr(one, "__file__", None) == file)
    space = dict(vars(module))
    try:
        exec(compile(tree, file, "exec", dont_inherit=True), space)  # noqa: S102  (this is what mutants are for)
    except Exception as error:  # noqa: BLE001  (a module that cannot be imported is caught at once)
        return f"cannot be imported: {error!r}"
    old = dict(vars(module))
    changed = {
        name: value
        for name, value in space.items()
        if name in old and not name.startswith("__") and not _alike(old[name], value)
    }
    for name, value in changed.items():
        if dataclasses.is_dataclass(value):
            new, known = vars(value)["__init__"], vars(old[name])["__init__"]
            known.__defaults__, known.__kwdefaults__ = new.__defaults__, new.__kwdefaults__
            old[name].__dataclass_fields__.update(value.__dataclass_fields__)
            continue
        for other in list(sys.modules.values()):
            if getattr(other, "__dict__", {}).get(name, other) is old[name]:
                setattr(other, name, value)
        if isinstance(value, type):
            _entered(old[name], value)
    return ""


def _entered(former: type, value: type) -> None:
    """Put a class in the place of a former one in all tables of ours that have it as a key or as a value."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0].startswith("atoll")]
    classes = [one for module in modules for one in vars(module).values() if isinstance(one, type)]
    for holder in (*modules, *classes):
        for table in [table for table in vars(holder).values() if type(table) is dict]:
            if former in table:
                table[value] = table.pop(former)
            table.update({key: value for key, kept in list(table.items()) if kept is former})


def _alike(one: object, other: object) -> bool:
    if isinstance(one, FunctionType | type):
        return _body(one) == _body(other)
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001  (arrays)
        return False


def _body(value: object) -> object:
    """Return what tells a function or class from a changed one: its fields' defaults."""
    if isinstance(value, type):
        defaults = getattr(value, "__struct_defaults__", None)
        fields = {name: repr(field.default) for name, field in getattr(value, "__dataclass_fields__", {}).items()}
        plain = {k: v for k, v in vars(value).items() if isinstance(v, int | float | str) and not k.startswith("__")}
        return repr(defaults), fields, plain
    return "a function"


def _set_defaults(function: FunctionType, tree: ast.Module, line: int) -> None:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if min([node.lineno, *(one.lineno for one in node.decorator_list)]) != line:
            continue
        space = function.__globals__
        values = [eval(compile(ast.Expression(e), "", "eval"), space) for e in node.args.defaults]  # noqa: S307
        named = {
            arg.arg: eval(compile(ast.Expression(e), "", "eval"), space)  # noqa: S307
            for arg, e in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            if e is not None
        }
        function.__defaults__, function.__kwdefaults__ = tuple(values) or None, named or None


def _functions(files: set[str]) -> dict[tuple[str, int, str], list[FunctionType]]:
    wanted = {str(Path(file).resolve()) for file in files}
    found: dict[tuple[str, int, str], list[FunctionType]] = {}
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType) and thing.__code__.co_filename in wanted:
            code = thing.__code__
            found.setdefault((code.co_filename, code.co_firstlineno, code.co_name), []).append(thing)
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _with_next(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    for number, item in enumerate(items):
        yield item, items[number + 1] if number + 1 < len(items) else None


def _hush() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def read(root: Path, files: Sequence[str]) -> list[Mutant]:
    """Return every mutant of these files of a tree."""
    return [mutant for file in files for mutant in mutants_of(file, (root / file).read_text(encoding="utf-8"))]
