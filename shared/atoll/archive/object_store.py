"""Where an archive's bytes are stored: a folder, or an object store that speaks S3. Four verbs that know nothing of runs.

    put      whole or not at all, and durable when it returns; replaces the old object
    get      the whole object, bounded
    names    the objects under a prefix
    remove   harmless if the object is gone already

The folder store syncs what it writes (`obstore.LocalStore` does not), and follows no symbolic link: whoever may write to the
folder must not have us read, write or remove files elsewhere. S3 goes through `obstore`; credentials, region and endpoint come
from the usual `AWS_…` variables, and are never shown. Every call may block and belongs in a thread. A missing object raises
`CheckpointError`; any other failure raises `ArchiveUnavailable`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote, urlsplit

from atoll.base.errors import ArchiveUnavailable, CheckpointError, SettingsError, for_a_terminal, redact
from atoll.base.files import NotRegular, opened_file, write_whole
from atoll.base.logs import get

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = get(__name__)

BESIDE = ".new-"
BESIDE_AGE_S = 3600.0
PART_BYTES = 8 << 20
RETRIES_MAX = 3
RETRY_S_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Name:
    """One object: its path, its size, and when it was last written (seconds since the epoch, by the store's clock)."""

    path: str
    size_bytes: int
    written_at_s: float


class ArchiveStore(Protocol):
    """See the module docstring. Paths are relative, with `/`; `where` is for messages."""

    where: str

    def put(self, path: str, data: bytes) -> None:
        """Write an object."""

    def get(self, path: str, size_bytes_max: int) -> bytes:
        """Return an object; `CheckpointError` when it is missing or larger than allowed."""

    def names(self, prefix: str) -> list[Name]:
        """Return the objects under the folder `prefix`, in order of paths."""

    def remove(self, paths: list[str]) -> None:
        """Remove objects."""


class FolderArchive:
    """An archive in a folder of this machine's file systems. The folder may be a symbolic link; nothing below it may."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder.absolute()
        self._links_told: set[str] = set()

    def put(self, path: str, data: bytes) -> None:
        """Write beside, sync, move into place, sync the folder. A link in that place is replaced, not followed."""
        target = self._place(path)
        beside = target.with_name(f"{BESIDE}{secrets.token_hex(4)}-{target.name}")
        with _disk_faults(self.where):
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, data, draft=beside)
            for folder in target.relative_to(self._folder).parents:
                _sync(self._folder / folder)

    def get(self, path: str, size_bytes_max: int) -> bytes:
        """Read a plain file, which a link or a pipe is not; its size is known before its bytes are read."""
        place = self._place(path)
        try:
            with opened_file(place, follow=False) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                data = b"" if size_bytes > size_bytes_max else file.read(size_bytes + 1)
                if max(size_bytes, len(data)) > size_bytes_max:
                    raise _too_large(path, max(size_bytes, len(data)), size_bytes_max)
                return data
        except (FileNotFoundError, NotADirectoryError):
            raise _missing(self.where, path) from None
        except NotRegular:
            raise _no_file(self.where, path) from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _no_file(self.where, path) from None
            raise _unavailable(f"{path} in {self.where}", error.strerror or str(error)) from error

    def names(self, prefix: str) -> list[Name]:
        """Walk the folder and follow no link in it; remove drafts that an interrupted `put` left long ago."""
        top = self._folder
        if prefix:
            top = self._place(prefix)
            if top.is_symlink():
                raise _no_file(self.where, prefix)
        found = []
        with _disk_faults(self.where):
            for folder, folders, files in os.walk(top, onerror=_unless_nothing_is_there):
                for file in (Path(folder, name) for name in (*folders, *files)):
                    with contextlib.suppress(FileNotFoundError):
                        found += self._named(file)
        return sorted(found, key=lambda name: name.path)

    def _named(self, file: Path) -> list[Name]:
        there, path = file.lstat(), file.relative_to(self._folder).as_posix()
        if stat.S_ISLNK(there.st_mode) and path not in self._links_told:
            self._links_told.add(path)
            log.warning(
                "archive.link", path=path, where=self.where, todo="Atoll makes no links and follows none: who made it?"
            )
        if not stat.S_ISREG(there.st_mode):
            return []
        if not file.name.startswith(BESIDE):
            return [Name(path, there.st_size, there.st_mtime)]
        if time.time() - there.st_mtime > BESIDE_AGE_S:
            with contextlib.suppress(OSError):  # whoever may only read leaves it
                file.unlink()
        return []

    def remove(self, paths: list[str]) -> None:
        """Unlink the files, or a link in the place of one; empty folders stay."""
        with _disk_faults(self.where):
            for path in paths:
                self._place(path).unlink(missing_ok=True)

    def _place(self, path: str) -> Path:
        levels = path.split("/")
        if "\0" in path or any(level in ("", ".", "..") for level in levels):
            raise CheckpointError("this is no path of an archive", got=repr(path), allowed="names, with / between them")
        place = self._folder
        for level in levels[:-1]:
            place /= level
            if place.is_symlink():
                raise _no_file(self.where, place.relative_to(self._folder).as_posix())
        return place / levels[-1]


class S3Archive:
    """An archive in an object store; a store's own `put` is whole or not at all, and durable when it returns."""

    def __init__(self, store: ObjectStore, where: str) -> None:
        self.where = where
        self._store = store

    def put(self, path: str, data: bytes) -> None:
        """Put the object."""
        with _s3_faults(self.where):
            self._store.put(path, data)

    def get(self, path: str, size_bytes_max: int) -> bytes:
        """Get the object; its size is known before its bytes are read."""
        with _s3_faults(self.where):
            try:
                size_bytes = self._store.head(path)["size"]
                if size_bytes > size_bytes_max:
                    raise _too_large(path, size_bytes, size_bytes_max)
                # One request per part: the library bounds the time of each, and a large object takes as long as it takes.
                ends = [(at, min(at + PART_BYTES, size_bytes)) for at in range(0, size_bytes, PART_BYTES)]
                return b"".join(bytes(self._store.get_range(path, start=at, end=end)) for at, end in ends)
            except FileNotFoundError:
                raise _missing(self.where, path) from None

    def names(self, prefix: str) -> list[Name]:
        """List the prefix."""
        with _s3_faults(self.where):
            listed = [meta for page in self._store.list(prefix or None) for meta in page]
        found = [Name(meta["path"], meta["size"], meta["last_modified"].timestamp()) for meta in listed]
        return sorted(found, key=lambda name: name.path)

    def remove(self, paths: list[str]) -> None:
        """Delete the objects."""
        with _s3_faults(self.where):
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._store.delete(path)


def open_archive(url: str) -> ArchiveStore:
    """Return the archive store at `url`: a path (`~` is a home), `file://…` or `s3://bucket/prefix`.

    Nothing is read or made yet. Raises `SettingsError` for any other URL, or one with a user name or password.
    """
    url = resolved(url)
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise SettingsError(
            "an archive's URL carries no user name or password",
            got=redact(url),
            todo="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment",
        )
    if not parts.scheme and url:
        return FolderArchive(Path(url))
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path not in ("", "/"):
        return FolderArchive(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        return _s3(url)
    raise SettingsError(
        "this is no place for an archive",
        got=url or "nothing",
        allowed="a folder, file:///folder or s3://bucket/prefix",
        todo="correct archive.url (or --restore)",
    )


def resolved(url: str) -> str:
    """Return `url`; a folder as an absolute path, so that it is the same place for every process."""
    try:
        return str(Path(url).expanduser().absolute()) if url and not urlsplit(url).scheme else url
    except (ValueError, RuntimeError) as error:
        raise SettingsError(
            "an archive's URL cannot be read",
            got=f"{redact(url)}: {error}",
            allowed="a folder, file:///folder or s3://bucket/prefix",
            todo="correct archive.url (or --restore)",
        ) from error


def _s3(url: str) -> ArchiveStore:
    from obstore.store import S3Store  # noqa: PLC0415

    with _s3_faults(url):
        retry = {"max_retries": RETRIES_MAX, "retry_timeout": timedelta(seconds=RETRY_S_MAX)}
        return S3Archive(S3Store.from_url(url, retry_config=retry), url)  # type: ignore[arg-type]  # its TypedDict


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _disk_faults(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unavailable(where, error.strerror or str(error)) from error


@contextlib.contextmanager
def _s3_faults(where: str) -> Iterator[None]:
    from obstore.exceptions import BaseError  # noqa: PLC0415  (verbs without an archive never load it)

    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        raise _unavailable(where, _brief(error)) from error


def _too_large(path: str, size_bytes: int, size_bytes_max: int) -> CheckpointError:
    return CheckpointError(
        "an object of the archive is too large", got=f"{size_bytes} bytes, {path}", allowed=size_bytes_max
    )


def _missing(where: str, path: str) -> CheckpointError:
    return CheckpointError("an object of the archive is missing", got=f"{path} in {where}")


def _no_file(where: str, path: str) -> CheckpointError:
    return CheckpointError(
        "a plain file or folder of the archive is something else",
        got=f"{path} in {where}",
        allowed="no symbolic link, pipe or device",
        todo="find out who made it, and remove it. An archive that moved is named where it is now (archive.url)",
    )


def _unless_nothing_is_there(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError)):
        raise error


def _unavailable(where: str, reason: str) -> ArchiveUnavailable:
    return ArchiveUnavailable(
        "the archive cannot be used",
        got=f"{where}: {reason}",
        todo="free space there, or correct archive.url, its permissions or the AWS_… variables",
    )


def _brief(error: BaseException) -> str:
    """Return the first line of what the library says, which may name any key; the rest is its own state."""
    return for_a_terminal(str(error)).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
