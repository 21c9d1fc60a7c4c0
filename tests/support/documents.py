"""Follows a document as its reader would: every block in order, in terminals, from the root of the repository.

A page's fenced blocks say what happens to them:

    bash, console       typed into a terminal; `console` shows commands after `$ ` and lines that the output must contain
    title="Terminal 2"  typed into that terminal, while the others go on; without a title the reader waits for the end
    python              the untitled blocks of a page are one program, run where the last of them stands
    title="loop.py"     saved under that name (any language)
    text, and others    only read

Comments say what a reader sees and does between blocks, and that a page takes long, or kills nodes of a broker:

    <!-- until Terminal 1 prints "training" -->
    <!-- Ctrl-C in Terminal 1 -->
    <!-- slow -->
    <!-- cluster faults -->

What a page installs, it uses: a block below the first comment reaches the network, those after the second one have the page's
own environment activated, in place of that of `make setup`.

    <!-- with a network -->
    <!-- activated: env -->

Ports are those that the page names. Where the system allows it, all terminals of a page share a network namespace of their own,
so that no other process of the machine has these ports; it also has no way out, so a page that needs one fails.

In expected lines `…` stands for anything. Runs are made in a folder whose entries are links to those of the repository, so
that what a page writes (`runs/`) stays out of it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support import caches

ROOT = Path(__file__).parents[2]
DEADLINE_S = 900.0
OWN = ("runs", "build", "dist", ".git", ".pytest_cache", ".hypothesis")
MARK = "DOCUMENT_OF_A_TEST"
SHELLS = ("bash", "console")
LOOPBACK_UP = """
import fcntl, socket, struct, sys
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14s", b"lo", 1, b""))
print("up", flush=True)
sys.stdin.read()
"""
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}) *(?P<language>[\w-]*)(?: +title=\"(?P<title>[^\"]+)\")? *$")
_UNTIL = re.compile(r"<!-- until (?P<terminal>[^\"]+?) prints \"(?P<text>[^\"]+)\" -->")
_INTERRUPT = re.compile(r"<!-- Ctrl-C in (?P<terminal>.+?) -->")
_ACTIVATED = re.compile(r"<!-- activated: (?P<folder>.+?) -->")
SLOW = "<!-- slow -->"
CLUSTER_FAULTS = "<!-- cluster faults -->"
NETWORK = "<!-- with a network -->"


@dataclass(frozen=True)
class Step:
    """One thing that a reader does.

    `kind` is `shell`, `console`, `python`, `save`, `until`, `interrupt`, `network` or `activate`.
    """

    kind: str
    line: int
    text: str = ""
    where: str = ""


def steps(page: str) -> list[Step]:
    """Return what a reader of `page` does, in order."""
    found: list[Step] = []
    program: list[str] = []
    last_python = -1
    lines = page.split("\n")
    at = 0
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        if not opening:
            found += _directives(lines[at], at + 1)
            at += 1
            continue
        begin, indent = at + 1, len(opening["indent"])
        at = next(i for i in range(begin, len(lines)) if lines[i].strip() == opening["ticks"])
        text = "\n".join(line[indent:] for line in lines[begin:at]) + "\n"
        language, title = opening["language"], opening["title"] or ""
        if language in SHELLS:
            found.append(Step("console" if language == "console" else "shell", begin, text, title))
        elif title:
            found.append(Step("save", begin, text, title))
        elif language == "python":
            program.append(text)
            last_python = len(found)
            found.append(Step("python", begin, "\n".join(program)))
        at += 1
    return [step for i, step in enumerate(found) if step.kind != "python" or i == last_python]


def _directives(line: str, number: int) -> Iterator[Step]:
    for match in _UNTIL.finditer(line):
        yield Step("until", number, match["text"], match["terminal"])
    for match in _INTERRUPT.finditer(line):
        yield Step("interrupt", number, "", match["terminal"])
    for match in _ACTIVATED.finditer(line):
        yield Step("activate", number, "", match["folder"])
    if NETWORK in line:
        yield Step("network", number)


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a `console` block, each with the lines that its output must contain, in their order."""
    found: list[tuple[str, list[str]]] = []
    for line in block.split("\n"):
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found and found[-1][0].endswith("\\"):
            found[-1] = (f"{found[-1][0]}\n{line}", found[-1][1])
        elif found and line.strip() and line.strip() != "…":
            found[-1][1].append(line)
    return found


def shows(output: str, expected: list[str]) -> str | None:
    """Return None if `output` has all expected lines in this order, else the first that it lacks."""
    given = iter(output.split("\n"))
    for line in expected:
        pattern = re.compile(".*".join(re.escape(part) for part in line.strip().split("…")))
        if not any(pattern.fullmatch(said.strip()) for said in given):
            return line
    return None


@dataclass
class Terminal:
    """One command at work, in a session of its own; its output goes to a file."""

    process: subprocess.Popen[bytes]
    output: Path
    interrupted: bool = False

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def interrupt(self) -> None:
        self.interrupted = True
        os.killpg(self.process.pid, signal.SIGINT)

    def finish(self, deadline_s: float) -> str:
        """Return all of its output once it has ended well; a command that was interrupted may say so by its exit code."""
        self.process.wait(max(1.0, deadline_s - time.monotonic()))
        allowed = {0, 1, 130, -signal.SIGINT} if self.interrupted else {0}
        assert self.process.returncode in allowed, f"left with {self.process.returncode}:\n{self.said()[-4000:]}"
        return self.said()


