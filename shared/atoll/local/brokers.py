"""The run's broker: a given one, which is checked, or our own, hosted by a child process.

Our own broker is a child of `up`, not a part of it: Ctrl-C in a terminal goes to every process of the foreground group, and
the broker must end last. The host restarts the server on the same port if it dies, and writes its address to a file, where a
restarted host finds its port.

In two states a server lives and does not serve; each is mended by a restart, which loses nothing. **Its disk was full**: it
refuses every write, also when there is room again, because it remembers the first error of a file until it restarts. **It is
frozen**: it holds its connections and says nothing. As a node of a cluster it does harm when it goes on: in its eyes every
leader has been silent, so it stands for election in every group, and commits pause for another 4 to 9 seconds. A node that is
started anew listens first. Silence alone proves nothing; a frozen server has no processor time either.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from atoll.base.errors import BrokerUnavailable, SettingsError, on_one_line
from atoll.base.exits import StopSignals, run_guarded, run_program
from atoll.base.files import read_text, write_whole
from atoll.base.health import show_life
from atoll.base.logs import configure, get
from atoll.bus.regions import RegionSide
from atoll.bus.server import DISK_FULL, LogReader, own_lines

if TYPE_CHECKING:
    from atoll.bus.nats.region_keeper import RegionKeeper
    from atoll.bus.options import BusOptions
    from atoll.bus.server import ClusterNode, Door, EmbeddedBroker

RESTARTS_MAX = 5
RESTARTS_S = 600.0
"""A server that dies so often within so long will not get better."""
WATCH_S = 0.25
log = get(__name__)
ROOM_BYTES: Final = 64 << 20
PROBE_EVERY_S: Final = 2.0
FROZEN_S: Final = 8.0
AGAIN_S: Final = 120.0
"""A server that is only slow, on a machine with too much to do, gets no faster by restarts."""


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
    from atoll.bus.server import ClusterNode, broker_of  # noqa: PLC0415
    from atoll.keys.locked import LockedDoor  # noqa: PLC0415
    from atoll.keys.roll import KeyFolder  # noqa: PLC0415

    configure("json", role="broker")
    port = _former_port(url_file) or port
    door = LockedDoor(KeyFolder(Path(keys)), store_dir, node=bool(node)) if keys else None
    member = msgspec.json.decode(node, type=ClusterNode) if node else None
    broker = broker_of(store_dir, port, member, door)
    keep_running(broker, lambda url: write_whole(url_file, url.encode()), door)


def keep_running(
    broker: EmbeddedBroker,
    ready: Callable[[str], None],
    door: Door | None = None,
    health_file: Path | None = None,
) -> None:
    """Start a broker, tell `ready` its address, and keep it running until SIGTERM or SIGINT.

    It reads its configuration again whenever its `door` has changed. While the server lives, `health_file` is touched; that of
    a region's leaf while its hub answers, too.

    Raises what `EmbeddedBroker.start` raises, also when the server died more than `RESTARTS_MAX` times in ten minutes.
    """
    stop = StopSignals()
    with broker, _region_keeper(broker) as keeper:
        deaths: deque[float] = deque(maxlen=RESTARTS_MAX)
        room, frozen = RoomWatch(broker.log_path), SilenceWatch(broker.answers, lambda: processor_s(broker.pid))
        ready(broker.url)
        while not stop.wait(WATCH_S):
            is_frozen = frozen.is_frozen()
            if broker.pid and frozen.answers and (keeper is None or keeper.hub_answers):
                show_life(health_file)
            if not broker.pid:
                _restart_dead(broker, deaths)
            elif is_frozen:
                log.warning("broker.restarted", reason=f"it said and did nothing for {FROZEN_S:g} s")
                broker.kill()
                _restart(broker)
            elif room.is_back():
                log.warning("broker.restarted", reason="its disk was full and has room again")
                _restart(broker)
                room = RoomWatch(broker.log_path)
            elif door is not None and door.has_changed():
                _apply_door(broker, door)


@contextlib.contextmanager
def _region_keeper(broker: EmbeddedBroker) -> Iterator[RegionKeeper | None]:
    if not isinstance(broker.link, RegionSide):
        yield None
        return
    from atoll.bus.nats.region_keeper import RegionKeeper  # noqa: PLC0415  (all other brokers need no client)

    keeper = RegionKeeper(broker.url, broker.link.keeper)
    keeper.start()
    try:
        yield keeper
    finally:
        keeper.stop()


def _restart_dead(broker: EmbeddedBroker, deaths: deque[float]) -> None:
    if len(deaths) == RESTARTS_MAX and time.monotonic() - deaths[0] < RESTARTS_S:
        raise BrokerUnavailable(
            "the broker dies again and again",
            got=f"{len(deaths)} restarts within {RESTARTS_S:g} s",
            todo=f"look at {broker.log_path}",
        )
    deaths.append(time.monotonic())
    log.warning("broker.restarted", reason="it died", restarts=len(deaths))
    _restart(broker)


def _restart(broker: EmbeddedBroker) -> None:
    try:
        broker.restart()
    except BrokerUnavailable as error:
        log.warning("broker.not_back", reason=on_one_line(str(error)))


def _apply_door(broker: EmbeddedBroker, door: Door) -> None:
    """Have the server take over a door that has changed.

    One that it refuses is put back, so that it can start again. One of which it says nothing stays: it may hold nobody who was
    let go, and the server is told once more. A hub is started again if the key of a leaf holds no more.
    """
    try:
        broker.reload()
        if door.cuts_off():
            log.warning("broker.restarted", reason="the key of a region holds no more, and its leaf may be connected")
            _restart(broker)
    except SettingsError as error:
        door.put_back()
        log.warning("broker.door_refused", reason=on_one_line(str(error)), holds="the former doors")
    except BrokerUnavailable as error:
        door.tell_again()
        log.warning("broker.door_unconfirmed", reason=on_one_line(str(error)))


def _former_port(url_file: Path) -> int:
    try:
        return int(read_text(url_file).rpartition(":")[2])
    except (OSError, ValueError):
        return 0


class RoomWatch:
    """Tells when a server that ran out of disk has room again, by the server's own words in its log."""

    def __init__(self, log_path: Path) -> None:
        self._log = LogReader(log_path)
        self._folder = log_path.parent
        self._is_full = False

    def is_back(self) -> bool:
        """Return True once after each time that the disk was full, as soon as it has `ROOM_BYTES` of room."""
        if not self._is_full and any(DISK_FULL in word for word in own_lines(self._log.news())):
            self._is_full = True
            todo = f"make {ROOM_BYTES >> 20} MiB of room in {self._folder}: nothing is lost, and the server starts again then"
            log.error("broker.disk_full", free_bytes=self._free_bytes(), todo=todo)
        if not self._is_full or self._free_bytes() < ROOM_BYTES:
            return False
        self._is_full = False
        return True

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._folder).free


