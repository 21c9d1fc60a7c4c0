"""The folder of a run on this machine, and `run.json`, which makes it resumable.

    OUT/run.json    what the run is: id, fixed settings, sessions so far     OUT/nats/    the broker's store
    OUT/data/       token shards                                             OUT/logs/    one file per process
    OUT/cache/      compiled programs                                        OUT/lock     held while `up` runs
    OUT/health/     touched by shards and learners                           OUT/archive/ run checkpoints
    OUT/checkpoints/  learners' optimizers
    OUT/report.json, report.html, model.safetensors, sample.txt, validation.json
    OUT/events.jsonl  of a *saved* run the whole event log: {"sequence": …, "subject": …, "event": {…}} a line

`run.json` is written whole and moved into place, so that a kill leaves the old one or the new one. Two `up` processes
on one folder would share a broker's store; the lock refuses the second. No secret is ever written here. A simulated run leaves
a saved one: no broker is asked, and every reader of it begins here, so all read the same.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import msgspec

from atoll.base.errors import InUse, PeerMisbehaved, SettingsError, StorageFull, is_full
from atoll.base.files import TooLarge, hold, lines_of, read_file, write_whole
from atoll.base.parsing import parsed
from atoll.base.wording import as_bytes
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.events import event_of
from atoll.wire.messages import Event

SCHEMA: Final = 1
FREE_MIN_BYTES: Final = 200 << 20
"""No run begins on a disk with less room."""
EMBEDDED: Final = "embedded"
SIMULATED: Final = "simulated"
RUNNING: Final = "running"
"""How a session ended that has not ended yet."""
RUN_FILE_BYTES_MAX: Final = 4 << 20
VALIDATION: Final = "validation.json"
"""The last file of an export: how the model measures, and which one it is."""
EVENTS_FILE: Final = "events.jsonl"
EVENT_LINE_BYTES_MAX: Final = 8 << 20
"""Twice what a broker takes as one message."""
_SECTION: Final = "protocol."
_FOLDERS = ("nats", "data", "cache", "logs", "health", "checkpoints")


class RebuiltRecord(msgspec.Struct, kw_only=True):
    """A rebuild from run checkpoint number `checkpoint`: what that holds, and what was known before the broker lost the run."""

    checkpoint: int
    tokens: int
    versions: int
    tokens_before: int
    versions_before: int
    checkpoint_at_s: float
    rebuilt_at_s: float


class SessionRecord(msgspec.Struct, kw_only=True):
    """One `atoll up` on this run: its wall seconds, how it ended, bytes moved."""

    began_at_s: float
    wall_s: float = 0.0
    ended: str = RUNNING
    bytes_up: int = 0
    bytes_down: int = 0
    rebuilt: RebuiltRecord | None = None


class RunFile(msgspec.Struct, kw_only=True):
    """The content of `run.json`; `broker` is "embedded", "simulated" or a URL without secrets.

    `settings` are dotted names. `tokens` and `versions` are what the run had trained and committed (over all fragments)
    at last sight. Until a run has `begun`, no process has agreed on anything, and the next session may change everything.
    """

    run: str
    learners: int
    settings: dict[str, Any]
    broker: str
    corpus: list[str] = msgspec.field(default_factory=list)
    atoll: str = ""
    commit: str = ""
    created_at_s: float = 0.0
    begun: bool = True
    tokens: int = 0
    versions: int = 0
    sessions: list[SessionRecord] = msgspec.field(default_factory=list)
    schema: int = SCHEMA


def read_run_file(out: Path) -> RunFile | None:
    """Return what `out` says of its run, or None if it holds none.

    Raises `SettingsError` when `out` is not a folder or its `run.json` is damaged or of another schema.
    """
    path = out / "run.json"
    try:
        run = parsed(read_file(path, RUN_FILE_BYTES_MAX), RunFile)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise SettingsError("the folder of a run is not a folder", got=out, todo="choose another --out") from None
    except TooLarge:
        raise SettingsError(f"{path} is too large to be ours", todo="choose another --out") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(
            f"{path} cannot be read", got=error, todo="restore it, or choose another --out for a new run"
        ) from error
    if run.schema != SCHEMA:
        raise SettingsError(f"{path} is of another schema", got=run.schema, allowed=SCHEMA, todo="use that Atoll")
    return run


def move_aside(out: Path) -> Path:
    """Rename a run's folder to the first free `<out>-<number>` and return that; its content stays as it is."""
    number = next(n for n in itertools.count(1) if not out.with_name(f"{out.name}-{n}").exists())
    with RunFolder(out):
        return out.rename(out.with_name(f"{out.name}-{number}"))


