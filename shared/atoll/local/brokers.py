"""The run's broker: a given one, which is checked, or our own, hosted by a child process.

Our own broker is a child of `up`, not a part of it: Ctrl-C in a terminal goes to every process of the foreground group, and
the broker must end last. The host restarts the server on the same port if it dies, and writes its address to a file; a
restarted host finds its port there. A broker of several nodes has a host for each.

A server that lives and does not serve is restarted, too (`atoll.local.broker_watches`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from atoll.base.atomic_files import write_whole
from atoll.base.errors import BrokerUnavailable, SettingsError, on_one_line
from atoll.base.exits import guarded, run_program
from atoll.base.health import show_life
from atoll.base.logs import configure, get
from atoll.base.regular_files import read_text
from atoll.base.stop_signals import StopSignals
from atoll.bus.regions import RegionSide
from atoll.local.broker_watches import FROZEN_S, RoomWatch, SilenceWatch, processor_s

if TYPE_CHECKING:
    from atoll.bus.cluster import ClusterNode, Door
    from atoll.bus.nats.region_keeper import RegionKeeper
    from atoll.bus.options import BusOptions
    from atoll.bus.server import EmbeddedBroker

RESTARTS_MAX = 5
RESTARTS_S = 600.0
"""A server that dies so often within so long will not get better."""
WATCH_S = 0.25

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
    from atoll.bus.cluster import ClusterNode, broker_of  # noqa: PLC0415
    from atoll.keys.locked import LockedDoor  # noqa: PLC0415
    from atoll.keys.roll import KeyFolder  # noqa: PLC0415

    configure("json", role="broker")
    port = _former_port(url_file) or port
    door = LockedDoor(KeyFolder(Path(keys)), store_dir, node=bool(node)) if keys else None
    member = msgspec.json.decode(node, type=ClusterNode) if node else None
    broker = broker_of(store_dir, port, member, door)
    keep(broker, lambda url: _announce(url_file, url), door)


def keep(
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
    with broker, _region_of(broker) as keeper:
        deaths: deque[float] = deque(maxlen=RESTARTS_MAX)
        room, frozen = RoomWatch(broker.log_path), SilenceWatch(broker.answers, lambda: processor_s(broker.pid))
        ready(broker.url)
        while not stop.wait(WATCH_S):
            is_frozen = frozen.is_frozen()
            if broker.pid and frozen.answers and (keeper is None or keeper.hub_answers):
                show_life(health_file)
            often = len(deaths) == RESTARTS_MAX and time.monotonic() - deaths[0] < RESTARTS_S
            if not broker.pid and not often:
                deaths.append(time.monotonic())
                log.warning("broker.restarted", reason="it died", restarts=len(deaths))
                _start_again(broker)
            elif broker.pid and is_frozen:
                log.warning("broker.restarted", reason=f"it said and did nothing for {FROZEN_S:g} s")
                broker.kill()
                _start_again(broker)
            elif broker.pid and room.is_back():
                log.warning("broker.restarted", reason="its disk was full and has room again")
                _start_again(broker)
                room = RoomWatch(broker.log_path)
            elif broker.pid and door is not None and door.has_changed():
                _take_over(broker, door)
            elif not broker.pid:
                raise BrokerUnavailable(
                    "the broker dies again and again",
                    got=f"{len(deaths)} restarts within {RESTARTS_S:g} s",
                    todo=f"look at {broker.log_path}",
                )


@contextlib.contextmanager
def _region_of(broker: EmbeddedBroker) -> Iterator[RegionKeeper | None]:
    """Keep the runs of the region whose leaf the broker is, if it is one; give the keeper."""
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


def _start_again(broker: EmbeddedBroker) -> None:
    """Start a server that was there before; one that does not come up is tried again."""
    try:
        broker.restart()
    except BrokerUnavailable as error:
        log.warning("broker.not_back", reason=on_one_line(str(error)))


def _take_over(broker: EmbeddedBroker, door: Door) -> None:
    """Have the server take over a door that has changed.

    One that it refuses is put back, so that it can start again. One of which it says nothing stays: it may hold nobody who was
    let go, and the server is told once more. A hub is started again if the key of a leaf holds no more.
    """
    try:
        broker.reload()
        if door.cuts_off():
            log.warning("broker.restarted", reason="the key of a region holds no more, and its leaf may be connected")
            _start_again(broker)
    except SettingsError as error:
        door.put_back()
        log.warning("broker.door_refused", reason=on_one_line(str(error)), holds="the former doors")
    except BrokerUnavailable as error:
        door.tell_again()
        log.warning("broker.door_unconfirmed", reason=on_one_line(str(error)))


def _former_port(url_file: Path) -> int:
    """Return the port an earlier host announced, or 0."""
    try:
        return int(read_text(url_file).rpartition(":")[2])
    except (OSError, ValueError):
        return 0


def _announce(url_file: Path, url: str) -> None:
    write_whole(url_file, url.encode())


def _main() -> None:
    host(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])


if __name__ == "__main__":
    run_program(lambda: guarded(_main))