def processor_s(pid: int) -> float | None:
    """Return the processor time that a process has had, in seconds; None where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, LookupError):
        return None


class SilenceWatch:
    """Tells when a server has said nothing and done nothing for `FROZEN_S`, and then not again for `AGAIN_S`."""

    def __init__(
        self,
        probe: Callable[[], bool | None],
        worked_s: Callable[[], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with a server that answers.

        Args:
            probe: returns whether it answers now, None if it could not be asked.
            worked_s: returns its processor time, None if nobody knows.
            clock: seconds.
        """
        self._probe = probe
        self._worked_s = worked_s
        self._clock = clock
        self._awake_s = self._probed_s = clock()
        self._work_s: float | None = None
        self._told_s = float("-inf")
        self.answers = True

    def is_frozen(self) -> bool:
        """Ask the server, if it is time to; return True if it should be started anew."""
        now_s = self._clock()
        if now_s - self._probed_s >= PROBE_EVERY_S:
            self._probed_s = now_s
            was_silent, self.answers = not self.answers, self._probe() is not False
            work_s = self._worked_s()
            # We may have been frozen with it: its silence counts from the first question that it leaves open.
            if self.answers or not was_silent or work_s is None or work_s != self._work_s:
                self._awake_s, self._work_s = now_s, work_s
        if self._clock() - self._awake_s < FROZEN_S or now_s - self._told_s < AGAIN_S:
            return False
        self._told_s, self._awake_s, self.answers = now_s, now_s, True
        return True


if __name__ == "__main__":
    store, url_file, port, node, keys = sys.argv[1:]
    run_program(lambda: run_guarded(lambda: host(Path(store), Path(url_file), int(port), node, keys)))
