"""The run's broker: somebody's, which is checked, or our own, hosted by a child.

Our own lives in a child of `up` rather than in `up` itself, because Ctrl-C in a terminal goes to every process of the
foreground group and the broker must be the last to go. The host starts the server again if it dies, on the same port,
and tells where it listens through a file; a host that is started again finds its port there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType

from atoll.errors import BrokerUnavailable

RESTARTS_MAX = 5
WATCH_S = 0.25


async def check_broker_at(url: str, patience_s: float) -> None:
    """Return if the broker at `url` can be used.

    Raises:
        SettingsError: not the address of a broker.
        BrokerUnavailable: it does not answer within `patience_s`, is too old, or has no JetStream.
    """
    from atoll.bus.connect import open_bus  # noqa: PLC0415  (the host below needs no client)
    from atoll.bus.options import DEFAULTS  # noqa: PLC0415

    options = replace(DEFAULTS, patience_s=patience_s)
    bus = await open_bus(url, "check", name="check", provision=False, options=options)
    await bus.close()


def host_command(store_dir: Path, url_file: Path, port: int) -> tuple[str, ...]:
    """Return the command of a host for a broker that keeps its data in `store_dir`; port 0 is a free one."""
    return (sys.executable, "-m", "atoll.up.brokers", str(store_dir), str(url_file), str(port))


def host(store_dir: Path, url_file: Path, port: int) -> None:
    """Run a broker until SIGTERM; write its URL to `url_file` once it answers.

    Raises what `EmbeddedBroker.start` raises, also when the server died more than `RESTARTS_MAX` times.
    """
    from atoll.bus.broker import EmbeddedBroker  # noqa: PLC0415

    stop = threading.Event()

    def leave(number: int, frame: FrameType | None) -> None:
        del number, frame
        stop.set()

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    with EmbeddedBroker(store_dir, _former_port(url_file) or port) as broker:
        restarts = 0
        _announce(url_file, broker.url)
        while not stop.wait(WATCH_S):
            if not broker.pid and restarts < RESTARTS_MAX:
                restarts += 1
                broker.restart()
            elif not broker.pid:
                raise BrokerUnavailable(
                    "the broker dies again and again", got=f"{restarts} restarts", todo=f"look at {broker.log_path}"
                )


def _former_port(url_file: Path) -> int:
    """Return the port an earlier host announced, or 0."""
    try:
        return int(url_file.read_text(encoding="utf-8").rpartition(":")[2])
    except (OSError, ValueError):
        return 0


def _announce(url_file: Path, url: str) -> None:
    beside = url_file.with_suffix(".new")
    beside.write_text(url, encoding="utf-8")
    os.replace(beside, url_file)  # noqa: PTH105  (the same as Path.replace, said with the file it becomes)


if __name__ == "__main__":
    from atoll.cli.main import guarded

    guarded(lambda: host(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
