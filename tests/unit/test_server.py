"""The embedded broker: found, started, ended, and what it says when it cannot."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.base.errors import BrokerUnavailable, EnvironmentFault, InUse, SettingsError
from atoll.bus.server import EmbeddedBroker, find_server

pytestmark = pytest.mark.connected


def alive(pid: int) -> bool:
    """Return whether the process runs; a zombie that nobody has collected does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return state != "Z"


def fake_server(path: Path, says: str) -> Path:
    """Write a program that answers `--version`."""
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("says", ["nats-server: v2.11.6", "nats-server: v1.99.0", "hello"])
def test_an_old_or_foreign_server_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str) -> None:
    monkeypatch.setenv("NATS_SERVER_BIN", str(fake_server(tmp_path / "old", says)))

    with pytest.raises(BrokerUnavailable, match=rf"(?s){says}.*2\.12"):
        find_server()


def test_it_starts_stops_and_starts_where_it_was(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path / "b")
    assert broker.pid == 0
    broker.start()
    first, url = broker.pid, broker.url
    assert alive(first)

    broker.kill()
    assert broker.pid == 0
    broker.restart()
    assert url == broker.url
    assert broker.pid not in (0, first)
    assert broker.pid == broker.start().pid

    second = broker.pid
    broker.stop()
    broker.stop()
    assert not alive(second)


def test_a_frozen_server_is_stopped_too(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path / "b").start()
    pid = broker.pid
    os.kill(pid, signal.SIGSTOP)

    broker.stop()

    assert not alive(pid)


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(InUse, match=str(port)):
            EmbeddedBroker(tmp_path / "b", port).start()


def test_another_broker_on_the_port_is_not_ours(tmp_path: Path) -> None:
    """A foreign server that answers on our port is no reason to believe that ours has started."""
    with EmbeddedBroker(tmp_path / "a") as first, pytest.raises(InUse):
        EmbeddedBroker(tmp_path / "b", first.port).start()


def test_two_brokers_never_share_a_store(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "b"), pytest.raises(EnvironmentFault, match="another broker"):
        EmbeddedBroker(tmp_path / "b").start()
    with EmbeddedBroker(tmp_path / "b") as again:
        assert again.pid


def test_a_death_at_start_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo 'nats-server: v2.15.0' && exit 0\necho 'fatal: no luck'\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("NATS_SERVER_BIN", str(program))

    with pytest.raises(BrokerUnavailable, match="no luck"):
        EmbeddedBroker(tmp_path / "b").start()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed leaves no broker behind, even when a short-lived thread had started it."""
    program = (
        "import sys,threading,time\nfrom atoll.bus.server import EmbeddedBroker\n"
        "b=EmbeddedBroker(sys.argv[1])\nt=threading.Thread(target=b.start)\nt.start()\nt.join()\n"
        "print(b.pid,flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "b")], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()

    deadline = time.monotonic() + 240.0
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid)


@pytest.mark.parametrize("moved", ['listen: "127.0.0.1:{port}"', "server_name: other"])
def test_an_included_file_that_moves_the_broker_is_named(tmp_path: Path, moved: str) -> None:
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        mine, theirs = (each.getsockname()[1] for each in (one, two))
    include = tmp_path / "more.conf"
    include.write_text(moved.format(port=theirs))

    with pytest.raises(SettingsError, match=r"more\.conf changes what this broker sets itself") as refused:
        EmbeddedBroker(tmp_path / "b", mine, include=include).start()

    assert str(theirs if "listen" in moved else mine) in str(refused.value.got)
    assert "--port" in str(refused.value.todo)
