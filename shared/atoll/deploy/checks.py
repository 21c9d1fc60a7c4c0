"""Checks of the doctor and of `atoll deploy check`: each finding is a row, with what to do where something is wrong.

From outside: whether each address of the broker is there, and whose certificate it shows. Each step explains the failure of
the next (no such name, no such port, a server of another kind, a certificate for other names), so each is asked by itself,
before any client. On the machine: disks, archive, congestion control, the modes of its secrets, all through a `MachineView`.
At the broker, as the identity of the seat: rights, clock, link, and whether the run is what the seat takes it for.

A *seat* is the machine and the identity where a check is run, and what is known of the deployment around it: from a run file
(on an island's machine there is no more), from the description and the name of one of its services (at the operator's), or
from the description alone, where the operator's own identity asks.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import ssl
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from atoll.base.clock import Clock, SystemClock
from atoll.base.errors import AtollError, SettingsError, on_one_line
from atoll.base.files import text_or_empty
from atoll.base.wording import DAY_S, as_bytes, as_rate, as_size, as_time, counted
from atoll.bus.interface import Bus
from atoll.bus.nats.administration import BrokerProbe, HubLinkMeasured, LinkMeasured
from atoll.bus.nats.connection import OTHER_TIME
from atoll.bus.nats.provision import HEADROOM_BYTES, VERSION_MIN
from atoll.bus.options import PORT, addresses
from atoll.bus.server import LINE_BYTES_MAX, unchecked_tls
from atoll.bus.streams import stream_of, stream_plan
from atoll.deploy.description import DeploymentDescription
from atoll.deploy.rendering import KEYS, SERVICES
from atoll.deploy.services import (
    DOOR,
    IDENTITY_FILE,
    RUN_FILE,
    PlannedLeaf,
    PlannedNode,
    PlannedService,
    archive_folder_of,
    broker_url,
    brokers_at,
    is_written,
    leaf_of,
    places,
    services,
    unit_name,
)
from atoll.keys.certificates import WARN_DAYS, begins_at_s, ends_at_s, hosts_of, pin
from atoll.keys.rights import Kind, Rights, rights_of
from atoll.run.folder import FREE_MIN_BYTES
from atoll.run.record import read_run
from atoll.settings import LoadedSettings, load
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.messages import RunRecord, spoken_versions
from atoll.wire.subjects import HUB, Subjects

Grade = Literal["ok", "note", "FAIL"]
WAIT_S: Final = 4.0
_OTHER_NAME: Final = (62, 64)
"""OpenSSL's codes for a certificate of another name, and of another address."""
KERNEL: Final = Path("/proc/sys/net/ipv4")
STORE_MIN_BYTES: Final = 2 << 30
FAR_S: Final = 0.01
"""From such an echo on the congestion control decides how much of a link is used."""
CHECKPOINTS: Final = 8
"""A learner's state has the model and two moments in float32, and while one is written the former is still there; in all about
so many times the model's own bytes."""
ARCHIVED: Final = 2
"""A run checkpoint has the values and the momentum in float32; so many times the model's own bytes."""
TIMEX_BYTES: Final = 512
TIME_ERROR: Final = 5
"""The answer of Linux to `adjtimex` while nobody keeps its clock right; its record is shorter than the bytes that it gets."""
_OTHERS: Final = 0o077
OFF_S: Final = 10.0
"""Clocks further apart than this make times in logs and reports lie, and end keys at another moment than the operator means."""
SLOW_BITS_PER_S: Final = 1e6
FLOAT_BYTES: Final = 4
LINK_TO_HUB: Final = "link to the hub"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: `grade` tells whether a run can do without it, `todo` what mends it."""

    grade: Grade
    about: str
    what: str
    todo: str = ""

    def text(self) -> str:
        """Return the line as a terminal shows it, and a second one with what to do."""
        line = f"{self.grade:<5} {self.about}: {self.what}"
        return f"{line}\n      to do: {self.todo}" if self.todo else line


def error_finding(about: str, error: AtollError, todo: str = "") -> Finding:
    """Return an error of ours as a finding."""
    parts = error.parts()
    said = [parts[name] for name in ("what", "got") if name in parts]
    allowed = [f"allowed: {parts['allowed']}"] if "allowed" in parts else []
    return Finding("FAIL", about, on_one_line("; ".join([*said, *allowed])), todo or on_one_line(parts.get("todo", "")))


def graded(about: str, what: str, todo: str = "", *, well: bool) -> Finding:
    """Return what was found: with `todo` where it is not well."""
    return Finding("ok", about, what) if well else Finding("FAIL", about, what, todo)


def grade_faults(about: str, faults: list[str], well: str, todo: str) -> Finding:
    """Return one finding: the faults if there are any, else what is well."""
    return Finding("FAIL", about, "; ".join(faults), todo) if faults else Finding("ok", about, well)


def as_date(at_s: float) -> str:
    """Return a moment as a person compares it with a clock."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


