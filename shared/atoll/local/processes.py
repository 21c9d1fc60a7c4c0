"""Child processes that cannot be left behind.

Every child leads a process group of its own. So Ctrl-C in the terminal reaches only `up`, and a kill reaches everything that
the child has started. On Linux a child also asks the kernel, before it executes its program, to be killed when its parent
dies: nothing survives `up`, not even a SIGKILL of it. The kernel means the parent *thread*, so the main thread must drive
the group. (On other systems a SIGKILL of `up` leaves children; every other way of leaving does not.)

Exit codes decide. 0 is a good end. 2 means that a person must change something, so a restart is useless. Anything else is
a fault: the child restarts after a pause, at most `restarts_max` times in a row. A child that lived for `PROVEN_S` gets all
its restarts back. A child that ended for want of the broker has spent none: no restart helps, and none is saved by giving it
up. The group only observes and restarts; the supervisor decides what an exit means for the run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, BrokerUnavailable, EnvironmentFault, UserError, parts_of
from atoll.base.exits import SIGNALLED, last_kind_in, last_word_in
from atoll.base.logs import get

log = get(__name__)

RESTART_PAUSE_S = 1.0
PROVEN_S = 10.0
REAP_S = 5.0
_WORDS_BYTES = 8192
_WORDS_LINES = 8
# Runs before the program takes the process over: die with the parent, unless the parent has died already.
DIE_WITH_PARENT = (
    "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,9);"
    "os.getppid()==int(sys.argv[1]) or os._exit(1);os.execv(sys.argv[2],sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """A child to start: its name (and log file), command, whole environment, and how many faults lead to a restart."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    restarts_max: int = 0


@dataclass(frozen=True, slots=True)
class Exit:
    """A child ended with `code` (negative: by that signal).

    `restarting` tells whether it will be restarted, `asked` whether it had been asked to leave, `absent` whether the broker
    was away.
    """

    name: str
    code: int
    restarting: bool = False
    asked: bool = False
    absent: bool = False

    @property
    def is_good(self) -> bool:
        """Return whether the process did what it was for, or left when it was asked to."""
        return self.code == 0 or (self.asked and self.code in (-signal.SIGTERM, SIGNALLED + signal.SIGTERM))

    @property
    def what(self) -> str:
        """Return the end in words."""
        if self.code >= 0:
            return f"left with exit code {self.code}"
        try:
            return f"was ended by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"was ended by signal {-self.code}"

    @property
    def news(self) -> str:
        """Return the end, and what comes of it, as a line."""
        away = "; the broker was away" if self.absent else ""
        more = f"{away}; starting it again" if self.restarting else "" if self.asked else "; it is not started again"
        return f"{self.name} {self.what}{more}"


@dataclass(slots=True)
class _Child:
    plan: ChildPlan
    process: subprocess.Popen[bytes] | None = None
    codes: list[int] = field(default_factory=list)
    restarts: int = 0
    born_s: float = 0.0
    away_s: float = 0.0
    """For how long the broker had been away when it was born."""
    was_proven: bool = False
    log_from: int = 0
    """Where its life begins in its log: a former one's last words are not its own."""
    due_s: float | None = None
    asked: bool = False


