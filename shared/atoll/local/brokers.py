"""The run's broker: a given one, which is checked, or our own, hosted by a child process.

Our own broker is a child of `up`, not a part of it: Ctrl-C in a terminal goes to every process of the foreground group, and
the broker must end last. The host restarts the server on the same port if it dies, and writes its address to a file; a
restarted host finds its port there. A broker of several nodes has a host for each.

A server whose disk was full refuses every write, even after there is room again, because it remembers the first error of a
file until it restarts. So the host restarts the server as soon as there is room. This loses nothing, because the server
has acknowledged nothing since.
"""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from atoll.base.atomic_files import write_whole
from atoll.base.errors import BrokerUnavailable
from atoll.base.exits import guarded
from atoll.base.logs import configure, get

if TYPE_CHECKING:
    from atoll.bus.cluster import ClusterNode
    from atoll.bus.options import BusOptions
    from atoll.bus.server import EmbeddedBroker

RESTARTS_MAX = 5
RESTARTS_S = 600.0
"""A server that dies so often within so long will not get better."""
WATCH_S = 0.25
ROOM_BYTES = 64 << 20
FULL_WORDS = b"no space left on device"

log = get(__name__)


async def check_broker_at(url: str, options: BusOptions) -> None:
    """Return if the broker at `url` can be used.

    Raises:
        SettingsError: not the address of a broker.
        BrokerUnavailable: it does not answer within `options.patience_s`, is too old, or has no JetStream.
        AccessDenied: it does not let us in.
    """
    from atoll.bus.open import open_bus  # noqa: PLC0415  (the host below needs no client)

    bus = await open_bus(url, "check", name="check", options=options)
    await bus.close()


def host_command(
    store_dir: Path, url_file: Path, port: int, node: ClusterNode | None = None, keys: Path | None = None
) -> tuple[str, ...]:
    """Return the command of a host for a broker, or a `node` of one, with its data in `store_dir`; port 0 is a free one.

    With a folder of `keys` the broker is locked.
    """
    words = (sys.executable, "-m", "atoll.local.brokers", str(store_dir), str(url_file), str(port))
    member = "" if node is None else msgspec.json.encode(node).decode()
    return (*words, member, "" if keys is None else str(keys.absolute()))


def host(store_dir: Path, url_file: Path, port: int, node: str, keys: str) -> None:
    """Run a broker, or a `node` of one, until SIGTERM; write its URL to `url_file` once it answers.

    Raises what `EmbeddedBroker.start` raises, also when the server died more than `RESTARTS_MAX` times.
    """
    from atoll.bus.cluster import ClusteredBroker, ClusterNode  # noqa: PLC0415
    from atoll.bus.server import EmbeddedBroker  # noqa: PLC0415
    from atoll.keys.locked import LockedDoor  # noqa: PLC0415
    from atoll.keys.roll import KeyFolder  # noqa: PLC0415

    configure("json", role="broker")
    port = _former_port(url_file) or port
    door = LockedDoor(KeyFolder(Path(keys)), store_dir) if keys else None
    broker = (
        ClusteredBroker(store_dir, msgspec.json.decode(node, type=ClusterNode), port)
        if node
        else EmbeddedBroker(store_dir, port, include=None if door is None else door.config.absolute())
    )
    keep(broker, lambda url: _announce(url_file, url), (lambda: False) if door is None else door.has_changed)


def keep(broker: EmbeddedBroker, ready: Callable[[str], None], has_changed: Callable[[], bool] = lambda: False) -> None:
    """Start a broker, tell `ready` its address, and keep it running until SIGTERM or SIGINT.

    It reads its configuration again whenever that `has_changed`.

    Raises what `EmbeddedBroker.start` raises, also when the server died more than `RESTARTS_MAX` times in ten minutes.
    """
    stop = threading.Event()

    def leave(number: int, frame: FrameType | None) -> None:
        del number, frame
        stop.set()

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    with broker:
        deaths: deque[float] = deque(maxlen=RESTARTS_MAX)
        room = RoomWatch(broker.log_path)
        ready(broker.url)
        while not stop.wait(WATCH_S):
            often = len(deaths) == RESTARTS_MAX and time.monotonic() - deaths[0] < RESTARTS_S
            if not broker.pid and not often:
                deaths.append(time.monotonic())
                log.warning("broker.restarted", reason="it died", restarts=len(deaths))
                broker.restart()
            elif broker.pid and room.is_back():
                log.warning("broker.restarted", reason="its disk was full and has room again")
                broker.restart()
                room = RoomWatch(broker.log_path)
            elif broker.pid and has_changed():
                broker.reload()
            elif not broker.pid:
                raise BrokerUnavailable(
                    "the broker dies again and again",
                    got=f"{len(deaths)} restarts within {RESTARTS_S:g} s",
                    todo=f"look at {broker.log_path}",
                )


class RoomWatch:
    """Tells when a server that ran out of disk has room again, by reading what the server appends to its log."""

    def __init__(self, log_path: Path) -> None:
        """Begin at the present end of the log."""
        self._log_path = log_path
        self._read_bytes = log_path.stat().st_size if log_path.exists() else 0
        self._full = False

    def is_back(self) -> bool:
        """Return True once after each time that the disk was full, as soon as it has `ROOM_BYTES` of room."""
        self._full = self._full or FULL_WORDS in self._news()
        if not self._full or shutil.disk_usage(self._log_path.parent).free < ROOM_BYTES:
            return False
        self._full = False
        return True

    def _news(self) -> bytes:
        """Return what was appended to the log; a log that shrank was rotated, and is read from its beginning."""
        size_bytes = self._log_path.stat().st_size
        if size_bytes == self._read_bytes:
            return b""
        with self._log_path.open("rb") as server_log:
            server_log.seek(self._read_bytes if size_bytes > self._read_bytes else 0)
            news = server_log.read()
            self._read_bytes = server_log.tell()
        return news


def _former_port(url_file: Path) -> int:
    """Return the port an earlier host announced, or 0."""
    try:
        return int(url_file.read_text(encoding="utf-8").rpartition(":")[2])
    except (OSError, ValueError):
        return 0


def _announce(url_file: Path, url: str) -> None:
    write_whole(url_file, url.encode())


if __name__ == "__main__":
    guarded(lambda: host(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]))