@dataclass(frozen=True, slots=True)
class ExpectedDoor:
    """The door as it must be.

    Attributes:
        authority: whose certificate we believe, as PEM; empty for an open door.
        certificate: the one that is to be shown, as PEM; empty if that is not known.
        now_s: the time, by this machine's clock.
        ours: whether the door is that of the seat itself, whose broker need not run yet.
    """

    authority: str
    certificate: str
    now_s: float
    ours: bool = False


def check_doors(url: str, expected: ExpectedDoor) -> tuple[list[Finding], int]:
    """Return the findings of all addresses of a broker, and how many of them can be used."""
    findings: list[Finding] = []
    greetings: list[dict[str, Any]] = []
    usable = 0
    for address in addresses(url):
        found = list(_check_door(address, expected, greetings))
        grades = {finding.grade for finding in found}
        usable += "ok" in grades and "FAIL" not in grades
        findings += found
    for name, what in (("version", "versions of nats-server"), ("max_payload", "bounds on a message (max_payload)")):
        if len(values := {str(told.get(name)) for told in greetings}) > 1:
            todo = "give all nodes the same"
            findings.append(Finding("note", "nodes", f"different {what}: {', '.join(sorted(values))}", todo))
    return findings, usable


def _check_door(address: str, expected: ExpectedDoor, greetings: list[dict[str, Any]]) -> Iterator[Finding]:
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or PORT
    about = f"{host}:{port}"
    try:
        connection = socket.create_connection((host, port), timeout=WAIT_S)
    except socket.gaierror as error:
        unknown = error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
        todo = (
            "correct the host in broker.url, or its name server" if unknown else "see whether the name server answers"
        )
        yield Finding("FAIL", about, f"no name server knows {host}" if unknown else f"{host}: {error.strerror}", todo)
        return
    except ConnectionRefusedError:
        if expected.ours:
            todo = "start it, and look again: then its door and its link are examined, too"
            yield Finding("note", about, "nobody listens on this port: the broker of this seat does not run yet", todo)
            return
        yield Finding("FAIL", about, "nobody listens on this port", "start the broker there, or correct the port")
        return
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else str(error.strerror or error)
        yield Finding("FAIL", about, why, f"let outbound TCP to port {port} through, and see whether the machine is up")
        return
    with connection:
        told = _read_greeting(connection)
        if told is None:
            todo = "see whether the server is frozen, or something else has this port"
            yield Finding("FAIL", about, "it is connected and does not greet as a nats-server does", todo)
            return
        greetings.append(told)
        yield from _check_greeting(about, told)
        if told.get("tls_required"):
            yield from _check_certificate(about, host, connection, expected)
        elif expected.authority:
            yield Finding("FAIL", about, "the server offers no TLS, and we have an identity", "start it with --keys")


def _read_greeting(connection: socket.socket) -> dict[str, Any] | None:
    try:
        line = connection.makefile("rb", buffering=0).readline(LINE_BYTES_MAX)
        told = json.loads(line.removeprefix(b"INFO "))
    except (OSError, ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) and "server_id" in told else None