class PrivateNetwork:
    """A network namespace with a loopback and nothing else; `prefix` puts a command into it, or is empty where none can be."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", LOOPBACK_UP],  # noqa: S607  (wherever it is)
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._holder.stdout is not None
        ready = self._holder.stdout.readline() == b"up\n"
        enter = ["nsenter", "--user", "--net", "--preserve-credentials", f"--target={self._holder.pid}", "--"]
        self.prefix = enter if ready else []

    @classmethod
    def possible(cls) -> bool:
        if shutil.which("unshare") is None:
            return False
        network = cls()
        network.close()
        return bool(network.prefix)

    def close(self) -> None:
        self._holder.communicate()


@dataclass
class Reader:
    """Follows one page in `folder`.

    Runs keep compiled programs in `programs`, where all pages find them. With None they are in a user's cache of the
    page's own, as they are for a reader.
    """

    folder: Path
    network: PrivateNetwork = field(default_factory=PrivateNetwork)
    terminals: dict[str, Terminal] = field(default_factory=dict)
    deadline_s: float = field(default_factory=lambda: time.monotonic() + DEADLINE_S)
    scripts: Path = Path(sys.executable).parent
    alone: bool = True
    programs: Path | None = caches.PROGRAMS

    def __post_init__(self) -> None:
        """Make the folder look like the repository after `make setup`."""
        self.folder.mkdir(parents=True)
        for entry in ROOT.iterdir():
            if entry.name not in OWN:
                (self.folder / entry.name).symlink_to(entry)
        (self.folder / "build").mkdir()

    def follow(self, page: str) -> None:
        """Do every step of `page`; an assertion names the line at which it failed."""
        for step in steps(page):
            try:
                self._do(step)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                raise AssertionError(f"line {step.line}: {error}\n{self._all_said()}") from error
        for name, terminal in self.terminals.items():
            try:
                terminal.finish(self.deadline_s)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                raise AssertionError(f"{name}: {error}\n{self._all_said()}") from error

    def _do(self, step: Step) -> None:
        if step.kind == "save":
            (self.folder / step.where).write_text(step.text, encoding="utf-8")
        elif step.kind == "until":
            self.wait_for(self.terminals[step.where], step.text)
        elif step.kind == "interrupt":
            self.terminals[step.where].interrupt()
        elif step.kind == "activate":
            self.scripts = self.folder / step.where / "bin"
            assert (self.scripts / "activate").is_file(), f"{step.where} is no environment"
        elif step.kind == "network":
            self.alone = False
        elif step.kind == "python":
            self._start("python", [sys.executable, "-c", step.text]).finish(self.deadline_s)
        else:
            self._type(step)
            self.alone = True

    def _type(self, step: Step) -> None:
        """Type a block: in its own terminal, or in any and wait for its end."""
        if step.kind == "console":
            for command, expected in commands(step.text):
                said = self.type("console", command).finish(self.deadline_s)
                missing = shows(said, expected)
                assert missing is None, f"`{command}` did not print\n{missing}\nbut\n{said}"
        elif step.where:
            if step.where in self.terminals:
                self.terminals[step.where].finish(self.deadline_s)
            self.terminals[step.where] = self.type(step.where, step.text)
        else:
            self.type("shell", step.text).finish(self.deadline_s)

    def type(self, name: str, text: str) -> Terminal:
        """Type `text` into a terminal and return that, at work."""
        return self._start(name, ["bash", "-eu", "-o", "pipefail", "-c", text])

    def _start(self, name: str, command: list[str]) -> Terminal:
        """Start a command in the environment that is activated: that of `make setup`, or the page's own."""
        output = self.folder / "build" / f"{len(list((self.folder / 'build').iterdir()))}-{name.replace(' ', '-')}.out"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
        environment |= {"PATH": f"{self.scripts}:{environment['PATH']}", MARK: str(self.folder), "COLUMNS": "200"}
        if self.programs:
            environment["ATOLL_LEARNER__COMPILE_CACHE"] = str(self.programs)
        else:
            environment["XDG_CACHE_HOME"] = str(self.folder / "user")
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*(self.network.prefix if self.alone else []), *command],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return Terminal(process, output)

    def wait_for(self, terminal: Terminal, text: str) -> None:
        """Look at a terminal until it shows `text`."""
        while text not in terminal.said():
            assert terminal.process.poll() is None, f"it ended without printing {text!r}:\n{terminal.said()[-4000:]}"
            assert time.monotonic() < self.deadline_s, f"it did not print {text!r} in time:\n{terminal.said()[-4000:]}"
            time.sleep(0.05)

    def _all_said(self) -> str:
        outputs = sorted((self.folder / "build").glob("*.out"))
        return "\n".join(
            f"--- {path.name}\n{path.read_text(encoding='utf-8', errors='replace')[-3000:]}" for path in outputs
        )

    def leave(self) -> list[int]:
        """End everything and return what the page left behind; nothing counts as left if a command was still at work."""
        at_work = [terminal.process for terminal in self.terminals.values() if terminal.process.poll() is None]
        for process in at_work:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE_S)
        left = processes_of(self.folder)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self.network.close()
        return [] if at_work else left


def documented(docstring: str) -> list[str]:
    """Return the commands that a docstring shows, indented, each before its explanation; a backslash joins two lines."""
    lines = re.sub(r" *\\\n *", " ", docstring).split("\n")
    return [re.split(r" {2,}", line.strip())[0] for line in lines if line.startswith("    ")]


def processes_of(folder: Path) -> list[int]:
    """Return the processes that were started, by whatever detour, from a page that is followed in `folder`."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
