"""What a doctor sees on the machine itself: room on its disks, its archive, its congestion control, the modes of its secrets.

Each check gets what it looks at as an argument: free bytes, the kernel's files, paths. So a test can give it a full disk.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.base.errors import SettingsError
from atoll.base.units import as_size
from atoll.deploy.archives import folder_of, is_written
from atoll.deploy.findings import Finding, of_error
from atoll.deploy.seat import Seat
from atoll.keys.rights import Kind
from atoll.run.folder import FREE_MIN_BYTES

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
"""What Linux answers to `adjtimex` while nobody keeps its clock right; its record is shorter than the bytes that we give it."""
_OTHERS: Final = 0o077


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
    """What the checks look at.

    Attributes:
        free: returns the room at a path, in bytes.
        write: writes into a folder, or raises `OSError`.
        kernel: folder of the kernel's network settings.
        sets_clock: returns whether the kernel has its clock set; None where it does not say.
    """

    free: Callable[[Path], int] = free_bytes
    write: Callable[[Path], None] = write_into
    kernel: Path = KERNEL
    sets_clock: Callable[[], bool | None] = follows_a_time_server


def disks(seat: Seat, view: MachineView, model_bytes: int) -> Iterator[Finding]:
    """Yield one finding for each folder that the service writes to or reads from; `model_bytes` is 0 if it is not known."""
    settings = seat.loaded.settings
    if seat.store is not None:
        yield _room(seat.store, STORE_MIN_BYTES, view)
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
        yield _room(folder, needed, view)
    if seat.role == "learner" and not settings.data.source and not settings.data.dir.is_dir():
        yield Finding(
            "FAIL", "data", f"no folder {settings.data.dir}", "bring the token shards here, or correct data.dir"
        )


def archive(seat: Seat, kind: Kind | None, view: MachineView, model_bytes: int) -> Iterator[Finding]:
    """Yield what is found of the archive's folder at the seat of a synchronizer, which is of `kind` by its identity.

    An object store is not tried: the unit or the container has its credentials, and we do not.
    """
    settings = seat.loaded.settings.archive
    if (seat.role or kind) != "synchronizer" or not is_written(settings):
        return
    try:
        folder = folder_of(settings.url)
    except SettingsError as error:
        yield of_error("archive", error)
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
    yield _room(folder, max(FREE_MIN_BYTES, (settings.keep + 1) * ARCHIVED * model_bytes), view)


def _room(folder: Path, needed: int, view: MachineView) -> Finding:
    try:
        free = view.free(folder)
    except OSError as error:
        return Finding("FAIL", "disk", f"{folder}: {error.strerror}", "see whether the disk is mounted")
    said = f"{as_size(free)} free at {folder}, {as_size(needed)} wanted"
    full = free < needed
    return Finding("FAIL" if full else "ok", "disk", said, "make room, or choose another folder" if full else "")


def congestion(view: MachineView, echo_s: float | None) -> Finding:
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


def secrets(paths: Iterable[Path]) -> Iterator[Finding]:
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


def region_of(seat: Seat, kind: Kind, name: str) -> Finding:
    """Return whether the identity at the seat of a region's broker is that region's."""
    if (kind, name) == ("region", seat.region):
        return Finding("ok", "identity", f"region {name}")
    todo = f"bring {seat.name}'s own folder here, as `atoll deploy render` writes it"
    return Finding("FAIL", "identity", f"that of {kind} {name}, and this is the broker of region {seat.region}", todo)


def role_of(seat: Seat, kind: Kind, name: str) -> Finding:
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