def _check_greeting(about: str, told: dict[str, Any]) -> Iterator[Finding]:
    version, least = str(told.get("version", "")), ".".join(map(str, VERSION_MIN))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < VERSION_MIN:
        yield Finding("FAIL", about, f"nats-server {version} is too old", f"upgrade to {least} or later")
    else:
        node = f", node {told['server_name']} of cluster {told['cluster']}" if told.get("cluster") else ""
        yield Finding("ok", about, f"nats-server {version}{node}")
    needed, taken = CHUNK_BYTES + HEADROOM_BYTES, told.get("max_payload")
    if not isinstance(taken, int) or taken < needed:
        what = f"it takes messages of {taken} bytes at most, and chunks need {needed}"
        yield Finding("FAIL", about, what, "set max_payload: 4MB in the broker's configuration, on every server")
    else:
        yield Finding("ok", about, f"messages of up to {as_bytes(taken)}")


def _check_certificate(about: str, host: str, connection: socket.socket, expected: ExpectedDoor) -> Iterator[Finding]:
    try:
        with unchecked_tls().wrap_socket(connection, server_hostname=host) as encrypted:
            shown = ssl.DER_cert_to_PEM_cert(encrypted.getpeercert(binary_form=True) or b"")
    except OSError as error:
        yield Finding(
            "FAIL", about, f"no TLS comes about: {error}", "see whether something on the way answers in its place"
        )
        return
    ends_s, names = ends_at_s(shown), hosts_of(shown)
    until, renew = _day(ends_s), "make another (`atoll keys certificate`), and bring it to every node"
    look = f"look at this machine's clock: it says {as_date(expected.now_s)}"
    if expected.now_s >= ends_s:
        yield Finding("FAIL", about, f"its certificate ended on {until}", f"{look}; if that is right, {renew}")
        return
    if expected.now_s < begins_at_s(shown):
        yield Finding("FAIL", about, f"its certificate holds only from {as_date(begins_at_s(shown))} on", look)
        return
    if expected.certificate and pin(expected.certificate) != pin(shown):
        what = "it shows another certificate than the one in the folder of keys"
        yield Finding(
            "FAIL", about, what, "bring services/broker of the hub to every node; if it was not you, mind who answers"
        )
    refused = _tls_error(host, int(about.rpartition(":")[2]), expected.authority)
    if isinstance(refused, ssl.SSLCertVerificationError) and refused.verify_code in _OTHER_NAME:
        what = f"its certificate is not for {host}, but for {', '.join(names) or 'nobody'}"
        yield Finding("FAIL", about, what, f"{renew}, or use one of these names")
    elif refused is not None:
        yield Finding("FAIL", about, *_explain_distrust(refused, look))
    elif not expected.authority:
        yield Finding("FAIL", about, "it asks for an identity, and we have none", "set broker.identity")
    elif ends_s - expected.now_s < WARN_DAYS * DAY_S:
        yield Finding("note", about, f"its certificate ends on {until}, in {as_time(ends_s - expected.now_s)}", renew)
    else:
        yield Finding("ok", about, f"its certificate is for {host} and holds until {until}")


def _explain_distrust(refused: OSError, look: str) -> tuple[str, str]:
    """Return why a certificate for the right host is not believed, and what to do; `look` is what a wrong clock needs."""
    if not isinstance(refused, ssl.SSLCertVerificationError):
        return f"no TLS comes about: {refused}", "try again"
    if refused.verify_code in OTHER_TIME:
        return f"its certificate, or its authority's, does not hold at this time: {refused.verify_message}", look
    return (
        f"its certificate is of another authority than our identity's: {refused.verify_message}",
        "take the identity that this broker's operator made; otherwise this is another broker, or somebody in between",
    )


