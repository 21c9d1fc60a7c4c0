"""Dumps of the last facts of a process's machines, when something fails or somebody asks for them (SIGUSR1).

A machine's recorder (`atoll.protocol.recorder`) keeps the facts; this writes them to files that `atoll replay` reads:

    <folder>/facts-<machine>-<process id>-<number>.jsonl        the newest `FILES_MAX` files of the folder stay

Writing a dump never raises: it happens while something else fails already.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

from atoll.base.errors import EXPECTED
from atoll.base.logs import get

FILES_MAX: Final = 32
DUMP_BYTES_MAX: Final = 64 << 20
ASKED: Final = "somebody asked for it"

log = get(__name__)


class Recorded(Protocol):
    """A machine that can be dumped: it has a name and gives its dump line by line."""

    name: str

    def lines(self, why: str) -> Iterator[bytes]:
        """Yield the lines of a dump of this moment."""


@dataclass(slots=True)
class DumpPolicy:
    """The folder that this process writes to; None for `atoll-facts` where the system keeps temporary files."""

    folder: Path | None = None

    @property
    def place(self) -> Path:
        """Return the folder."""
        return self.folder or Path(tempfile.gettempdir()) / "atoll-facts"


policy = DumpPolicy()
_recorders: weakref.WeakSet[Recorded] = weakref.WeakSet()
_numbers = itertools.count(1)


def keep(recorder: Recorded) -> None:
    """Have this recorder dumped as well when all are; it is forgotten when nobody else holds it."""
    _recorders.add(recorder)


def is_our_bug(error: BaseException) -> bool:
    """Return whether an error is neither the person's nor the machine's nor a peer's doing."""
    return isinstance(error, Exception) and not isinstance(error, EXPECTED)


def dump(recorder: Recorded, why: str) -> Path | None:
    """Write one machine's last facts and return where; None when they could not be written."""
    path = policy.place / f"facts-{recorder.name}-{os.getpid()}-{next(_numbers)}.jsonl"
    try:
        policy.place.mkdir(parents=True, exist_ok=True)
        # Old ones go first: in a full folder they make the room, and pruning after a failure would never be reached.
        for old in sorted(policy.place.glob("facts-*.jsonl"), key=_age)[: 1 - FILES_MAX]:
            old.unlink(missing_ok=True)
        _write(path, recorder.lines(why))
    except Exception as error:  # noqa: BLE001  (an odd value in a fact may raise anything, and something else fails already)
        with contextlib.suppress(OSError, ValueError):
            path.unlink(missing_ok=True)
        log.warning("facts.not_dumped", machine=recorder.name, why=why, reason=f"{type(error).__name__}: {error}")
        return None
    log.error("facts.dumped", machine=recorder.name, why=why, path=str(path), todo=f"atoll replay {path}")
    return path


def dump_all(why: str) -> list[Path]:
    """Write the last facts of every machine of this process."""
    written = [dump(recorder, why) for recorder in sorted(_recorders, key=lambda one: one.name)]
    return [path for path in written if path is not None]


def dump_if_our_bug(error: BaseException, *recorders: Recorded) -> None:
    """Write the last facts of these machines when `error` is a bug of ours."""
    if is_our_bug(error):
        for recorder in recorders:
            dump(recorder, f"{type(error).__name__}: {error}")


def dump_on_signal() -> None:
    """Write everything whenever this process gets SIGUSR1. For the main thread of a process of ours."""

    def write(number: int, frame: FrameType | None) -> None:
        del number, frame
        dump_all(ASKED)

    signal.signal(signal.SIGUSR1, write)


def _write(path: Path, lines: Iterator[bytes]) -> None:
    left = DUMP_BYTES_MAX
    with path.open("xb") as file:
        path.chmod(0o600)
        for line in lines:
            left -= len(line) + 1
            if left < 0:
                log.warning("facts.cut_off", path=str(path), allowed=DUMP_BYTES_MAX)
                return
            file.write(line + b"\n")


def _age(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except OSError:
        return 0.0, path.name