class ProcessGroup:
    """The children of one `up`, by name. Not for use from several threads."""

    def __init__(self, log_dir: Path, clock: Clock) -> None:
        self._log_dir = log_dir
        self._clock = clock
        self._children: dict[str, _Child] = {}
        self._killed = False
        self.proven: Callable[[str], bool] = lambda _: True
        """Whether a life that has ended, and lasted `PROVEN_S`, did what it was for: faults before it count no more then."""
        self.away_s: Callable[[], float] = lambda: 0.0
        """For how long the broker has been away until now, as far as we know."""

    def start(self, plan: ChildPlan) -> None:
        """Start a child, or one of the same name anew.

        Raises `EnvironmentFault` when the operating system cannot start it.
        """
        child = _Child(plan)
        self._children[plan.name] = child
        self._spawn(child)

    def allow(self, name: str, restarts_max: int) -> None:
        """Restart a child after faults from now on, because it has shown that it can start."""
        child = self._children[name]
        child.plan = replace(child.plan, restarts_max=restarts_max)

    def poll(self) -> list[Exit]:
        """Take note of children that have ended, start those whose pause is over, and return the ends."""
        now_s = self._clock.monotonic()
        ends: list[Exit] = []
        for child in self._children.values():
            if child.due_s is not None and now_s >= child.due_s and not self._killed:
                child.due_s = None
                ends += self._spawn_again(child, now_s)
            if child.process is not None and (code := child.process.poll()) is not None:
                ends.append(self._note_end(child, child.process.pid, code, now_s))
        return ends

    def alive(self, names: Iterable[str]) -> set[str]:
        """Return which of `names` run or are about to be started again."""
        return {name for name in names if (c := self._children.get(name)) and (c.process or c.due_s is not None)}

    def begun_again(self, names: Iterable[str], within_s: float) -> set[str]:
        """Return which of `names` have ended and were started again within the last seconds, or are about to be."""
        now_s = self._clock.monotonic()
        found = ((name, self._children[name]) for name in names if name in self._children)
        lately = ((name, child) for name, child in found if child.codes and not child.asked)
        return {
            name
            for name, child in lately
            if child.due_s is not None or (child.process and now_s - child.born_s < within_s)
        }

    def pid(self, name: str) -> int:
        """Return the process id of a child, 0 when it does not run."""
        child = self._children.get(name)
        return child.process.pid if child is not None and child.process is not None else 0

    def codes(self, name: str) -> tuple[int, ...]:
        """Return the exit codes of a child's lives so far, the latest last."""
        child = self._children.get(name)
        return () if child is None else tuple(child.codes)

    def ask(self, names: Iterable[str]) -> None:
        """Ask children to leave (SIGTERM), once each: a second would stop them at once. They are not restarted."""
        for name in names:
            child = self._children.get(name)
            if child is None or child.asked:
                continue
            child.asked = True
            child.due_s = None
            if child.process is not None:
                _signal_group(child.process.pid, signal.SIGTERM, group=False)

    def kill(self, names: Iterable[str]) -> None:
        """Kill children and whatever they have started, and wait until they are gone."""
        doomed = [self._children[name] for name in names if name in self._children]
        for child in doomed:
            child.asked, child.due_s = True, None
            if child.process is not None:
                _signal_group(child.process.pid, signal.SIGKILL)
        for child in doomed:
            if child.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.codes.append(child.process.wait(REAP_S))
                    child.process = None

    def kill_all(self) -> None:
        """Kill everything; nothing is started after this."""
        self._killed = True
        self.kill(list(self._children))

    def _last_words(self, name: str) -> tuple[str, str]:
        """Return the error that a child's log ends with, and its class (or "ours"); else the end of the log, and nothing."""
        try:
            with self.log_path(name).open("rb") as log:
                begun = self._children[name].log_from if name in self._children else 0
                at = log.seek(max(begun, log.seek(0, os.SEEK_END) - _WORDS_BYTES))
                lines = log.read().decode("utf-8", "replace").splitlines()
                lines = lines[1:] if at > begun else lines  # the first one is the rest of one
        except OSError:
            return "", ""
        told = next((line for line in reversed(lines) if last_word_in(line)), "")
        if told:
            return last_word_in(told), last_kind_in(told)
        plain = [line for line in lines if line.strip() and not line.startswith("{")]
        begins = [i for i, line in enumerate(plain) if line.startswith("atoll: ")]
        ours = plain[begins[-1] :] if begins else []
        if not ours or any(line.startswith("Traceback ") for line in ours):  # it went on, and ended otherwise
            return "\n".join(plain[-_WORDS_LINES:]), ""
        return "\n".join(
            [ours[0], *itertools.takewhile(lambda line: not line.startswith("Exception "), ours[1:])]
        ), "ours"

    def log_path(self, name: str) -> Path:
        """Return where a child logs."""
        return self._log_dir / f"{name}.jsonl"

    def failure(self, name: str, what: str) -> AtollError:
        """Return an error for a child that is needed and gone: with its own last words and its own exit code."""
        code = self.codes(name)[-1] if self.codes(name) else 1
        kind = {UserError.exit_code: UserError, EnvironmentFault.exit_code: EnvironmentFault}.get(code, AtollError)
        # What a killed one said last is not why it ended.
        last, kind_said = ("", "") if code < 0 else self._last_words(name)
        log = f"look at {self.log_path(name)}"
        if not kind_said:
            return kind(what, got=last.replace("\n", "\n           ") or Exit(name, code).what, todo=log)
        told = parts_of(last)
        todo = f"{told['todo']}; its log is {self.log_path(name)}" if "todo" in told else log
        return kind(f"{what}: {told['what']}", got=told.get("got"), allowed=told.get("allowed"), todo=todo)

    def _spawn_again(self, child: _Child, now_s: float) -> list[Exit]:
        """Start a child that has ended; if the system cannot, that is one more fault of this child, and nobody else's."""
        try:
            self._spawn(child)
        except EnvironmentFault as error:
            log.warning("child.not_started", child=child.plan.name, reason=str(error))
            return [self._plan_restart(child, error.exit_code, now_s)]
        return []

    def _spawn(self, child: _Child) -> None:
        child.born_s, child.away_s = self._clock.monotonic(), self.away_s()
        command = list(child.plan.command)
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), *command]
        try:
            with self.log_path(child.plan.name).open("ab") as log:
                child.log_from = log.tell()
                child.process = subprocess.Popen(  # noqa: S603  # our own programs, no shell
                    command,
                    env=dict(child.plan.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    process_group=0,
                )
        except OSError as error:
            raise EnvironmentFault(
                f"{child.plan.name} cannot be started", got=error, todo="free memory, processes or disk"
            ) from error

    def _note_end(self, child: _Child, pid: int, code: int, now_s: float) -> Exit:
        _signal_group(pid, signal.SIGKILL)
        child.process = None
        proven = self.proven(child.plan.name) and now_s - child.born_s >= PROVEN_S
        child.restarts = 0 if proven else child.restarts
        child.was_proven = child.was_proven or proven
        return self._plan_restart(child, code, now_s)

    def _is_absence(self, child: _Child, code: int) -> bool:
        """Return whether a child ended for want of the broker: we missed it, too, or the child that has reached it says so."""
        if code != EnvironmentFault.exit_code or self._last_words(child.plan.name)[1] != BrokerUnavailable.__name__:
            return False
        return child.was_proven or self.away_s() > child.away_s

    def _plan_restart(self, child: _Child, code: int, now_s: float) -> Exit:
        child.codes.append(code)
        fault = code not in (0, UserError.exit_code)
        absent = self._is_absence(child, code)
        left = absent or child.restarts < child.plan.restarts_max
        restarting = fault and not child.asked and not self._killed and child.plan.restarts_max > 0 and left
        if restarting:
            child.restarts += not absent
            child.due_s = now_s + RESTART_PAUSE_S * max(1, child.restarts)
        return Exit(child.plan.name, code, restarting=restarting, asked=child.asked, absent=absent)


def _signal_group(pid: int, number: signal.Signals, *, group: bool = True) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, number)