def _day(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d")


def _tls_error(host: str, port: int, authority: str) -> OSError | None:
    """Return why who trusts this authority does not believe the certificate, by a second connection; None if it does."""
    if not authority:
        return None
    try:
        with socket.create_connection((host, port), timeout=WAIT_S) as connection:
            _read_greeting(connection)
            ssl.create_default_context(cadata=authority).wrap_socket(connection, server_hostname=host).close()
    except OSError as error:
        return error
    return None


def free_bytes(path: Path) -> int:
    """Return the room on the disk of a folder, or of the nearest one above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def follows_a_time_server() -> bool | None:
    """Return whether the kernel says that somebody keeps its clock right; None where it does not say."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR


def write_into(folder: Path) -> None:
    """Write into a folder as we are, and leave no trace; raise `OSError` where that cannot be done."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"atoll doctor")
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class MachineView:
    """The machine as the checks look at it.

    Attributes:
        free: returns the room at a path, in bytes.
        write: writes into a folder, or raises `OSError`.
        kernel: folder of the kernel's network settings.
        sets_clock: returns whether the kernel has its clock set; None where it does not say.
        clock: the clock that is compared with the broker's.
        measures_link: whether some megabytes are sent to measure the link.
    """

    free: Callable[[Path], int] = free_bytes
    write: Callable[[Path], None] = write_into
    kernel: Path = KERNEL
    sets_clock: Callable[[], bool | None] = follows_a_time_server
    clock: Clock = field(default_factory=SystemClock)
    measures_link: bool = True


def check_disks(seat: Seat, view: MachineView, model_bytes: int) -> Iterator[Finding]:
    """Yield one finding for each folder that the service writes to or reads from; `model_bytes` is 0 if it is not known."""
    settings = seat.loaded.settings
    if seat.store is not None:
        yield _check_room(seat.store, STORE_MIN_BYTES, view)
        return
    state = settings.learner.checkpoint_dir if seat.role in (None, "learner") else None
    folds = seat.role in ("synchronizer", "premerger")
    given = settings.synchronizer.scratch_dir if folds else settings.learner.scratch_dir
    scratch = given or Path(tempfile.gettempdir())
    wanted: dict[Path, int] = {}
    for folder, needed in ((state, CHECKPOINTS * model_bytes), (scratch, 2 * model_bytes)):
        if folder is not None:
            wanted[folder] = max(FREE_MIN_BYTES, needed)
    for folder, needed in wanted.items():
        yield _check_room(folder, needed, view)
    if seat.role == "learner" and not settings.data.source and not settings.data.dir.is_dir():
        yield Finding(
            "FAIL", "data", f"no folder {settings.data.dir}", "bring the token shards here, or correct data.dir"
        )


def check_archive(seat: Seat, kind: Kind | None, view: MachineView, model_bytes: int) -> Iterator[Finding]:
    """Yield what is found of the archive's folder at the seat of a synchronizer, which is of `kind` by its identity.

    An object store is not tried: the unit or the container has its credentials, and we do not.
    """
    settings = seat.loaded.settings.archive
    if (seat.role or kind) != "synchronizer" or not is_written(settings):
        return
    try:
        folder = archive_folder_of(settings.url)
    except SettingsError as error:
        yield error_finding("archive", error)
        return
    if folder is None:
        return
    if not folder.is_dir():
        todo = f"mount its disk, or make it for the user of the service: install -d -o USER -m 0700 {folder}"
        yield Finding("FAIL", "archive", f"no folder {folder}", todo)
        return
    try:
        view.write(folder)
    except OSError as error:
        todo = f"give {folder} to the user of the service (chown), or mount it so that it can be written to"
        said = f"user {os.geteuid()} cannot write into {folder}: {error.strerror}"
        yield Finding("FAIL", "archive", said, todo)
        return
    yield Finding("ok", "archive", f"user {os.geteuid()} can write into {folder}")
    # The oldest checkpoint is removed once a newer one is complete.
    yield _check_room(folder, max(FREE_MIN_BYTES, (settings.keep + 1) * ARCHIVED * model_bytes), view)


def _check_room(folder: Path, needed: int, view: MachineView) -> Finding:
    try:
        free = view.free(folder)
    except OSError as error:
        return Finding("FAIL", "disk", f"{folder}: {error.strerror}", "see whether the disk is mounted")
    said = f"{as_size(free)} free at {folder}, {as_size(needed)} wanted"
    return graded("disk", said, "make room, or choose another folder", well=free >= needed)


def check_congestion(view: MachineView, echo_s: float | None) -> Finding:
    """Return how the kernel sends; `echo_s` is the shortest echo of the broker, None if there is none."""
    try:
        used = (view.kernel / "tcp_congestion_control").read_text(encoding="utf-8").strip()
        known = (view.kernel / "tcp_available_congestion_control").read_text(encoding="utf-8").split()
    except OSError:
        return Finding("note", "congestion control", "this system does not tell (only Linux does)")
    if used == "bbr" or "bbr" in known:
        said = used if used == "bbr" else f"{used}; bbr is there, and connections for tensors ask for it"
        return Finding("ok", "congestion control", said)
    far = echo_s is None or echo_s >= FAR_S
    what = (
        f"{used}, and no bbr: a link of 50 ms that loses one packet in a hundred carries 2 of 100 Mbit/s instead of 87"
    )
    todo = "modprobe tcp_bbr; sysctl -w net.ipv4.tcp_congestion_control=bbr net.core.default_qdisc=fq; keep it in /etc/sysctl.d"
    if not far:
        return Finding("ok", "congestion control", f"{used}; on a near link that is no matter")
    return Finding("note", "congestion control", what, todo)


def check_secrets(paths: Iterable[Path]) -> Iterator[Finding]:
    """Yield one finding for each secret that others may read or that is not there, or one for all of them."""
    fine = []
    for path in paths:
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except OSError as error:
            yield Finding("FAIL", "secret", f"{path}: {error.strerror}", "render again, or correct broker.identity")
            continue
        if mode & _OTHERS:
            todo = f"chmod 600 {path}; if others could have read it, give it a new key (`atoll keys rotate`)"
            yield Finding("FAIL", "secret", f"others may read {path} (mode {mode:04o})", todo)
        else:
            fine.append(path)
    if fine:
        yield Finding("ok", "secret", f"{', '.join(map(str, fine))}: nobody else may read it")


def check_region_identity(seat: Seat, kind: Kind, name: str) -> Finding:
    """Return whether the identity at the seat of a region's broker is that region's."""
    if (kind, name) == ("region", seat.region):
        return Finding("ok", "identity", f"region {name}")
    todo = f"bring {seat.name}'s own folder here, as `atoll deploy render` writes it"
    return Finding("FAIL", "identity", f"that of {kind} {name}, and this is the broker of region {seat.region}", todo)


def check_role(seat: Seat, kind: Kind, name: str) -> Finding:
    """Return whether the identity is what the service needs, and no more."""
    wanted = seat.role or kind
    learner = seat.loaded.settings.learner.id
    if kind == wanted and (wanted != "learner" or name == learner):
        return Finding("ok", "identity", f"{kind} {name}")
    if kind == wanted:
        todo = "take the identity that was made for this learner id, or correct learner.id"
        return Finding("FAIL", "identity", f"that of learner {name}, and the service is learner {learner}", todo)
    if kind == "operator":
        todo = "give the service its own identity: what is stolen there would open everything"
        return Finding("note", "identity", f"the operator's, and a {wanted} needs less", todo)
    return Finding(
        "FAIL", "identity", f"that of a {kind}, and the service is a {wanted}", "take the identity of the service"
    )


async def check_clock(probe: BrokerProbe, run: str, view: MachineView) -> Finding:
    """Return how far our clock is from the broker's; where that says nothing, whether the kernel has its clock set."""
    # Of all streams the one of which a region may ask, too.
    found = await probe.time(stream_of(stream_plan(run), Subjects(run).run_record).name, view.clock.wall)
    if found is None:
        untold = "the broker tells its time to founders, synchronizers and operators of a founded run"
        kept = {True: "follows a time server", False: "follows no time server", None: "does not say whose time it has"}
        says = f"this machine says {as_date(view.clock.wall())}, and {kept[view.sets_clock()]}"
        return Finding("note", "clock", f"{untold}; {says}")
    said = f"{as_time(abs(found.ahead_s))} {'behind' if found.ahead_s > 0 else 'ahead of'} the broker's"
    if abs(found.ahead_s) - found.within_s >= OFF_S:
        todo = "let this machine, or the broker's, follow a time server (chrony, or `timedatectl set-ntp true`)"
        return Finding("FAIL", "clock", f"ours is {said}", todo)
    return Finding("ok", "clock", f"within {as_time(max(0.1, abs(found.ahead_s) + found.within_s))} of the broker's")


async def check_rights(probe: BrokerProbe, kind: Kind, run: str, name: str, *, founds: bool) -> list[Finding]:
    """Return whether the broker lets this identity do what its kind must, and keeps it from what it must not."""
    needed = _needed_rights(kind, run, name, founds=founds)
    denied, unheard = [], 0
    for subject in needed.stores:
        if (allowed := await probe.may_store(_sample_subject(subject))) is False:
            denied.append(f"publish {subject}")
        unheard += allowed is None
    denied += [f"subscribe {subject}" for subject in needed.hears if not await probe.may_hear(subject)]
    told = f"{counted(len(needed.stores), 'subject')} to publish on, {len(needed.hears)} to hear"
    todo = "ask the operator for an identity of the right kind; is the broker's roll the newest one?"
    found = [grade_faults("rights", denied, f"{kind}: {told}", todo)]
    if unheard and not denied:
        found.append(
            Finding("note", "rights", f"{unheard} of these subjects have no stream yet: the run is not founded")
        )
    if kind == "learner" and await probe.may_hear(f"{Subjects(run).prefix}.up.>"):
        what = "this learner may hear what others send: the broker has no locked door for it"
        found.append(Finding("FAIL", "rights", what, "start the broker with --keys"))
    return found


def _needed_rights(kind: Kind, run: str, name: str, *, founds: bool) -> Rights:
    s = Subjects(run)
    if kind in ("synchronizer", "operator"):
        return Rights(stores=(s.head("*"), s.lease(0), s.event("*", "shard-0")), hears=(f"{s.prefix}.>",))
    return rights_of(kind, run, name, founds=founds)


def _sample_subject(pattern: str) -> str:
    return ".".join("0" if level in ("*", ">") else level for level in pattern.split("."))


async def check_link(probe: BrokerProbe, model_bytes: int) -> tuple[list[Finding], float | None]:
    """Return what the link carries each way, and the shortest echo in seconds (None if nothing came back)."""
    found = await probe.link()
    if found is None:
        todo = "see whether something on the way ends connections that carry much"
        return [Finding("FAIL", "link", "a few megabytes did not come back within seconds", todo)], None
    where = "to the region's broker: " if probe.in_region else ""
    findings = [_link_finding("link", found, 0 if probe.in_region else model_bytes, where)]
    if not probe.in_region:
        return findings, found.echo_s
    to_hub, echo_s = await check_hub_link(probe, model_bytes)
    return [*findings, *to_hub], echo_s


async def check_hub_link(probe: BrokerProbe, model_bytes: int) -> tuple[list[Finding], float | None]:
    """Return what the link of a region carries to its hub, and the hub's shortest echo in seconds, as `check_link` does."""
    found = await probe.hub_link()
    if found is None:
        todo = "see whether the link is cut or full, and what nats-server.log in the store of the region's broker says"
        return [Finding("FAIL", LINK_TO_HUB, "the hub did not answer through it within seconds", todo)], None
    return [_link_finding(LINK_TO_HUB, found, model_bytes)], found.echo_s


def _link_finding(about: str, found: HubLinkMeasured, model_bytes: int, where: str = "") -> Finding:
    up = found.up_bits_per_s
    down = found.down_bits_per_s if isinstance(found, LinkMeasured) else None
    back = "" if down is None else f", down at least {as_rate(down)}"
    moved = f"up {as_rate(up)}{back} ({as_bytes(found.bytes_moved)} moved)"
    model = f"; all parameters in float32 take {as_time(8 * model_bytes / up)} up" if model_bytes else ""
    slow = min(up, up if down is None else down) < SLOW_BITS_PER_S
    todo = "`atoll plan` says what rate a run needs" if slow else ""
    return Finding(
        "note" if slow else "ok", about, f"{where}{1000 * found.echo_s:.1f} ms there and back; {moved}{model}", todo
    )


async def read_record(bus: Bus, run: str) -> tuple[RunRecord | None, list[Finding]]:
    """Return the run record, if there is one that this Atoll reads, and what stands against it."""
    try:
        record = await read_run(bus, Subjects(run))
    except AtollError as error:
        return None, [error_finding("run", error)]
    if record is None:
        return None, [
            Finding("note", "run", f"{run} is not founded yet: its first learner with the right to it does that")
        ]
    said = f"{run}, founded by {record.founder}, wire version {record.schema} (we speak {spoken_versions()})"
    return record, [Finding("ok", "run", said)]


def check_founding(record: RunRecord, loaded: LoadedSettings) -> Finding:
    """Return how the run's protocol differs from the settings that were given for it."""
    theirs, ours = (msgspec.to_builtins(one) for one in (record.protocol, loaded.settings.protocol))
    names = sorted({name.split(".")[1] for name in loaded.origins if name.startswith("protocol.")})
    differences = [
        f"protocol.{name} is {json.dumps(theirs[name])} in the run and {json.dumps(ours[name])} here"
        for name in names
        if name in theirs and theirs[name] != ours[name]
    ]
    return grade_faults(
        "founding",
        differences,
        "the run's protocol is as our settings say, as far as they say anything",
        "the founder's hold for the whole run: correct the settings, or found another run",
    )


async def check_copies(probe: BrokerProbe, run: str, wanted: int) -> list[Finding]:
    """Return whether the run's streams have as many copies as our settings say; nothing if we may not ask."""
    found: dict[str, int] = {}
    for plan in stream_plan(run):
        told = await probe.stream(plan.name)
        if told is not None:
            config: dict[str, Any] = told.get("config") or {}
            found[plan.name] = int(config.get("num_replicas") or 1)
    if not found:
        return []
    fewer = [f"{name} has {count} of {wanted} copies" for name, count in found.items() if count < wanted]
    todo = (
        "a run keeps the copies of its founding: found it anew with broker.replicas, or `nats stream update --replicas`"
    )
    alike = f"{counted(len(found), 'stream')} of {counted(min(found.values()), 'copy', 'copies')}"
    return [grade_faults("copies", fewer, alike, todo)]


def model_bytes(record: RunRecord | None) -> int:
    """Return the bytes of the run's parameters in float32; 0 if there is no run."""
    return 0 if record is None else FLOAT_BYTES * sum(record.layout.fragment_sizes())


OPERATORS: Path = Path(KEYS) / "identities" / "operator.toml"


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a check is run.

    Attributes:
        name: how the seat is called.
        settings: what its service is told; where values came from.
        role: what its service does; None if only the identity tells.
        certificate: the certificate (PEM) that the broker must show; empty if that is not known here.
        authority: the authority (PEM) that a node of the broker shows; services have that of their identity.
        secrets: files that nobody but their owner may read.
        store: folder of a node's data; None for what is no node.
        hubs: where the broker of a region reaches the hub.
        hub_certificate: the certificate (PEM) that the hub must show there.
        region: the region whose broker this is; empty for what is none.
        region_identity: who that broker is at the hub.
    """

    name: str
    loaded: LoadedSettings
    role: Kind | None = None
    certificate: str = ""
    authority: str = ""
    secrets: tuple[Path, ...] = ()
    store: Path | None = None
    hubs: tuple[str, ...] = ()
    hub_certificate: str = ""
    region: str = ""
    region_identity: Path | None = None


def seat_of_file(config: Path | None, assignments: list[str]) -> Seat:
    """Return the seat that a run file describes."""
    loaded = load(config, assignments)
    return Seat(str(config or "the environment"), loaded, secrets=_secrets(loaded))


def seat_of_service(described: DeploymentDescription, out: Path, service: str | None, assignments: list[str]) -> Seat:
    """Return the seat of a rendered service; without a name that of the operator.

    Raises:
        SettingsError: the description has no such service, or it is not rendered in `out`.
    """
    if service is None:
        return _seat_of_operator(described, out, assignments)
    names = []
    for place in places(described):
        for broker in brokers_at(described, place):
            if broker.name == service:
                return _seat_of_broker(described, out, broker, assignments)
            names.append(broker.name)
        for planned in services(described, place):
            if planned.name == service:
                return _seat_of_planned(out, place, planned, leaf_of(described, place), assignments)
            names.append(planned.name)
    raise SettingsError(
        "the description has no such service",
        got=service,
        allowed=", ".join(names),
        todo="correct --service",
    )


def _seat_of_operator(described: DeploymentDescription, out: Path, assignments: list[str]) -> Seat:
    url, identity = broker_url(described, ""), out / OPERATORS
    own = [f"run={described.run}", f"broker.url={url}", f"broker.identity={identity}"]
    own += [f"broker.replicas={described.hub.count}"]
    own += [f"{name}={json.dumps(value)}" for name, value in described.settings.items() if name == "protocol"]
    secrets = (identity, *(out / KEYS / name for name in ("root.key", "authority.key", "broker.key")))
    shown = text_or_empty(out / HUB / SERVICES / DOOR / "broker.pem")
    return Seat("operator", load(None, [*own, *assignments], {}), "operator", shown, secrets=secrets)


def _seat_of_planned(
    out: Path, place: str, service: PlannedService, leaf: PlannedLeaf | None, assignments: list[str]
) -> Seat:
    file = out / place / SERVICES / service.name / RUN_FILE
    if not file.is_file():
        raise SettingsError("this service is not rendered", got=f"no {file}", todo="atoll deploy render")
    loaded = load(file, assignments)
    door = out / HUB / SERVICES / DOOR if leaf is None else out / place / SERVICES / leaf.name
    return Seat(service.name, loaded, service.kind, text_or_empty(door / "broker.pem"), secrets=_secrets(loaded))


def _seat_of_broker(
    described: DeploymentDescription, out: Path, broker: PlannedNode | PlannedLeaf, assignments: list[str]
) -> Seat:
    """Return the seat of a broker: it has a door, and is nobody but in a region, where it is somebody at the hub."""
    hub = out / HUB / SERVICES / DOOR
    door = out / broker.place / SERVICES / broker.door if isinstance(broker, PlannedLeaf) else hub
    loaded = load(None, [f"run={described.run}", f"broker.url={broker.address}", *assignments], {})
    shown, authority = (text_or_empty(door / file) for file in ("broker.pem", "authority.pem"))
    store = Path(f"/var/lib/{unit_name(described, broker.name)}")
    seat = Seat(broker.name, loaded, None, shown, authority, (door / "broker.key",), store)
    if not isinstance(broker, PlannedLeaf):
        return seat
    identity = door / IDENTITY_FILE
    return replace(
        seat,
        secrets=(*seat.secrets, identity),
        hubs=broker.hubs,
        hub_certificate=text_or_empty(hub / "broker.pem"),
        region=broker.place,
        region_identity=identity,
    )


def _secrets(loaded: LoadedSettings) -> tuple[Path, ...]:
    identity = loaded.settings.broker.identity
    return () if identity is None else (identity,)