class RunFolder:
    """The folder while we hold it; a context manager."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._lock: IO[str] | None = None

    def __enter__(self) -> Self:
        self._check_ours()
        self._check_room()
        try:
            for name in _FOLDERS:
                (self.out / name).mkdir(parents=True, exist_ok=True)
            self._lock = hold(self.out / "lock")
        except OSError as error:
            raise unusable(self.out, error) from error
        if self._lock is None:
            raise InUse("another run uses this folder", got=self.out, todo="stop it or choose another --out")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def path(self, *parts: str) -> Path:
        """Return a path inside the folder."""
        return self.out.joinpath(*parts)

    def write(self, name: str, data: bytes) -> Path:
        """Write `name` whole or not at all. Raises `StorageFull` without room."""
        path = self.path(name)
        try:
            write_whole(path, data)
        except OSError as error:
            raise unusable(self.out, error) from error
        return path

    def remove(self, name: str) -> None:
        """Remove a file, if it is there. Raises `SettingsError` for one that cannot be removed."""
        try:
            self.path(name).unlink(missing_ok=True)
        except OSError as error:
            raise unusable(self.out, error) from error

    def save(self, run: RunFile) -> None:
        """Write `run.json`."""
        self.write("run.json", msgspec.json.format(msgspec.json.encode(run), indent=2) + b"\n")

    def _check_ours(self) -> None:
        """Refuse a folder with content but no `run.json`: our files could replace a user's files."""
        if not self.out.is_dir() or (self.out / "run.json").exists():
            return
        foreign = sorted(entry.name for entry in self.out.iterdir() if not _is_left_over(entry))
        if foreign:
            raise SettingsError(
                "this folder holds something else than a run",
                got=f"{self.out.absolute()}: {', '.join(foreign[:5])}",
                allowed="a new or empty folder, or one with run.json",
                todo="choose another --out",
            )

    def _check_room(self) -> None:
        existing = next(path for path in (self.out.absolute(), *self.out.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if free < FREE_MIN_BYTES:
            raise StorageFull(
                "too little room for a run",
                got=f"{as_bytes(free)} free under {self.out}",
                allowed=f"{as_bytes(FREE_MIN_BYTES)} or more",
                todo="free space or choose another --out",
            )


def unusable(out: Path, error: OSError) -> SettingsError | StorageFull:
    """Return the operating system's error about the output folder `out` as an error of ours."""
    if is_full(error):
        return StorageFull("the disk is full", got=out, todo="free space or choose another --out")
    return SettingsError(
        "the folder of a run cannot be used",
        got=f"{error.filename or out}: {error.strerror}",
        allowed="a folder we may write to",
        todo="choose another --out or correct its permissions",
    )


def _is_left_over(entry: Path) -> bool:
    """Return whether `entry` is left from a run that ended before it began: our lock, an empty folder, logs."""
    if entry.name == "lock":
        return True
    return entry.name in _FOLDERS and entry.is_dir() and (entry.name == "logs" or not any(entry.iterdir()))


class SavedEvent(msgspec.Struct, frozen=True):
    """A line of `events.jsonl`."""

    subject: str
    event: msgspec.Raw


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run that its folder alone tells; without a `run.json` nobody knows its `agreement`, nor whether it was `simulated`."""

    folder: Path
    run: str
    agreement: ProtocolSettings | None = None
    simulated: bool = False


def saved_run(out: Path) -> SavedRun | None:
    """Return the saved run in a folder; None if the folder holds none, or a run that has a broker.

    Raises:
        SettingsError: `run.json` is damaged, or says no agreement that we know.
    """
    file = read_run_file(out)
    if file is None:
        return SavedRun(out, out.resolve().name) if (out / EVENTS_FILE).is_file() else None
    return SavedRun(out, file.run, agreement_of(file), simulated=True) if file.broker == SIMULATED else None


def saved_events(path: Path) -> Iterator[Event | None]:
    """Yield the events of an `events.jsonl`; None stands for a line that cannot be read.

    Raises:
        SettingsError: the file cannot be read.
    """
    try:
        for line in lines_of(path, EVENT_LINE_BYTES_MAX):
            try:
                saved = parsed(line or b"", SavedEvent)
                yield event_of(saved.subject, bytes(saved.event))
            except (PeerMisbehaved, msgspec.MsgspecError):
                yield None
    except OSError as error:
        raise SettingsError(
            "the event log of this run cannot be read",
            got=f"{path}: {error.strerror}",
            todo="restore the file, or simulate it again",
        ) from error


def agreement_of(file: RunFile) -> ProtocolSettings:
    """Return what the processes of a run agreed on, by its `run.json`.

    Raises:
        SettingsError: it says no agreement that we know.
    """
    told = {name.removeprefix(_SECTION): value for name, value in file.settings.items() if name.startswith(_SECTION)}
    try:
        return msgspec.convert(told, ProtocolSettings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(
            "run.json says no agreement that we know", got=error, todo="simulate the run again"
        ) from error
