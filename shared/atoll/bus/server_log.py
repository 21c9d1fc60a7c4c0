"""The log of a nats-server: the lines that are its own word, what is appended, and the error that its end tells of.

We read in the log what no interface tells: that a new configuration was taken over, or refused, that the disk is full, and why
a server ended at its start. But
the server also writes there what clients say of themselves, their names and keys, and whoever reaches its port is a client. A
line about a connection begins with its address and number; everything else is the server's own word. Clients cannot begin a
line: the server quotes what they say.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from atoll.base.errors import AtollError, BrokerUnavailable, InUse, SettingsError, StorageFull

RELOADED: Final = "Reloaded server configuration"
RELOAD_FAILED: Final = "Failed to reload server configuration"
DISK_FULL: Final = "no space left on device"

_LINE: Final = re.compile(r"\[\d+\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+ \[[A-Z]{3}\] (.*)")
_OF_CONNECTION: Final = re.compile(r"\S+ - [a-z]+:\d+ - ")
_IN_USE: Final = re.compile(r"listen tcp \S*?:(\d+): bind: address already in use")


def own_lines(text: str) -> list[str]:
    """Return what the server itself says in these lines of its log, without the lines about connections."""
    said = (_LINE.fullmatch(line) for line in text.splitlines())
    return [line[1] for line in said if line is not None and _OF_CONNECTION.match(line[1]) is None]


class LogReader:
    """Reads what is appended to a log from now on, also over a rotation: the server renames the file and begins another."""

    def __init__(self, path: Path) -> None:
        """Begin at the present end."""
        self._path = path
        self._file, self._read_bytes = self._stamp()

    def news(self) -> str:
        """Return what was appended since it was asked last."""
        file, size_bytes = self._stamp()
        if (file, size_bytes) == (self._file, self._read_bytes):
            return ""
        before = ""
        if file != self._file:
            before, self._read_bytes = self._rest_of_rotated(), 0
        elif size_bytes < self._read_bytes:
            self._read_bytes = 0
        data = self._from(self._path, self._read_bytes)
        self._file, self._read_bytes = file, self._read_bytes + len(data)
        return before + data.decode("utf-8", "replace")

    def _stamp(self) -> tuple[int, int]:
        try:
            seen = self._path.stat()
        except OSError:
            return 0, 0
        return seen.st_ino, seen.st_size

    def _rest_of_rotated(self) -> str:
        """Return the end, as far as we have not read it, of the file that the log was before."""
        for former in self._path.parent.glob(f"{self._path.name}.*"):
            try:
                if former.stat().st_ino == self._file:
                    return self._from(former, self._read_bytes).decode("utf-8", "replace")
            except OSError:
                continue
        return ""

    @staticmethod
    def _from(path: Path, start: int) -> bytes:
        try:
            with path.open("rb") as log:
                log.seek(start)
                return log.read()
        except OSError:
            return b""


def startup_error(log_tail: str, place: str, store_dir: Path, log_path: Path) -> AtollError:
    """Map the end of the log of a server that ended at its start to an error; `place` is where it was to listen, host:port.

    Only the server's own lines count: what clients say of themselves stands in the log, too.
    """
    words = "\n".join(own_lines(log_tail)) or log_tail
    if "address already in use" in words:
        named = _IN_USE.search(words)
        own = place.rpartition(":")[2]
        port = own if named is None else named[1]
        which = "the broker's port" if port == own else "another port of the broker (--leaf-port, --cluster-port)"
        return InUse(
            f"something else listens on {which}",
            got=port,
            allowed="a free port",
            todo="stop that process, choose another port, or give its url if it is a broker",
        )
    if "no space left" in words:
        return StorageFull("the broker's disk is full", got=store_dir, todo="free space or move the store")
    if "no such host" in words or "cannot assign requested address" in words:
        return SettingsError(
            "the broker cannot listen there",
            got=place,
            allowed="an address of this machine, or 0.0.0.0 for all of them",
            todo="correct --host",
        )
    return BrokerUnavailable("the broker ended at start", got=log_tail, todo=f"look at {log_path}")
